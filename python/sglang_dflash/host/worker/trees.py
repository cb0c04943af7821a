"""Trees of N rows for each request of a small batch (SGLANG_DFLASH_TREE=N): the likeliest drafts of whole blocks.

The draft fills a block; the tree holds its N - 1 likeliest paths. The rows of a request are equally many, so graphs of
one shape verify them, and nothing waits for the device. A batch of more requests, or one with a request that needs its
rows in a chain (grammars, penalties, processors, logprobs), gets whole blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.policy import SameRows
from sglang_dflash.host.start.widths import FULL, TREE, WIDTH, WITH_GRAPHS, asked, attention_backends, tree_rows
from sglang_dflash.host.worker import simulated
from sglang_dflash.host.worker.draft_input import known_kv_lens
from sglang_dflash.host.worker.draft_runner import DraftRunner, rows_a_request
from sglang_dflash.host.worker.protocols import ModelRunner, ScheduleBatch
from sglang_dflash.host.worker.rows import Prepare, Proposed, StepRows
from sglang_dflash.host.worker.width_graphs import Graphs, capture_graphs, check_memory

logger = logging.getLogger(__name__)
MOST_ROWS = 64
"""Replayed over chat, code and sums, at a cost of 0.05 log2(N / 8) steps, 64 rows brought 1.21 to 1.30 of the chain's
tokens per time, 32 rows 1.21 to 1.28."""
MOST_REQUESTS = 4
"""With more requests, rows are not nearly free."""
CANDIDATES = 8
"""Ids of a depth that a tree may hold; the recordings held as many."""
CASCADE = "fa3"
"""The attention backend on CUDA: its cascade for EAGLE's trees takes a mask, at fixed places."""


def check(cfg: Any, target: Any, draft: DraftConfig, block_size: int) -> None:
    """Refuses trees that a server cannot verify.

    Args:
        cfg: SGLang's view of the server arguments, with the backends that it has chosen.
        target: SGLang's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the value, the variable and what is needed.
    """
    if TREE not in os.environ:
        return
    rows, most = tree_rows(), min(MOST_ROWS, ops.most_rows(block_size - 1, CANDIDATES))
    if not block_size < rows <= most:
        allowed = f"unset, or {block_size + 1} to {most} rows over blocks of {block_size}"
        raise ValueError(f"{TREE} is {os.environ[TREE]!r}; allowed: {allowed}.")
    reason = _why_not(cfg, target, draft)
    if reason is not None:
        raise ValueError(f"{TREE}={rows} needs {reason}. Unset it.")


def _why_not(cfg: Any, target: Any, draft: DraftConfig) -> str | None:
    backends = attention_backends(cfg)
    if asked(cfg.device) != FULL:
        return f"{WIDTH}={FULL} or unset, because trees are grown over whole blocks"
    if cfg.device == "cuda" and backends != {CASCADE}:
        return f"--attention-backend {CASCADE}, not {', '.join(sorted(backends))}"
    if cfg.device == "cuda" and cfg.cuda_graph_config.decode.backend == Backend.DISABLED:
        return WITH_GRAPHS
    if cfg.device == "cuda" and cfg.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype auto, not {cfg.kv_cache_dtype}, because the cascade was never run over quantised KV"
    if cfg.enable_return_routed_experts or cfg.enable_return_indexer_topk:
        return "a server that returns neither experts nor indices of tokens, which SGLang keeps by slot"
    if cfg.page_size != 1:
        return f"--page-size 1, not {cfg.page_size}, because accepted rows move to other slots"
    for flag, value in (("--tp-size", cfg.tp_size), ("--dp-size", cfg.dp_size if cfg.enable_dp_attention else 1)):
        if value > 1:
            return f"{flag} 1, not {value}, because ranks could grow different trees"
    if cfg.enable_deterministic_inference:
        return "a server without --enable-deterministic-inference, because a tree's keys stand in another order"
    if cfg.enable_lora or cfg.lora_paths:
        return "a server without --enable-lora, because the two have never been run together"
    if mambaish_config(target) is not None:
        return "a target without recurrent state, because a state has one successor"
    if target.is_hybrid_swa or target.attention_arch == AttentionArch.MLA or target.is_multimodal:
        return "a target of text alone, without sliding windows and MLA, because no other was ever run so"
    if target.has_attention_sinks:
        return "a target without attention sinks, because the cascade would count them twice"
    if draft.selector is not None or draft.domino is not None:
        return "a draft whose head gives several ids for a row; DFlash2's and Domino's give one"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0, because a tree's mask follows from its drafts"
    return None


