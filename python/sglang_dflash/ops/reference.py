"""The specification of every op, in plain torch, for any device and without SGLang."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.ops.kv_buffers import FP8, KVBuffers

MOST_SAMPLED = 64
"""The largest `top_k` for which `sample_rows` is made."""


class Drafts(NamedTuple):
    """Proposed ids, and how sure the draft is of each.

    Fields:
        ids: int64.
        log_probs: float32, of the same shape; -inf where the probability is zero or the logits have no finite maximum.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor


class GreedyAcceptance(NamedTuple):
    """What a block commits.

    Fields:
        out_ids: [B, W] int64; row b holds its committed ids first, the rest is zero.
        commit_lens: [B] int32, 1..W: accepted drafts plus the bonus.
        bonus_ids: [B] int64: the target's own token after the accepted drafts.
    """

    out_ids: torch.Tensor
    commit_lens: torch.Tensor
    bonus_ids: torch.Tensor


class Filters(NamedTuple):
    """The sampling parameters of every request.

    Fields:
        temperatures: [B] float32, above 0.
        top_ks: [B] int32, at least 1; 1 makes a request greedy.
        top_ps: [B] float32, in (0, 1].
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor


def gather_slots(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """KV slots of the given positions of each request.

    Args:
        req_to_token: [R, C] int32; slot of each position of each request row.
        req_pool_indices: [B] int; the batch's rows.
        positions: [B, K] int64, each < C.

    Returns:
        [B, K] int64.
    """
    return req_to_token[req_pool_indices.long()[:, None], positions].long()


def recent_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    size: int,
    page_size: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot table of a draft that sees only the latest `size` tokens of each request.

    It starts at a page boundary, so it includes the tokens before them in the same page.

    Args:
        req_to_token: [R, C] int32; slot of each position of each request row.
        req_pool_indices: [B] int; the batch's rows.
        prefix_lens: [B] int.
        width: columns of the table.

    Returns:
        [B] int64: the first position of each request; [B, width] int32: the slots from there on. Beyond the end of
        `req_to_token` its last slot repeats.
    """
    starts = (prefix_lens.long() - size).clamp(min=0) // page_size * page_size
    positions = starts[:, None] + torch.arange(width, device=starts.device)
    return starts, req_to_token[req_pool_indices.long()[:, None], positions.clamp(max=req_to_token.shape[1] - 1)]


