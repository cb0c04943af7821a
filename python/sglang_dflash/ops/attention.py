"""Attention of B-row queries over paged KV with torch's SDPA: decode, verify and extend on a plain CPU.

Queries are never padded to the KV length. Requests with the same number of rows go through one call, unless
padding their KV to the longest would cost more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sglang_dflash.ops.reference import visible_keys

EXTEND_ROWS = 512  # rows per SDPA call in a long extend: bounds the mask and skips the keys ahead of the chunk
MAX_PADDING = 1.5  # padded KV over real KV up to which requests share one call


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a batch's query rows stand and where their KV lies; made once per forward, shared by all layers.

    Fields:
        slots: [B, S] int64; KV slots of positions 0.. of each request, padded beyond its length with its first.
        prefix_lens: per request, the tokens before its first row.
        row_lens: per request, its query rows. Rows of the requests follow each other in the query tensor.
        batched: whether all requests go through one SDPA call.
    """

    slots: torch.Tensor
    prefix_lens: list[int]
    row_lens: list[int]
    batched: bool
    _masks: dict[tuple[bool, int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def gather(
        cls,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        prefix_lens: list[int],
        row_lens: list[int],
    ) -> PagedRows:
        """Reads the slots of every request from its row in `req_to_token` ([R, C] int32)."""
        kv_lens = torch.tensor([prefix + rows for prefix, rows in zip(prefix_lens, row_lens, strict=True)])
        longest = int(kv_lens.max()) if prefix_lens else 0
        slots = req_to_token[req_pool_indices.long(), :longest].long()
        # Behind its length a row still holds what an earlier request left there: slots of somebody else by now,
        # whose NaN would pass a mask that only weighs them with zero.
        beyond = torch.arange(longest) >= kv_lens[:, None]
        slots = torch.where(beyond, slots[:, :1], slots)
        uniform = len(set(row_lens)) == 1 and row_lens[0] <= EXTEND_ROWS
        batched = uniform and slots.numel() <= MAX_PADDING * int(kv_lens.sum())
        return cls(slots, prefix_lens, row_lens, batched)

    @property
    def kv_lens(self) -> list[int]:
        return [prefix + rows for prefix, rows in zip(self.prefix_lens, self.row_lens, strict=True)]

    def batch_mask(self, causal: bool, window_left: int | None, groups: int) -> torch.Tensor | None:
        """[B, 1, groups * W, S] bool for the batched call; None where every row sees every key."""
        key = (causal, window_left, groups)
        if key not in self._masks:
            self._masks[key] = self._build_batch_mask(causal, window_left, groups)
        return self._masks[key]

    def _build_batch_mask(self, causal: bool, window_left: int | None, groups: int) -> torch.Tensor | None:
        rows, longest = self.row_lens[0], self.slots.shape[1]
        ragged = any(length != longest for length in self.kv_lens)
        if not ragged and window_left is None and (not causal or rows == 1):
            return None
        prefixes = torch.tensor(self.prefix_lens)[:, None, None]  # [B, 1, 1]
        behind = prefixes + torch.arange(rows)[None, :, None] - torch.arange(longest)  # [B, W, S]
        visible = behind >= (0 if causal else 1 - rows + torch.arange(rows)[None, :, None])
        if window_left is not None:
            visible &= behind <= window_left
        return visible.repeat(1, groups, 1)[:, None]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
) -> torch.Tensor:
    """Attention of every request's rows over its own KV; specification: `reference.attention_rows`.

    Args:
        q: [T, Hq, D], the requests' rows one after the other.
        k_cache, v_cache: [slots, Hkv, D and Dv]; the rows' own KV is already in them.
        rows: of this forward.
        causal, window_left: see `reference.attention_rows`.

    Returns:
        [T, Hq, Dv] in `q`'s dtype.
    """
    if rows.batched:
        return _batched(q, k_cache, v_cache, rows, scaling, causal, window_left)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    start = 0
    for index, (prefix, count) in enumerate(zip(rows.prefix_lens, rows.row_lens, strict=True)):
        slots = rows.slots[index, : prefix + count]
        k, v = k_cache[slots].to(q.dtype), v_cache[slots].to(q.dtype)  # [S, Hkv, D]
        out[start : start + count] = _one_request(q[start : start + count], k, v, prefix, scaling, causal, window_left)
        start += count
    return out


def _batched(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scaling: float,
    causal: bool,
    window_left: int | None,
) -> torch.Tensor:
    batch, width, kv_heads = len(rows.row_lens), rows.row_lens[0], k_cache.shape[1]
    groups = q.shape[1] // kv_heads
    # A query group shares its KV head: folding the group into the rows spares SDPA a copy of the keys per head.
    folded = q.view(batch, width, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, W, D]
    folded = folded.reshape(batch, kv_heads, groups * width, -1)
    k = k_cache[rows.slots].to(q.dtype).transpose(1, 2)  # [B, Hkv, S, D]
    v = v_cache[rows.slots].to(q.dtype).transpose(1, 2)
    mask = rows.batch_mask(causal, window_left, groups)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    out = out.view(batch, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4)  # [B, W, Hkv, G, Dv]
    return out.reshape(batch * width, kv_heads * groups, -1)


def _one_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: int,
    scaling: float,
    causal: bool,
    window_left: int | None,
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, Hkv, S, D]
    chunks = []
    for first in range(0, len(q), EXTEND_ROWS):
        chunk = q[first : first + EXTEND_ROWS]  # [C, Hq, D]
        begin = prefix + first
        end = begin + len(chunk) if causal else k.shape[2]
        start = 0 if window_left is None else max(0, begin - window_left)
        mask = visible_keys(len(chunk), begin - start, end - start, causal, window_left, q.device)
        chunks.append(
            F.scaled_dot_product_attention(
                chunk.transpose(0, 1)[None],
                k[:, :, start:end],
                v[:, :, start:end],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=grouped,
            )[0].transpose(0, 1)
        )
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
