"""The specification of the ops over trees of proposed rows: candidates, best-first search, ancestors, acceptance.

A request's rows form a tree. Row 0 is the anchor, the newest emitted token; each other row proposes a token behind its
parent, which comes before it. A chain is the tree in which row i has the parent i - 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch


class Proposal(NamedTuple):
    """The best ids of each row, and how sure the draft is of them.

    Fields:
        ids: [..., k] int64, the best first. Ties: the lowest id first.
        log_probs: [..., k] float32; -inf where the probability is zero or the logits have no finite maximum.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor


class Trees(NamedTuple):
    """One tree of R rows for each request, in the order in which best-first search finds the rows.

    Fields:
        parents: [B, R] int32; -1 for the anchor.
        depths: [B, R] int32; edges from the anchor.
        ranks: [B, R] int32; which candidate of its depth a row proposes; -1 for the anchor.
        reaches: [B, R] float32; chance that all drafts up to the row are accepted, 1 for the anchor, never rising along
            the rows. 0 from the row on where a request has no more candidates; such a row is no part of the tree.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    reaches: torch.Tensor


class PlannedRows(NamedTuple):
    """The rows that the target verifies, request by request. Row 0 of each request is its anchor.

    Fields:
        parents: [T] int32, counted within the request; -1 for the anchor.
        depths, ranks: [T] int32; a row proposes candidate `rank` of its depth. -1 for the anchor.
        requests: [T] int64; the request of each row.
        row_starts: [B + 1] int64.
        counts: [B] int32; rows of each request, at least 1.
        lens: the same as a list.
        row_mask: [B, W, W] bool: the rows of its request that each row sees; None if all requests have chains.
        length: rows on the longest path.
        width: W, rows of the request with the most.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    requests: torch.Tensor
    row_starts: torch.Tensor
    counts: torch.Tensor
    lens: list[int]
    row_mask: torch.Tensor | None
    length: int
    width: int

    def seen(self) -> torch.Tensor:
        """[B, W, W] bool: `row_mask`, also of chains."""
        if self.row_mask is not None:
            return self.row_mask
        chain = torch.ones(self.width, self.width, dtype=torch.bool).tril()
        return chain.expand(len(self.row_starts) - 1, -1, -1)


class TreeAcceptance(NamedTuple):
    """What each tree commits.

    Fields:
        out_ids: [B, L] int64; the committed ids first, the rest is zero.
        commit_lens: [B] int32, 1..L: accepted drafts plus the bonus.
        bonus_ids: [B] int64: the target's own token after the accepted drafts.
        path: [B, L] int64; the accepted rows, the anchor's first, as indices among all T rows. The rest repeats the
            anchor's.
    """

    out_ids: torch.Tensor
    commit_lens: torch.Tensor
    bonus_ids: torch.Tensor
    path: torch.Tensor


def accept_anchors(target_ids: torch.Tensor) -> TreeAcceptance:
    """`accept_tree` where nothing was drafted: each request's one row is its anchor.

    Args:
        target_ids: [B] int64; the target's own tokens. `out_ids` and `bonus_ids` share their memory.
    """
    rows, ones = _anchor_rows(len(target_ids))
    return TreeAcceptance(target_ids[:, None], ones, target_ids, rows)


