"""The specification of the ops of norms, rotary embeddings and attention, in plain torch.

`recurrent_reference.py` has that of layers with recurrent state, `mixture.py` that of a mixture of experts. They serve
wherever the native ops do not.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension in float32, returned in `x`'s dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `x + residual` (same shape and dtype), and that sum. Each result is rounded only once."""
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps).to(x.dtype), total.to(x.dtype)


def rope_neox(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired (neox style), over the first `cos_sin.shape[1]` of the last dimension.

    Args:
        x: [N, ..., D].
        positions: [N] int64, each < P.
        cos_sin: [P, R] with R <= D; cosines in the first half of a row, sines in the second.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].to(x.dtype).chunk(2, dim=-1)  # [N, R/2] each
    shape = (len(x), *([1] * (x.dim() - 2)), rotary_dim // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def norm_rope_(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Normalises and rotates every head in place, as attention does with queries and keys.

    Args:
        x: [N, heads, D], the last dimension dense.
        weight: [D], or None: no norm.
        positions, cos_sin: see `rope_neox`.
    """
    x.copy_(rope_neox(x if weight is None else rms_norm(x, weight, eps), positions, cos_sin))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_starts: torch.Tensor,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention_rows` of every request over its paged KV.

    Args:
        q: [T, Hq, D], the requests' rows one after the other.
        k_cache, v_cache: [slots, Hkv, D and Dv]; the rows' own KV is already in them.
        req_to_token: [R, C] int32; slot of each position of each request row.
        req_pool_indices: [B] int64; the batch's rows.
        prefix_lens: [B] int64; tokens before a request's first row.
        row_starts: [B + 1] int64, from 0 to T; request b has the rows `row_starts[b] : row_starts[b + 1]` of `q`.
        sinks: [Hq] or None; see `attention_rows`.

    Returns:
        [T, Hq, Dv] in `q`'s dtype.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    starts = row_starts.tolist()
    for index, (row, prefix) in enumerate(zip(req_pool_indices.tolist(), prefix_lens.tolist(), strict=True)):
        rows = slice(starts[index], starts[index + 1])
        count = rows.stop - rows.start
        slots = req_to_token[row, : prefix + count].long()
        out[rows] = attention_rows(q[rows], k_cache[slots], v_cache[slots], prefix, scaling, causal, window_left, sinks)
    return out


def write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_starts: torch.Tensor,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """An attention layer's work: writes the rows' own keys and values to their slots, then calls `paged_attention`.

    Args:
        q: [T, Hq * D] or [T, Hq, D].
        k, v: [T, Hkv * D and Dv] or [T, Hkv, D and Dv], in the caches' dtype.
        slots: [T] int64; the slots of the rows' positions in `req_to_token`. No slot occurs twice.

    Returns:
        [T, Hq * Dv] in `q`'s dtype.
    """
    k_cache[slots] = k.view(-1, *k_cache.shape[1:])
    v_cache[slots] = v.view(-1, *v_cache.shape[1:])
    q = q.flatten(1)
    q = q.reshape(len(q), q.shape[1] // k_cache.shape[2], k_cache.shape[2])
    rows = (req_to_token, req_pool_indices, prefix_lens, row_starts)
    return paged_attention(q, k_cache, v_cache, *rows, scaling, causal, window_left, sinks).flatten(1)


def attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_len: int,
    scaling: float,
    causal: bool,
    window_left: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped-query attention of one request's rows over its prefix and its own rows, in float32.

    Row i is at position `prefix_len + i`. A window of HF size w is `window_left` = w - 1: a causal row sees
    the keys from `window_left` before it up to itself; a bidirectional row sees every key whose distance behind
    it is at most `window_left`, and all keys ahead of it.

    Args:
        q: [T, Hq, D]; k, v: [prefix_len + T, Hkv, D and Dv], Hq a multiple of Hkv.
        sinks: [Hq] or None; for each head the score of one more key, which every row sees and whose value is 0. Its
            score is not scaled (gpt-oss).

    Returns:
        [T, Hq, Dv] in `q`'s dtype.
    """
    groups = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(groups, 1)
    values = v.float().repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scaling
    visible = visible_keys(len(q), prefix_len, len(k), causal, window_left, q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)


def visible_keys(
    rows: int, prefix_len: int, keys: int, causal: bool, window_left: int | None, device: torch.device
) -> torch.Tensor | None:
    """[rows, keys] bool: which keys each row sees; None where it sees all (see `attention_rows`)."""
    if not causal and window_left is None:
        return None
    behind = torch.arange(rows, device=device)[:, None] + prefix_len - torch.arange(keys, device=device)
    visible = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    return visible if window_left is None else visible & (behind <= window_left)
