"""Training blocks: random anchors in the target's answers, block rows, labels, and the keys that each row sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

from sglang_dflash.reference import Attend, LayerAttention

IGNORED = -100
# Edge length of flex attention's tiles, and the number of tile rows that mask creation evaluates at a time.
_TILE = 128
_TILE_ROWS_AT_ONCE = 4
_Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A blocks of K rows for each of B conversations, one after the other: Q = A * K rows per conversation.

    Fields:
        anchors: [B, A] int64; positions of the blocks' first rows.
        ids: [B, Q] int64; in each block the anchor's clean token, then K-1 mask tokens.
        positions: [B, Q] int64, absolute.
        labels: [B, Q] int64; the clean token that the row predicts, IGNORED where nothing is learned.
    """

    anchors: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    block_size: int

    def previous_ids(self) -> torch.Tensor:
        """[B, A, K] int64; the clean token before each labelled row, and any token id before the others."""
        ids, labels = (value.unflatten(1, (-1, self.block_size)) for value in (self.ids, self.labels))
        clean = torch.where(labels == IGNORED, ids, labels)  # row 0 has no label and holds the anchor
        return clean.roll(1, dims=-1)


def sample_anchors(learned: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws up to `count` distinct random anchors per conversation, in ascending order (paper, appendix A.1).

    An anchor and the token after it must both be learned. A conversation with fewer such positions than A is filled
    up with -1 at the front.

    Args:
        learned: [B, T] bool.
        generator: a CPU generator, so that a seed gives the same anchors on every device.

    Returns:
        [B, A] int64 on the device of `learned`, A <= count.
    """
    valid = (learned[:, :-1] & learned[:, 1:]).cpu()
    keys = torch.rand(valid.shape, generator=generator).masked_fill(~valid, 2.0)
    width = max(1, min(count, int(valid.sum(1).max())))
    drawn = keys.topk(width, largest=False)
    anchors = drawn.indices.masked_fill(drawn.values >= 2.0, -1)
    return anchors.sort(1).values.to(learned.device)


def make_blocks(
    ids: torch.Tensor,
    learned: torch.Tensor,
    anchors: torch.Tensor,
    block_size: int,
    mask_token_id: int,
    anchor_first: bool = False,
) -> Blocks:
    """Makes a block `[anchor, MASK x (K-1)]` at each anchor.

    The label of row k is the clean token at its own position, of an `anchor_first` draft that behind it, if all tokens
    from the anchor to the label are learned: nothing is drafted after the target's end token.

    Args:
        ids: [B, T] int64; clean tokens.
        learned: [B, T] bool.
        anchors: [B, A] int64; -1 makes an empty block without labels.
    """
    kept, anchors = anchors >= 0, anchors.clamp(min=0)
    offsets = torch.arange(block_size, device=ids.device)
    rows = anchors[..., None] + offsets  # [B, A, K]: absolute positions
    said = rows + anchor_first
    inside = said.clamp(max=ids.shape[1] - 1)
    batch = torch.arange(len(ids), device=ids.device)[:, None, None]
    labelled = (learned[batch, inside] & (said < ids.shape[1])).cumprod(2).bool()
    labelled &= (kept & learned[batch[..., 0], anchors])[..., None] & (offsets + anchor_first > 0)
    labels = ids[batch, inside].masked_fill(~labelled, IGNORED)
    block_ids = torch.where(offsets == 0, ids[batch[..., 0], anchors][..., None], mask_token_id)
    return Blocks(anchors, block_ids.flatten(1), rows.flatten(1), labels.flatten(1), block_size)


def dense_mask(blocks: Blocks, context_len: int, attention: LayerAttention) -> torch.Tensor:
    """The keys that each row sees: the context before its anchor, and its own block. The reference of the others.

    Keys are the `context_len` context features, then the Q block rows.

    Returns:
        [B, 1, Q, context_len + Q] bool.
    """
    device = blocks.anchors.device
    context = _seen_context(blocks, context_len, attention)
    own = torch.block_diag(*[_seen_rows(blocks.block_size, attention, device)] * blocks.anchors.shape[1])  # [Q, Q]
    return torch.cat((context, own.bool().expand(len(context), 1, -1, -1)), 3)


def _seen_context(blocks: Blocks, context_len: int, attention: LayerAttention) -> torch.Tensor:
    """The context that each row sees, [B, 1, Q, context_len] bool."""
    anchors = blocks.anchors.repeat_interleave(blocks.block_size, 1)[..., None]  # [B, Q, 1]
    context = torch.arange(context_len, device=anchors.device)
    seen = context < anchors
    if attention.window is not None:
        seen = seen & (blocks.positions[..., None] - context < attention.window)
    return seen[:, None]


def _seen_rows(size: int, attention: LayerAttention, device: torch.device) -> torch.Tensor:
    """The rows of its own block that each row sees, [K, K] bool."""
    offset = torch.arange(size, device=device)
    behind = offset[:, None] - offset
    seen = behind >= 0 if attention.causal else torch.ones_like(behind, dtype=torch.bool)
    return seen if attention.window is None else seen & (behind < attention.window)


def split_attention(blocks: Blocks, context_len: int, attention: LayerAttention) -> Attend:
    """Attention of the rows that `dense_mask` describes, without the scores between blocks, of which none is seen.

    Those are five sixths of all scores with 256 blocks of 8 rows behind 400 tokens.

    Returns:
        q [B, Hq, Q, D], k and v [B, Hkv, T + Q, D] -> [B, Hq, Q, D]; the softmax is computed in float32.
    """
    size = blocks.block_size
    hidden_context = ~_seen_context(blocks, context_len, attention)[:, None]  # [B, 1, 1, Q, T]
    hidden_rows = ~_seen_rows(size, attention, blocks.anchors.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (batch, heads, rows, dim), kv_heads = q.shape, k.shape[1]
        (k, own_k), (v, own_v) = (value.split((context_len, rows), dim=2) for value in (k, v))
        groups = (q * dim**-0.5).view(batch, kv_heads, -1, rows, dim)
        far = (groups.flatten(2, 3) @ k.mT).view(*groups.shape[:4], -1).float()  # [B, Hkv, G, Q, T]
        blocked = groups.unflatten(3, (-1, size))  # [B, Hkv, G, A, K, D]
        near = (blocked @ own_k.unflatten(2, (-1, size))[:, :, None].mT).float()  # [B, Hkv, G, A, K, K]
        far = far.masked_fill(hidden_context, float("-inf"))
        near = near.masked_fill(hidden_rows, float("-inf"))
        shares = torch.cat((far, near.flatten(3, 4)), dim=-1).softmax(-1).to(v.dtype)
        far, near = shares.split((context_len, size), dim=-1)
        out = (far.flatten(2, 3) @ v).view(groups.shape)
        out = out + (near.unflatten(3, (-1, size)) @ own_v.unflatten(2, (-1, size))[:, :, None]).flatten(3, 4)
        return out.view(batch, heads, rows, dim)

    return attend


def flex_mask(blocks: Blocks, context_len: int, attention: LayerAttention) -> BlockMask:
    """The mask of `dense_mask` for flex attention, which never holds it as a whole."""
    size, anchors, window = blocks.block_size, blocks.anchors, attention.window
    rows = blocks.ids.shape[1]
    last = anchors.shape[1] - 1

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        anchor = anchors[b, (q // size).clamp(max=last)]  # flex pads rows to whole tiles: q may exceed the last row
        offset, key_offset = q % size, (kv - context_len) % size
        in_context = (kv < context_len) & (kv < anchor)
        in_block = (kv >= context_len) & ((kv - context_len) // size == q // size)
        if attention.causal:
            in_block = in_block & (key_offset <= offset)
        if window is not None:
            in_context = in_context & (anchor + offset - kv < window)
            in_block = in_block & (offset - key_offset < window)
        return in_context | in_block

    return _tiled(sees, len(anchors), rows, context_len + rows, anchors.device)


def _tiled(sees: _Sees, batch: int, rows: int, keys: int, device: torch.device) -> BlockMask:
    """Like torch's `create_block_mask`, but evaluates a few rows of tiles at a time, not all rows x keys at once."""
    none = torch.zeros((), dtype=torch.int64, device=device)
    requests = torch.arange(batch, device=device)[:, None, None]
    columns = torch.arange(-(-keys // _TILE) * _TILE, device=device)
    counts = []
    for some in torch.arange(-(-rows // _TILE) * _TILE, device=device).split(_TILE * _TILE_ROWS_AT_ONCE):
        seen = sees(requests, none, some[:, None], columns) & (some[:, None] < rows) & (columns < keys)
        counts.append(seen.unflatten(2, (-1, _TILE)).sum(3).unflatten(1, (-1, _TILE)).sum(2))
    tiles = torch.cat(counts, dim=1)[:, None]  # [B, 1, Q tiles, KV tiles]: visible (row, key) pairs
    full = tiles == _TILE * _TILE
    return BlockMask.from_kv_blocks(
        *_chosen((tiles > 0) & ~full),
        *_chosen(full),
        BLOCK_SIZE=_TILE,
        mask_mod=sees,
        seq_lengths=(rows, keys),
    )


def _chosen(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of tiles: the number of true tiles, and the indices of all tiles, the true ones first."""
    chosen = tiles.int()
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int().contiguous()


MASKS = {"dense": dense_mask, "split": split_attention, "flex": flex_mask}
"""By --attention: what makes the draft's mask of blocks, context length and kind of layer."""