@lru_cache(maxsize=256)
def _anchor_rows(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, 1] int64 and [B] int32; shared, so nobody writes to them."""
    return torch.arange(batch)[:, None], torch.ones(batch, dtype=torch.int32)


def top_log_probs(logits: torch.Tensor, count: int) -> Proposal:
    """The `count` best ids of every row, with their log-probabilities.

    Args:
        logits: [N, V] floating; NaN counts as -inf.
        count: k, 1..V.
    """
    values = torch.where(logits.isnan(), float("-inf"), logits.float())
    best = values.sort(dim=-1, descending=True, stable=True)
    log_probs = best.values[:, :count] - values.logsumexp(-1, keepdim=True)
    return Proposal(best.indices[:, :count], torch.where(log_probs.isnan(), float("-inf"), log_probs))


def best_first(chances: torch.Tensor, rows: int) -> Trees:
    """Adds rows to each request's tree, always the one that is most likely to be reached (DDTree).

    A block-diffusion draft proposes all depths at once, so a candidate's chance does not depend on its parent.

    Args:
        chances: [B, D, k] float32; chance that candidate j of depth d + 1 is accepted if its parent is. Falling in j.
        rows: R, at least 1.
    """
    shape = (len(chances), rows)
    parents, depths, ranks = (np.full(shape, fill, dtype=np.int32) for fill in (-1, 0, -1))
    reaches = np.zeros(shape, dtype=np.float32)
    for request, own in enumerate(chances.numpy()):
        reaches[request, 0] = 1
        found: list[tuple[float, int, int, int, int]] = []  # (-reach, order of discovery, parent, depth, rank)
        order = 0

        def find(parent: int, depth: int, rank: int) -> None:
            nonlocal order
            if depth > own.shape[0] or rank >= own.shape[1]:  # noqa: B023
                return
            reach = reaches[request, parent] * own[depth - 1, rank]  # noqa: B023
            if reach > 0:
                heapq.heappush(found, (-float(reach), order, parent, depth, rank))  # noqa: B023
                order += 1

        find(0, 1, 0)
        for row in range(1, rows):
            if not found:
                break
            negative, _, parent, depth, rank = heapq.heappop(found)
            parents[request, row], depths[request, row], ranks[request, row] = parent, depth, rank
            reaches[request, row] = -negative
            find(parent, depth, rank + 1)
            find(row, depth + 1, 0)
    return Trees(*(torch.from_numpy(field) for field in (parents, depths, ranks, reaches)))


def take_rows(
    trees: Trees,
    drafted: Sequence[int],
    lens: Sequence[int],
    batch: int,
    copied: Sequence[int] = (),
    copied_lens: Sequence[int] = (),
) -> PlannedRows:
    """The first `lens` rows of each tree, chains for copies, and the anchor alone for all other requests.

    Args:
        drafted: indices of the requests that have trees, rising.
        lens: rows of each tree, 1..R.
        batch: B, all requests.
        copied: indices of other requests, rising. Each row of their chains proposes the first candidate of its depth.
        copied_lens: rows of each chain, anchor included.
    """
    fields: list[list[int]] = [[], [], [], []]
    row_lens = [1] * batch
    of_request = dict(zip(drafted, range(len(drafted)), strict=True))
    chain_lens = dict(zip(copied, copied_lens, strict=True))
    for request in range(batch):
        tree = of_request.get(request)
        rows = [(-1, 0, -1)]
        if tree is not None:
            count = row_lens[request] = lens[tree]
            own = (field[tree, :count].tolist() for field in trees[:3])
            rows = list(zip(*own, strict=True))
        elif request in chain_lens:
            count = row_lens[request] = chain_lens[request]
            rows += [(row - 1, row, 0) for row in range(1, count)]
        for row in rows:
            for field, value in zip(fields, (*row, request), strict=True):
                field.append(value)
    parents, depths, ranks = (torch.tensor(field, dtype=torch.int32) for field in fields[:3])
    starts = [0, *accumulate(row_lens)]
    chains = all(depth == row - starts[request] for row, (depth, request) in enumerate(zip(*fields[1::2], strict=True)))
    width = max(row_lens)
    mask = None
    if not chains:
        padded = torch.full((batch, width), -1, dtype=torch.int32)
        for request, count in enumerate(row_lens):
            padded[request, :count] = parents[starts[request] : starts[request] + count]
        mask = ancestors(padded, width) & (torch.arange(width) < torch.tensor(row_lens)[:, None])[:, :, None]
    requests = torch.tensor(fields[3], dtype=torch.int64)
    length = 1 + max(fields[1])
    counts = torch.tensor(row_lens, dtype=torch.int32)
    return PlannedRows(parents, depths, ranks, requests, torch.tensor(starts), counts, row_lens, mask, length, width)


def lay_out_trees(
    rows: PlannedRows,
    drafted: Sequence[int],
    candidate_ids: torch.Tensor,
    bonus_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and slots of the rows of trees, [T] int64 each.

    A row's position follows from its depth. Its slot is that of position `prefix_len + i`, if it is row i of its
    request.

    Args:
        drafted: indices of the requests that have candidates.
        candidate_ids: [len(drafted), D, k] int64.
        bonus_ids, prefix_lens, req_pool_indices: [B] int64.
        req_to_token: [R, C] int32.
    """
    prefixes = prefix_lens.long()[rows.requests]
    ids = bonus_ids[rows.requests]
    proposed = (rows.ranks >= 0).nonzero()[:, 0]
    tree_of = torch.zeros(len(bonus_ids), dtype=torch.int64)
    tree_of[torch.tensor(list(drafted), dtype=torch.int64)] = torch.arange(len(drafted))
    depths, ranks = rows.depths[proposed].long(), rows.ranks[proposed].long()
    ids[proposed] = candidate_ids[tree_of[rows.requests[proposed]], depths - 1, ranks]
    within = torch.arange(len(ids)) - rows.row_starts[rows.requests]
    slots = req_to_token[req_pool_indices.long()[rows.requests], prefixes + within].long()
    return ids, prefixes + rows.depths, slots