def block_layout(
    bonus_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The drafted block: `[bonus, MASK x (K-1)]` from absolute position `prefix_len` on (paper, section 4).

    Args:
        bonus_ids: [B] int64.
        prefix_lens: [B] int; committed tokens whose KV exists, the bonus not counted.
        req_pool_indices: [B] int.
        req_to_token: [R, C] int32, C >= max(prefix_lens) + K.
        block_size: K, anchor included.
        mask_token_id: the id the draft was trained to fill.

    Returns:
        ids, positions and KV slots, each [B, K] int64.
    """
    ids = bonus_ids.new_full((len(bonus_ids), block_size), mask_token_id, dtype=torch.int64)
    ids[:, 0] = bonus_ids
    positions = prefix_lens.long()[:, None] + torch.arange(block_size, device=prefix_lens.device)
    return ids, positions, gather_slots(req_to_token, req_pool_indices, positions)


def extend_positions(prefix_lens: list[int], row_lens: list[int]) -> torch.Tensor:
    """Positions of an extend's rows: for each request in turn, `row_lens[b]` positions from `prefix_lens[b]` on.

    Returns:
        [sum(row_lens)] int64 on the CPU.
    """
    spans = [torch.arange(p, p + n) for p, n in zip(prefix_lens, row_lens, strict=True)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def accept_chain(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """Accepts the longest prefix of drafts that equals the tokens chosen by the target (paper, section 3).

    Args:
        target_ids: [B, W] int64; row i is the target's token after `ids[:, i]`, so draft i+1 is compared with it.
        ids: [B, W] int64; anchor first, then the drafts.
    """
    matches = (ids[:, 1:] == target_ids[:, :-1]).long()
    accept_lens = matches.cumprod(1).sum(1)  # [B] int64, 0..W-1
    bonus_ids = target_ids.gather(1, accept_lens[:, None]).squeeze(1)
    # All committed ids are the target's own choices, because each accepted draft equals one.
    columns = torch.arange(ids.shape[1], device=ids.device)
    out_ids = target_ids.masked_fill(columns > accept_lens[:, None], 0)
    return GreedyAcceptance(out_ids, (accept_lens + 1).int(), bonus_ids)


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of every row. Ties: the lowest id wins; NaN is larger than all numbers; -0 equals 0.

    Args:
        logits: [N, V] floating.

    Returns:
        [N] int64.
    """
    return logits.argmax(-1)


def best_log_probs(logits: torch.Tensor) -> Drafts:
    """The best id of every row with its log-probability, [N] each. Ties: the lowest id wins.

    Args:
        logits: [N, V] floating; NaN counts as -inf.
    """
    values = torch.where(logits.isnan(), float("-inf"), logits.float())
    ids = values.argmax(-1)
    log_probs = values.gather(-1, ids[:, None])[:, 0] - values.logsumexp(-1)
    return Drafts(ids, torch.where(log_probs.isnan(), float("-inf"), log_probs))


def accept_greedy(logits: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """`accept_chain` with the target's `row_argmax`, and its rules for ties and NaN.

    Args:
        logits: [B, W, V] floating; the target's logits, one row per verified id.
        ids: [B, W] int64; anchor first, then the drafts.
    """
    return accept_chain(row_argmax(logits), ids)


def kept_probabilities(logits: torch.Tensor, requests: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The probabilities from which each row's token is drawn: those of SGLang's sampler with flashinfer.

    A row's logits are divided by its temperature. A token is kept if its probability is above zero, fewer than `top_k`
    tokens of the row are likelier, and these have less than `top_p` of the whole row's probability together
    (`top_k_top_p_sampling_from_probs` of flashinfer, `filter_apply_order="joint"`). Tokens of equal logits are kept or
    dropped together, so more than `top_k` may be kept. A `top_p` of 1 drops nobody. Kept probabilities are divided by
    their sum.

    Args:
        logits: [N, V] float32.
        requests: [N] int64; the request of each row.

    Returns:
        [N, V] float32. NaN where a row has no distribution: one of its logits is NaN or inf, or all are -inf.
    """
    probs = (logits / filters.temperatures[requests][:, None]).softmax(-1)
    ordered, ids = logits.sort(-1, descending=True)
    likelier = torch.searchsorted(-ordered, -ordered)  # [N, V] int64; how many tokens of the row are above each
    mass = probs.gather(1, ids).cumsum(1)
    mass = torch.cat((torch.zeros_like(mass[:, :1]), mass), 1).gather(1, likelier)
    top_ks, top_ps = filters.top_ks[requests][:, None], filters.top_ps[requests][:, None]
    kept = (likelier < top_ks) & ((mass < top_ps) | (top_ps >= 1))
    probs = probs * torch.zeros_like(kept).scatter(1, ids, kept)
    return probs / probs.sum(-1, keepdim=True)


def sample_rows(
    logits: torch.Tensor, requests: torch.Tensor, filters: Filters, uniform: torch.Tensor, any_id: bool
) -> torch.Tensor:
    """Draws the token of every row, by the inverse of the cumulated `kept_probabilities` in the order of the ids.

    A row with a `top_k` of 1 gets its `row_argmax`. Another row without a distribution gets id 0, as from flashinfer.

    Args:
        logits, requests, filters: as in `kept_probabilities`; `top_k` at most `MOST_SAMPLED`.
        uniform: [N] float32, in [0, 1). Its steps of 2^-24 (torch's) round the shares.
        any_id: a row without a distribution gets `uniform * V`, rounded down, instead of id 0.

    Returns:
        [N] int64.
    """
    vocab = logits.shape[1]
    probs = kept_probabilities(logits, requests, filters)
    mass = probs.double().cumsum(1)
    whole = mass[:, -1:]
    drawn = (mass > uniform[:, None].double() * whole).int().argmax(1)
    fallback = (uniform * (vocab if any_id else 0)).long().clamp(max=vocab - 1)
    drawn = torch.where(whole[:, 0].isnan(), fallback, drawn)
    return torch.where(filters.top_ks[requests] <= 1, row_argmax(logits), drawn)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension in float32, returned in `x`'s dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


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


def context_kv(
    features: torch.Tensor,
    kv_weight: torch.Tensor,
    kv_bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft keys and values of committed tokens, for all draft layers (paper, "KV injection").

    `features` are the outputs of the target's tapped layers after `fc` and `hidden_norm`. The draft layers'
    `input_layernorm` is not applied to them.

    Args:
        features: [N, H].
        kv_weight: [L, 2, Hkv, D, H]; each draft layer's stacked key and value projection.
        kv_bias: [L, 2, Hkv, D] or None.
        k_norm_weight: [L, D].
        eps: of the key norm.
        positions: [N] int64, absolute.
        cos_sin: [P, R] as in `rope_neox`.

    Returns:
        k and v, each [L, N, Hkv, D] in the features' dtype.
    """
    kv = project_context(features, kv_weight, kv_bias)
    k = rope_neox(rms_norm(kv[:, :, 0], k_norm_weight[:, None], eps), positions, cos_sin)
    return k.transpose(0, 1), kv[:, :, 1].transpose(0, 1)


def project_context(features: torch.Tensor, kv_weight: torch.Tensor, kv_bias: torch.Tensor | None) -> torch.Tensor:
    """The matrix product of `context_kv`, one for all layers. Keys are not yet normalised or rotated.

    Returns:
        [N, L, 2, Hkv, D] in the features' dtype.
    """
    rows = kv_weight.reshape(-1, kv_weight.shape[-1])
    kv = F.linear(features, rows, None if kv_bias is None else kv_bias.reshape(-1))
    return kv.view(-1, *kv_weight.shape[:-1])


def write_context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    buffers: KVBuffers,
) -> None:
    """Does the rest of `context_kv` and writes its keys and values into their slots.

    Args:
        kv: [N, L, 2, Hkv, D]; from `project_context`.
        k_norm_weight, eps, positions, cos_sin: as in `context_kv`.
        slots: [N] int, each within the buffers; if one occurs twice, either row may be kept.
        buffers: of the L layers, in `kv`'s dtype or in FP8, to which rows are rounded.
    """
    buffers.check(kv)
    k = rope_neox(rms_norm(kv[:, :, 0], k_norm_weight[:, None], eps), positions, cos_sin)  # [N, L, Hkv, D]
    for layer, (k_buffer, v_buffer) in enumerate(zip(buffers.k, buffers.v, strict=True)):
        for buffer, rows in ((k_buffer, k[:, layer]), (v_buffer, kv[:, layer, 1])):
            if buffer.dtype == FP8:  # torch assigns no rows of FP8
                buffer, rows = buffer.view(torch.uint8), rows.to(FP8).view(torch.uint8)
            buffer[slots.long()] = rows
