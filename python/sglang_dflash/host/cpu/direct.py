"""Calls a captured model without the runners around it, which have nothing to do in a decode step on one CPU rank."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_distribution import (
    _ExpertDistributionRecorderNoop,
    get_global_expert_distribution_recorder,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from sglang_dflash.host.cpu.compiled import is_captured

logger = logging.getLogger(__name__)
NEEDS = ("canary_manager", "eplb_manager", "lora_manager", "msprobe_debugger")
"""Attributes of a runner: parts that act before or after each forward, if the server has them."""
PREPARES = ("prepare_for_forward", "prepare_forward_batch")
"""Methods that a model may have for its runners to call."""


class DirectForward:
    """A decode step's forward of one model.

    SGLang's `ModelRunner.forward` and its eager runner serve every mode, device and feature. For a small model on a
    CPU they take as long as several of its layers. What they do for a plain verify forward is done here: the attention
    backend prepares the batch, and the model runs with that backend in the forward context.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._backend = runner, runner.attn_backend
        self._context = ForwardContext(attn_backend=self._backend)

    @classmethod
    def of(cls, runner: Any) -> DirectForward | None:
        """None: the runners are needed. To be asked once the server's models and graphs are ready."""
        if not is_captured(runner):
            return None
        parts = _parts_around(runner)
        if parts:
            logger.info("Decode steps go through SGLang's runners, because %s act around them.", ", ".join(parts))
            return None
        return cls(runner)

    def __call__(self, forward_batch: ForwardBatch) -> Any:
        """The model's output: a `LogitsProcessorOutput`."""
        self._runner.forward_pass_id += 1
        outer = set_forward_context(self._context)
        try:
            self._backend.init_forward_metadata(forward_batch)
            kwargs = {} if forward_batch.input_embeds is None else {"input_embeds": forward_batch.input_embeds}
            return self._runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch, **kwargs)
        finally:
            set_forward_context(outer)


def _parts_around(runner: Any) -> list[str]:
    """Parts of the server that act before or after each forward."""
    parts = [name for name in NEEDS if getattr(runner, name, None) is not None]
    parts += [name for name in PREPARES if hasattr(runner.model, name)]
    if dumper.may_enable:
        parts.append("SGLang's dumper")
    if envs.SGLANG_ENABLE_METRICS_DEVICE_TIMER.get():  # the timer itself comes later
        parts.append("a device timer")
    if runner.enable_elastic_ep:
        parts.append("elastic expert parallelism")
    if not isinstance(get_global_expert_distribution_recorder(), _ExpertDistributionRecorderNoop):
        parts.append("a recorder of experts")
    if get_global_experts_capturer() is not None or get_global_indexer_capturer() is not None:
        parts.append("a capturer of experts or indexer choices")
    return parts
