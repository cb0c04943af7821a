"""Counts the torch ops that our worker dispatches in a decode step outside the two models' forwards, box by box.

The worker, draft runner, context KV writer, head and row sampler are the real ones. Batch, KV plan and verify input are
SGLang's own classes. Not counted: the two forwards (stand-ins return ready tensors), the attention backends' metadata,
the copies into a graph's buffers, and the scheduler's work around a step (relay of bonus ids and lengths, allocation
of slots, copies of results).
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_worker import BATCH, BLOCK, COLUMNS, LAYERS, decode_batch, worker_of
from stand_ins import configured, one_rank
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash import ops
from sglang_dflash.host.worker import draft_input
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.draft_input import DraftInput
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.rows import StepRows
from sglang_dflash.host.worker.worker import DFlashWorker

BOXES = {
    "block": (StepRows, "lay_out"),
    "KV plan": (StepRows, "plan_kv"),
    "draft": (DraftRunner, "propose"),
    "verify": (DFlashWorker, "_verify"),
    "acceptance": (Acceptor, "accept"),
    "context KV": (DraftRunner, "write_context"),
    "next input": (DraftInput, "create"),
}
"""Box -> its method; an op outside all boxes counts as the step's own."""
ALIASES = {"aten._unsafe_view", "aten.detach", "aten.lift_fresh", "aten.alias", "aten._reshape_alias"}
ALLOCATIONS = {"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided"}

LAUNCHES = 56  # of a step with torch's bodies
WAITS = {"aten._local_scalar_dense", "aten.item", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.masked_select"}
"""Ops that read a tensor's values on the CPU: on a device tensor, each waits for all earlier work."""


class Counting(TorchDispatchMode):
    """Classifies every dispatched op: a launch, a view, an allocation, or arithmetic on a CPU tensor of lengths."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.box = "the step's own"
        self.found: dict[str, Counter[tuple[str, str]]] = {
            kind: Counter() for kind in ("launch", "view", "allocation", "host")
        }
        self._host = list(host)  # kept alive, because they are compared by identity

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        tensors = [one for one in [*args, *(kwargs or {}).values()] if isinstance(one, torch.Tensor)]
        if name == "aten.lift_fresh":  # made from Python numbers
            self._host += tensors
        if tensors and all(any(one is held for held in self._host) for one in tensors):
            kind = "host"
            if isinstance(out, torch.Tensor):
                self._host.append(out)
        elif name in ALLOCATIONS:
            kind = "allocation"
        else:
            kind = "view" if name in ALIASES or (func.is_view and _shares(out, tensors)) else "launch"
        self.found[kind][self.box, name] += 1
        return out

    def listed(self, kind: str) -> str:
        lines = []
        for box in dict.fromkeys(box for box, _ in self.found[kind]):
            names = [f"{name}{f' x{n}' if n > 1 else ''}" for (b, name), n in self.found[kind].items() if b == box]
            lines.append(f"  {box}: {', '.join(names)}")
        return f"{kind}: {self.found[kind].total()}\n" + "\n".join(lines)


def _shares(out: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an op that may alias did alias; a cast or a reshape may also copy."""
    first = out[0] if isinstance(out, tuple | list) else out
    return any(first.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in tensors)


@contextmanager
def _in_boxes(monkeypatch: pytest.MonkeyPatch, counting: Counting):
    """Tells `counting` in which box an op is dispatched."""
    with monkeypatch.context() as patch:
        for box, (owner, name) in BOXES.items():
            method = getattr(owner, name)

            def within(*args: Any, box: str = box, method: Any = method, **named: Any) -> Any:
                outer, counting.box = counting.box, box
                try:
                    return method(*args, **named)
                finally:
                    counting.box = outer

            patch.setattr(owner, name, staticmethod(within) if owner is DraftInput else within)
        patch.setattr(torch, "inference_mode", torch.no_grad)  # would hide the parts of composite ops
        with counting:
            yield


def test_launches_of_a_step(monkeypatch):
    """Fails where a step dispatches more ops outside the forwards than before (a copy, a cast, arithmetic): each is a
    launch on a device. If there are fewer, lower the number."""
    table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
    published = []
    with configured(), one_rank(), torch.no_grad():
        worker, batch = worker_of(table, ops.TORCH_KERNELS), decode_batch()
        counting = Counting([batch.seq_lens_cpu])
        with _in_boxes(monkeypatch, counting):
            result = worker.forward_batch_generation(batch, published.append)
    assert torch.equal(published[0], torch.tensor([5, 9, 30]) + result.accept_lens)
    print(f"batch {BATCH}, block {BLOCK}, {LAYERS} draft layers")
    for kind in counting.found:
        print(counting.listed(kind))
    assert counting.found["launch"].total() <= LAUNCHES, counting.listed("launch")
    assert not {name for _, name in counting.found["launch"]} & WAITS, "the CPU waits for the device in a step"


def test_the_reservation_before_a_step_launches_nothing(monkeypatch):
    """Fails where reserving slots does more on the device than two copies of lengths to it, or waits for it. The
    host's allocation itself is left out."""
    uploaded: list[torch.Tensor] = []
    monkeypatch.setattr(draft_input, "upload", lambda tensor, device: uploaded.append(tensor))
    monkeypatch.setattr(draft_input, "alloc_for_spec_decode", lambda *_, **__: None)
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 2 * BLOCK)
    with configured():
        batch = decode_batch()
    for req in batch.reqs:
        req.kv.kv_committed_len = req.kv.kv_allocated_len = 9
    batch.token_to_kv_pool_allocator = SimpleNamespace(page_size=1, available_size=lambda: 0)  # no room ahead
    batch.req_to_token_pool = SimpleNamespace(req_to_token=torch.empty(BATCH, COLUMNS, dtype=torch.int32))
    batch.maybe_evict_swa = lambda: None
    counting = Counting([])
    with counting:
        batch.spec_info.prepare_for_decode(batch)
    assert batch.spec_info.nxt_kv_lens_cpu.tolist() == [9 + 2 * BLOCK] * BATCH
    print(counting.listed("host"))
    assert len(uploaded) == 2
    assert not counting.found["launch"], counting.listed("launch")
