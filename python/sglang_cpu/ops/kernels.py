"""Chooses the bodies of all ops, native or specification: once, when a caller is constructed, which then holds them.

A native body takes the arguments of its specification and gives the same result, up to the rounding that the tests
allow. A request's result depends neither on the number of threads nor on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from sglang_cpu.ops import mixture, native, recurrent, recurrent_reference, reference
from sglang_cpu.ops.attention import NATIVE_ATTENTION, REFERENCE_ATTENTION, Attention


@dataclass(frozen=True, slots=True)
class Kernels:
    """The bodies of all ops for tensors of some dtypes.

    Each field has the signature of the function of the same name in `reference`, `recurrent_reference` (layers with
    state) or `mixture` (experts).

    Fields:
        native: whether they are the ops of `csrc/`.
    """

    native: bool
    attention: Attention
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    norm_rope_: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor, torch.Tensor], None]
    experts: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    delta_gates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]


REFERENCE_KERNELS = Kernels(
    native=False,
    attention=REFERENCE_ATTENTION,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    norm_rope_=reference.norm_rope_,
    experts=mixture.experts,
    causal_conv=recurrent_reference.causal_conv,
    delta_gates=recurrent_reference.delta_gates,
    delta_rule=recurrent_reference.delta_rule,
    selective_scan=recurrent_reference.selective_scan,
    gated_rms_norm=recurrent_reference.gated_rms_norm,
)


def choose_kernels(*dtypes: torch.dtype) -> Kernels:
    """The bodies for tensors of all these dtypes. Native bodies take float32 and bfloat16.

    Args:
        dtypes: of everything that the caller hands over: also of a KV cache or of states.
    """
    return _native_kernels() if native.serves("cpu", *dtypes) else REFERENCE_KERNELS


@cache
def _native_kernels() -> Kernels:
    compiled = torch.ops.sglang_cpu
    return Kernels(
        native=True,
        attention=NATIVE_ATTENTION,
        rms_norm=compiled.rms_norm,
        add_rms_norm=compiled.add_rms_norm,
        norm_rope_=compiled.norm_rope_,
        experts=compiled.experts,
        causal_conv=recurrent.causal_conv,
        delta_gates=compiled.delta_gates,
        delta_rule=recurrent.delta_rule,
        selective_scan=recurrent.selective_scan,
        gated_rms_norm=compiled.gated_rms_norm,
    )
