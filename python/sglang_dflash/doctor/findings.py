"""What an examination found: PASS, WARN, FAIL and SKIP lines, each with a `Fix:`, on a console and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.markup import escape


class Level(StrEnum):
    """How bad a finding is. SKIP: it was not measured, and the finding says why."""

    PASS = "PASS"
    SKIP = "SKIP"
    WARN = "WARN"
    FAIL = "FAIL"


COLORS = {Level.PASS: "green", Level.SKIP: "dim", Level.WARN: "yellow", Level.FAIL: "red"}


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that may explain low acceptance. `said`, `fix`: a sentence each, without a full stop."""

    name: str
    said: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Fields:
        about: what was looked at, in a word or two.
        said: one sentence with the values that were found.
        fix: what to do, one sentence; "" where nothing needs doing.
        cause: what this could explain if acceptance is low: a name of `causes.CAUSES`, "" for nothing.
        causes: what may explain it, likeliest first.
    """

    level: Level
    about: str
    said: str
    fix: str = ""
    cause: str = ""
    causes: tuple[Cause, ...] = ()

    @property
    def strong(self) -> bool:
        """Whether `cause` is likely to be the explanation, not only possible."""
        return self.level != Level.PASS


def ok(about: str, said: str, cause: str = "") -> Finding:
    return Finding(Level.PASS, about, said, cause=cause)


def skip(about: str, said: str, fix: str = "") -> Finding:
    return Finding(Level.SKIP, about, said, fix)


def warn(about: str, said: str, fix: str, cause: str = "") -> Finding:
    """What may cost acceptance or speed; `cause`: then it is likely to."""
    return Finding(Level.WARN, about, said, fix, cause)


def fail(about: str, said: str, fix: str) -> Finding:
    """What keeps the server from starting, or nearly all drafts from being accepted."""
    return Finding(Level.FAIL, about, said, fix)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    Fields:
        about: what was examined: a target and its draft, or the URL of a server.
        findings: in the order in which they were made.
        measured: numbers behind the findings, for the JSON.
    """

    about: str
    findings: Sequence[Finding]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Level:
        """The worst level; PASS where nothing was found."""
        order = list(Level)
        return max((one.level for one in self.findings if one.level != Level.SKIP), key=order.index, default=Level.PASS)

    @property
    def exit_code(self) -> int:
        return int(self.verdict == Level.FAIL)

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "verdict": self.verdict,
            "findings": [asdict(one) for one in self.findings],
            "measured": self.measured,
        }


def show(findings: Iterable[Finding], console: Console) -> None:
    """One line per finding, its `Fix:` below it."""
    for one in findings:
        color = COLORS[one.level]
        line = f"[{color}]{one.level}[/{color}]  [bold]{escape(one.about)}[/bold]: {escape(one.said)}"
        console.print(line, soft_wrap=True)
        if one.fix:
            console.print(f"      Fix: {escape(one.fix)}", soft_wrap=True)
        for number, cause in enumerate(one.causes, start=1):
            console.print(f"      {number}. {escape(cause.said)}\n         Fix: {escape(cause.fix)}", soft_wrap=True)


def show_verdict(diagnosis: Diagnosis, console: Console) -> None:
    counts = {level: sum(one.level == level for one in diagnosis.findings) for level in Level}
    said = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    color = COLORS[diagnosis.verdict]
    console.print(
        f"[{color}]{diagnosis.verdict}[/{color}]  {escape(diagnosis.about)}: {said or 'nothing was examined'}"
    )
