"""Decides which models run as captured graphs on a CPU, captures them at start-up, and logs the decision.

On SmolLM2-135M in float32 a plain step takes 23.3 ms compiled and 37.1 ms not at one request, 35.2 and 44.7 ms at eight
(two AVX2 cores).
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import time
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mamba2_config
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.dflash import DFlashGroupedConv
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

from sglang_cpu.attention import CpuAttentionBackend
from sglang_cpu.detect import ATTENTION_BACKEND
from sglang_cpu.hooking import AROUND, hook
from sglang_cpu.mla import is_latent

logger = logging.getLogger(__name__)
VARIABLE = "SGLANG_DFLASH_COMPILE"
MAX_ROWS = 512  # above it, matrix products dominate and Python's overhead does not matter
BY_DEFAULT = frozenset(
    {
        "Gemma4ForConditionalGeneration",
        "Glm4ForCausalLM",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
    }
)
"""Targets that are captured without being asked to: tests compare their captured forwards with uncompiled ones. A trace
follows one path through a model's code, and another model may take another path for another batch."""


def check() -> None:
    """Raises SystemExit, a sentence, if the variable has no allowed value. Runs before any weight is read."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"{VARIABLE} is {asked!r}; allowed: 0 (never), 1 (wherever a model can be traced), or unset.")


@hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
    AROUND,
    why="captures nothing on a plain CPU, so each step runs the Python of all modules",
    until="SGLang captures forwards on a CPU",
)
def capture_forward(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Captures and compiles a CPU's forwards at the point where SGLang captures graphs on an accelerator.

    SGLang's own CPU graphs support only decode, at fixed batch sizes, and need its AMX kernels. This can go when its
    CPU graph runners support verification and the draft, too.
    """
    original(runner, *args, **kwargs)
    reason = why_not(runner)
    what = "draft" if runner.is_draft_worker else "target"
    if reason is not None:
        logger.info("The %s's forward runs uncompiled: %s.", what, reason)
        return
    message = "The %s's forward is compiled now, some 15 s at the first start, a few at later ones; %s=0 skips it."
    logger.info(message, what, VARIABLE)
    begin = time.perf_counter()
    try:
        captured = (_install_draft if runner.is_draft_worker else _install_target)(runner)
    except Exception as error:  # tracing can fail in many ways; the model is served all the same
        logger.warning("The %s's forward could not be captured: it runs uncompiled, and slower.", what, exc_info=error)
        return
    seconds = time.perf_counter() - begin
    logger.info("The %s's forward is captured: %d compiled pieces, %.1f s.", what, captured.distinct_pieces, seconds)


def why_not(runner: Any) -> str | None:
    """Why the forward is not captured; None if it can be."""
    asked, config = os.environ.get(VARIABLE, ""), runner.model_config
    if asked == "0":
        return f"{VARIABLE}=0"
    if get_exec().deterministic.enable_deterministic_inference:
        return "--enable-deterministic-inference uses its own kernels"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler was found (g++, or the one that CXX names)"
    if get_parallel().tp_size > 1:
        return "with --tp-size above 1, ranks exchange tensors during it"
    if get_lora().enable_lora and not runner.is_draft_worker:
        return "LoRA adapters change it from batch to batch"
    if is_latent(config):
        return "latent attention is not traced"
    if mamba2_config(config) is not None:
        return "layers of Mamba-2 are not traced"
    if any(isinstance(module, FusedMoE) for module in runner.model.modules()):
        return "a mixture of experts takes other code for other batches"
    if any(isinstance(module, DFlashGroupedConv) for module in runner.model.modules()):
        return "its convolutions end where a block begins, and a trace would fix the width of the blocks"
    backend = getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)
    if not isinstance(backend, CpuAttentionBackend):
        return f"its attention is not {ATTENTION_BACKEND} (--attention-backend)"
    if asked == "1" or runner.is_draft_worker:
        return None
    unknown = BY_DEFAULT.isdisjoint(config.hf_config.architectures)
    name = ", ".join(config.hf_config.architectures) if unknown else f"{config.quantization} weights"
    if unknown or config.quantization is not None:
        return f"our tests have not compared {name} with and without; {VARIABLE}=1 compiles it all the same"
    return None


def _install_target(runner: Any) -> Any:
    from sglang_cpu.captured import CapturedLayers  # imports inductor: seconds that only compiling needs

    module = runner.model.model
    original = module.forward
    sees = runner.model_config.is_multimodal  # then the layers get embeddings, of text, too

    def call(rows: torch.Tensor, positions: torch.Tensor, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out = original(None, positions, batch, rows) if sees else original(rows, positions, batch, None)
        return out if isinstance(out, tuple) else (out, [])

    speculates = not runner.spec_algorithm.is_none()
    mode = ForwardMode.TARGET_VERIFY if speculates else ForwardMode.DECODE
    embeds = torch.zeros(1, runner.model_config.hidden_size, dtype=runner.dtype)
    rows = embeds if sees else torch.zeros(1, dtype=torch.int64)
    sections = getattr(runner.model, "is_mrope_enabled", False)
    captured = CapturedLayers(module, call, rows, mode, sections)
    names = list(inspect.signature(original).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Models pass arguments by position or by name; the first four are ids, positions, batch and embeddings."""
        named = [kwargs[name] for name in names[len(args) :] if name in kwargs]
        if len(named) < len(kwargs):  # an argument that the trace does not know
            return original(*args, **kwargs)
        ids, positions, batch, *others = *args, *named
        rows = others.pop(0) if sees and others else ids
        traced = rows is not None and positions.dim() == 1 + sections and not any(other is not None for other in others)
        if not traced or not 0 < len(rows) <= MAX_ROWS:
            return original(*args, **kwargs)
        hidden, *tapped = captured.run(rows, positions, batch)
        return (hidden, AuxHiddenStateList(tapped)) if tapped else hidden

    module.forward = forward
    return captured


def _install_draft(runner: Any) -> Any:
    from sglang_cpu.captured import CapturedLayers

    module = runner.model
    original = module.forward

    def call(embeds: torch.Tensor, positions: torch.Tensor, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return original(None, positions, batch, embeds).hidden_states, []

    embeds = torch.zeros(1, runner.model_config.hidden_size, dtype=runner.dtype)
    captured = CapturedLayers(module, call, embeds, ForwardMode.TARGET_VERIFY)

    def forward(ids: Any, positions: Any, batch: Any, input_embeds: Any = None, **kwargs: Any) -> Any:
        if input_embeds is None or not 0 < len(positions) <= MAX_ROWS:
            return original(ids, positions, batch, input_embeds, **kwargs)
        (hidden,) = captured.run(input_embeds, positions, batch)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    module.forward = forward
    return captured