def ancestors(parents: torch.Tensor, width: int) -> torch.Tensor:
    """[B, width, width] bool: which rows of its request each row sees, its ancestors and itself.

    Args:
        parents: [B, R >= width] int32, each before its row; -1: none.
    """
    masks = torch.zeros(len(parents), width, width, dtype=torch.bool)
    for mask, own in zip(masks, parents[:, :width].tolist(), strict=True):
        for row, parent in enumerate(own):
            if parent >= 0:
                mask[row] = mask[parent]
            mask[row, row] = True
    return masks


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """Follows each tree from its anchor, always to the child that equals the target's token after its parent.

    Args:
        target_ids: [T] int64; the target's token after each row.
        ids: [T] int64; the rows' own tokens, the requests' rows one after the other.
        parents: [T] int32, counted within the request; -1 for its first row, the anchor.
        row_starts: [B + 1] int64; request b has the rows `row_starts[b] : row_starts[b + 1]`, at least one.
        length: L, at least the rows on the longest path. Of equal children the first is taken.
    """
    starts = row_starts.tolist()
    batch = len(starts) - 1
    out_ids = torch.zeros(batch, length, dtype=torch.int64)
    path = row_starts[:-1, None].repeat(1, length)
    lens = torch.ones(batch, dtype=torch.int32)
    for request, (first, end) in enumerate(pairwise(starts)):
        row = first
        while True:
            place = int(lens[request]) - 1
            path[request, place], out_ids[request, place] = row, target_ids[row]
            children = (parents[first:end] == row - first) & (ids[first:end] == target_ids[row])
            if not children.any():
                break
            row = first + int(children.nonzero()[0])
            lens[request] += 1
    bonus_ids = out_ids.gather(1, lens[:, None].long() - 1).squeeze(1)
    return TreeAcceptance(out_ids, lens, bonus_ids, path)


def accept_tree_greedy(
    logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """`accept_tree` with the argmax of the target's `logits` ([T or more, V]); ties and NaN as in `row_argmax`."""
    return accept_tree(logits[: len(ids)].argmax(-1), ids, parents, row_starts, length)


def exchange_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    commit_lens: torch.Tensor,
    row_starts: torch.Tensor,
) -> None:
    """Orders the slots of each request's rows: those of its accepted path first, then the others, as they stood.

    Row i of a request has the slot of position `prefix_len + i`. Afterwards the committed tokens have the slots of
    their positions, and every slot still has one place in the table.

    Args:
        req_to_token: [R, C] int32, changed in place.
        req_pool_indices: [B] int64; the requests' rows in the table.
        prefix_lens: [B] int64.
        path, commit_lens: of a `TreeAcceptance`.
        row_starts: [B + 1] int64.
    """
    starts = row_starts.tolist()
    for request, count in enumerate(commit_lens.tolist()):
        first, rows = starts[request], starts[request + 1] - starts[request]
        taken = [row - first for row in path[request, :count].tolist()]
        order = taken + [row for row in range(rows) if row not in taken]
        begin = int(prefix_lens[request])
        slots = req_to_token[int(req_pool_indices[request])]
        slots[begin : begin + rows] = slots[begin : begin + rows][order]


def committed_rows(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    commit_lens: torch.Tensor,
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The accepted rows of all requests, as indices among all T rows; their positions; the slots of these positions;
    their hidden states.

    Args:
        req_to_token: [R, C] int32.
        req_pool_indices: [B] int64; the requests' rows in the table.
        prefix_lens: [B] int64.
        path, commit_lens: of a `TreeAcceptance`.
        hidden: [T or more, H].

    Returns:
        [N] int64 each and [N, H]; N: the sum of `commit_lens`.
    """
    places = torch.arange(path.shape[1])
    committed = places < commit_lens[:, None]  # [B, L]
    positions = prefix_lens[:, None] + places
    requests = req_pool_indices[:, None].expand_as(path)[committed]
    rows, positions = path[committed], positions[committed]
    return rows, positions, req_to_token[requests, positions].long(), hidden[rows]
