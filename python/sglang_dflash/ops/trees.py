"""Trees of N rows: which drafts they hold, what each row sees, and what a verification accepts.

Row 0 of a request is its anchor; each other row proposes a token behind its parent, which stands before it. The bodies
are torch alone, with shapes that depend on no value: nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.ops.reference import Drafts

LEAST_LOG_PROB = -1e4
"""Stands for the logarithm of 0, so that rows without a chance fill a tree in which no others are left."""


class Trees(NamedTuple):
    """One tree of N rows for each request, the likelier rows first.

    Fields:
        parents, depths: [B, N] int64; of the anchor 0.
        ids: [B, N] int64; 0 in the anchor's place.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ids: torch.Tensor


class TreeAcceptance(NamedTuple):
    """What a tree commits: as of a chain (`GreedyAcceptance`), and `path`, [B, N] int64: the accepted rows, then each
    place itself."""

    out_ids: torch.Tensor
    commit_lens: torch.Tensor
    bonus_ids: torch.Tensor
    path: torch.Tensor


def top_drafts(logits: torch.Tensor, count: int) -> Drafts:
    """The `count` best ids of each row, the likelier first. Ties at the cut: any of them.

    Args:
        logits: [N, V] floating; NaN counts as -inf.
        count: C, at most V.

    Returns:
        [N, C] each.
    """
    values = torch.where(logits.isnan(), float("-inf"), logits.float())
    best = values.topk(count, dim=-1)
    log_probs = best.values - values.logsumexp(-1, keepdim=True)
    return Drafts(best.indices, torch.where(log_probs.isnan(), float("-inf"), log_probs))


def most_rows(depths: int, candidates: int) -> int:
    """Rows, the anchor included, of the tree of all paths."""
    return sum(candidates**depth for depth in range(depths + 1))


def grow_trees(drafts: Drafts, rows: int) -> Trees:
    """The likeliest rows of each request: best-first search over the draft's probabilities (DDTree).

    A block-diffusion draft proposes all depths at once, so a candidate's chance does not depend on its parent. A row's
    chance is less than its parent's, so the likeliest rows of all depths form a tree; at most N - 1 rows of one depth
    are among them.

    Args:
        drafts: [B, D, C] each; the candidates of each depth, the likelier first.
        rows: N, 2 to `most_rows`.
    """
    batch, depths, count = drafts.ids.shape
    assert 2 <= rows <= most_rows(depths, count), (rows, depths, count)
    chances = drafts.log_probs.double().clamp(LEAST_LOG_PROB, -1e-9)  # less than 0, so that a parent is likelier
    chance = chances.new_zeros(batch, 1)
    found: list[tuple[torch.Tensor, ...]] = []  # chance, number of the parent, depth, id; [B, M] each
    first = 0  # number of the first row of the depth above
    for depth in range(depths):
        above = chance.shape[1]
        reached = (chance[:, :, None] + chances[:, depth, None]).flatten(1)
        chance, place = reached.topk(min(rows - 1, reached.shape[1]))
        ids = drafts.ids[:, depth].gather(1, place % count)
        found.append((chance, place // count + first, torch.full_like(place, depth + 1), ids))
        first += above
    chance, parents, depth_of, ids = (torch.cat(fields, 1) for fields in zip(*found, strict=True))
    kept = chance.topk(rows - 1).indices  # the largest first
    row_of = kept.new_zeros(batch, chance.shape[1] + 1)  # by number; the anchor's is 0
    row_of.scatter_(1, kept + 1, torch.arange(1, rows, device=kept.device).expand(batch, -1))
    fields = row_of.gather(1, parents.gather(1, kept)), depth_of.gather(1, kept), ids.gather(1, kept)
    return Trees(*(F.pad(field, (1, 0)) for field in fields))


def seen_rows(parents: torch.Tensor, length: int) -> torch.Tensor:
    """[B, N, N] bool: which rows of its request each row sees, its ancestors and itself.

    Args:
        parents: [B, N] int64.
        length: at least the rows of the longest path.
    """
    back = parents
    seen = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((length - 1).bit_length()):  # each time, twice as far back
        seen = seen | seen.gather(1, back[:, :, None].expand_as(seen))
        back = back.gather(1, back)
    return seen


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, length: int
) -> TreeAcceptance:
    """Accepts the longest path from the anchor on whose rows are the tokens that the target chose behind their parents.

    Rows with one parent have different ids, so one path at most is accepted; were they equal, one of them would be.

    Args:
        target_ids: [B, N] int64; the target's token behind each row.
        ids, parents, depths: [B, N] int64.
        length: at least the rows of the longest path.
    """
    rows = ids.shape[1]
    right = ids == target_ids.gather(1, parents)
    right[:, 0] = True
    back = parents
    for _ in range((length - 1).bit_length()):
        right = right & right.gather(1, back)
        back = back.gather(1, back)
    places = torch.arange(rows, device=ids.device).expand_as(ids)
    path = torch.cat((places, places[:, :1]), 1)  # a last place, for rows that are not accepted
    path = path.scatter(1, torch.where(right, depths, rows), places)[:, :rows]
    lens = depths.masked_fill(~right, 0).amax(1) + 1
    out_ids = target_ids.gather(1, path)
    bonus_ids = out_ids.gather(1, lens[:, None] - 1)[:, 0]
    return TreeAcceptance(out_ids.masked_fill(places >= lens[:, None], 0), lens.int(), bonus_ids, path)


def attention_mask(seen: torch.Tensor, prefix_lens: torch.Tensor, cells: int) -> torch.Tensor:
    """SGLang's mask of trees: of each request, N rows over its prefix and its N rows; one behind the other.

    Args:
        seen: [B, N, N] bool.
        prefix_lens: [B] int.
        cells: at least as many as the mask needs; SGLang may not know the lengths.

    Returns:
        [cells] bool; True behind the mask.
    """
    rows, prefixes = seen.shape[1], prefix_lens.long()
    row_cells = prefixes + rows  # of one row
    first = (row_cells.cumsum(0) - row_cells) * rows + prefixes
    places = torch.arange(rows, device=seen.device)
    at = first[:, None, None] + places[:, None] * row_cells[:, None, None] + places
    mask = torch.ones(cells, dtype=torch.bool, device=seen.device)
    mask[at] = seen
    return mask
