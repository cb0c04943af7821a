"""The plan stream on made-up streams: every op is checked against all others for a missing wait between streams.

Each stream has a vector clock. An event takes a copy of it, and a wait merges one, so that two accesses to the same
memory are in order, or a race is reported. Ops run at once on the CPU, so values are checked as well.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.cuda_graph_config import Backend
from stand_in_worker import BATCH, BLOCK, COLUMNS, VOCAB, decode_batch, worker_of
from stand_ins import configured, one_rank
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash import ops
from sglang_dflash.core.policy import SameRows
from sglang_dflash.host.worker.beside_rows import BesideRows
from sglang_dflash.host.worker.plan_stream import PlanStream, own_input_buffers

Clock = dict["Stream", int]
GRAPHS_OFF = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=Backend.DISABLED)))


@pytest.fixture(autouse=True)
def _configured():
    with configured(), one_rank(), torch.no_grad():
        yield


class Stream:
    """A stream of the made-up device."""

    def __init__(self, device: Device | None = None) -> None:
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        self._merge(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self._merge(other.clock)

    def _merge(self, clock: Clock) -> None:
        for stream, tick in clock.items():
            self.clock[stream] = max(tick, self.clock.get(stream, 0))


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.clock: Clock = {}

    def record(self) -> None:
        self.clock = dict(self._device.current.clock)


class Device:
    """Stands for `torch.cuda`, whose names it has."""

    def __init__(self) -> None:
        self.forward_stream = self.current = Stream()

    def Stream(self, priority: int) -> Stream:  # noqa: N802
        assert priority < 0, "the host draws its streams from the pool of priority 0"
        return Stream()

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Races(TorchDispatchMode):
    """Reports pairs of ops on two streams that touch the same memory, one of them writing, with no wait between."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.found: list[str] = []
        self._device = device
        self._writes: dict[int, tuple[Stream, int, str]] = {}
        self._reads: dict[int, list[tuple[Stream, int, str]]] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        stream = self._device.current
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        access = (stream, stream.clock[stream], func._schema.name)
        values = [*args, *(kwargs or {}).values()]
        for argument, value in zip(func._schema.arguments, values, strict=False):
            for tensor in torch.utils._pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    written = argument.alias_info is not None and argument.alias_info.is_write
                    self._touch(tensor, access, written)
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._touch(tensor, access, True)
        return out

    def _touch(self, tensor: torch.Tensor, access: tuple[Stream, int, str], written: bool) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        place = storage.data_ptr()
        others = [self._writes[place]] if place in self._writes else []
        if written:
            others += self._reads.pop(place, [])
            self._writes[place] = access
        else:
            self._reads.setdefault(place, []).append(access)
        for stream, tick, name in others:
            if stream is not access[0] and access[0].clock.get(stream, 0) < tick:
                self.found.append(f"{access[2]} does not wait for {name}")


