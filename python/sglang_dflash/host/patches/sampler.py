"""SGLang's sampler, fixed so that a request's token does not depend on other requests of its batch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_cpu.hooking import AROUND, hook


@hook(
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    AROUND,
    why="one path is chosen for a whole batch, so a row's token depends on other requests",
    until="SGLang chooses per row",
)
def sample_as_if_alone(
    original: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> tuple[torch.Tensor, Any]:
    """Every row takes the path that it would take alone; SGLang chooses one path for the whole batch.

    If another row is sampled, SGLang sends a greedy row (top_k 1) through the filters, too: a tie then goes to the
    token that the sort puts first. Alone, the row takes the argmax: the lowest id of a tie. With seeds, SGLang also
    sends a row without filters through them if another row has filters, and hashes the row's noise from each token's
    rank. Alone, it hashes the noise from the token's id. The selection runs on the device.
    """
    if info.grammars:
        # If a grammar allows only the end and `min_new_tokens` forbids it, the row has no token and its softmax is NaN.
        # SGLang's draw from NaN would end the scheduler. So any token is drawn, at which the grammar aborts.
        probs.nan_to_num_(nan=1.0 / probs.shape[-1])
    tokens, capture = original(sampler, probs, info, positions, simple)  # [N] int32; it leaves `probs` as it was
    if simple or not (info.is_any_greedy or info.sampling_seed is not None):
        return tokens, capture
    if info.sampling_seed is not None:
        unfiltered = (info.top_ks == TOP_K_ALL) & (info.top_ps == 1.0) & (info.min_ps <= 0.0)
        alone = sampling_from_probs_torch(probs, sampling_seed=info.sampling_seed, positions=positions)
        tokens = torch.where(unfiltered, alone.to(tokens.dtype), tokens)
    if info.is_any_greedy:
        tokens = torch.where(info.top_ks <= 1, probs.argmax(-1).to(tokens.dtype), tokens)
    if capture is not None:
        # This is the weight of SGLang's token. With None, SGLang looks up the weight of ours.
        capture = capture._replace(selected_weight=None)
    return tokens, capture


@hook(
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
    AROUND,
    why="SGLang asserts that `min_p` and a seed do not meet",
    until="SGLang serves both",
)
def seeded_min_p(
    original: Any,
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    **options: Any,
) -> Any:
    """Makes `min_p` work with a seed. SGLang refuses it by an assert, because the weights are not renormalised.

    They need not be: the token is the argmax of log weight + noise, and renormalising a row adds the same value to all
    of its tokens. The tokens that min_p keeps are a prefix of the sorted row, so their number works as a top_k.
    """
    if need_min_p_sampling and sampling_seed is not None:
        kept = (probs >= probs.amax(-1, keepdim=True) * min_ps[:, None]).sum(-1)  # [N] int64, at least 1
        top_ks, need_min_p_sampling = torch.minimum(top_ks, kept.to(top_ks.dtype)), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options)
