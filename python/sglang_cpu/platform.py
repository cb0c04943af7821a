"""Our CPU platform for SGLang: the answers that SGLang asks of an out-of-tree platform, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_cpu.detect import ATTENTION_BACKEND
from sglang_cpu.loading import mend_kimi_linear, move_weights


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A machine without an accelerator. SGLang must not take its AMX, Triton or CUDA paths.

    `_enum` is `OOT`: SGLang's own `CPU` value means "AMX kernels from `sgl_kernel`" at some thirty places.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # no Triton, no graphs, no device kernels

    def post_load_model(self, model: torch.nn.Module) -> None:
        mend_kimi_linear(model)
        move_weights(model)

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"  # without it, one /start_profile request would end the server

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_quantization_config(self, quantization: str) -> Any:
        from sglang_cpu.quantization import ONLINE  # its imports ask for this platform

        return ONLINE.get(quantization)

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether recurrent layers keep snapshots of their states for the prefix cache (`CpuStateBackend`)."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Only SGLang's own worker asks for it (`SGLANG_DFLASH_WORKER=builtin`); ours lays out its own blocks."""
        return _block_slots


def _block_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: Any,
) -> torch.Tensor:
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].long().reshape(-1)
