"""Chooses the target's token after every row of a verified block, as SGLang's sampler does for plain decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host.draft_input import upload
from sglang_dflash.host.emitted_text import EmittedText
from sglang_dflash.host.penalties import Group, RequestPenalties
from sglang_dflash.host.protocols import LogitsOutput, ModelRunner, ScheduleBatch

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

    Our code applies penalties. The host applies grammar masks, filters, seeds, processors and logprobs, over all T
    rows. A draft is accepted if it equals the row's token. Given the tokens before it, a draft is not random, so this
    leaves the sampled distribution unchanged.
    """

    def __init__(self, target_runner: ModelRunner, max_width: int, kernels: ops.Kernels) -> None:
        self._runner = target_runner
        vocab_size = target_runner.model_config.vocab_size
        self._penalties = RequestPenalties(vocab_size, max_width, target_runner.device, kernels)
        self._text = EmittedText()
        self.sampled_rows = SAMPLED_ROWS

    def prefill(self, batch: ScheduleBatch) -> Group | None:
        """To be called before the target's prefill, which samples the first tokens. Returns the group for
        `commit_first`."""
        group = self._penalties.prefill(batch)
        if batch.sampling_info.has_custom_logit_processor:
            self._text.prefill(batch)
        return group

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
        )

    def grammar_tree(self, batch: ScheduleBatch, plan: VerifyPlan) -> GrammarTree | None:
        """To be called before the verify forward is launched: otherwise the copy of the ids would wait for it."""
        if not batch.has_grammar:
            return None
        if plan.trees is None:
            return GrammarTree.from_linear_chain(plan.chains())
        if plan.attention_mask is None:
            return _grammar_tree(plan)
        ids, parents = (rows.view(plan.batch, plan.verify_width) for rows in (plan.ids, plan.trees.parents))
        return GrammarTree.from_device(*ops.links(parents), ids)

    def choose(
        self, batch: ScheduleBatch, plan: VerifyPlan, target_out: LogitsOutput, tree: GrammarTree | None, barrier: Any
    ) -> tuple[torch.Tensor, Group | None]:
        """Chooses the target's token of every row; fills in `target_out`'s logprobs if a request asks for them.

        Args:
            target_out: the verify forward's `LogitsProcessorOutput`; its logits are overwritten.
            barrier: advances the grammars over the previous step's tokens; None without overlap.

        Returns:
            [T] int64; and the group for `commit`.
        """
        info, logits = batch.sampling_info, target_out.next_token_logits
        # In the host's order (SamplingBatchInfo.apply_logits_bias): penalties, grammar, bias.
        group = self._penalties.group(batch)
        if group is not None:
            self._penalties.apply(group, logits, plan)
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=logits.device, barrier=barrier
            )
            if mask is not None:
                _rows_of(mask, plan).apply(logits)
        if info.logit_bias is not None:
            if plan.trees is None:
                logits.view(plan.batch, plan.verify_width, -1).add_(info.logit_bias[:, None])
            else:
                logits.add_(plan.repeat(info.logit_bias))
        params = self._text.row_params(batch, plan) if info.has_custom_logit_processor else None
        spans = _spans(plan.lens, self.sampled_rows)
        outs = [LogitsProcessorOutput(next_token_logits=logits[span.rows]) for span in spans]
        ids = torch.cat([self._sample(batch, plan, params, *both) for both in zip(spans, outs, strict=True)])
        if batch.return_logprob:
            _join_logprobs(target_out, outs)
        return ids.long(), group

    def _sample(
        self,
        batch: ScheduleBatch,
        plan: VerifyPlan,
        row_params: list[Any] | None,
        span: Span,
        out: LogitsProcessorOutput,
    ) -> torch.Tensor:
        """The token of every row of a span, [N] int; `out` has their logits and gets their logprobs."""
        ids: torch.Tensor = self._runner.sampler(
            out,
            expand(batch.sampling_info, span, row_params),
            batch.return_logprob,
            plan.repeat_list(batch.top_logprobs_nums)[span.rows] if batch.return_logprob else [],
            plan.repeat_list(batch.token_ids_logprobs)[span.rows] if batch.return_logprob else [],
            plan.positions[span.rows],
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


class Span(NamedTuple):
    """Some consecutive requests of a batch, and their rows.

    Fields:
        requests, rows: slices of the B requests and of the T rows.
        lens: rows of each of these requests.
    """

    requests: slice
    rows: slice
    lens: list[int]

    def repeat(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """The rows' values, from one for each request of the batch."""
        if values is None:
            return None
        own = values[self.requests]
        if len(set(self.lens)) == 1:
            return own.repeat_interleave(self.lens[0], 0)
        return own.repeat_interleave(torch.tensor(self.lens, device=own.device), 0)


def _spans(lens: list[int], most: int) -> list[Span]:
    """The requests in spans of at most `most` rows, or of one request that has more. lens: rows of each request."""
    spans, first, row = [], 0, 0
    while first < len(lens):
        end, rows = first + 1, lens[first]
        while end < len(lens) and rows + lens[end] <= most:
            rows += lens[end]
            end += 1
        spans.append(Span(slice(first, end), slice(row, row + rows), lens[first:end]))
        first, row = end, row + rows
    return spans


def _grammar_tree(plan: VerifyPlan) -> GrammarTree:
    """The host's form of trees: each row's first child and next sibling, [B, W], -1 for none. Rows that a request lacks
    hang nowhere."""
    assert plan.trees is not None
    shape = (plan.batch, plan.verify_width)
    children, siblings = torch.full(shape, -1), torch.full(shape, -1)
    parents, first = plan.trees.parents.tolist(), 0
    for request, count in enumerate(plan.trees.lens):
        latest: dict[int, int] = {}  # of each parent, its last child so far
        for row in range(1, count):
            parent = parents[first + row]
            before = latest.get(parent)
            if before is None:
                children[request, parent] = row
            else:
                siblings[request, before] = row
            latest[parent] = row
        first += count
    ids = torch.zeros(shape, dtype=torch.int64)
    ids[_places(plan)] = plan.ids
    return GrammarTree.from_host(children, siblings, ids)


def _places(plan: VerifyPlan) -> torch.Tensor:
    """[B, W] bool: which places of a table with W columns the rows fill, in order."""
    return torch.arange(plan.verify_width) < torch.tensor(plan.lens)[:, None]


def _rows_of(mask: GrammarMask, plan: VerifyPlan) -> GrammarMask:
    """The T rows of a mask, which has W for each request."""
    if plan.trees is None or plan.attention_mask is not None:
        return mask
    return GrammarMask(mask.grammar, mask.vocab_mask[_places(plan).flatten()])


def expand(info: SamplingBatchInfo, span: Span, row_params: list[Any] | None) -> SamplingBatchInfo:
    """The sampling info of each row of a span, without what is already applied to the logits.

    row_params: custom parameters of every row of the batch; None without processors.
    """
    processors = info.custom_logit_processor
    if processors is not None:
        requests = range(len(info.temperatures))[span.requests]
        processors = {
            key: _processor_of_rows(entry, requests, span.lens, info.temperatures.device)
            for key, entry in processors.items()
            if any(row in requests for row in entry.rows)
        }
        row_params = row_params and row_params[span.rows]
    return replace(
        info,
        temperatures=span.repeat(info.temperatures),
        top_ps=span.repeat(info.top_ps),
        top_ks=span.repeat(info.top_ks),
        min_ps=span.repeat(info.min_ps),
        sampling_seed=span.repeat(info.sampling_seed),
        custom_params=row_params,
        custom_logit_processor=processors,
        grammar_mask=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
    )


def _processor_of_rows(entry: ProcessorEntry, requests: range, lens: list[int], device: Any) -> ProcessorEntry:
    firsts = [0, *accumulate(lens)]
    asked = [r - requests.start for r in entry.rows if r in requests]
    rows = [firsts[place] + i for place in asked for i in range(lens[place])]
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


def follow(target_out: LogitsOutput, path: torch.Tensor) -> None:
    """Orders the rows' logprobs in `target_out`, a `LogitsProcessorOutput`, by the accepted rows ([B, L] int64)."""
    if target_out.next_token_logprobs is None:
        return
    rows = path.flatten()
    target_out.next_token_logprobs = target_out.next_token_logprobs[rows].view(path.shape)
    for name in LOGPROBS:
        values = getattr(target_out, name)
        if values is not None:
            setattr(target_out, name, [values[row] for row in rows.tolist()])
