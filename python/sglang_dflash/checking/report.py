"""The results of a check, its verdict, and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dflash.checking.cases import LOGPROBS_CASE, PLAIN, WHOLE_BLOCKS_CASE
from sglang_dflash.checking.compare import Difference, first_difference
from sglang_dflash.checking.draft_kv import DraftKv
from sglang_dflash.checking.probes import Contamination
from sglang_dflash.checking.recording import Recording
from sglang_dflash.core.row_counts import RowCounts
from sglang_dflash.serving import AcceptanceStats, Completion, ServerInfo, TiePolicy

INERT_TAU = 1.15  # below it, a step commits hardly more tokens than plain decoding
SHOWN = 20  # differences in the short report


@dataclass(frozen=True, slots=True)
class Found:
    """One difference, and where it was found."""

    case: str
    prompt_id: str
    concurrency: int
    difference: Difference


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case at one concurrency.

    Fields:
        identical, ties, different: number of compared requests, by result.
        tokens: number of tokens that are equal.
        refused: server's message -> number of requests.
        unknown: number of requests that only the on arm answers.
        changed: number of off-arm answers that differ from the plain ones; with none, a case shows little.
        adapts: the steps had widths of their own, so tau does not show how good the drafts are.
    """

    case: str
    concurrency: int
    identical: int
    ties: int
    different: int
    tokens: int
    refused: dict[str, int]
    unknown: int
    changed: int
    adapts: bool
    acceptance: AcceptanceStats
    found: list[Found]

    @property
    def compared(self) -> int:
        return self.identical + self.ties + self.different


def judge_case(
    recording: Recording, case: str, concurrency: int, outcomes: Sequence[Completion], tie_policy: TiePolicy
) -> CaseResult:
    """Compares one case's outcomes with the off arm's.

    Args:
        outcomes: the on arm's outcomes for the case's requests, in the recording's order.
    """
    exchanges = recording.of_case(case)
    plain = {exchange.request.prompt_id: exchange.outcome.ids for exchange in recording.of_case(PLAIN)}
    identical = unknown = tokens = 0
    refused: Counter[str] = Counter()
    found = []
    for exchange, outcome in zip(exchanges, outcomes, strict=True):
        if outcome.refusal:
            refused[outcome.refusal] += 1
        elif not exchange.outcome.answered and not outcome.failure:
            unknown += 1
        else:
            difference = first_difference(exchange.request, exchange.outcome, outcome, tie_policy)
            tokens += len(outcome.ids) if difference is None else difference.index
            identical += difference is None
            if difference is not None:
                found.append(Found(case, exchange.request.prompt_id, concurrency, difference))
    ties = sum(one.difference.tie for one in found)
    return CaseResult(
        case=case,
        concurrency=concurrency,
        identical=identical,
        ties=ties,
        different=len(found) - ties,
        tokens=tokens,
        refused=dict(refused),
        unknown=unknown,
        changed=sum(e.outcome.answered and e.outcome.ids != plain.get(e.request.prompt_id) for e in exchanges),
        adapts=any(outcome.adapts for outcome in outcomes),
        acceptance=AcceptanceStats.of(outcomes),
        found=found,
    )


