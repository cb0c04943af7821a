"""Hooks where SGLang 0.5.23 treats a verified block differently from the same tokens decoded one by one.

Each restores plain decoding's result, and says what SGLang does and why ours differs.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_cpu.hooking import AFTER, AROUND, hook
from sglang_dflash.host.start.version import serves_dflash
from sglang_dflash.host.worker.protocols import Req


@hook(
    "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
    AFTER,
    why="penalizers stand in a set, so their order changes from process to process",
    until="SGLang orders them",
    always=True,
)
def order_penalizers(result: Any, orchestrator: Any, *_: Any, **__: Any) -> None:
    """Makes every server with this plugin add penalties first and scale last.

    SGLang keeps its penalizers in a set of classes. So without overlap their order can change from process to
    process, and with it the result of a repetition penalty combined with another penalty. With overlap, and under
    speculation, SGLang itself adds first and scales last.
    """
    ordered = sorted(orchestrator.penalizers.items(), key=lambda item: (item[1].is_multiplicative, item[0].__name__))
    orchestrator.penalizers = dict(ordered)


@hook(
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    AROUND,
    why="SGLang looks for stops in a block as a whole; plain decoding ends at the first one reached",
    until="SGLang goes token by token",
)
def finish_token_by_token(original: Any, req: Req, new_accepted_len: int = 1) -> None:
    """Ends a request at the first stop in the block, as plain decoding does.

    SGLang searches the block as a whole: stop strings before regexes before stop tokens. Among strings, or among
    regexes, the first in the request's list wins over the first in the text.
    """
    params, grammar = req.sampling_params, req.grammar
    cut = new_accepted_len > 1 and req.to_finish is not None and not req.finished() and serves_dflash()
    grammar_is_ahead = req.__dict__.pop("dflash_grammar_is_ahead", False)
    if grammar is not None and _owes_a_token(req):
        if grammar_is_ahead:
            req.grammar = None  # the grammar has ended, but the request emits one more token
        else:
            req.dflash_past_grammar = True  # a prefill has emitted it, and the grammar gets it later
    if new_accepted_len > 1 and (params.stop_strs or params.stop_regex_strs):
        _finish_at_first(original, req, new_accepted_len)
    else:
        original(req, new_accepted_len)
    req.grammar = grammar
    if cut:  # an aborted request ends with the next token in plain decoding
        req.finished_len = len(req.output_ids) - new_accepted_len + 1
    rejected = req.__dict__.pop("dflash_rejected", None)
    if rejected is not None and not req.finished():
        req.to_finish = rejected
        original(req, new_accepted_len)
    deferred = req.__dict__.pop("dflash_reasoning", None)
    if deferred is not None:
        count, tokens = deferred
        past_stop = 0 if req.finished_len is None else max(0, len(req.output_ids) - req.finished_len)
        count(req, tokens[: len(tokens) - past_stop])


def _finish_at_first(original: Any, req: Req, new_accepted_len: int) -> None:
    ids, grammar = req.output_ids, req.grammar
    block = ids[-new_accepted_len:]
    del ids[-new_accepted_len:]
    req.grammar = None  # it has already accepted the whole block
    for place, token in enumerate(block, start=1):
        ids.append(token)
        if place == len(block):
            req.grammar = grammar
        original(req, 1)
        if req.finished():
            ids.extend(block[place:])  # later readers expect the whole block
            break


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._accept_grammar_tokens",
    AROUND,
    why="with `ignore_eos`, plain decoding emits one token past a grammar's end; SGLang drops it from a block",
    until="both agree",
)
def accept_past_the_end(original: Any, processor: Any, req: Req, tokens: int | list[int]) -> list[int]:
    """Keeps the one token that plain decoding emits past what a grammar accepts, and that SGLang drops from a block.

    With `ignore_eos`, plain decoding notices a grammar's end one token late. And it looks for stops before it gives a
    token to the grammar: so a stop in the block, up to the token that the grammar rejects, wins over the error.
    """
    if not serves_dflash():
        return original(processor, req, tokens)
    run = [tokens] if isinstance(tokens, int) else tokens
    req.dflash_grammar_is_ahead = True  # it gets the tokens before `finish_token_by_token`
    if not req.sampling_params.ignore_eos:
        return _accept(original, processor, req, run)
    if req.grammar.is_terminated():
        req.dflash_past_grammar = True
        return run[:1]
    retained = _accept(original, processor, req, run)
    if req.grammar.is_terminated() and len(retained) < len(run):
        req.dflash_past_grammar = True
        retained = run[: len(retained) + 1]
    return retained


def _accept(original: Any, processor: Any, req: Req, run: list[int]) -> list[int]:
    before = req.to_finish
    retained: list[int] = original(processor, req, run)
    if req.to_finish is before:
        return retained
    req.dflash_rejected, req.to_finish = req.to_finish, before  # for `finish_token_by_token`
    return run[: len(retained) + 1]


def _owes_a_token(req: Req) -> bool:
    """Whether the grammar has ended and the one token past its end is not emitted yet."""
    return (
        req.sampling_params.ignore_eos
        and serves_dflash()
        and req.grammar.is_terminated()
        and not getattr(req, "dflash_past_grammar", False)
    )


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_update_reasoning_tokens",
    AROUND,
    why="a block's reasoning tokens are counted before the stop is looked for",
    until="SGLang counts up to the stop",
)
def defer_reasoning_tokens(original: Any, processor: Any, req: Req, tokens: Any) -> None:
    """Counts a block's reasoning tokens once its stop is found. SGLang counts earlier, also tokens past the stop."""
    if isinstance(tokens, list) and len(tokens) > 1:
        req.dflash_reasoning = (lambda *arguments: original(processor, *arguments)), tokens
    else:
        original(processor, req, tokens)


def restore_prefill_only() -> None:
    """Keeps requests with `max_new_tokens` 0 prefill-only under DFLASH.

    With speculation on, SGLang samples them, which changes the logprobs of scoring. `is_prefill_only` is a property,
    which SGLang's hook registry cannot hook, so it is replaced here.
    """
    from sglang.srt.managers.schedule_batch import Req

    Req.is_prefill_only = property(_is_prefill_only)


def _is_prefill_only(req: Req) -> bool:
    return req.sampling_params.max_new_tokens == 0 and get_spec().speculative_algorithm in (None, "DFLASH")
