"""Chooses the target's token after every row of a verified block, as SGLang's sampler does for plain decoding."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker import sampling_masks
from sglang_dflash.host.worker.draft_input import upload
from sglang_dflash.host.worker.emitted_text import EmittedText
from sglang_dflash.host.worker.penalties import Group, RequestPenalties
from sglang_dflash.host.worker.protocols import LogitsOutput, ModelRunner, ScheduleBatch

SAMPLED_ROWS = 512
"""Most rows that SGLang samples at once, because its sampler holds several [rows, V] tensors, with seeds in float64.
256 requests in blocks of 16 rows are 4,096 rows."""

DRAW = "SGLANG_DFLASH_DRAW"
"""`1` lets the op `sample_rows` draw. It is off by default: no GPU has run it."""

LOGPROBS = {
    "next_token_top_logprobs_val": torch.Tensor,
    "next_token_top_logprobs_idx": torch.Tensor,
    "next_token_token_ids_logprobs_val": torch.Tensor,
    "next_token_token_ids_logprobs_idx": list,
}
"""Fields of `LogitsProcessorOutput`, and the type of their entries, one per row. A field is None if no row asks."""


class RowSampler:
    """Samples each row as plain decoding would at that position, once the drafts before the row are emitted.

    Our code applies penalties. SGLang applies grammar masks, filters, seeds, processors and logprobs, over all T
    rows. Where the op `sample_rows` draws as SGLang's sampler does (`can_draw`), it may be called instead. A draft is
    accepted if it equals the row's token. Given the tokens before it, a draft is not random, so this leaves the
    sampled distribution unchanged.
    """

    def __init__(self, target_runner: ModelRunner, max_width: int, kernels: ops.Kernels, draws: bool = False) -> None:
        """draws: whether the op may draw."""
        self._runner = target_runner
        vocab_size = target_runner.model_config.vocab_size
        self._penalties = RequestPenalties(vocab_size, max_width, target_runner.device, kernels)
        self._text = EmittedText()
        self._sample_rows = kernels.sample_rows
        self.draws = draws
        self.sampled_rows = SAMPLED_ROWS

    def prefill(self, batch: ScheduleBatch) -> Group | None:
        """To be called before the target's prefill, which samples the first tokens. Returns the group for
        `commit_first`."""
        group = self._penalties.prefill(batch)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.prefill(batch)
        return group

    def receive(self, batch: ScheduleBatch) -> None:
        """Starts requests that come with their first tokens from another server's prefill."""
        self._penalties.start(batch.reqs)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.start(batch)

    def commit_first(self, batch: ScheduleBatch, group: Group | None, ids: torch.Tensor) -> None:
        """To be called after the target's prefill. ids: [B] int; the first tokens."""
        # The sampler gives int32, its argmax int64.
        self.commit(batch, group, ids[:, None].long(), torch.ones_like(ids, dtype=torch.int32))

    def is_plain_greedy(self, batch: ScheduleBatch) -> bool:
        """Whether every row's token is the argmax of the target's unchanged logits."""
        info = batch.sampling_info
        return (
            info.is_all_greedy
            and info.acc_additive_penalties is None
            and info.logit_bias is None
            and not info.has_custom_logit_processor
            and not batch.has_grammar
            and not batch.return_logprob
            and info.sampling_mask_batch_indices is None
        )

    def grammar_tree(self, batch: ScheduleBatch, rows: VerifyRows) -> GrammarTree | None:
        """To be called before the verify forward is launched: otherwise the copy of the ids would wait for it."""
        if not batch.has_grammar:
            return None
        if rows.chosen is None:
            return GrammarTree.from_linear_chain(rows.chains())
        children = torch.arange(1, rows.width + 1, device=rows.ids.device).expand(rows.batch, -1)
        children = torch.where(children < rows.chosen.lens[:, None], children, -1)
        return GrammarTree.from_device(children, torch.full_like(children, -1), rows.blocks(rows.ids))

    def choose(
        self, batch: ScheduleBatch, rows: VerifyRows, target_out: LogitsOutput, tree: GrammarTree | None, barrier: Any
    ) -> tuple[torch.Tensor, Group | None]:
        """Chooses the target's token of every row; fills in `target_out`'s logprobs and sampling masks where asked for.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`; its logits are overwritten.
            barrier: advances the grammars over the previous step's tokens; None without overlap.

        Returns:
            [T] int64; and the group for `commit`.
        """
        count = len(rows.ids)
        info, logits = batch.sampling_info, target_out.next_token_logits[:count]
        # In SGLang's order (SamplingBatchInfo.apply_logits_bias): penalties, grammar, bias.
        group = self._penalties.group(batch)
        if group is not None:
            self._penalties.apply(group, logits, rows)
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=logits.device, barrier=barrier
            )
            if mask is not None:
                _rows_of(mask, rows).apply(logits)
        if info.logit_bias is not None:
            if rows.chosen is None:
                rows.blocks(logits).add_(info.logit_bias[:, None])
            else:
                logits.add_(info.logit_bias[rows.requests()])
        if self.draws and can_draw(batch, logits, self._runner.sampler):
            return self._draw(info, rows, logits), group
        params = self._text.row_params(batch, rows) if info.has_custom_logit_processor else None
        spans = [slice(first, min(first + self.sampled_rows, count)) for first in range(0, count, self.sampled_rows)]
        outs = [LogitsProcessorOutput(next_token_logits=logits[span]) for span in spans]
        ids = torch.cat([self._sample(batch, rows, params, *both) for both in zip(spans, outs, strict=True)])
        if batch.return_logprob:
            _join_logprobs(target_out, outs)
        if info.sampling_mask_batch_indices is not None:
            sampling_masks.join(target_out, outs, info, rows.requests_on_cpu(), rows.width)
        return ids.long(), group

    def _draw(self, info: SamplingBatchInfo, rows: VerifyRows, logits: torch.Tensor) -> torch.Tensor:
        """The token of every row, [T] int64, of a batch that `can_draw`."""
        sanitize_nan_logits(logits, "sampler: next_token_logits")
        filters = ops.Filters(info.temperatures.flatten(), info.top_ks, info.top_ps)
        uniform = torch.rand(len(logits), device=logits.device)
        # With grammars a row may have no token at all; see `sample_as_if_alone`.
        return self._sample_rows(logits, rows.requests(), filters, uniform, any_id=bool(info.grammars))

    def _sample(
        self,
        batch: ScheduleBatch,
        rows: VerifyRows,
        row_params: list[Any] | None,
        span: slice,
        out: LogitsProcessorOutput,
    ) -> torch.Tensor:
        """The token of every row of a span, [N] int; `out` has their logits and gets their logprobs."""
        asking = rows.requests_on_cpu()[span] if batch.return_logprob else []
        ids: torch.Tensor = self._runner.sampler(
            out,
            expand(batch.sampling_info, rows, span, row_params),
            batch.return_logprob,
            [batch.top_logprobs_nums[request] for request in asking],
            [batch.token_ids_logprobs[request] for request in asking],
            rows.positions[span],
        )
        return ids

    def commit(self, batch: ScheduleBatch, group: Group | None, ids: torch.Tensor, lens: torch.Tensor) -> None:
        """Records what a step emitted: of every request, the first `lens` ([B]) of its `ids` ([B, W]).

        group: the requests with penalties, as `choose` returned them; None if none asks.
        """
        if group is not None:
            self._penalties.commit(group, ids, lens)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.commit(batch, ids, lens)


