"""Attention over paged KV with torch's SDPA: decode, verify and extend on a plain CPU.

Queries are never padded to the KV length. Requests with equally many rows share one SDPA call, unless padding their KV
to the longest would cost more than it saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sglang_dflash.ops.reference import visible_keys

EXTEND_ROWS = 512  # rows per SDPA call in a long extend: bounds the mask, and keys ahead of a causal chunk are skipped
FOLDED_ROWS = 32  # up to this many rows, a group's heads are folded into the rows; with more, the mask is too large
BATCHED_TOKENS = 2048  # padded KV tokens up to which requests share one call; above, one by one stays in the cache
MAX_PADDING = 1.5  # ratio of padded to real KV tokens up to which requests share one call


class KVScratch:
    """Memory that gathered keys and values reuse: new memory pages in every call cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows `slots` ([N] int64) of `cache` ([S, H, D]), valid until the next call with the same name."""
        shape = (len(slots), *cache.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[name] = cache.new_empty(size + size // 2)
        return torch.index_select(cache, 0, slots, out=buffer[:size].view(shape))


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The positions of a batch's query rows and the slots of their KV; built once per forward for all layers.

    Fields:
        slots: [B, S] int64; KV slots of each request's positions 0 to S-1. Beyond its length, its first slot repeats.
        prefix_lens: per request, the tokens before its first query row.
        row_lens: per request, its query rows. The query tensor holds the requests' rows one after the other.
        kv_lens: per request, prefix_lens + row_lens.
        batched: whether all requests go through one SDPA call.
        scratch: memory for gathered KV.
    """

    slots: torch.Tensor
    prefix_lens: list[int]
    row_lens: list[int]
    kv_lens: list[int]
    batched: bool
    scratch: KVScratch = field(default_factory=KVScratch)
    _masks: dict[tuple[int, bool, int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def gather(
        cls,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        prefix_lens: list[int],
        row_lens: list[int],
        scratch: KVScratch | None = None,
    ) -> PagedRows:
        """Reads the slots of every request from its row in `req_to_token` ([R, C] int32).

        Forwards may share a `scratch` if they never run at the same time.
        """
        kv_lens = [prefix + rows for prefix, rows in zip(prefix_lens, row_lens, strict=True)]
        longest = max(kv_lens, default=0)
        slots = req_to_token[req_pool_indices.long(), :longest].long()
        # Beyond its length a row still holds slots of an earlier request, which another request may own by then. Their
        # NaN would pass the mask, because a weight of zero times NaN is NaN.
        beyond = torch.arange(longest) >= torch.tensor(kv_lens, dtype=torch.int64)[:, None]
        slots = torch.where(beyond, slots[:, :1], slots)
        uniform = len(set(row_lens)) == 1 and row_lens[0] <= FOLDED_ROWS
        batched = uniform and slots.numel() <= min(BATCHED_TOKENS, MAX_PADDING * sum(kv_lens))
        return cls(slots, prefix_lens, row_lens, kv_lens, batched, scratch or KVScratch())

    @classmethod
    def uniform(
        cls, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
    ) -> PagedRows:
        """`gather` for `width` rows of every request; prefix_lens: [B] int."""
        return cls.gather(req_to_token, req_pool_indices, prefix_lens.tolist(), [width] * len(prefix_lens))

    def folded_mask(self, index: int, causal: bool, window_left: int | None, groups: int) -> torch.Tensor | None:
        """[1 or B, 1, groups * W, S] bool: what request `index` sees, or each one (-1). None: each row sees all."""
        key = (index, causal, window_left, groups)
        if key not in self._masks:
            if index < 0:
                mask = self._batch_mask(causal, window_left)
            else:
                prefix, rows = self.prefix_lens[index], self.row_lens[index]
                one = visible_keys(rows, prefix, prefix + rows, causal and rows > 1, window_left, self.slots.device)
                mask = None if one is None else one[None]
            self._masks[key] = None if mask is None else mask.repeat(1, groups, 1)[:, None]
        return self._masks[key]

    def _batch_mask(self, causal: bool, window_left: int | None) -> torch.Tensor | None:
        rows, longest = self.row_lens[0], self.slots.shape[1]
        ragged = any(length != longest for length in self.kv_lens)
        if not ragged and window_left is None and (not causal or rows == 1):
            return None
        prefixes = torch.tensor(self.prefix_lens)[:, None, None]  # [B, 1, 1]
        behind = prefixes + torch.arange(rows)[None, :, None] - torch.arange(longest)  # [B, W, S]
        visible = behind >= (0 if causal else 1 - rows + torch.arange(rows)[None, :, None])
        return visible if window_left is None else visible & (behind <= window_left)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every request's rows over its own KV; specification: `reference.attention_rows`.

    Args:
        q: [T, Hq, D], the requests' rows one after the other.
        k_cache, v_cache: [slots, Hkv, D and Dv]; the rows' own KV is already in them.
        rows: built for this forward.
        causal, window_left, sinks: see `reference.attention_rows`.

    Returns:
        [T, Hq, Dv] in `q`'s dtype.
    """
    if rows.batched:
        return _folded(q, k_cache, v_cache, rows, -1, scaling, causal, window_left, sinks)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    start = 0
    for index, (prefix, count) in enumerate(zip(rows.prefix_lens, rows.row_lens, strict=True)):
        own = q[start : start + count]
        if count <= FOLDED_ROWS:
            result = _folded(own, k_cache, v_cache, rows, index, scaling, causal, window_left, sinks)
        else:
            slots = rows.slots[index, : prefix + count]
            k = rows.scratch.gather("k", k_cache, slots).to(q.dtype)  # [S, Hkv, D]
            v = rows.scratch.gather("v", v_cache, slots).to(q.dtype)
            result = _one_extend(own, k, v, prefix, scaling, causal, window_left, sinks)
        out[start : start + count] = result
        start += count
    return out


def _folded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    index: int,
    scaling: float,
    causal: bool,
    window_left: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One SDPA call for request `index`, or for all requests (-1).

    The query heads of a group share one KV head. They are folded into the rows, because SDPA would copy the keys for
    each head otherwise.
    """
    slots = rows.slots if index < 0 else rows.slots[index : index + 1, : rows.kv_lens[index]]
    batch, longest = slots.shape
    kv_heads = k_cache.shape[1]
    groups, width = q.shape[1] // kv_heads, len(q) // batch
    folded = q.view(batch, width, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, W, D]
    folded = folded.reshape(batch, kv_heads, groups * width, -1)
    flat = slots.reshape(-1)
    k = rows.scratch.gather("k", k_cache, flat).view(batch, longest, kv_heads, -1)
    v = rows.scratch.gather("v", v_cache, flat).view(batch, longest, kv_heads, -1)
    k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    mask = rows.folded_mask(index, causal, window_left, groups)
    if sinks is not None:
        scores = sinks.view(kv_heads, groups, 1).expand(-1, -1, width).reshape(1, kv_heads, groups * width, 1)
        k, v, mask = with_sink(k, v, mask, scores.to(q.dtype))
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    out = out.view(batch, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4)  # [B, W, Hkv, G, Dv]
    return out.reshape(batch * width, kv_heads * groups, -1)


def _one_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: int,
    scaling: float,
    causal: bool,
    window_left: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, Hkv, S, D]
    chunks = []
    for first in range(0, len(q), EXTEND_ROWS):
        chunk = q[first : first + EXTEND_ROWS]  # [C, Hq, D]
        begin = prefix + first
        end = begin + len(chunk) if causal else k.shape[2]
        start = 0 if window_left is None else max(0, begin - window_left)
        square = causal and window_left is None and begin == 0 and sinks is None
        mask = None if square else visible_keys(len(chunk), begin - start, end - start, causal, window_left, q.device)
        keys, values = k[:, :, start:end], v[:, :, start:end]
        if sinks is not None:
            scores = sinks.view(1, -1, 1, 1).expand(-1, -1, len(chunk), -1)
            keys, values, mask = with_sink(keys, values, mask, scores.to(q.dtype))
        chunks.append(
            F.scaled_dot_product_attention(
                chunk.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=mask,
                is_causal=square,
                scale=scaling,
                enable_gqa=grouped,
            )[0].transpose(0, 1)
        )
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def with_sink(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds one key of zeros, with a value of zeros; the mask, which SDPA adds to the scores, gives it its score.

    Args:
        k, v: [B, Hkv, S, D and Dv].
        mask: bool, broadcastable to [B, H, R, S]; None: every row sees every key.
        scores: [1, H, R, 1]; the sink's, in the dtype of the queries.

    Returns:
        k and v, [B, Hkv, S + 1, D and Dv], and the mask, [B, H, R, S + 1].
    """
    seen = torch.zeros((), dtype=scores.dtype, device=scores.device).expand(len(k), *scores.shape[1:3], k.shape[2])
    if mask is not None:
        seen = seen.masked_fill(~mask, -torch.inf)
    added = torch.cat((seen, scores.expand(len(k), -1, -1, -1)), -1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), added
