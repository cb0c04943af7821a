"""SGLang's sampler, mended: a request's token depends on no other request of its batch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.sampling_params import TOP_K_ALL


def sample_as_if_alone(
    original: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> tuple[torch.Tensor, Any]:
    """Every row takes the path that it would take alone; the host chooses one path for the whole batch.

    Beside a sampled row, a greedy one (top_k 1) goes through the filters, where a tie falls to whatever the sort puts
    first; alone it is the argmax, the lowest id of a tie. With seeds, a row without filters goes through them too,
    where its noise is hashed from the rank of a token; alone, from its id. All is selected on the device.
    """
    if info.grammars:
        # Where a grammar leaves only the end, and `min_new_tokens` forbids it, a row has no token and its softmax no
        # number, on which the host's draw ends the scheduler. Whatever is drawn instead, the grammar then aborts.
        probs.nan_to_num_(nan=1.0 / probs.shape[-1])
    tokens, capture = original(sampler, probs, info, positions, simple)  # [N] int32; it leaves `probs` as it was
    if simple or not (info.is_any_greedy or info.sampling_seed is not None):
        return tokens, capture
    if info.sampling_seed is not None:
        unfiltered = (info.top_ks == TOP_K_ALL) & (info.top_ps == 1.0) & (info.min_ps <= 0.0)
        plain = sampling_from_probs_torch(probs, sampling_seed=info.sampling_seed, positions=positions)
        tokens = torch.where(unfiltered, plain.to(tokens.dtype), tokens)
    if info.is_any_greedy:
        tokens = torch.where(info.top_ks <= 1, probs.argmax(-1).to(tokens.dtype), tokens)
    if capture is not None:
        # The weight of the token that the host chose; without it, the host looks up that of ours.
        capture = capture._replace(selected_weight=None)
    return tokens, capture


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
    """`min_p` with a seed, which the host asserts away: it holds that the weights must be renormalised first.

    They need not be: the token is the argmax of log weight + noise, and a row's norm adds the same to all of its
    tokens. What min_p leaves is a prefix of the sorted row, so its length is a top_k.
    """
    if need_min_p_sampling and sampling_seed is not None:
        kept = (probs >= probs.amax(-1, keepdim=True) * min_ps[:, None]).sum(-1)  # [N] int64, at least 1
        top_ks, need_min_p_sampling = torch.minimum(top_ks, kept.to(top_ks.dtype)), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options)


HOOKS: dict[str, tuple[Any, HookType]] = {
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": (sample_as_if_alone, HookType.AROUND),
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": (seeded_min_p, HookType.AROUND),
}
"""Hook target -> (our function, how it is applied). `hooks.install` registers them and proves them in place."""
