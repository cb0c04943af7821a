"""Acceptance: which of the verified rows are committed, and what follows them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker import sampling_masks, simulated
from sglang_dflash.host.worker.penalties import Group
from sglang_dflash.host.worker.protocols import LogitsOutput, ScheduleBatch
from sglang_dflash.host.worker.sampling import RowSampler, in_blocks
from sglang_dflash.host.worker.sharded_logits import ShardedLogits


class Acceptor:
    """Chooses the target's token of every row, and accepts the drafts that equal it.

    A batch that asks for nothing but the argmax takes one op for both, if all rows of its blocks are verified, there is
    one rank and acceptance is real.
    Otherwise the tokens are chosen first: by an argmax, or by the sampler. Then all ranks get the same tokens, and are
    compared; or commit lengths are drawn (`simulated`).
    """

    def __init__(
        self,
        sampler: RowSampler,
        kernels: ops.Kernels,
        tp_sync: SpecTpSync,
        sharded_logits: ShardedLogits | None,
        one_rank: bool,
    ) -> None:
        """sharded_logits: None if every rank has the logits of the whole vocabulary."""
        self._sampler, self._kernels, self._tp_sync, self._sharded_logits = sampler, kernels, tp_sync, sharded_logits
        self._accept_chain = simulated.accept if simulated.simulates() else kernels.accept_chain
        self._fuses = one_rank and not simulated.simulates()

    def accept(
        self, rows: VerifyRows, batch: ScheduleBatch, target_out: LogitsOutput, grammar_tree: Any, grammar_barrier: Any
    ) -> tuple[ops.GreedyAcceptance | ops.TreeAcceptance, Group | None]:
        """Of every request, the committed ids and what follows them.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`. Its logits may be overwritten or dropped; its
                logprobs are put in the order of the blocks.
            grammar_tree: of `RowSampler.grammar_tree`.
            grammar_barrier: see `RowSampler.choose`.

        Returns:
            The acceptance; and the group for `RowSampler.commit`.
        """
        greedy = self._sampler.is_plain_greedy(batch)
        if greedy and self._fuses and rows.chosen is None and rows.parents is None:
            logits = target_out.next_token_logits
            return self._kernels.accept_greedy(rows.blocks(logits), rows.chains()), None
        group: Group | None = None
        if greedy:
            target_ids = self._argmax(target_out)[: len(rows.ids)]
        else:
            if self._sharded_logits is not None:
                target_out.next_token_logits = self._sharded_logits.gather(target_out.next_token_logits)
            target_ids, group = self._sampler.choose(batch, rows, target_out, grammar_tree, grammar_barrier)
        if not greedy or self._sharded_logits is None:  # of shards, the ranks have just exchanged the best ids
            target_ids = self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_ids)
        if rows.parents is not None:
            positions = rows.blocks(rows.positions)
            depths = positions - positions[:, :1]
            return ops.accept_tree(rows.blocks(target_ids), rows.chains(), rows.parents, depths, rows.width), group
        in_blocks(target_out, rows)
        accepted = self._accept_chain(rows.blocks(target_ids), rows.chains())
        sampling_masks.accept(target_out, batch.sampling_info, accepted.commit_lens)
        return accepted, group

    def _argmax(self, target_out: LogitsOutput) -> torch.Tensor:
        """[T or more] int64; ties: the lowest id wins."""
        logits = target_out.next_token_logits
        if self._sharded_logits is None:
            return self._kernels.row_argmax(logits)
        target_out.next_token_logits = None  # a shard must not pass for logits
        return self._sharded_logits.argmax(logits)
