"""Trees of equally many rows on any device: torch bodies of the ops in `tree.py` whose shapes depend on no value.

So nothing here waits for a device, and a CUDA graph may hold it. Row 0 of each tree is its anchor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.ops.tree import Proposal, TreeAcceptance, Trees


class DraftedTrees(NamedTuple):
    """One tree of N rows for each request.

    Fields:
        ids: [B, N] int64; the anchor's first.
        parents, depths, ranks: [B, N] int32; as in `Trees`.
        seen: [B, N, N] bool; each row's ancestors and itself.
    """

    ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def empty(cls, batch: int, rows: int, device: torch.device | str) -> DraftedTrees:
        ids = torch.empty(batch, rows, dtype=torch.int64, device=device)
        parents, depths, ranks = (torch.empty(batch, rows, dtype=torch.int32, device=device) for _ in range(3))
        return cls(ids, parents, depths, ranks, torch.empty(batch, rows, rows, dtype=torch.bool, device=device))


class FinalSlots(NamedTuple):
    """Where the rows of a path belong, [B * L] int64 each. Places behind the path keep what they have.

    Fields:
        positions: those of L tokens behind the prefix.
        slots: of these positions.
        sources: the slots that hold the tokens' KV.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor


def most_rows(depths: int, candidates: int, most: int) -> int:
    """Rows, the anchor included, that every tree over `depths` depths can have; at most `most`."""
    rows, level = 1, 1
    for _ in range(depths):
        level = min(level * candidates, most)
        rows = min(rows + level, most)
    return rows


def top_log_probs(logits: torch.Tensor, count: int) -> Proposal:
    """See `tree.top_log_probs`. Of equal logits at the cut, any are taken; those taken stand in order of their ids."""
    values = torch.where(logits.isnan(), float("-inf"), logits.float())
    ids = values.topk(count, dim=-1).indices.sort(dim=-1).values
    best = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    log_probs = best.values - values.logsumexp(-1, keepdim=True)
    return Proposal(ids.gather(-1, best.indices), torch.where(log_probs.isnan(), float("-inf"), log_probs))


