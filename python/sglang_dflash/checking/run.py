"""A check from beginning to end: the off arm's answers, the on arm's, what differs, and the probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import httpx

from sglang_dflash.checking.arms import Arm, ServerInfo, plan_counts
from sglang_dflash.checking.asking import Outcome, ask_all, with_best
from sglang_dflash.checking.cases import CASES, PLAIN, WHOLE_BLOCKS_CASE, Case
from sglang_dflash.checking.compare import Tolerance, tokens_named
from sglang_dflash.checking.draft_kv import DraftKv, probe_draft_kv, requests_needed
from sglang_dflash.checking.oracle import probe_reference
from sglang_dflash.checking.pool import empty_cache, used_slots
from sglang_dflash.checking.probes import marked_requests, probe_contamination
from sglang_dflash.checking.progress import Watch
from sglang_dflash.checking.prompts import Prompt
from sglang_dflash.checking.recording import Exchange, Recording, count_requests, record, tokenize
from sglang_dflash.checking.report import CaseResult, Report, judge_case
from sglang_dflash.serving import TINY_TARGET, Client, ServerError


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check does.

    Fields:
        off: where answers with speculation off come from: an arm to ask, or a recording.
        on: the arm to check.
        prompts: unused with a recording.
        cases: None: all of them.
        num_prompts: of a recording, the first so many.
        limit: `max_new_tokens` of the off run.
        control: ask the off arm at the higher concurrency, too.
        reference: compare verify steps with the reference in transformers.
        save_off: where to keep the off run.
    """

    off: Arm | Recording
    on: Arm
    prompts: list[Prompt]
    cases: list[Case] | None
    num_prompts: int
    limit: int
    concurrency: int
    seed: int
    tie_ulps: float | None
    control: bool
    reference: bool
    save_off: Path | None


def check(plan: Plan, watch: Watch) -> Report:
    """
    Raises:
        ServerError: an arm does not start, the off arm stops answering, or nothing could be compared.
        ValueError: a prompt is not taken, or a case cannot be asked.
    """
    controls: list[Outcome] = []
    if isinstance(plan.off, Recording):
        recording = _narrowed(plan.off, plan)
    else:
        recording, controls = _ask_off(plan, plan.off, watch)
    with watch.waiting("Starting the server with speculation ...") as on_wait, plan.on.up(on_wait) as client:
        info = ServerInfo.ask(client)
        report = Report(recording.server, info, Tolerance.of(info.dtype, plan.tie_ulps))
        report.warnings += _warnings(recording.server, info)
        if controls:
            report.control = _judge_all(recording, controls, plan.concurrency, report.tolerance)
        alone = _ask_on(plan, recording, client, report, watch)
        whole_blocks = plan.on.with_whole_blocks() if any(outcome.adapts for outcome in alone) else None
        if whole_blocks is None and not report.broken:
            _probe_draft_kv(plan, plan.on, recording, client, report, watch)
    if whole_blocks is not None and not report.broken:
        alone = _ask_whole_blocks(plan, whole_blocks, recording, report, watch)
    if plan.reference and alone and not report.broken:  # no server is up, so that its memory is free
        plain = recording.of_case(PLAIN)
        with watch.phase("Reference in transformers", len(plain)) as advance:
            report.reference = _ask_reference(report.on, plain, alone, advance)
    if not report.compared and not report.broken:
        refusals = sorted({sentence for result in report.results for sentence in result.refused})
        raise ServerError(f"Nothing could be compared: every request was refused ({' / '.join(refusals)[:400]})")
    return report


def _narrowed(recording: Recording, plan: Plan) -> Recording:
    names = None if plan.cases is None else [case.name for case in plan.cases]
    missing = sorted(set(names or []) - set(recording.cases()))
    if missing:
        raise ValueError(f"--cases has {', '.join(missing)}; --off-from holds {', '.join(recording.cases())}.")
    return recording.only(names, plan.num_prompts)


def _possible(cases: Sequence[Case] | None, server: ServerInfo) -> list[Case]:
    """The cases that the off arm answers the same twice; all of those that were asked for by name."""
    left_out = [case.name for case in cases or [] if case.deterministic and not server.deterministic]
    if left_out:
        raise ValueError(
            f"--cases has {', '.join(left_out)}; the server needs --enable-deterministic-inference for it."
        )
    return [case for case in cases or CASES if server.deterministic or not case.deterministic]


