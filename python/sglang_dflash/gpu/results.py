"""The results of a check: a JSON file per stage with machine and versions, and a README generated from all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.bench.layout import escaped, grid, number
from sglang_dflash.gpu.archive import write_whole

Row = dict[str, Any]
HIDDEN = ("launched", "differences")  # columns that only the JSON has


class OtherRunError(ValueError):
    """The folder holds results that this call must not extend: another commit or other options."""


@dataclass(slots=True)
class Stage:
    """The results of one stage so far.

    Fields:
        rows: one per cell.
        failures: sentences on what was wrong or did not run.
        notes: sentences that a reader of the numbers must know.
        left: why another call is needed; "" if all cells ran.
        absent: arms that could not be served where it ran; a note says why.
        commit, versions, machine: what was measured, and where.
        commands: the command of every call.
        seconds: total of all calls.
    """

    stage: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: str = "not begun"
    absent: list[str] = field(default_factory=list)
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def state(self) -> str:
        return "partial" if self.left else "failed" if self.failures else "done"


class Results:
    """The folder of a check."""

    def __init__(self, folder: Path, order: Sequence[str]) -> None:
        """order: stage names in the order of the README."""
        self.folder = folder
        self._order = list(order)

    def load(self, stage: str) -> Stage:
        """The stage's results; an empty Stage if it has not begun.

        Raises:
            ValueError: the file was not written by gpu-check.
        """
        path = self.folder / f"{stage}.json"
        if not path.exists():
            return Stage(stage)
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            held.pop("state")
            return Stage(**held)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold results of gpu-check: {error}.") from None

    def save(self, stage: Stage) -> None:
        """Writes the stage's JSON atomically, then the README."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"state": stage.state, **_without_nan(asdict(stage))}
        write_whole(self.folder / f"{stage.stage}.json", json.dumps(content, indent=1) + "\n")
        write_whole(self.folder / "README.md", self.readme())

    def readme(self) -> str:
        held = [self.load(name) for name in self._order]
        begun = [stage for stage in held if stage.commands]
        blocks = ["# GPU check", _overview(held)]
        if begun:
            blocks.append(_setting(begun))
        for stage in begun:
            blocks += [f"## {stage.stage}", *_stage(stage)]
        return "\n\n".join(block for block in blocks if block) + "\n"


def _overview(held: Sequence[Stage]) -> str:
    rows = [
        [stage.stage, stage.state if stage.commands else "-", str(len(stage.rows)), f"{stage.seconds:.0f}"]
        for stage in held
    ]
    return grid(["stage", "state", "cells", "seconds"], rows)


def _setting(begun: Sequence[Stage]) -> str:
    commits = ", ".join(dict.fromkeys(stage.commit for stage in begun))
    last = begun[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items() if name != "commit")
    gpus = "; ".join(last.machine.get("gpus") or ["no GPU"])
    return f"Commit {commits}; {escaped(gpus)}; {escaped(last.machine.get('cpu', ''))}; {escaped(versions)}."


def _stage(stage: Stage) -> list[str]:
    columns = [name for name in dict.fromkeys(key for row in stage.rows for key in row) if name not in HIDDEN]
    table = grid(columns, [[_cell(row.get(column)) for column in columns] for row in stage.rows]) if stage.rows else ""
    lines = [f"* failed: {escaped(sentence)}" for sentence in stage.failures]
    lines += [f"* {escaped(sentence)}" for sentence in stage.notes]
    lines += [f"* unfinished: {escaped(stage.left)}"] if stage.left else []
    command = f"`{stage.commands[-1]}`" if stage.commands else ""
    return [table, _launched(stage.rows), "\n".join(lines), command]


def _launched(rows: Sequence[Row]) -> str:
    """The kernels that a step launches outside of graphs, if the stage counted them."""
    lines = []
    for row in rows:
        if row.get("launched"):
            names = ", ".join(f"{escaped(name)} x {_cell(count)}" for name, count in row["launched"].items())
            lines.append(f"* {row['arm']} at {_cell(row['load'])}: {names}")
    return "Kernels launched outside of graphs, per step:\n\n" + "\n".join(lines) if lines else ""


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int | float) and math.isfinite(value):
        return str(int(value)) if value == int(value) else number(value)
    return "-" if value in (None, "") or isinstance(value, float) else escaped(value)


def _without_nan(content: Any) -> Any:
    """Replaces NaN and infinities with None, because JSON has neither."""
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
