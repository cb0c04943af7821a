"""Graphs of other widths than K: for each one, the target's and the draft's own graphs and attention backends.

SGLang's attention backends and graph runners are made for one number of rows a request, so each width has its own, as
in SGLang's adaptive EAGLE. A step takes those of its width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang.srt.runtime_context import get_spec

from sglang_dflash.host.patches import page_tables
from sglang_dflash.host.start.widths import WIDTH, WITH_GRAPHS
from sglang_dflash.host.worker.draft_runner import MIN_GRAPH_MEMORY_GB, DraftRunner, rows_a_request
from sglang_dflash.host.worker.protocols import ModelRunner

logger = logging.getLogger(__name__)


class Graphs(NamedTuple):
    """What a runner holds for steps of one shape."""

    attn_backend: Any
    decode_cuda_graph_runner: Any

    @classmethod
    def of(cls, runner: ModelRunner) -> Graphs:
        return cls(runner.attn_backend, runner.decode_cuda_graph_runner)

    def give(self, runner: ModelRunner) -> None:
        runner.attn_backend, runner.decode_cuda_graph_runner = self


class WidthGraphs:
    """The graphs of a server's widths. Those of width K are SGLang's own."""

    def __init__(self, target: ModelRunner, draft: DraftRunner, widths: Iterable[int]) -> None:
        """widths: W of all steps."""
        self.widths = sorted(set(widths), reverse=True)
        self._target, self._draft = target, draft
        self._of_target: dict[int, Graphs] = {}
        self._of_draft: dict[int, Graphs] = {}

    def capture(self) -> None:
        """To be called when SGLang has captured its own.

        Raises:
            SystemExit: it has captured none, or memory is short.
        """
        target, draft, block_size = self._target, self._draft.runner, get_spec().speculative_num_draft_tokens
        if target.decode_cuda_graph_runner is None:
            raise SystemExit(f"DFLASH cannot start: {WIDTH} needs {WITH_GRAPHS}. Unset it.")
        begin, free_gb = time.perf_counter(), self._draft.free_memory_gb()
        self._of_target[block_size], self._of_draft[block_size] = Graphs.of(target), Graphs.of(draft)
        for width in self.widths:
            if width != block_size:
                check_memory(self._draft, width, WIDTH)
                with rows_a_request(width):
                    capture_graphs(target)
                    self._of_target[width] = Graphs.of(target)
                if width > 1:
                    self._draft.capture_graphs_of(width, capture_graphs)
                    self._of_draft[width] = Graphs.of(draft)
        self.use(block_size)
        logger.info(
            "Steps have %s rows a request; graphs of other widths than %d took %.1f s and %.2f GB.",
            " or ".join(map(str, self.widths)),
            block_size,
            time.perf_counter() - begin,
            free_gb - self._draft.free_memory_gb(),
        )

    def use(self, width: int) -> None:
        """The forwards of this step have W rows a request."""
        self._of_target[width].give(self._target)
        if width > 1:
            self._of_draft[width].give(self._draft.runner)


def check_memory(draft: DraftRunner, rows: int, variable: str) -> None:
    """Raises SystemExit if memory is short before more graphs are captured."""
    free_gb = draft.free_memory_gb()
    if free_gb < MIN_GRAPH_MEMORY_GB:
        raise SystemExit(
            f"DFLASH cannot start: {free_gb:.1f} GB are free before the graphs of {rows} rows, which need "
            f"{MIN_GRAPH_MEMORY_GB:.0f} GB. Lower --mem-fraction-static, give fewer or smaller sizes of batches "
            f"(--cuda-graph-bs-decode), or unset {variable}."
        )


def capture_graphs(runner: ModelRunner) -> None:
    """Makes another attention backend and graphs, in the runner's places for them."""
    runner.attn_backend = runner._get_attention_backend(init_new_workspace=True)
    runner.kv_index_translator.bind_and_verify_backends([runner.attn_backend])
    page_tables.widen([runner.attn_backend])
    usage = runner.graph_memory_usage, runner.graph_time_usage
    runner.init_decode_cuda_graph()
    runner.graph_memory_usage, runner.graph_time_usage = usage  # of width K; the log says those of the others