def _warnings(off: ServerInfo, on: ServerInfo) -> list[str]:
    warnings = []
    if off.algorithm:
        warnings.append(f"the off arm runs with speculation ({off.algorithm}): this is no proof of losslessness")
    if off.overlap:
        warnings.append(
            "the off arm runs with overlap scheduling; the baseline is a server with --disable-overlap-schedule"
        )
    if not on.algorithm:
        warnings.append("the on arm runs without speculation (--speculative-algorithm DFLASH)")
    for name in ("model_path", "dtype", "version"):
        theirs, ours = getattr(off, name), getattr(on, name)
        if theirs != ours:
            warnings.append(f"the arms differ in {name}: {theirs} off, {ours} on")
    return warnings


def _ask_off(plan: Plan, arm: Arm, watch: Watch) -> tuple[Recording, list[Outcome]]:
    """The off run, and what the same requests get at the higher concurrency where that is asked for."""
    try:
        with watch.waiting("Starting the server without speculation ...") as on_wait, arm.up(on_wait) as client:
            info = ServerInfo.ask(client)
            cases = _possible(plan.cases, info)
            prompts = tokenize(client, plan.prompts, info.max_prompt_len)
            with watch.phase("Speculation off, one at a time", count_requests(cases, len(prompts))) as advance:
                recording = record(client, info, prompts, cases, plan.limit, plan.seed, advance)
            if plan.save_off is not None:
                recording.save(plan.save_off)
            if not plan.control:
                return recording, []
            bodies = [with_best(exchange.request.body) for exchange in recording.exchanges]
            with watch.phase(f"Speculation off, {plan.concurrency} at a time", len(bodies)) as advance:
                return recording, ask_all(client, bodies, plan.concurrency, advance)
    except httpx.HTTPError as error:
        raise ServerError(f"The server without speculation stopped answering: {_last_words(arm, error)}") from None


def _last_words(arm: Arm, error: httpx.HTTPError) -> str:
    return f"{arm.last_words()} [{(str(error).splitlines() or [type(error).__name__])[0]}]"


def _judge_all(
    recording: Recording, outcomes: Sequence[Outcome], concurrency: int, tolerance: Tolerance
) -> list[CaseResult]:
    """outcomes: of all exchanges of the recording, in their order."""
    by_case: dict[str, list[Outcome]] = {}
    for exchange, outcome in zip(recording.exchanges, outcomes, strict=True):
        by_case.setdefault(exchange.request.case, []).append(outcome)
    return [judge_case(recording, case, concurrency, by_case[case], tolerance) for case in recording.cases()]


def _ask_on(plan: Plan, recording: Recording, client: Client, report: Report, watch: Watch) -> list[Outcome]:
    """Asks every case and the markers; returns what the plain requests got alone."""
    alone: list[Outcome] = []
    try:
        if plan.on.may_flush:
            empty_cache(client)
        report.slots_before = used_slots(client)
        before = plan_counts(client)
        for concurrency in dict.fromkeys((1, plan.concurrency)):
            outcomes = _ask_matrix(plan, recording, client, report, concurrency, watch)
            alone = alone or outcomes
        _ask_markers(plan, client, report, watch)
        after = plan_counts(client)
        report.plan = None if after is None or before is None else after.since(before)
        report.token_texts = _token_texts(client, tokens_named(one.difference for one in report.found()))
    except httpx.HTTPError as error:
        report.broken = _last_words(plan.on, error)
    return alone


def _ask_matrix(
    plan: Plan, recording: Recording, client: Client, report: Report, concurrency: int, watch: Watch
) -> list[Outcome]:
    """Every case at one concurrency, case after case; returns what the plain case got.

    One at a time, prompts are fresh only in the first case and then hit the radix cache; several at a time, they are
    fresh in every case.
    """
    name = "Speculation on, " + ("one at a time" if concurrency == 1 else f"{concurrency} at a time")
    plain: list[Outcome] = []
    with watch.phase(name, len(recording.exchanges)) as advance:
        for case in recording.cases():
            bodies = [exchange.request.body for exchange in recording.of_case(case)]
            if concurrency > 1 and plan.on.may_flush:
                _count_slots(client, report)
                empty_cache(client)
            outcomes = ask_all(client, bodies, concurrency, advance)
            report.results.append(judge_case(recording, case, concurrency, outcomes, report.tolerance))
            plain = outcomes if case == PLAIN else plain
    return plain


