"""Chooses the target's token after every row of a verified block, as SGLang's sampler does for plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host.draft_input import upload
from sglang_dflash.host.emitted_text import EmittedText
from sglang_dflash.host.penalties import RequestPenalties

SAMPLED_ROWS = 512
"""Most rows that the host samples at once, because its sampler holds several [rows, V] tensors, with seeds in float64.
256 requests in blocks of 16 rows are 4,096 rows."""

LOGPROBS = {
    "next_token_top_logprobs_val": torch.Tensor,
    "next_token_top_logprobs_idx": torch.Tensor,
    "next_token_token_ids_logprobs_val": torch.Tensor,
    "next_token_token_ids_logprobs_idx": list,
}
"""Fields of `LogitsProcessorOutput`, and the type of their entries, one per row. A field is None if no row asks."""


class RowSampler:
    """Samples each row as plain decoding would at that position, once the drafts before the row are emitted.

    Our code applies penalties. The host applies grammar masks, filters, seeds, processors and logprobs, over B * W
    rows. A draft is accepted if it equals the row's token. Given the tokens before it, a draft is not random, so this
    leaves the sampled distribution unchanged.
    """

    def __init__(self, target_runner: Any, max_width: int) -> None:
        self._runner = target_runner
        self._penalties = RequestPenalties(target_runner.model_config.vocab_size, max_width, target_runner.device)
        self._text = EmittedText()
        self.sampled_rows = SAMPLED_ROWS
        self._group: Any = None  # set by `prefill` and `choose` for the `commit` after them

    def prefill(self, batch: Any) -> None:
        """To be called before the target's prefill, which samples the first tokens."""
        self._group = self._penalties.prefill(batch)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.prefill(batch)

    def prefilled(self, batch: Any, ids: torch.Tensor) -> None:
        """To be called after the target's prefill. ids: [B] int; the first tokens."""
        # The sampler gives int32, its argmax int64.
        self.commit(batch, ids[:, None].long(), torch.ones_like(ids, dtype=torch.int32))

    def plain(self, batch: Any) -> bool:
        """Whether every row's token is the argmax of the target's unchanged logits."""
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
        """To be called before the verify forward is launched: otherwise the copy of the ids would wait for it."""
        return GrammarTree.from_linear_chain(plan.ids) if batch.has_grammar else None

    def choose(self, batch: Any, plan: VerifyPlan, target_out: Any, tree: GrammarTree | None, barrier: Any):
        """Chooses the target's token of every row; fills in `target_out`'s logprobs if a request asks for them.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`; its logits are overwritten.
            barrier: advances the grammars over the previous step's tokens; None without overlap.

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
        at_once = max(1, self.sampled_rows // plan.width)
        parts = [slice(i, min(i + at_once, len(batch.reqs))) for i in range(0, len(batch.reqs), at_once)]
        outs = [LogitsProcessorOutput(next_token_logits=rows[part].flatten(0, 1)) for part in parts]
        ids = torch.cat([self._sample(batch, plan, params, *both) for both in zip(parts, outs, strict=True)])
        if batch.return_logprob:
            _join_logprobs(target_out, outs)
            target_out.next_token_logprobs = target_out.next_token_logprobs.view(plan.ids.shape)
        return ids.view(plan.ids.shape).long()

    def _sample(
        self, batch: Any, plan: VerifyPlan, row_params: list[Any] | None, part: slice, out: LogitsProcessorOutput
    ) -> torch.Tensor:
        """The token of every row of the requests `part`, [N] int; `out` has their logits and gets their logprobs."""
        ids: torch.Tensor = self._runner.sampler(
            out,
            expand(batch.sampling_info, plan.width, row_params, part),
            batch.return_logprob,
            _each(batch.top_logprobs_nums[part], plan.width) if batch.return_logprob else [],
            _each(batch.token_ids_logprobs[part], plan.width) if batch.return_logprob else [],
            plan.positions[part].flatten(),
        )
        return ids

    def commit(self, batch: Any, ids: torch.Tensor, lens: torch.Tensor) -> None:
        """Records what a step emitted: of every request, the first `lens` ([B]) of its `ids` ([B, W])."""
        if self._group is not None:
            self._penalties.commit(self._group, ids, lens)
            self._group = None
        if batch.sampling_info.has_custom_logit_processor:
            self._text.commit(batch, ids, lens)


def expand(
    info: SamplingBatchInfo, width: int, row_params: list[Any] | None, part: slice = slice(None)
) -> SamplingBatchInfo:
    """The sampling info of `width` rows per request, without what is already applied to the logits.

    Args:
        row_params: custom parameters of every row of the batch; None without processors.
        part: the requests whose rows are sampled.
    """

    def each(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[part].repeat_interleave(width, 0)

    processors = info.custom_logit_processor
    if processors is not None:
        requests = range(len(info.temperatures))[part]
        processors = {
            key: _processor_of_rows(entry, requests, width, info.temperatures.device)
            for key, entry in processors.items()
            if any(row in requests for row in entry.rows)
        }
        row_params = row_params and row_params[requests.start * width : requests.stop * width]
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


def _processor_of_rows(entry: ProcessorEntry, requests: range, width: int, device: Any) -> ProcessorEntry:
    rows = [(r - requests.start) * width + i for r in entry.rows if r in requests for i in range(width)]
    return ProcessorEntry(entry.processor, rows, upload(torch.tensor(rows, dtype=torch.int64), device))


def _join_logprobs(target_out: Any, outs: list[LogitsProcessorOutput]) -> None:
    """Writes the logprobs of all parts, in order, into `target_out`."""
    target_out.next_token_logprobs = torch.cat([out.next_token_logprobs for out in outs])
    for name, kind in LOGPROBS.items():
        if all(getattr(out, name) is None for out in outs):
            continue
        joined: list[Any] = []
        for out in outs:
            logits = out.next_token_logits
            nothing = logits.new_empty(0) if kind is torch.Tensor else []
            joined += getattr(out, name) or [nothing] * len(logits)
        setattr(target_out, name, joined)


def _each(values: list[Any], width: int) -> list[Any]:
    return [value for value in values for _ in range(width)]
