"""A check from beginning to end: the off arm's answers, the on arm's, what differs, and the probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import httpx

from sglang_dflash.checking.cases import CASES, PLAIN, WHOLE_BLOCKS_CASE, Case
from sglang_dflash.checking.compare import tokens_named
from sglang_dflash.checking.draft_kv import DraftKv, probe_draft_kv, requests_needed
from sglang_dflash.checking.oracle import probe_reference
from sglang_dflash.checking.probes import marked_requests, probe_contamination
from sglang_dflash.checking.recording import Exchange, Recording, count_requests, record, tokenize
from sglang_dflash.checking.report import CaseResult, Report, judge_case
from sglang_dflash.serving import (
    TINY_TARGET,
    Arm,
    Client,
    Completion,
    Progress,
    ServerError,
    ServerInfo,
    TiePolicy,
    row_counts,
    with_best,
)
from sglang_dflash.serving.arms import START_S
from sglang_dflash.serving.errors import first_line
from sglang_dflash.serving.sessions import Session


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
        logs: folder of the servers' logs.
    """

    off: Arm | Recording
    on: Arm
    prompts: list[Session]
    cases: list[Case] | None
    num_prompts: int
    limit: int
    concurrency: int
    seed: int
    tie_ulps: float | None
    control: bool
    reference: bool
    save_off: Path | None
    logs: Path

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def check(plan: Plan, progress: Progress) -> Report:
    """
    Raises:
        ServerError: an arm does not start, the off arm stops answering, or nothing could be compared.
        ValueError: a prompt is not taken, or a case cannot be asked.
    """
    controls: list[Completion] = []
    if isinstance(plan.off, Recording):
        recording = _narrowed(plan.off, plan)
    else:
        recording, controls = _ask_off(plan, plan.off, progress)
    starting = progress.waiting("Starting the server with speculation ...")
    with starting as on_wait, plan.on.up(plan.log("on"), START_S, on_wait) as server:
        client = server.client()
        info = ServerInfo.ask(client)
        report = Report(recording.server, info, TiePolicy.of(info.dtype, plan.tie_ulps))
        report.warnings += _warnings(recording.server, info)
        if controls:
            report.control = _judge_all(recording, controls, plan.concurrency, report.tie_policy)
        alone = _ask_on(plan, recording, client, report, progress)
        whole_blocks = plan.on.with_whole_blocks() if any(outcome.adapts for outcome in alone) else None
        if whole_blocks is None and not report.broken:
            _probe_draft_kv(plan, plan.on, plan.log("on"), recording, client, report, progress)
    if whole_blocks is not None and not report.broken:
        alone = _ask_whole_blocks(plan, whole_blocks, recording, report, progress)
    if plan.reference and alone and not report.broken:  # no server is up, so that its memory is free
        plain = recording.of_case(PLAIN)
        with progress.phase("Reference in transformers", len(plain)) as advance:
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


def _ask_off(plan: Plan, arm: Arm, progress: Progress) -> tuple[Recording, list[Completion]]:
    """The off run, and what the same requests get at the higher concurrency where that is asked for."""
    try:
        starting = progress.waiting("Starting the server without speculation ...")
        with starting as on_wait, arm.up(plan.log("off"), START_S, on_wait) as server:
            client = server.client()
            info = ServerInfo.ask(client)
            cases = _possible(plan.cases, info)
            prompts = tokenize(client, plan.prompts, info.max_prompt_len)
            with progress.phase("Speculation off, one at a time", count_requests(cases, len(prompts))) as advance:
                recording = record(client, info, prompts, cases, plan.limit, plan.seed, advance)
            if plan.save_off is not None:
                recording.save(plan.save_off)
            if not plan.control:
                return recording, []
            bodies = [with_best(exchange.request.body) for exchange in recording.exchanges]
            with progress.phase(f"Speculation off, {plan.concurrency} at a time", len(bodies)) as advance:
                return recording, client.ask_all(bodies, plan.concurrency, advance)
    except httpx.HTTPError as error:
        raise ServerError(
            f"The server without speculation stopped answering: {_why(arm, plan.log('off'), error)}"
        ) from None


def _why(arm: Arm, log: Path, error: httpx.HTTPError) -> str:
    return f"{arm.why_gone(log)} [{first_line(error)}]"


def _judge_all(
    recording: Recording, outcomes: Sequence[Completion], concurrency: int, tie_policy: TiePolicy
) -> list[CaseResult]:
    """outcomes: of all exchanges of the recording, in their order."""
    by_case: dict[str, list[Completion]] = {}
    for exchange, outcome in zip(recording.exchanges, outcomes, strict=True):
        by_case.setdefault(exchange.request.case, []).append(outcome)
    return [judge_case(recording, case, concurrency, by_case[case], tie_policy) for case in recording.cases()]


def _ask_on(plan: Plan, recording: Recording, client: Client, report: Report, progress: Progress) -> list[Completion]:
    """Asks every case and the markers; returns what the plain requests got alone."""
    alone: list[Completion] = []
    try:
        if plan.on.may_flush:
            client.flush_when_idle()
        report.slots_before = client.used_slots()
        before = row_counts(client)
        for concurrency in dict.fromkeys((1, plan.concurrency)):
            outcomes = _ask_matrix(plan, recording, client, report, concurrency, progress)
            alone = alone or outcomes
        _ask_markers(plan, client, report, progress)
        after = row_counts(client)
        report.rows = None if after is None or before is None else after.since(before)
        report.token_texts = client.detokenize(tokens_named(one.difference for one in report.found()))
    except httpx.HTTPError as error:
        report.broken = _why(plan.on, plan.log("on"), error)
    return alone


