"""Attention whose result for a row is the same bits in a decode step, a verified block and a prefill chunk, on a CPU.

Torch's flash kernel computes blocks of rows over blocks of 512 keys. Here every block is full: queries form tiles with
the same number of rows, and keys are padded to whole blocks. So all products inside have the same shape, and a block
that a row does not see leaves the row's result unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_dflash.ops.attention import FOLDED_ROWS, MAX_PADDING, PagedRows
from sglang_dflash.ops.reference import visible_keys

TILE_ROWS = 8  # rows of a tile, a group's heads folded in; with more heads in a group, a tile is one token
KEY_BLOCK = 512  # `kv_split_size` of torch's kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)
MASK_ELEMENTS = 1 << 20  # mask elements of one call: bounds the mask of a long extend
BATCHED_TOKENS = 8192  # padded KV tokens up to which requests share one call


def invariant_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
) -> torch.Tensor:
    """`paged_attention` for keys and values of the same head size, computed in float32 for every dtype.

    For 16-bit types torch's kernel packs the keys or not, depending on the amount of work, and then rounds differently.
    It takes no row masks: in a tree, keys stand in another order than in a prefill.
    """
    assert rows.row_mask is None
    out = torch.empty_like(q)
    start = 0
    for requests in _groups(rows):
        count = len(requests) * rows.row_lens[requests.start]
        own = q[start : start + count].float()
        out[start : start + count] = _attend(own, k_cache, v_cache, rows, requests, scaling, causal, window_left)
        start += count
    return out


def _groups(rows: PagedRows) -> list[range]:
    """All requests in one group if they have few rows and little padding; else one by one."""
    each = range(len(rows.row_lens))
    padded = [_whole_blocks(length) for length in rows.kv_lens]
    if len(set(rows.row_lens)) == 1 and rows.row_lens[0] <= FOLDED_ROWS:
        together = len(padded) * max(padded)
        if together <= min(BATCHED_TOKENS, MAX_PADDING * sum(padded)):
            return [each]
    return [range(index, index + 1) for index in each]


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    requests: range,
    scaling: float,
    causal: bool,
    window_left: int | None,
) -> torch.Tensor:
    """Requests with equally many rows. A call takes several tiles of one request, or one tile of each request."""
    (_, heads, dim), batch, kv_heads = q.shape, len(requests), k_cache.shape[1]
    count, groups = len(q) // batch, heads // kv_heads
    tile = max(1, TILE_ROWS // groups)  # tokens
    tiles = -(-count // tile)
    k, v = _keys_and_values(k_cache, v_cache, rows, requests)  # [B, Hkv, S, D]
    folded = F.pad(q.view(batch, count, heads, dim), (0, 0, 0, 0, 0, tiles * tile - count))
    folded = folded.view(batch, tiles, tile, kv_heads, groups, dim).permute(0, 1, 3, 4, 2, 5)
    folded = folded.reshape(batch, tiles, kv_heads, groups * tile, dim)
    out = torch.empty_like(folded)
    step = 1 if batch > 1 else max(1, MASK_ELEMENTS // (groups * tile * k.shape[2]))
    for first in range(0, tiles, step):
        own = folded[:, first : first + step].flatten(0, 1)
        mask = _mask(rows, requests, first * tile, (min(first + step, tiles) - first) * tile, causal, window_left)
        keys = mask.shape[-1]
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            own,
            k[:, :, :keys].expand(len(own), -1, -1, -1),
            v[:, :, :keys].expand(len(own), -1, -1, -1),
            attn_mask=mask.view(len(own), 1, 1, tile, keys).expand(-1, -1, groups, -1, -1).flatten(2, 3),
            scale=scaling,
        )[0]
        out[:, first : first + step] = result.view(batch, -1, *result.shape[1:])
    out = out.view(batch, tiles, kv_heads, groups, tile, dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, tiles * tile, heads, dim)[:, :count].reshape(q.shape)


def _whole_blocks(length: int) -> int:
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def _keys_and_values(
    k_cache: torch.Tensor, v_cache: torch.Tensor, rows: PagedRows, requests: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, Hkv, S, D] float32 each, S whole blocks. Beyond a request's length its first token repeats, masked out."""
    longest = max(rows.kv_lens[index] for index in requests)
    slots = rows.slots[requests.start : requests.stop, :longest]
    slots = torch.cat([slots, slots[:, :1].expand(-1, _whole_blocks(longest) - longest)], dim=1)
    k = rows.scratch.gather("k", k_cache, slots.flatten()).view(*slots.shape, *k_cache.shape[1:])
    v = rows.scratch.gather("v", v_cache, slots.flatten()).view(*slots.shape, *v_cache.shape[1:])
    return k.float().transpose(1, 2), v.float().transpose(1, 2)


def _mask(
    rows: PagedRows, requests: range, first: int, count: int, causal: bool, window_left: int | None
) -> torch.Tensor:
    """[B, count, keys] float32: 0 for the keys that the rows from `first` on see, -inf for the others."""
    key = (requests.start, first, count, causal, window_left)
    if key in rows.tile_masks:
        return rows.tile_masks[key]
    lengths, prefixes = [rows.kv_lens[i] for i in requests], [rows.prefix_lens[i] + first for i in requests]
    ends = [min(prefix + count, length) if causal else length for prefix, length in zip(prefixes, lengths, strict=True)]
    mask = torch.zeros(len(requests), count, _whole_blocks(max(ends)))
    for one, prefix, length in zip(mask, prefixes, lengths, strict=True):
        visible = visible_keys(count, prefix, one.shape[1], causal, window_left, mask.device)
        if visible is not None:
            one.masked_fill_(~visible, -torch.inf)
        one[:, length:] = -torch.inf
    # The masks of all parts of a long extend would be too large together.
    if rows.row_lens[requests.start] <= max(count, FOLDED_ROWS):
        rows.tile_masks[key] = mask
    return mask
