"""The specification of a plan's two ops: which rows of a step are verified, and what drafted steps teach.

* Calibration (`platt_scaling`): each verified row whose parent was accepted is one observation. The parameters follow
  by online logistic regression: each takes a Newton step on its own, with the information (sum of p * (1 - p)) of its
  recent observations.
* Offers (`draft_offers`): a request whose drafts are better than the mean is probably so beyond the depths that were
  drafted, too. So the odds there are those of the mean chances, times the geometric mean of its odds over theirs at the
  drafted depths, to the power of `own_share`.

What a step's blocks can teach is written into one dense table. Several steps are learned together, and by then their
tensors would no longer be in the processor's caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_dflash.ops.draft_offers import Offers
from sglang_dflash.ops.platt_scaling import DEPTHS, OTHERS, SLOPE, SLOPES, PlattTuning, logit, platt
from sglang_dflash.ops.tree import PlannedRows, best_first, take_rows

LEAST_CHANCE = 1e-3  # of a draft, and of its miss, where odds are compared
LEAST_INFORMATION = 1e-4  # of one observation
ROW_GROUP = 4
"""Products take the rows of a step in groups of as many, see `rows_that_pay`."""
ROW_SHARE = 0.3
"""What a row adds to the time of its group, as a share of a row's mean time. From the steps of servers:
docs/benchmarks/cpu-step.md."""


class PlanTables(NamedTuple):
    """What a plan has learned of P requests, and the blocks that it has still to learn.

    Fields:
        shared: [DEPTHS + D, 2] float64; see `platt_scaling.platt`.
        own: [P, 2] float64; the same of single requests.
        offers: of the same P requests, up to D depths and R - 1 rows.
        by_depth: [D, 3] float64; of all verified rows of a depth: how many, how many were promised and accepted.
        own_by_depth: [P, D, 3] float64; the same of single requests.
        blocks: [N, F] float32; drafted requests of recent steps; see `Block`.
    """

    shared: torch.Tensor
    own: torch.Tensor
    offers: Offers
    by_depth: torch.Tensor
    own_by_depth: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def none(cls, requests: int, steps: int, rows: int, depths: int, blocks: int) -> PlanTables:
        """requests: P. steps: offers that are kept of each. rows: R. depths: D. blocks: N."""
        shared = torch.zeros((DEPTHS + depths, 2), dtype=torch.float64)
        shared[SLOPE, 0] = 1.0
        return cls(
            shared,
            torch.zeros((requests, 2), dtype=torch.float64),
            Offers.none(requests, steps, rows - 1, depths),
            torch.zeros((depths, 3), dtype=torch.float64),
            torch.zeros((requests, depths, 3), dtype=torch.float64),
            torch.zeros(blocks, Block.columns(rows, depths)),
        )


class Block(NamedTuple):
    """Views of one row of `PlanTables.blocks`, in the order of its columns. Whole numbers are exact in float32.

    Fields:
        head: [4]; the request among those of its step, its first row among the step's, how many rows of it are
            verified, and the depths that the draft filled.
        parents, depths, ranks, reaches: [R]; its tree; see `Trees`.
        said: [R]; log-probabilities of the rows by the draft; 0 where a row proposes nothing.
        first: [D]; chances of the first candidates of the filled depths.
    """

    head: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    reaches: torch.Tensor
    said: torch.Tensor
    first: torch.Tensor

    @staticmethod
    def columns(rows: int, depths: int) -> int:
        return 4 + 5 * rows + depths

    @classmethod
    def of(cls, blocks: torch.Tensor, index: int, depths: int) -> Block:
        rows = most_rows(blocks, depths)
        return cls(*torch.split(blocks[index], [4, rows, rows, rows, rows, rows, depths]))


def most_rows(blocks: torch.Tensor, depths: int) -> int:
    """R of `PlanTables.blocks`."""
    return (blocks.shape[1] - 4 - depths) // 5


class VerifiedRows(NamedTuple):
    """Sums over verified rows, without the anchors.

    Fields:
        rows: how many.
        depth: depths of the deepest rows of their trees.
        promised: how many should be accepted by the plan's chances.
        accepted: how many were.
    """

    rows: int
    depth: int
    promised: float
    accepted: int


def plan_rows(
    log_probs: torch.Tensor,
    tables: PlanTables,
    first_block: int,
    places: Sequence[int],
    max_logit: float,
    least: float,
    drafted: Sequence[int],
    batch: int,
    copied: Sequence[int] = (),
    copied_lens: Sequence[int] = (),
) -> PlannedRows:
    """The rows that pay, and at least the anchor of each request.

    The drafted requests are written into `tables.blocks`, from row `first_block` on.

    Args:
        log_probs, places, max_logit: as in `platt`.
        least: as in `rows_that_pay`.
        drafted: the b requests among all `batch`.
        copied, copied_lens: as in `take_rows`.
    """
    chances = platt(log_probs, tables.shared, tables.own, places, max_logit)
    depths = len(tables.by_depth)
    trees = best_first(chances, most_rows(tables.blocks, depths))
    lens = rows_that_pay(trees.reaches, batch + sum(copied_lens) - len(copied_lens), least)
    rows = take_rows(trees, drafted, lens, batch, copied, copied_lens)
    filled = log_probs.shape[1]
    for i, (request, count) in enumerate(zip(drafted, lens, strict=True)):
        block = Block.of(tables.blocks, first_block + i, depths)
        block.head.copy_(torch.tensor([request, rows.row_starts[request], count, filled]))
        for column, field in zip(block[1:5], trees, strict=True):
            column.copy_(field[i])
        proposed = trees.ranks[i] >= 0
        block.said.zero_()
        block.said[proposed] = log_probs[i, trees.depths[i][proposed] - 1, trees.ranks[i][proposed]]
        block.first[:filled] = chances[i, :, 0]
    return rows


def rows_that_pay(reaches: torch.Tensor, besides: int, least: float) -> list[int]:
    """Rows of each tree, anchor included: those that together bring the most tokens beyond the price of their time.

    The first row of a group takes most of the group's time, the others only `ROW_SHARE` of a mean row each. So where
    the likeliest rows start a group, the next likeliest fill it, although they would not pay alone.

    Args:
        reaches: [b, R] float32; as in `Trees`.
        besides: rows that are verified anyway: the anchors of all requests, and copies.
        least: tokens that the mean time of a row is worth; 0: all rows are taken.
    """
    rows = [(-reach, request) for request, own in enumerate(reaches[:, 1:].tolist()) for reach in own if reach > 0]
    rows.sort()  # the likeliest first; ties: the first request
    row_price = least * ROW_SHARE
    first_price = row_price + least * ROW_GROUP * (1 - ROW_SHARE)
    surplus = most = 0.0
    taken = 0
    for count, (negative, _) in enumerate(rows, 1):
        starts_group = (besides + count - 1) % ROW_GROUP == 0
        surplus -= negative + (first_price if starts_group else row_price)
        if surplus > most or least == 0:
            most, taken = surplus, count
    lens = [1] * len(reaches)
    for _, request in rows[:taken]:
        lens[request] += 1
    return lens


def learn_steps(
    tables: PlanTables,
    places: Sequence[Sequence[int]],
    paths: Sequence[torch.Tensor],
    tuning: PlattTuning,
    deep_weight: float,
    own_share: float,
    new: Sequence[int] = (),
) -> VerifiedRows:
    """Learns in place from the first rows of `tables.blocks`, step by step, the oldest first.

    Args:
        places: of each step's drafted requests, at least one: their rows in the tables of requests, all different.
        paths: [B, L] int64 of each step; see `TreeAcceptance`.
        deep_weight: share. Weight of each step in the mean chances of depths.
        own_share: share. 0: what a request offers beyond the drafted depths is the mean alone.
        new: rows in the tables of requests whose request is new to them. What another one has left there is forgotten.
    """
    tables.own[list(new)] = 0.0
    tables.offers.kept[list(new)] = 0
    tables.own_by_depth[list(new)] = 0.0
    rows = depth = accepted = index = 0
    promised = 0.0
    for own_places, path in zip(places, paths, strict=True):
        blocks = [Block.of(tables.blocks, index + i, len(tables.by_depth)) for i in range(len(own_places))]
        index += len(blocks)
        for block, place in zip(blocks, own_places, strict=True):
            request, start, count, _ = block.head.int().tolist()
            path_rows = path[request].tolist()
            on_path = [start + row in path_rows for row in range(count)]
            _observe(tables, block, place, on_path, tuning)
            deep, reaches = block.depths[1:count].int().tolist(), block.reaches[1:count].tolist()
            for of_depth, reach, held in zip(deep, reaches, on_path[1:], strict=True):
                one = torch.tensor([1.0, reach, float(held)], dtype=torch.float64)
                tables.by_depth[of_depth - 1] += one
                tables.own_by_depth[place, of_depth - 1] += one
            rows, depth = rows + count - 1, depth + max(deep, default=0)
            promised, accepted = promised + sum(reaches), accepted + sum(on_path[1:])
        _keep(tables.offers, blocks, own_places, deep_weight, own_share)
    return VerifiedRows(rows, depth, promised, accepted)


def _observe(tables: PlanTables, block: Block, place: int, on_path: Sequence[bool], tuning: PlattTuning) -> None:
    """Learns from the verified rows of one request whose parents were accepted, in their order."""
    shared, offset = tables.shared, tables.own[place]

    def learn(parameter: torch.Tensor, gradient: float, information: float, prior: float, trials: float) -> None:
        parameter[1] += information - float(parameter[1]) / trials
        value = float(parameter[0]) + tuning.damping * gradient / (float(parameter[1]) + prior)
        parameter[0] = min(max(value, -tuning.max_logit), tuning.max_logit)

    parents, depths, ranks = (field.int().tolist() for field in block[1:4])
    said = block.said.tolist()
    for row in range(1, len(on_path)):
        if not on_path[parents[row]] or not said[row] > -math.inf:  # or NaN: nothing was said
            continue
        depth, rank = shared[DEPTHS + depths[row] - 1], ranks[row]
        x = logit(said[row], tuning.max_logit)
        # With the parameters of now: several rows in a row must not all correct the same error.
        total = float(shared[SLOPE, 0]) * x + float(depth[0]) + float(offset[0])
        chance = 1 / (1 + math.exp(-total - (float(shared[OTHERS, 0]) if rank > 0 else 0.0)))
        surplus, information = on_path[row] - chance, chance * (1.0 - chance) + LEAST_INFORMATION
        learn(shared[SLOPE], surplus * x, information * x * x, tuning.slope_prior, tuning.slope_trials)
        shared[SLOPE, 0].clamp_(*SLOPES)
        learn(depth, surplus, information, tuning.depth_prior, tuning.depth_trials)
        learn(offset, surplus, information, tuning.request_prior, tuning.request_trials)
        if rank > 0:
            learn(shared[OTHERS], surplus, information, tuning.depth_prior, tuning.depth_trials)


def _keep(offers: Offers, blocks: Sequence[Block], places: Sequence[int], deep_weight: float, own_share: float) -> None:
    """Keeps what the drafted requests of one step offered."""
    filled = int(blocks[0].head[3])
    first = torch.stack([block.first[:filled] for block in blocks]).double()
    deep = offers.deep[:filled].double()
    offers.deep[:filled] = deep + deep_weight * (first.mean(0) - deep)
    log_odds = _log_odds(first) - _log_odds(offers.deep[:filled].double())
    odds = (own_share * log_odds.mean(1)).exp()
    for i, (block, place) in enumerate(zip(blocks, places, strict=True)):
        step = int(offers.kept[place]) % offers.reaches.shape[1]
        offers.kept[place] += 1
        offers.reaches[place, step] = block.reaches[1:]
        offers.depths[place, step] = block.depths[1:].int()
        offers.drafted[place, step] = filled
        offers.through[place, step] = first[i].prod()
        offers.odds[place, step] = odds[i]


def _log_odds(chances: torch.Tensor) -> torch.Tensor:
    return chances.clamp(LEAST_CHANCE, 1 - LEAST_CHANCE).logit()