def _ask_matrix(
    plan: Plan, recording: Recording, client: Client, report: Report, concurrency: int, progress: Progress
) -> list[Completion]:
    """Every case at one concurrency, case after case; returns what the plain case got. Says what was found, so that a
    check that is ended later has not run for nothing.

    One at a time, prompts are fresh only in the first case and then hit the radix cache; several at a time, they are
    fresh in every case.
    """
    name = "Speculation on, " + ("one at a time" if concurrency == 1 else f"{concurrency} at a time")
    plain: list[Completion] = []
    with progress.phase(name, len(recording.exchanges)) as advance:
        for case in recording.cases():
            bodies = [exchange.request.body for exchange in recording.of_case(case)]
            if concurrency > 1 and plan.on.may_flush:
                _count_slots(client, report)
                client.flush_when_idle()
            outcomes = client.ask_all(bodies, concurrency, advance)
            report.results.append(judge_case(recording, case, concurrency, outcomes, report.tie_policy))
            plain = outcomes if case == PLAIN else plain
    judged = [result for result in report.results if result.concurrency == concurrency]
    identical, ties = sum(r.identical for r in judged), sum(r.ties for r in judged)
    different, refused = sum(r.different for r in judged), sum(sum(r.refused.values()) for r in judged)
    progress.say(f"{name}: {identical} identical, {ties} ties, {different} different, {refused} refused")
    return plain


def _ask_whole_blocks(
    plan: Plan, arm: Arm, recording: Recording, report: Report, progress: Progress
) -> list[Completion]:
    """Starts the server with whole blocks, whose steps can be compared; returns what the plain requests got alone.

    The plain requests become a case of the report. If the server does not start, the report says that and nothing else
    is lost.
    """
    plain = recording.of_case(PLAIN)
    waiting = progress.waiting("Starting the server with whole blocks, to compare steps ...")
    log = plan.log("on-whole-blocks")
    try:
        with waiting as on_wait, arm.up(log, START_S, on_wait) as server:
            client = server.client()
            before = client.used_slots() or 0
            with progress.phase("Whole blocks, one at a time", len(plain)) as advance:
                alone = client.ask_all([exchange.request.body for exchange in plain], 1, advance)
            used = client.used_slots(before)
            if used is not None:
                report.slots_after.append((report.slots_before or 0) + used - before)
            result = judge_case(recording, PLAIN, 1, alone, report.tie_policy)
            found = [replace(one, case=WHOLE_BLOCKS_CASE) for one in result.found]
            report.results.append(replace(result, case=WHOLE_BLOCKS_CASE, found=found))
            report.token_texts |= client.detokenize(tokens_named(one.difference for one in found))
            _probe_draft_kv(plan, arm, log, recording, client, report, progress)
            return alone
    except ServerError as error:
        report.draft_kv = DraftKv(skipped=f"the server with whole blocks did not start: {error}")
    except httpx.HTTPError as error:
        report.broken = _why(arm, log, error)
    return []


def _probe_draft_kv(
    plan: Plan, arm: Arm, log: Path, recording: Recording, client: Client, report: Report, progress: Progress
) -> None:
    """Fills `report.draft_kv`, or `report.broken`. `arm` and its `log`: of the server that `client` asks."""
    if not arm.may_flush:
        report.draft_kv = DraftKv(skipped="it empties the server's radix cache; --flush allows it")
        return
    plain = recording.of_case(PLAIN)
    try:
        with progress.phase("Draft KV", requests_needed(plain)) as advance:
            exact = report.on.dtype == "float32"
            report.draft_kv = probe_draft_kv(client, plain, plan.concurrency, exact, advance)
    except httpx.HTTPError as error:
        report.broken = _why(arm, log, error)


def _ask_markers(plan: Plan, client: Client, report: Report, progress: Progress) -> None:
    limit = min(plan.limit, 64)
    embedded = report.on.model_path == str(TINY_TARGET)
    try:
        marked = marked_requests(client, Random(plan.seed), plan.concurrency, limit, embedded)
        with progress.phase("Markers", len(marked)) as advance:
            report.contamination = probe_contamination(client, marked, max(2, plan.concurrency), advance)
    except ValueError as error:  # a server without a tokenizer
        report.warnings.append(f"no markers were asked: {error}")
    _count_slots(client, report)


def _ask_reference(
    server: ServerInfo, plain: Sequence[Exchange], alone: Sequence[Completion], on_done: Callable[[], None]
) -> DraftKv:
    try:
        return probe_reference(server, plain, alone, on_done)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a device without memory for both models
        return DraftKv(skipped=f"the reference in transformers cannot run: {str(error).splitlines()[0]}")


def _count_slots(client: Client, report: Report) -> None:
    """Emptying the cache returns leaked slots, too: to be called before that."""
    used = client.used_slots(report.slots_before or 0)
    if used is not None:
        report.slots_after.append(used)