@dataclass(slots=True)
class Report:
    """Filled while a check runs.

    Fields:
        control: the off arm's own answers at the higher concurrency, compared with those it gave alone.
        slots_before: KV slots in use on the idle on arm before the first request; None if it was never idle.
        slots_after: the same later, read each time before the cache is emptied.
        rows: what the on arm's steps verified; None if all verify the same rows.
        broken: why the on arm stopped answering; empty if it did not.
        token_texts: texts of the token ids in the differences.
    """

    off: ServerInfo
    on: ServerInfo
    tie_policy: TiePolicy
    results: list[CaseResult] = field(default_factory=list)
    control: list[CaseResult] = field(default_factory=list)
    contamination: Contamination | None = None
    draft_kv: DraftKv | None = None
    reference: DraftKv | None = None
    rows: RowCounts | None = None
    slots_before: int | None = None
    slots_after: list[int] = field(default_factory=list)
    broken: str = ""
    warnings: list[str] = field(default_factory=list)
    token_texts: dict[int, str] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        return sum(result.compared for result in self.results)

    @property
    def tokens(self) -> int:
        return sum(result.tokens for result in self.results)

    @property
    def ties(self) -> int:
        return sum(result.ties for result in self.results)

    @property
    def leaked(self) -> int:
        return sum(max(0, slots - (self.slots_before or 0)) for slots in self.slots_after)

    @property
    def plain(self) -> CaseResult | None:
        """The plain requests, one at a time; of whole blocks, if they were asked."""
        by_case = {result.case: result for result in self.results if result.concurrency == 1}
        return by_case.get(WHOLE_BLOCKS_CASE) or by_case.get(PLAIN)

    @property
    def inert(self) -> bool:
        plain = self.plain
        if plain is None or plain.adapts:  # a narrow step accepts little of a good draft
            return False
        return plain.acceptance.steps > 0 and plain.acceptance.tau < INERT_TAU

    def found(self) -> Iterator[Found]:
        """Real differences first, then ties."""
        every = [one for result in self.results for one in result.found]
        yield from sorted(every, key=lambda one: one.difference.tie)

    def failures(self) -> list[str]:
        """One sentence per reason why this is not lossless."""
        reasons = []
        different = sum(result.different for result in self.results)
        if different:
            reasons.append(
                f"{different} of {self.compared} requests got another answer than alone with speculation off"
            )
        if self.tie_policy.too_many(self.ties, self.tokens):
            reasons.append(f"{self.ties} ties in {self.tokens} tokens are more than rounding explains in float32")
        if self.contamination is not None and self.contamination.foreign:
            reasons.append(f"{len(self.contamination.foreign)} answers hold another request's marker")
        if self.contamination is not None and self.contamination.failed:
            reasons.append(f"{len(self.contamination.failed)} requests with markers failed")
        if self.leaked:
            reasons.append(f"{self.leaked} KV slots stay in use although no request is left")
        if self.broken:
            reasons.append(f"the server with speculation stopped answering: {self.broken}")
        return reasons

    def notes(self) -> list[str]:
        """One sentence per finding that does not change the verdict."""
        notes = list(self.warnings)
        if self.inert:
            notes.append("the draft does not speed anything up: hardly any of its tokens are accepted")
        for probe in (self.draft_kv, self.reference):
            if probe is not None:
                notes += [f"acceptance lost: {sentence}" for sentence in probe.lost]
                notes += [f"acceptance probe skipped: {probe.skipped}"] if probe.skipped else []
        if self.ties and not self.control:
            notes.append("there are ties: --control also counts those of several requests at a time, speculation off")
        refused = {result.case for result in self.results if result.refused}
        if refused:
            notes.append(
                f"{len(refused)} of {len({r.case for r in self.results})} cases were refused, wholly or partly"
            )
        unchanged = (PLAIN, WHOLE_BLOCKS_CASE, LOGPROBS_CASE)
        idle = [r.case for r in self.results if not r.changed and r.compared and r.case not in unchanged]
        if idle:
            notes.append(f"these cases changed no answer, so they show little: {', '.join(dict.fromkeys(idle))}")
        if self.contamination is not None and not self.contamination.own:
            notes.append("no answer held its own marker, so the contamination probe shows little")
        if not self.slots_after and not self.broken:
            notes.append("KV slots were not counted: the server was never idle")
        return notes

    @property
    def lossless(self) -> bool:
        return not self.failures()

    def to_json(self, whole: bool) -> dict[str, Any]:
        """
        Args:
            whole: all differences; else only the first SHOWN of them.
        """
        found = list(self.found())
        return {
            "lossless": self.lossless,
            "failures": self.failures(),
            "notes": self.notes(),
            "requests": self.compared,
            "tokens": self.tokens,
            "tie_gap": self.tie_policy.tie_gap,
            "cases": [_case_json(result) for result in self.results],
            "control": [_case_json(result) for result in self.control],
            "differences": [self._found_json(one) for one in (found if whole else found[:SHOWN])],
            "contamination": asdict(self.contamination) if self.contamination else None,
            "draft_kv": asdict(self.draft_kv) if self.draft_kv else None,
            "reference": asdict(self.reference) if self.reference else None,
            "rows": asdict(self.rows) if self.rows else None,
            "kv_slots": {"before": self.slots_before, "after": self.slots_after},
            "servers": {"off": self.off.to_json(), "on": self.on.to_json()},
        }

    def _found_json(self, one: Found) -> dict[str, Any]:
        row = {"case": one.case, "prompt": one.prompt_id, "concurrency": one.concurrency, **asdict(one.difference)}
        for arm in ("off", "on"):
            row[f"{arm}_text"] = self.token_texts.get(row[f"{arm}_id"])
        return row


def _case_json(result: CaseResult) -> dict[str, Any]:
    row = asdict(result)
    del row["found"]
    stats = result.acceptance
    return {**row, "acceptance": {"steps": stats.steps, "by_position": stats.shares, "tau": stats.tau}}