class Step:
    """A step of a worker whose verify metadata and draft forward are visible ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, with_stream: bool) -> None:
        self.device = Device()
        monkeypatch.setattr(torch, "get_device_module", lambda *_: self.device)
        table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
        self.worker, self.batch = worker_of(table, ops.TORCH_KERNELS), decode_batch()
        self.worker.device = "cuda"  # the worker's way with graphs: metadata before the forward
        if with_stream:
            kernels, models = ops.TORCH_KERNELS, (self.worker._target, self.worker._draft)
            self.worker.step_rows = BesideRows(BLOCK, SameRows(BLOCK), *models, VOCAB - 1, kernels)
            self.worker.step_rows.use_graphs(self.worker._prepare_verify)
            self.worker.step_rows._stream = self.stream = PlanStream("cuda")
        self.metadata = torch.zeros(BATCH, dtype=torch.int64)
        self.prepared_on: list[Stream] = []
        self.draft_was_known: list[bool] = []
        self._draft_done: tuple[Stream, int] | None = None
        # The host's graph runner, as far as our worker sees it: it fills the graph's inputs ahead, and at the replay
        # copies ids and positions once more.
        self.worker._target.decode_cuda_graph_runner = SimpleNamespace(
            can_run_graph=lambda forward_batch: True, load_batch=self._prepare
        )
        self.inputs = torch.zeros((2, BATCH * BLOCK), dtype=torch.int64)
        forward = self.worker._target_worker.forward_batch_generation

        def verify(forward_batch: Any = None, **rest: Any) -> Any:
            for place, given in zip(self.inputs, (forward_batch.input_ids, forward_batch.positions), strict=True):
                place.copy_(given)
            self.verified = self.inputs + self.metadata.sum()
            return forward(**rest)

        self.worker._target_worker.forward_batch_generation = verify
        runner = self.worker._draft.runner
        draft = runner.forward

        def propose(forward_batch: Any) -> Any:
            forward_batch.input_ids + 0, forward_batch.seq_lens + 0
            self._draft_done = self.device.current, self.device.current.clock.get(self.device.current, 0)
            return draft(forward_batch)

        runner.forward = propose

    def _prepare(self, forward_batch: Any) -> None:
        self.prepared_on.append(self.device.current)
        self.inputs.copy_(torch.stack((forward_batch.input_ids, forward_batch.positions)))
        self.metadata.copy_(forward_batch.seq_lens + forward_batch.input_ids.view(BATCH, -1)[:, 0])
        stream, tick = self._draft_done
        self.draft_was_known.append(self.device.current.clock.get(stream, 0) >= tick)

    def run(self, steps: int = 2) -> tuple[list[str], list[torch.Tensor]]:
        """Races; and the values of every step."""
        values = []
        with Races(self.device) as races:
            for _ in range(steps):
                batch = decode_batch()
                result = self.worker.forward_batch_generation(batch)
                values += [result.next_token_ids, result.accept_lens, self.verified]
        return races.found, values


def test_the_verify_is_prepared_beside_the_draft(monkeypatch):
    """Fails where the preparation waits for the draft's forward, the forward stream reads what is not written yet, or a
    value differs from a step without the stream."""
    plain = Step(monkeypatch, False)
    races, expected = plain.run()
    assert not races and plain.prepared_on == [plain.device.forward_stream] * 2 and all(plain.draft_was_known)
    step = Step(monkeypatch, True)
    races, values = step.run()
    assert not races, races
    assert step.prepared_on == [step.stream._stream] * 2
    assert step.draft_was_known == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("planted", ["no wait for the block", "no wait before the verify", "drafts before the wait"])
def test_a_missing_wait_is_found(planted, monkeypatch):
    """Fails where this file could not fail: each wait, left out or late, must be reported."""
    step = Step(monkeypatch, True)
    if planted == "no wait for the block":
        monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    elif planted == "no wait before the verify":
        monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    else:
        join = step.stream.join

        def late() -> None:
            ids = step.batch.spec_info.bonus_tokens  # any write to the block before the wait
            blocks[0].ids[:, 1:].copy_(ids[:, None].expand(-1, BLOCK - 1))
            join()

        blocks: list[Any] = []
        lay_out = step.worker.step_rows.lay_out

        def remember(*rest: Any) -> Any:
            blocks[:] = [lay_out(*rest)]
            return blocks[0]

        step.worker.step_rows.lay_out, step.stream.join = remember, late
    races, _ = step.run()
    assert races


@pytest.mark.parametrize(
    ("asked", "device", "wanted"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_off_unless_asked_for(asked, device, wanted, monkeypatch):
    """Fails where a server that does not set SGLang's variable, or runs on a CPU, prepares on a plan stream; or where
    the draft's graphs share the target's input buffers, which the plan stream fills meanwhile."""
    monkeypatch.setattr("sglang_dflash.host.worker.draft_runner.get_exec", lambda: SimpleNamespace(graph=GRAPHS_OFF))
    monkeypatch.setattr("sglang_dflash.host.worker.draft_runner.draft_pp_context", nullcontext)
    step = Step(monkeypatch, False)
    step.worker.device = step.worker._draft.runner.device = device
    of_target, of_draft = input_buffers.share_input_buffer("a test's", torch.zeros(3)), []
    step.worker._draft.worker = SimpleNamespace(
        init_cuda_graphs=lambda **_: of_draft.append(input_buffers.share_input_buffer("a test's", torch.zeros(3)))
    )
    with envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(asked):
        assert PlanStream.wanted(device) == wanted
        step.worker.init_cuda_graphs()
    assert (of_draft[0].data_ptr() != of_target.data_ptr()) == wanted


def test_without_graphs_nothing_is_prepared_ahead(monkeypatch):
    """Fails where a server that has captured no graphs prepares its forwards on a plan stream."""
    step = Step(monkeypatch, True)
    step.worker._target.decode_cuda_graph_runner = None
    assert step.worker.step_rows.propose(decode_batch()).forward_batch is None


def test_runners_share_their_input_buffers_again():
    """Fails where an error while the draft's graphs are captured leaves later runners without the shared buffers."""
    shared = input_buffers.share_input_buffer("another test's", torch.zeros(3))
    with pytest.raises(KeyError), own_input_buffers(True):
        raise KeyError
    assert input_buffers.share_input_buffer("another test's", torch.zeros(3)).data_ptr() == shared.data_ptr()
