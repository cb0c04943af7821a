"""Chooses the target's token after every row of a verified block, as SGLang's sampler does for plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host.emitted_text import EmittedText
from sglang_dflash.host.penalties import RequestPenalties


class RowSampler:
    """Row i sees what plain decoding sees at that position once the drafts before it are emitted.

    Penalties are ours; grammar masks, filters, seeds, processors and logprobs are the host's, over B * W rows. A draft
    is accepted where it equals the row's token: as a draft is no random choice given what precedes it, that leaves the
    sampled distribution as it is.
    """

    def __init__(self, target_runner: Any, max_width: int) -> None:
        self._runner = target_runner
        self._penalties = RequestPenalties(target_runner.model_config.vocab_size, max_width, target_runner.device)
        self._text = EmittedText()
        self._group: Any = None

    def prefill(self, batch: Any) -> None:
        """Before the target's prefill, which samples the first tokens."""
        self._group = self._penalties.prefill(batch)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.prefill(batch)

    def prefilled(self, batch: Any, ids: torch.Tensor) -> None:
        """ids: [B] int; the first tokens."""
        self.commit(batch, ids[:, None].long(), torch.ones_like(ids))  # the sampler gives int32, its argmax int64

    def plain(self, batch: Any) -> bool:
        """Whether the rows' tokens are the argmax of the target's logits as they are."""
        info = batch.sampling_info
        return (
            info.is_all_greedy
            and info.acc_additive_penalties is None
            and info.logit_bias is None
            and not info.has_custom_logit_processor
            and not batch.has_grammar
            and not batch.return_logprob
        )

    def grammar_tree(self, batch: Any, plan: VerifyPlan) -> GrammarTree | None:
        """To be called before the verify forward is launched, which the copy of the ids must not wait for."""
        return GrammarTree.from_linear_chain(plan.ids) if batch.has_grammar else None

    def choose(self, batch: Any, plan: VerifyPlan, target_out: Any, tree: GrammarTree | None, barrier: Any):
        """The target's tokens of all rows; fills in `target_out`'s logprobs where a request asks for them.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`; its logits are overwritten.
            barrier: advances the grammars over the step before (`GrammarTree`'s use); None without overlap.

        Returns:
            [B, W] int64.
        """
        info, logits = batch.sampling_info, target_out.next_token_logits
        if self.plain(batch):
            return ops.row_argmax(logits).view(plan.ids.shape)  # ties: the lowest id wins
        rows = logits.view(*plan.ids.shape, -1)  # [B, W, V]
        # In the host's order (SamplingBatchInfo.apply_logits_bias): penalties, grammar, bias.
        self._group = self._penalties.group(batch)
        if self._group is not None:
            self._penalties.apply(self._group, rows, plan.ids)
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=logits.device, barrier=barrier
            )
            if mask is not None:
                mask.apply(logits)
        if info.logit_bias is not None:
            rows.add_(info.logit_bias[:, None])
        params = self._text.row_params(batch, plan) if info.has_custom_logit_processor else None
        ids = self._runner.sampler(
            target_out,
            expand(info, plan.width, params),
            batch.return_logprob,
            _each(batch.top_logprobs_nums, plan.width) if batch.return_logprob else [],
            _each(batch.token_ids_logprobs, plan.width) if batch.return_logprob else [],
            plan.positions.flatten(),
        )
        if batch.return_logprob:
            target_out.next_token_logprobs = target_out.next_token_logprobs.view(plan.ids.shape)
        return ids.view(plan.ids.shape).long()

    def commit(self, batch: Any, ids: torch.Tensor, lens: torch.Tensor) -> None:
        """Counts what a step has emitted: the first `lens` ([B]) of the `ids` ([B, W]) of every request."""
        if self._group is not None:
            self._penalties.commit(self._group, ids, lens)
            self._group = None
        if batch.sampling_info.has_custom_logit_processor:
            self._text.commit(batch, ids, lens)


def expand(info: SamplingBatchInfo, width: int, row_params: list[Any] | None) -> SamplingBatchInfo:
    """The sampling of `width` rows per request: what is already in the logits is left out.

    Args:
        row_params: custom parameters of every row, where there are processors.
    """

    def each(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(width, 0)

    processors = info.custom_logit_processor
    if processors is not None:
        offsets = torch.arange(width, device=info.temperatures.device)
        processors = {
            key: ProcessorEntry(
                entry.processor,
                [row * width + i for row in entry.rows for i in range(width)],
                (entry.indices[:, None] * width + offsets).flatten(),
            )
            for key, entry in processors.items()
        }
    return replace(
        info,
        temperatures=each(info.temperatures),
        top_ps=each(info.top_ps),
        top_ks=each(info.top_ks),
        min_ps=each(info.min_ps),
        sampling_seed=each(info.sampling_seed),
        custom_params=row_params,
        custom_logit_processor=processors,
        grammar_mask=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
    )


def _each(values: list[Any], width: int) -> list[Any]:
    return [value for value in values for _ in range(width)]
