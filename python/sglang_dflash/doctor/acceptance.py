"""Judges a server's answers: tau by kind of text against the card, and whether some way of asking loses acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_dflash.doctor.causes import BEHIND_LONG, CAUSES, CRUSHED, REDUCED, rank
from sglang_dflash.doctor.expected import FAR, INERT, SOME, Expected, share
from sglang_dflash.doctor.findings import Cause, Finding, Level, fail, ok, skip, warn
from sglang_dflash.doctor.interview import (
    AGAIN,
    ALONE,
    LONG,
    LONG_AGAIN,
    OTHER_MODE,
    SAMPLED,
    SECOND_TURN,
    Asked,
)
from sglang_dflash.doctor.tau import Tau, ratio, surely_less

CRUSHED_BELOW = 0.2  # share of the expected accepted drafts
COLLAPSED, LESS = 0.6, 0.8
"""Share of the accepted drafts of the same questions alone, below which a way of asking fails, or is doubted: three
answers of a few dozen steps scatter by 15 %. Both also ask for standard errors."""
SOME_MORE, MANY_MORE = 0.1, 0.25
"""Share of more verify steps for equal answers from the cache: they should be equally many, but for rounding."""
DOUBTED_ERRORS = 2.5
"""Standard errors for a WARN: four ways are compared, and one of 40 sound servers should get one."""
FEW_STEPS = 20  # drafted steps, below which a tau says little
FLUSH = "--flush lets doctor empty the cache first"


@dataclass(frozen=True, slots=True)
class Answers:
    """
    Fields:
        chunk: tokens that a prefill takes at most; 0: all.
        thinks: whether the chat template thinks by default; None: it has no switch for it.
        drafts: of a whole block; 0: as many as some step verified.
    """

    asked: Sequence[Asked]
    chunk: int = 0
    thinks: bool | None = None
    drafts: int = 0

    def of(self, way: str) -> list[Asked]:
        return [one for one in self.asked if one.way == way and one.answer.answered]

    def tau(self, way: str) -> Tau:
        return self.tau_of(self.of(way))

    def tau_of(self, some: Iterable[Asked]) -> Tau:
        return Tau.of((one.answer for one in some), self.drafts)

    def beside(self, way: str) -> tuple[Tau, Tau]:
        """Tau of a way, and of the same questions alone."""
        own = self.of(way)
        places = {one.question for one in own}
        return (
            self.tau_of(own),
            self.tau_of(one for one in self.of(ALONE) if one.question in places),
        )

    def by_kind(self) -> dict[str, Tau]:
        kinds = dict.fromkeys(one.kind for one in self.of(ALONE))
        return {kind: self.tau_of(one for one in self.of(ALONE) if one.kind == kind) for kind in kinds}

    def mean_tau(self) -> float:
        """Over kinds, each as one."""
        taus = [one.tau for one in self.by_kind().values() if one.steps]
        return sum(taus) / len(taus) if taus else 0.0

    def mean_error(self) -> float:
        """The standard error of `mean_tau`."""
        errors = [one.error for one in self.by_kind().values() if one.steps]
        return sum(error**2 for error in errors) ** 0.5 / len(errors) if errors else 0.0


def judge(answers: Answers, expected: Expected | None, evidence: Sequence[Finding]) -> Iterator[Finding]:
    """
    Args:
        expected: None: nobody says what tau should be.
        evidence: findings of the files.
    """
    if not answers.tau(ALONE).steps:
        yield fail(
            "acceptance",
            "no answer has verify steps with drafts: speculation is off, or this server reports none.",
            "start the server with --speculative-algorithm DFLASH; where the worker decodes plainly because drafting "
            "does not pay, SGLANG_DFLASH_WIDTH=full shows what the draft can do",
        )
        return
    yield _overall(answers, expected, evidence)
    yield from _cached(answers)
    yield from _second_turn(answers)
    yield from _long(answers)
    yield from _thinking(answers)
    yield from _sampled(answers)
    yield from _retracted(answers)


def _overall(answers: Answers, expected: Expected | None, evidence: Sequence[Finding]) -> Finding:
    taus = answers.by_kind()
    tau, steps = answers.mean_tau(), sum(one.steps for one in taus.values())
    said = f"tau is {tau:.2f} (standard error {answers.mean_error():.2f}) over {steps} drafted steps"
    if any(one.estimated for one in taus.values()):
        said += ", estimated for whole blocks, as steps verified fewer rows"
    if steps < FEW_STEPS:
        return skip("acceptance", f"{said}, which are too few to judge.", "raise --max-new-tokens")
    if expected is None:
        if tau < INERT:
            return _low(
                Level.FAIL, f"{said}: hardly any draft is accepted.", rank(CRUSHED, evidence, _pointers(answers))
            )
        return ok("acceptance", f"{said}; nobody says what it should be (--expect-tau X).")
    low = share(tau, expected.least(taus))
    said += f", and {expected.said(taus)}"
    if tau >= INERT and low >= SOME:
        return ok("acceptance", f"{said}.")
    causes = rank(CRUSHED if low < CRUSHED_BELOW else REDUCED, evidence, _pointers(answers))
    if tau >= INERT and low < FAR and (well := _kinds_as_expected(taus, expected)):
        bad = sorted(set(taus) - set(well))
        return _low(Level.WARN, f"{said}; {', '.join(bad)} alone is low.", (CAUSES["text"], *causes))
    level = Level.FAIL if tau < INERT or low < FAR else Level.WARN
    said += f": {max(0.0, low):.0%} of the accepted drafts"
    return _low(level, f"{said}.", causes)


def _low(level: Level, said: str, causes: tuple[Cause, ...]) -> Finding:
    fix = f"look at the likely causes in this order, first {CAUSES[causes[0].name].said}"
    return Finding(level, "acceptance", said, fix, causes=causes)


def _kinds_as_expected(taus: Mapping[str, Tau], expected: Expected) -> list[str]:
    """Kinds of text that the card names and whose tau is as it says."""
    return [
        kind
        for kind, one in taus.items()
        if kind in expected.by_kind and share(one.tau, expected.by_kind[kind]) >= SOME
    ]


def _pointers(answers: Answers) -> list[str]:
    """Causes at which the other ways of asking point."""
    other, default = answers.beside(OTHER_MODE)
    compared = [(default, other, ("thinking",))]
    compared += [(*answers.beside(way), causes) for way, causes in ((LONG, BEHIND_LONG), (AGAIN, ("cache",)))]
    return [cause for one, base, causes in compared if one.steps and _lost(one, base) for cause in causes]


def _lost(one: Tau, other: Tau) -> bool:
    return ratio(one, other) < COLLAPSED and surely_less(one, other)


def _compared(about: str, named: str, one: Tau, other: Tau, fix: str) -> Finding:
    """A way against the same questions alone."""
    said = f"{named} tau is {one.tau:.2f}, and {other.tau:.2f} for the same questions alone"
    if _lost(one, other):
        return fail(about, f"{said}: acceptance collapses.", fix)
    if ratio(one, other) < LESS and surely_less(one, other, DOUBTED_ERRORS):
        return warn(about, f"{said}.", fix)
    return ok(about, f"{said}.")


def _cached(answers: Answers) -> Iterator[Finding]:
    """The same prompts, first computed, then from the cache: short ones and long ones."""
    about = "cached prefix"
    pairs = [*_pairs(answers, ALONE, AGAIN), *_pairs(answers, LONG, LONG_AGAIN)]
    cold = [pair for pair in pairs if not pair[0].cached]
    held = [pair for pair in cold if pair[1].cached]
    if not held and pairs:
        why = "the second answers did not come from the cache" if cold else "the first ones came from it already"
        yield skip(about, f"not measured: {why}.", "serve without --disable-radix-cache" if cold else FLUSH)
    if not held:
        return
    fresh, again = (answers.tau_of(some) for some in zip(*held, strict=True))
    fix = f"{CAUSES['cache'].fix}; `sglang-dflash check` with whole blocks tells which write is lost"
    more = _more_steps(held)
    said = f"from the prefix cache tau is {again.tau:.2f}, and {fresh.tau:.2f} for the same prompts at first"
    if _lost(again, fresh) or more >= MANY_MORE:
        yield fail(about, f"{said}: acceptance collapses.", fix)
    elif more >= SOME_MORE:
        yield warn(about, f"{said}, for the same answers.", fix)
    else:
        yield ok(about, f"{said}.")


def _pairs(answers: Answers, first: str, second: str) -> list[tuple[Asked, Asked]]:
    """The same questions in two ways."""
    before = {one.question: one for one in answers.of(first)}
    return [(before[one.question], one) for one in answers.of(second) if one.question in before]


def _more_steps(pairs: Sequence[tuple[Asked, Asked]]) -> float:
    """Share by which equal answers take more steps the second time; 0.0 where steps have widths of their own."""
    equal = [(one.answer, other.answer) for one, other in pairs if one.answer.ids == other.answer.ids]
    if not equal or any(answer.adapts for pair in equal for answer in pair):
        return 0.0
    before, after = (sum(answer.steps for answer in answers) for answers in zip(*equal, strict=True))
    return after / before - 1 if before else 0.0


def _second_turn(answers: Answers) -> Iterator[Finding]:
    one, other = answers.beside(SECOND_TURN)
    if one.steps and other.steps:
        fix = (
            "a draft that was trained on several turns; where the first turn was cached, look at the cached prefix, too"
        )
        yield _compared("second turn", "in a second turn", one, other, fix)


def _long(answers: Answers) -> Iterator[Finding]:
    one, other = answers.beside(LONG)
    longest = max((a.answer.prompt_tokens for a in answers.of(LONG)), default=0)
    if not (one.steps and other.steps):
        yield skip("long context", "not measured: no long chat was answered.")
        return
    chunks = -(-longest // answers.chunk) if answers.chunk else 1
    causes = [CAUSES[name].said for name in BEHIND_LONG]
    if chunks > 1:
        causes.insert(0, "the draft's KV behind a chunk is not whole")
    fix = f"look at: {'; '.join(causes)}; or the draft was trained on short texts alone"
    pieces = f" in {chunks} chunks" if chunks > 1 else ""
    yield _compared("long context", f"behind chats of up to {longest:,} tokens{pieces}", one, other, fix)
    if chunks == 1:
        said, fix = "there are no chunks at all", ""
        if answers.chunk:
            said = f"no prompt was longer than a chunk ({answers.chunk:,} tokens)"
            fix = f"--long-tokens {2 * answers.chunk}, if the context allows it"
        yield skip("chunk", f"not measured: {said}.", fix)


def _thinking(answers: Answers) -> Iterator[Finding]:
    about = "thinking mode"
    if answers.thinks is None:
        yield ok(about, "the chat template has no switch for it.")
        return
    other, default = answers.beside(OTHER_MODE)
    now, then = ("on", "off") if answers.thinks else ("off", "on")
    said = f"with thinking {now}, the default, tau is {default.tau:.2f}, and {other.tau:.2f} with thinking {then}"
    if ratio(default, other) < LESS and surely_less(default, other, DOUBTED_ERRORS):
        value = str(not answers.thinks).lower()
        fix = f'if your application allows it, send "chat_template_kwargs": {{"enable_thinking": {value}}}'
        yield warn(about, f"{said}: the draft was trained with thinking {then}.", fix)
    else:
        yield ok(about, f"{said}.")


def _sampled(answers: Answers) -> Iterator[Finding]:
    one, other = answers.beside(SAMPLED)
    if one.steps and other.steps:
        yield ok("temperature 1", f"tau is {one.tau:.2f}, and {other.tau:.2f} greedy for the same questions.")


def _retracted(answers: Answers) -> Iterator[Finding]:
    retracted = [one for one in answers.asked if one.answer.meta.get("num_retractions")]
    if not retracted:
        return
    places = {one.question for one in retracted}
    one = answers.tau_of(retracted)
    other = answers.tau_of(a for a in answers.asked if a.question in places and a not in retracted)
    fix = "a larger --max-total-tokens, so that nothing is retracted; then report it"
    named = f"{len(retracted)} answers were retracted and taken up again; in them"
    yield _compared("retraction", named, one, other, fix)