class TreeRows(StepRows):
    """Trees for small batches, whole blocks for all others."""

    def __init__(self, rows: int, block_size: int, target_runner: ModelRunner, draft: DraftRunner, *parts: Any) -> None:
        """To be constructed before graphs are captured. Raises SystemExit if a layer of the target has a window, which
        only the loaded target tells."""
        super().__init__(block_size, SameRows(block_size), target_runner, draft, *parts)
        attentions = (one for one in target_runner.model.modules() if isinstance(one, RadixAttention))
        if any((one.sliding_window_size or -1) >= 0 for one in attentions):
            raise SystemExit(f"DFLASH cannot start: {TREE}={rows} needs a target without sliding windows. Unset it.")
        self._rows, self._most_keys = rows, 0
        self._of_blocks: Graphs | None = None
        self._of_trees: Graphs | None = None
        draft.give_hidden()
        logger.info("Up to %d requests verify trees of %d rows; no GPU has run this.", MOST_REQUESTS, rows)

    @property
    def widths(self) -> list[int]:
        return [self._rows, self._block_size]

    def use_graphs(self, prepare: Prepare) -> None:
        if self._target.decode_cuda_graph_runner is not None:
            self._of_blocks = Graphs.of(self._target)
            check_memory(self._draft, self._rows, TREE)
            with rows_a_request(self._rows), _tree_graphs():
                capture_graphs(self._target)
            self._of_trees = Graphs.of(self._target)
            self._of_blocks.give(self._target)

    def interrupt(self) -> None:
        super().interrupt()
        if self._of_blocks is not None:
            self._of_blocks.give(self._target)

    def propose(self, batch: ScheduleBatch) -> Proposed:
        if len(batch.reqs) > MOST_REQUESTS or _needs_chains(batch):
            self.interrupt()
            return super().propose(batch)
        if self._of_trees is not None:
            self._of_trees.give(self._target)
        self._begin(batch)
        block = self.lay_out(batch, self._rows)
        own = block.first(self._draft.rows_of(self._block_size))
        kv_lens, graph = known_kv_lens(batch, own.width), batch.can_run_decode_cuda_graph
        with spec_stage_span("draft"):
            drafts = self._draft.candidates(own, self.plan_kv(own, batch), kv_lens, graph, CANDIDATES)
        trees = ops.grow_trees(drafts, self._rows)
        ids = torch.cat((block.ids[:, :1], trees.ids[:, 1:]), 1)
        positions = block.prefix_lens[:, None] + trees.depths
        self._most_keys = known_kv_lens(batch, self._rows)[1]
        flat = ids.flatten(), positions.flatten(), block.slots.flatten()
        return Proposed(VerifyRows(*flat, self._rows, parents=trees.parents), self.plan_kv(block, batch))

    def verify_fields(self, rows: VerifyRows) -> dict[str, Any]:
        if rows.parents is None:
            return super().verify_fields(rows)
        seen = ops.seen_rows(rows.parents, self._block_size)
        if self._of_trees is None:
            return {"seen": seen}
        prefix_lens = rows.blocks(rows.positions)[:, 0]
        return {"custom_mask": ops.attention_mask(seen, prefix_lens, self._rows * self._most_keys)}

    def cap_lens(self, rows: VerifyRows) -> torch.Tensor | None:
        return self._lens(rows)

    def committed(
        self,
        rows: VerifyRows,
        accepted: ops.TreeAcceptance | ops.GreedyAcceptance,
        hidden: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Moves the accepted rows' KV to the slots of their positions. Behind the path, rows stay where they are."""
        if rows.parents is None:
            return super().committed(rows, accepted, hidden, slots)
        assert isinstance(accepted, ops.TreeAcceptance)
        path = accepted.path[:, : self._block_size]
        held = rows.blocks(rows.slots)
        # A slot may be read for one row and written for another: SGLang's move reads all before it writes.
        self._target.token_to_kv_pool.move_kv_cache(held[:, : path.shape[1]].flatten(), held.gather(1, path).flatten())
        positions = rows.blocks(rows.positions)[:, :1] + torch.arange(path.shape[1], device=path.device)
        first = torch.arange(rows.batch, device=path.device)[:, None] * self._rows
        return hidden[(first + path).flatten()], positions.flatten(), rows.blocks(slots)[:, : path.shape[1]].flatten()


def _needs_chains(batch: ScheduleBatch) -> bool:
    info = batch.sampling_info
    return bool(
        info.acc_additive_penalties is not None
        or info.has_custom_logit_processor
        or batch.has_grammar
        or batch.return_logprob
        or info.sampling_mask_batch_indices is not None
        or batch.return_hidden_states
    )


@contextmanager
def _tree_graphs() -> Iterator[None]:
    """What SGLang captures within this block takes a mask, and is for few requests."""
    context, decode = get_context(), get_exec().graph.cuda_graph_config.decode
    sizes, topk = decode.bs, get_spec().speculative_eagle_topk
    decode.bs = [size for size in sizes if size <= MOST_REQUESTS] or [min(sizes)]
    context.override("sglang_dflash.trees", speculative_eagle_topk=2)  # more than 1: EAGLE's trees
    try:
        yield
    finally:
        context.override("sglang_dflash.trees", speculative_eagle_topk=topk)
        decode.bs = sizes


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.resolve_max_speculative_num_draft_tokens",
    AROUND,
    why="slots and buffers are sized for K rows a request; with SGLANG_DFLASH_TREE=N a step has up to N",
    until="SGLang serves trees with DFLASH",
)
def most_rows_of_a_step(original: Any, algorithm: Any, server_args: Any) -> int | None:
    most = original(algorithm, server_args)
    return max(most or 0, tree_rows()) if tree_rows() and algorithm.is_dflash() else most
