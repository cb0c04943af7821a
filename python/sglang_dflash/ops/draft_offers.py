"""The specification of what is remembered of recent drafts, and of the choice whom to draft next.

An offer is what one drafted step of a request offered: the rows of its tree, with the chances to reach them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from sglang_dflash.ops.tree import Trees

LEAST_CHANCE = 1e-3  # of a draft, and of its miss, where odds are compared


class Offers(NamedTuple):
    """The latest S offers of each of P requests. The request at a place writes them in turn.

    Fields:
        reaches: [P, S, N] float32; of a tree's rows without the anchor, as in `Trees`.
        depths: [P, S, N] int32; of the same rows.
        drafted: [P, S] int64; depths that the draft filled.
        through: [P, S] float32; chance that the first candidates of all these depths are accepted.
        odds: [P, S] float32; factor of the odds of the mean chances beyond these depths.
        kept: [P] int64; offers so far. The next one is written at `kept % S`.
        deep: [D] float32; mean chance of each depth's first candidate, over all requests.
    """

    reaches: torch.Tensor
    depths: torch.Tensor
    drafted: torch.Tensor
    through: torch.Tensor
    odds: torch.Tensor
    kept: torch.Tensor
    deep: torch.Tensor

    @classmethod
    def none(cls, places: int, steps: int, rows: int, depths: int) -> Offers:
        """rows: N. depths: D."""
        return cls(
            torch.zeros(places, steps, rows),
            torch.zeros(places, steps, rows, dtype=torch.int32),
            torch.zeros(places, steps, dtype=torch.int64),
            torch.zeros(places, steps),
            torch.ones(places, steps),
            torch.zeros(places, dtype=torch.int64),
            torch.ones(depths),
        )


class StepCosts(NamedTuple):
    """Seconds of a step: fixed ones, and those of a row. `rest` is all but the draft; `gap_s` comes after the step."""

    gap_s: float
    draft_fixed_s: float
    draft_row_s: float
    rest_fixed_s: float
    rest_row_s: float


class BestWidth(NamedTuple):
    """What the draft should fill.

    Fields:
        width: rows of a block, anchor included; 1: drafting promises nothing.
        requests: those that get a block, rising.
        tokens, seconds: of such a step, as promised.
    """

    width: int
    requests: list[int]
    tokens: float
    seconds: float


class OfferedStep(NamedTuple):
    """What one step offered to its b drafted requests.

    Fields:
        places: of the requests in `Offers`, all different.
        chances: [b, D', k] float32; see `platt`. At most D depths were drafted.
        trees: of these requests.
    """

    places: Sequence[int]
    chances: torch.Tensor
    trees: Trees


def keep_offers(offers: Offers, steps: Sequence[OfferedStep], deep_weight: float, own_share: float) -> None:
    """Keeps the offers of some steps in place, the oldest step first.

    A request whose drafts are better than the mean is probably so beyond the depths that were drafted, too. So the odds
    there are those of the mean chances, times the geometric mean of its odds over theirs at the drafted depths, to the
    power of `own_share`.

    Args:
        deep_weight: share. Weight of each step in the mean chances of depths.
        own_share: share. 0: what a request offers beyond the drafted depths is the mean alone.
    """
    for step in steps:
        _keep_step(offers, *step, deep_weight, own_share)


def _keep_step(
    offers: Offers, places: Sequence[int], chances: torch.Tensor, trees: Trees, deep_weight: float, own_share: float
) -> None:
    first = chances[:, :, 0].double()
    drafted = first.shape[1]
    deep = offers.deep[:drafted].double()
    offers.deep[:drafted] = deep + deep_weight * (first.mean(0) - deep)
    log_odds = _log_odds(first) - _log_odds(offers.deep[:drafted].double())
    odds = (own_share * log_odds.mean(1)).exp()
    for i, place in enumerate(places):
        step = int(offers.kept[place]) % offers.reaches.shape[1]
        offers.kept[place] += 1
        offers.reaches[place, step] = trees.reaches[i, 1:]
        offers.depths[place, step] = trees.depths[i, 1:]
        offers.drafted[place, step] = drafted
        offers.through[place, step] = first[i].prod()
        offers.odds[place, step] = odds[i]


def _log_odds(chances: torch.Tensor) -> torch.Tensor:
    return chances.clamp(LEAST_CHANCE, 1 - LEAST_CHANCE).logit()


def best_width(
    offers: Offers, places: Sequence[int], others: Sequence[int], prior_steps: float, costs: StepCosts, price: float
) -> BestWidth:
    """Which requests should be drafted, and how wide, if their drafts are worth what recent ones were.

    A row is taken if its chance is worth its time. A request is drafted if its rows bring more tokens than the draft
    and they cost.

    Args:
        places: of the B requests; -1: nothing is known of the request.
        others: places whose latest offers count for every request.
        prior_steps: weight of all `others` together, beside 1 for each offer of the request's own.
        price: tokens that a second is worth.
    """
    batch, depths, steps = len(places), len(offers.deep), offers.reaches.shape[1]
    least = price * costs.rest_row_s
    tokens = [[0.0] * (depths + 1) for _ in places]  # by depth
    rows = [[0.0] * (depths + 1) for _ in places]
    latest = [(other, (int(offers.kept[other]) - 1) % steps, prior_steps / len(others)) for other in others]
    for request, place in enumerate(places):
        own = [(place, step, 1.0) for step in range(min(int(offers.kept[place]), steps))] if place >= 0 else []
        total = sum(weight for _, _, weight in (*own, *latest))
        for at, step, weight in (*own, *latest):
            for depth, reach in _offered(offers, at, step):
                if reach > least:
                    tokens[request][depth] += reach * weight / total
                    rows[request][depth] += weight / total
    plain_s = costs.gap_s + costs.rest_fixed_s + costs.rest_row_s * batch
    best = BestWidth(1, [], float(batch), plain_s)
    best_rate = 0.0
    for width in range(2, depths + 2):
        requests, promised, seconds = [], float(batch), plain_s + costs.draft_fixed_s
        for request in range(batch):
            brought = sum(tokens[request][:width])
            cost_s = costs.rest_row_s * sum(rows[request][:width]) + costs.draft_row_s * width
            if brought > price * cost_s:
                requests.append(request)
                promised, seconds = promised + brought, seconds + cost_s
        if requests and promised / seconds > best_rate:
            best, best_rate = BestWidth(width, requests, promised, seconds), promised / seconds
    return best


def _offered(offers: Offers, place: int, step: int) -> Iterator[tuple[int, float]]:
    """Depth and reach of each row. Beyond what was drafted, the offer goes on as a chain of mean chances, with its own
    factor of their odds."""
    yield from zip(offers.depths[place, step].tolist(), offers.reaches[place, step].tolist(), strict=True)
    reach, odds = float(offers.through[place, step]), float(offers.odds[place, step])
    for depth in range(int(offers.drafted[place, step]), len(offers.deep)):
        mean = float(offers.deep[depth])
        reach *= odds * mean / (odds * mean + 1 - mean)
        yield depth + 1, reach