def draws_asked() -> bool:
    """Whether the op may draw (`SGLANG_DFLASH_DRAW`).

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(DRAW, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{DRAW} is {value!r}; allowed: 0 or 1.")
    return value == "1"


def can_draw(batch: ScheduleBatch, logits: torch.Tensor, sampler: Any) -> bool:
    """Whether the op `sample_rows` gives the rows of a batch the distribution of SGLang's sampler; read off the host.

    It does where SGLang's flashinfer filters by top-k and top-p together. With min_p flashinfer filters in another
    order. SGLang's pytorch backend keeps only some of equal tokens, which ones torch leaves open.
    """
    info = batch.sampling_info
    return (
        type(sampler) is Sampler
        and get_exec().kernel.sampling_backend == "flashinfer"
        and logits.dtype == torch.float32
        and logits.stride(1) == 1
        and not info.is_all_greedy
        and info.max_top_k is not None
        and info.max_top_k <= ops.MOST_SAMPLED
        and not info.need_min_p_sampling
        and info.sampling_seed is None
        and not info.has_custom_logit_processor
        and not batch.return_logprob
        and info.sampling_mask_batch_indices is None
    )


def _rows_of(mask: GrammarMask, rows: VerifyRows) -> GrammarMask:
    """The T rows of a mask, which has W for each request."""
    return mask if rows.chosen is None else GrammarMask(mask.grammar, mask.vocab_mask[rows.chosen.kept])


def expand(info: SamplingBatchInfo, rows: VerifyRows, span: slice, row_params: list[Any] | None) -> SamplingBatchInfo:
    """The sampling info of each row of a span of the T rows, without what is already applied to the logits.

    row_params: custom parameters of all T rows; None without processors.
    """
    requests = rows.requests()[span]

    def repeat(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[requests]

    processors = info.custom_logit_processor
    if processors is not None:
        device, of_rows = info.temperatures.device, rows.requests_on_cpu()[span]
        found = {key: _processor_of_rows(entry, of_rows, device) for key, entry in processors.items()}
        processors = {key: entry for key, entry in found.items() if entry.rows}
        row_params = row_params and row_params[span]
    captured: dict[str, torch.Tensor | None] = {}
    if info.sampling_mask_batch_indices is not None:
        captured = sampling_masks.captured(info, rows.requests_on_cpu()[span], info.temperatures.device)
    return replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        custom_params=row_params,
        custom_logit_processor=processors,
        grammar_mask=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        **captured,
    )


def _processor_of_rows(entry: ProcessorEntry, of_rows: list[int], device: Any) -> ProcessorEntry:
    """of_rows: the request of each row."""
    asked = set(entry.rows)
    rows = [row for row, request in enumerate(of_rows) if request in asked]
    return ProcessorEntry(entry.processor, rows, upload(torch.tensor(rows, dtype=torch.int64), device))


def _join_logprobs(target_out: LogitsOutput, outs: list[LogitsProcessorOutput]) -> None:
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


def in_blocks(target_out: LogitsOutput, rows: VerifyRows) -> None:
    """Orders the rows' logprobs in `target_out`, a `LogitsProcessorOutput`, as SGLang expects them: by whole blocks
    ([B, W])."""
    if target_out.next_token_logprobs is None:
        return
    target_out.next_token_logprobs = rows.blocks(target_out.next_token_logprobs)
    if rows.chosen is None:
        return
    row_of = rows.chosen.row_of.flatten().tolist()
    for name in LOGPROBS:
        values = getattr(target_out, name)
        if values is not None:
            setattr(target_out, name, [values[row] for row in row_of])
