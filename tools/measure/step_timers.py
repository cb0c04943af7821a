"""Timers in SGLang's scheduler process for `profile_step.py`, loaded as a temporary plugin.

A timer adds a call's own time, without the timed calls inside it, to its stage. Totals are written whenever the
scheduler goes idle.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

VARIABLE = "STEP_TIMERS_OUTPUT"
TARGET = "worker: target"  # the target's forward, head included
STAGES = {
    "scheduler": [
        "sglang.srt.managers.scheduler:Scheduler.get_next_batch_to_run",
        "sglang.srt.managers.scheduler:Scheduler.run_batch",
    ],
    "requests in": ["sglang.srt.managers.scheduler:Scheduler.ingest_requests"],
    "batch: prepare": ["sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode"],
    "batch: filter, merge": [
        "sglang.srt.managers.schedule_batch:ScheduleBatch.filter_batch",
        "sglang.srt.managers.schedule_batch:ScheduleBatch.merge_batch",
    ],
    "batch: isolation": ["sglang.srt.managers.schedule_batch:ScheduleBatch.copy"],
    "batch: futures": [
        "sglang.srt.managers.overlap_utils:FutureMap.resolve_seq_lens_cpu",
        "sglang.srt.managers.overlap_utils:FutureMap.publish",
        "sglang.srt.managers.overlap_utils:FutureMap.stash",
        "sglang.srt.managers.overlap_utils:resolve_forward_inputs",
    ],
    "batch: ForwardBatch": ["sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new"],
    "batch: eager buffers": ["sglang.srt.model_executor.runner.eager_runner:EagerRunner.load_batch"],
    TARGET: [
        "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
        "sglang_dflash.host.worker.worker:DFlashWorker._run_target",
    ],
    "runner": ["sglang.srt.model_executor.model_runner:ModelRunner.forward"],
    "model": [
        "sglang.srt.models.qwen3:Qwen3ForCausalLM.forward",
        "sglang.srt.models.dflash:DFlashDraftModel.forward",
    ],
    "model: layer glue": [
        "sglang.srt.layers.layer_boundary.stage:StageBoundary.prepare",
        "sglang.srt.layers.layer_boundary.stage:StageBoundary.finish",
    ],
    "model: norm": ["sglang.srt.layers.layernorm:RMSNorm.forward_native"],
    "model: rotary": ["sglang.srt.layers.rotary_embedding.base:RotaryEmbedding.forward_native"],
    "model: linear": ["sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod.apply"],
    "model: activation": ["sglang.srt.layers.activation:SiluAndMul.forward_native"],
    "attention: metadata": ["sglang_cpu.attention:CpuAttentionBackend.init_forward_metadata"],
    "attention": ["sglang_cpu.attention:CpuAttentionBackend.forward_extend"],
    "attention: KV write": ["sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer"],
    "head and logits": ["sglang.srt.layers.logits_processor:LogitsProcessor.forward"],
    "sampling": [
        "sglang.srt.model_executor.model_runner:ModelRunner.sample",
        "sglang_dflash.host.worker.sampling:RowSampler.choose",
    ],
    "worker: block": ["sglang_dflash.host.worker.worker:DFlashWorker.forward_batch_generation"],
    "worker: draft": ["sglang_dflash.host.worker.draft_runner:DraftRunner.propose"],
    "worker: draft head": ["sglang_dflash.host.worker.draft_heads:DraftHead.draft_ids"],
    "worker: draft ids": [
        "sglang_dflash.host.worker.short_head:ShortHead.exchange",
        "sglang_dflash.host.worker.short_head:ShortHead.see_prompts",
        "sglang_dflash.host.worker.short_head:ShortHead.see_answers",
    ],
    "worker: verify": ["sglang_dflash.host.worker.worker:DFlashWorker._verify"],
    "worker: commit": ["sglang_dflash.host.worker.draft_runner:DraftRunner.write_context"],
    "results": ["sglang.srt.managers.scheduler:Scheduler.process_batch_result"],
    "results: stream": [
        "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer.stream_output"
    ],
}


def install(folder: Path, output: Path) -> dict[str, str]:
    """Writes a distribution with our entry point; returns the environment variables with which a server finds it."""
    info = folder / "step_timers-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step-timers\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nstep_timers = step_timers:activate\n")
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(output)}


def read(output: Path | None) -> dict[str, Any]:
    """The totals so far; the scheduler must be idle.

    Returns: `us` and `calls` by stage, `steps`, and `targets_us`, the whole time of every forward of the target.
    """
    nothing: dict[str, Any] = {"us": {}, "calls": {}, "steps": 0, "targets_us": []}
    if output is None:
        return nothing
    time.sleep(1.5)  # the scheduler writes once it is idle
    return json.loads(output.read_text()) if output.exists() else nothing


class Timers:
    def __init__(self, output: Path) -> None:
        self.own_us: defaultdict[str, float] = defaultdict(float)
        self.targets_us: list[float] = []
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._in_target = False
        self._output = output
        self._written = -1

    def time(self, stage: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            outermost = stage == TARGET and not self._in_target  # one of its places may call another
            self._in_target |= outermost
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = (time.perf_counter_ns() - begin) / 1e3
                self.own_us[stage] += took - self._inner.pop()
                if outermost:
                    self.targets_us.append(took)
                    self._in_target = False
                self.calls[stage] += 1
                self._inner[-1] += took

        return timed

    def write(self) -> None:
        steps = self.calls["batch: prepare"]
        if steps != self._written:
            self._written = steps
            totals = {"us": self.own_us, "calls": self.calls, "steps": steps, "targets_us": self.targets_us}
            draft = self._output.with_suffix(".new")
            draft.write_text(json.dumps(totals))
            draft.replace(self._output)


def activate() -> None:
    """Entry point: SGLang calls it in each of its processes. Installs the timers when a scheduler is constructed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hang(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        timers = Timers(Path(os.environ[VARIABLE]))
        for stage, places in STAGES.items():
            for place in places:
                _hang(timers, stage, place)
        original(scheduler, *args, **kwargs)
        on_idle = scheduler.on_idle

        def idle() -> None:
            timers.write()
            on_idle()

        scheduler.on_idle = idle

    # Before any layer exists: a layer keeps the method that it found at construction.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", hang, HookType.AROUND)


def _hang(timers: Timers, stage: str, place: str) -> None:
    module_name, _, path = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function = owner.__dict__[name]
    timed = timers.time(stage, getattr(function, "__func__", function))
    setattr(owner, name, type(function)(timed) if isinstance(function, classmethod | staticmethod) else timed)
    if not parents:  # a module-level function: modules that imported it by name hold their own reference
        import sys

        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is function:
                setattr(module, name, timed)
