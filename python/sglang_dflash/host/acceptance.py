"""Acceptance: which rows of a verified plan are committed, and what follows them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host import simulated
from sglang_dflash.host.penalties import Group
from sglang_dflash.host.protocols import LogitsOutput, ScheduleBatch
from sglang_dflash.host.sampling import RowSampler, follow
from sglang_dflash.host.sharded_logits import ShardedLogits

Acceptance = ops.GreedyAcceptance | ops.TreeAcceptance


class Acceptor:
    """Chooses the target's token of every row, and accepts the drafts that equal it.

    A batch that asks for nothing but the argmax takes one op for both, if there is one rank and acceptance is real.
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
        self, plan: VerifyPlan, batch: ScheduleBatch, target_out: LogitsOutput, grammar_tree: Any, grammar_barrier: Any
    ) -> tuple[Acceptance, Group | None]:
        """Of every request, the committed ids and what follows them.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`. Its logits may be overwritten or dropped; its
                logprobs are put in the order of the accepted path.
            grammar_tree: of `RowSampler.grammar_tree`.
            grammar_barrier: see `RowSampler.choose`.

        Returns:
            The acceptance, that of a tree where the plan has trees; and the group for `RowSampler.commit`.
        """
        greedy = self._sampler.is_plain_greedy(batch)
        if greedy and self._fuses:
            accepted = self._accept_greedy(plan, target_out.next_token_logits)
            if accepted is not None:
                return accepted, None
        group: Group | None = None
        if plan.places is not None:
            target_out.next_token_logits = plan.spread(target_out.next_token_logits)
        if greedy:
            target_ids = self._argmax(target_out)
        else:
            if self._sharded_logits is not None:
                target_out.next_token_logits = self._sharded_logits.gather(target_out.next_token_logits)
            target_ids, group = self._sampler.choose(batch, plan, target_out, grammar_tree, grammar_barrier)
        target_ids = self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_ids)
        return self._compare(plan, target_ids, target_out), group

    def _accept_greedy(self, plan: VerifyPlan, logits: torch.Tensor) -> Acceptance | None:
        """Argmax and acceptance in one op. logits: [T or more, V]. None for trees of anchors alone."""
        trees = plan.trees
        if plan.places is not None:
            target_ids = self._kernels.row_argmax(logits[: len(plan.places)])
            shape = plan.batch, plan.verify_width
            return self._kernels.accept_chain(plan.spread(target_ids).view(shape), plan.compared())
        if trees is None:
            return self._kernels.accept_greedy(logits.view(plan.batch, plan.verify_width, -1), plan.chains())
        if plan.verify_width > 1:
            return self._kernels.accept_tree_greedy(logits, plan.ids, trees.parents, trees.row_starts, trees.length)
        return None

    def _argmax(self, target_out: LogitsOutput) -> torch.Tensor:
        """[T] int64; ties: the lowest id wins."""
        logits = target_out.next_token_logits
        if self._sharded_logits is None:
            return self._kernels.row_argmax(logits)
        target_out.next_token_logits = None  # a shard must not pass for logits
        return self._sharded_logits.argmax(logits)

    def _compare(self, plan: VerifyPlan, target_ids: torch.Tensor, target_out: LogitsOutput) -> Acceptance:
        """target_ids: [T] int64."""
        trees, shape = plan.trees, (plan.batch, plan.verify_width)
        if trees is not None:
            rows = plan.ids, trees.parents, trees.row_starts, trees.length
            anchors = plan.verify_width == 1
            accepted = ops.accept_anchors(target_ids) if anchors else self._kernels.accept_tree(target_ids, *rows)
            follow(target_out, accepted.path)
            return accepted
        if target_out.next_token_logprobs is not None:
            target_out.next_token_logprobs = target_out.next_token_logprobs.view(shape)
        return self._accept_chain(target_ids.view(shape), plan.compared())
