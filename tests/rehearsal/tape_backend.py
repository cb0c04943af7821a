"""Puts tapes where SGLang's graph runner keeps CUDA graphs, and watches what a replay may touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from tape import Tape, TapeError
from torch.utils._pytree import tree_leaves

WARM_UPS = 2  # as in the host's FullCudaGraphBackend


class TapeGraphBackend(BaseCudaGraphBackend):
    """One tape for each batch size. All graphs of the process share one pool, the draft's and the target's alike: a
    replay may overwrite what another graph returned."""

    _pool: ClassVar[list[tuple[Tape, list[torch.Tensor]]]] = []
    late: ClassVar[list[Callable[[], None]] | None] = None
    """Replays of the draft that wait for `run_late`; None if they run at once."""

    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._runner = cuda_graph_runner
        self._graphs: dict[Any, tuple[Tape, Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(WARM_UPS):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        tape = Tape()
        out = tape.record(forward_fn)
        self._graphs[shape_key] = tape, out
        self._pool.append((tape, _tensors(out)))

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        tape, out = self._graphs[shape_key]
        runner = self._runner.model_runner

        def run() -> None:
            for other, returned in self._pool:
                if other is not tape:
                    other.spoil(returned)
            with only_these_slots_change(runner.token_to_kv_pool, static_forward_batch.out_cache_loc):
                tape.replay()

        if self.late is not None and runner.is_draft_worker:
            self.late.append(run)
        else:
            run()
        return out

    @classmethod
    def run_late(cls) -> None:
        while cls.late:
            cls.late.pop(0)()

    def cleanup(self) -> None:
        mine = [tape for tape, _ in self._graphs.values()]
        self._pool[:] = [entry for entry in self._pool if entry[0] not in mine]
        self._graphs.clear()


@contextmanager
def only_these_slots_change(pool: Any, slots: torch.Tensor) -> Iterator[None]:
    """Raises TapeError if keys or values of another slot than the batch's own and the padding slot changed."""
    buffers = [*pool.k_buffer, *pool.v_buffer]
    before = [buffer.clone() for buffer in buffers]
    yield
    differs = [(old != new).flatten(1).any(1) for old, new in zip(before, buffers, strict=True)]
    changed = torch.stack(differs).any(0)  # [S]
    changed[slots] = False
    changed[0] = False
    if changed.any():
        raise TapeError(f"a replay wrote slots that the batch does not own: {changed.nonzero().flatten().tolist()}")


def _tensors(out: Any) -> list[torch.Tensor]:
    """The tensors of a forward's output, which is one of the host's dataclasses."""
    return [leaf for leaf in tree_leaves(vars(out)) if isinstance(leaf, torch.Tensor)]