def _ask_whole_blocks(plan: Plan, arm: Arm, recording: Recording, report: Report, watch: Watch) -> list[Outcome]:
    """Starts the server with whole blocks, whose steps can be compared; returns what the plain requests got alone.

    The plain requests become a case of the report. If the server does not start, the report says that and nothing else
    is lost.
    """
    plain = recording.of_case(PLAIN)
    waiting = watch.waiting("Starting the server with whole blocks, to compare steps ...")
    try:
        with waiting as on_wait, arm.up(on_wait) as client:
            before = used_slots(client) or 0
            with watch.phase("Whole blocks, one at a time", len(plain)) as advance:
                alone = ask_all(client, [exchange.request.body for exchange in plain], 1, advance)
            used = used_slots(client, before)
            if used is not None:
                report.slots_after.append((report.slots_before or 0) + used - before)
            result = judge_case(recording, PLAIN, 1, alone, report.tolerance)
            found = [replace(one, case=WHOLE_BLOCKS_CASE) for one in result.found]
            report.results.append(replace(result, case=WHOLE_BLOCKS_CASE, found=found))
            report.token_texts |= _token_texts(client, tokens_named(one.difference for one in found))
            _probe_draft_kv(plan, arm, recording, client, report, watch)
            return alone
    except ServerError as error:
        report.draft_kv = DraftKv(skipped=f"the server with whole blocks did not start: {error}")
    except httpx.HTTPError as error:
        report.broken = _last_words(arm, error)
    return []


def _probe_draft_kv(plan: Plan, arm: Arm, recording: Recording, client: Client, report: Report, watch: Watch) -> None:
    """Fills `report.draft_kv`, or `report.broken`. `arm`: whose server `client` asks."""
    if not arm.may_flush:
        report.draft_kv = DraftKv(skipped="it empties the server's radix cache; --flush allows it")
        return
    plain = recording.of_case(PLAIN)
    try:
        with watch.phase("Draft KV", requests_needed(plain)) as advance:
            exact = report.on.dtype == "float32"
            report.draft_kv = probe_draft_kv(client, plain, plan.concurrency, exact, advance)
    except httpx.HTTPError as error:
        report.broken = _last_words(arm, error)


def _ask_markers(plan: Plan, client: Client, report: Report, watch: Watch) -> None:
    limit = min(plan.limit, 64)
    embedded = report.on.model_path == str(TINY_TARGET)
    try:
        marked = marked_requests(client, Random(plan.seed), plan.concurrency, limit, embedded)
        with watch.phase("Markers", len(marked)) as advance:
            report.contamination = probe_contamination(client, marked, max(2, plan.concurrency), advance)
    except ValueError as error:  # a server without a tokenizer
        report.warnings.append(f"no markers were asked: {error}")
    _count_slots(client, report)


def _ask_reference(
    server: ServerInfo, plain: Sequence[Exchange], alone: Sequence[Outcome], on_done: Callable[[], None]
) -> DraftKv:
    try:
        return probe_reference(server, plain, alone, on_done)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a device without memory for both models
        return DraftKv(skipped=f"the reference in transformers cannot run: {str(error).splitlines()[0]}")


def _count_slots(client: Client, report: Report) -> None:
    """Emptying the cache returns leaked slots, too: to be called before that."""
    used = used_slots(client, report.slots_before or 0)
    if used is not None:
        report.slots_after.append(used)


def _token_texts(client: Client, tokens: Sequence[int]) -> dict[int, str]:
    """Empty where the server has no tokenizer."""
    if not tokens:
        return {}
    body = {"tokens": [[token] for token in tokens], "skip_special_tokens": False}
    response = client.post("/detokenize", body)
    if response.status_code != 200:
        return {}
    return dict(zip(tokens, response.json()["text"], strict=True))