def grow_trees(chances: torch.Tensor, rows: int) -> Trees:
    """`tree.best_first`, depth by depth: at most R - 1 rows of a depth can be among the best, and then so are their
    parents.

    Ties: the shallower row first. Candidates without a chance fill a tree that has no others, so that all have R rows.

    Args:
        chances: [B, D, k] float32.
        rows: R, 2 to `most_rows`.
    """
    batch, depths, count = chances.shape
    most = rows - 1
    reach = chances.new_ones(batch, 1)  # of the rows of one depth
    found: list[tuple[torch.Tensor, ...]] = []  # reach, number of the parent, depth, rank; [B, M] each
    first = 0  # number of the first row of the depth above; the anchor is 0
    for depth in range(depths):
        above = reach.shape[1]
        reached = (reach[:, :, None] * chances[:, depth, None]).flatten(1)
        reach, place = reached.topk(min(most, reached.shape[1]))
        found.append((reach, place // count + first, torch.full_like(place, depth + 1), place % count))
        first += above
    reaches, above_of, depth_of, rank_of = (torch.cat(fields, 1) for fields in zip(*found, strict=True))  # [B, S]
    assert reaches.shape[1] >= most, (reaches.shape, rows)
    best = reaches.sort(dim=1, descending=True, stable=True)  # stable: a parent stays before its child
    kept = best.indices[:, :most]
    row_of = kept.new_zeros(batch, reaches.shape[1] + 1)  # by number; the parents of kept rows are kept
    row_of.scatter_(1, kept + 1, torch.arange(1, rows, device=kept.device).expand(batch, -1))
    parents = row_of.gather(1, above_of.gather(1, kept))
    return Trees(
        F.pad(parents, (1, 0), value=-1).int(),
        F.pad(depth_of.gather(1, kept), (1, 0), value=0).int(),
        F.pad(rank_of.gather(1, kept), (1, 0), value=-1).int(),
        F.pad(best.values[:, :most], (1, 0), value=1.0),
    )


def ancestors(parents: torch.Tensor, length: int) -> torch.Tensor:
    """`tree.ancestors`, [B, N, N] bool, by doubling the way that is looked back.

    Args:
        parents: [B, N] int32; -1 for the anchor.
        length: at least the rows on the longest path.
    """
    back = parents.long().clamp(min=0)
    seen = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((length - 1).bit_length()):
        seen = seen | seen.gather(1, back[:, :, None].expand_as(seen))
        back = back.gather(1, back)
    return seen


def draft_trees(proposal: Proposal, anchor_ids: torch.Tensor, rows: int) -> DraftedTrees:
    """The likeliest rows of a proposal.

    Args:
        proposal: [B, D, k] each.
        anchor_ids: [B] int64.
        rows: N.
    """
    depths, count = proposal.ids.shape[1:]
    trees = grow_trees(proposal.log_probs.exp(), rows)
    places = (trees.depths[:, 1:].long() - 1) * count + trees.ranks[:, 1:]
    ids = torch.cat((anchor_ids[:, None], proposal.ids.flatten(1).gather(1, places)), 1)
    return DraftedTrees(ids, *trees[:3], ancestors(trees.parents, min(depths + 1, rows)))


def lay_out(
    depths: torch.Tensor, prefix_lens: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots as of `tree.lay_out_trees`, [T] int64 each. depths: [B, N] int32."""
    prefixes = prefix_lens.long()[:, None]
    places = prefixes + torch.arange(depths.shape[1], device=depths.device)
    slots = req_to_token[req_pool_indices.long()[:, None], places].long()
    return (prefixes + depths).flatten(), slots.flatten()


def attention_mask(seen: torch.Tensor, prefix_lens: torch.Tensor, cells: int) -> torch.Tensor:
    """[cells] bool, in SGLang's form: request by request, row by row, which of the prefix and of the N rows is seen.

    Every row sees the whole prefix. Cells behind the last request's are True.

    Args:
        seen: [B, N, N] bool.
        prefix_lens: [B] int64.
        cells: at least the sum of N * (prefix_len + N), as known on the host.
    """
    columns = torch.arange(seen.shape[1], device=seen.device)
    prefixes = prefix_lens.long()
    keys = prefixes + seen.shape[1]  # of each row
    starts = (keys.cumsum(0) - keys) * seen.shape[1] + prefixes
    places = starts[:, None, None] + columns[:, None] * keys[:, None, None] + columns
    mask = torch.ones(cells, dtype=torch.bool, device=seen.device)
    return mask.scatter_(0, places.flatten(), seen.flatten())


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree`. Here all requests have equally many rows, and children of one row differ."""
    batch = len(row_starts) - 1
    if batch == 0:
        nothing = target_ids.new_empty(0, length)
        return TreeAcceptance(nothing, nothing.new_empty(0, dtype=torch.int32), nothing.new_empty(0), nothing)
    width, device = len(ids) // batch, ids.device
    target_ids, ids = target_ids.view(batch, width), ids.view(batch, width)
    back = parents.view(batch, width).long().clamp(min=0)
    accepted = ids == target_ids.gather(1, back)
    accepted[:, 0].fill_(True)
    depths = torch.ones_like(back)
    depths[:, 0].fill_(0)
    for _ in range((length - 1).bit_length()):  # each looks twice as far back
        accepted = accepted & accepted.gather(1, back)
        depths = depths + depths.gather(1, back)
        back = back.gather(1, back)
    rows = torch.arange(width, device=device).expand(batch, -1)
    path = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)  # the last place takes what is rejected
    path = path.scatter_(1, torch.where(accepted, depths, length), rows)[:, :length]
    lens = accepted.sum(1, dtype=torch.int32)
    committed = torch.arange(length, device=device) < lens[:, None]
    out_ids = torch.where(committed, target_ids.gather(1, path), 0)
    bonus_ids = out_ids.gather(1, lens[:, None].long() - 1).squeeze(1)
    return TreeAcceptance(out_ids, lens, bonus_ids, path + row_starts[:-1, None])


def final_slots(
    slots: torch.Tensor, path: torch.Tensor, commit_lens: torch.Tensor, prefix_lens: torch.Tensor
) -> FinalSlots:
    """`tree.committed_rows` with L places for each request.

    Args:
        slots: [T] int64; row i of a request has that of position `prefix_len + i`.
        path, commit_lens: of a `TreeAcceptance`.
        prefix_lens: [B] int64.
    """
    batch, length = path.shape
    places = torch.arange(length, device=path.device)
    own = slots.view(batch, -1)[:, :length]
    sources = torch.where(places < commit_lens[:, None], slots[path], own)
    return FinalSlots((prefix_lens.long()[:, None] + places).flatten(), own.flatten(), sources.flatten())


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's first child and next sibling, [B, N] int64 each; -1 for none. parents: [B, N] int32."""
    rows = torch.arange(parents.shape[1], device=parents.device)
    children = parents[:, None] == rows[:, None]  # [B, N, N]
    siblings = (parents[:, None] == parents[:, :, None]) & (rows > rows[:, None])
    return _first(children), _first(siblings)


def _first(which: torch.Tensor) -> torch.Tensor:
    """[B, N] int64: the first True of each row, -1 if there is none."""
    return torch.where(which.any(-1), which.byte().argmax(-1), -1)
