"""Prints the rows of each stage as a table and keeps them in a JSON file, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_dflash.bench.machine import commit
from sglang_dflash.gpu.archive import write_whole


class Report:
    """The JSON file of all stages. It is written after every row, so that an aborted run keeps what it measured."""

    def __init__(self, folder: Path, facts: dict[str, Any], name: str) -> None:
        """
        Args:
            facts: the machine.
            name: the commit of this folder, "" to ask git.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu_ops.json"
        self.content: dict[str, Any] = {"commit": name or commit(), "machine": facts, "running": ""}
        self.content |= {"stages": {}, "failures": {}}
        if self._path.exists():
            held = json.loads(self._path.read_text())
            if held["commit"] == self.content["commit"] and _same_machine(held["machine"], facts):
                self.content |= {"stages": held["stages"], "failures": held["failures"]}
                if held["running"]:
                    self.content["failures"][held["running"]] = "its run was cut; the rows before are kept"
        self._write()

    def run(self, stage: str, rows: Iterable[dict[str, Any]]) -> None:
        """Keeps the rows as they come. `running` names the stage until its last row, also in an aborted run's file."""
        kept: list[dict[str, Any]] = []
        self.content["running"] = stage
        self.content["stages"][stage] = kept
        self.content["failures"].pop(stage, None)
        try:
            for row in rows:
                kept.append(row)
                self._write()
        except KeyboardInterrupt:
            self.fail(stage, "interrupted; the rows before are kept")
            raise
        finally:
            print_table(kept)
        self.content["running"] = ""
        self._write()

    def fail(self, stage: str, reason: str) -> None:
        self.content["failures"][stage] = reason
        self.content["running"] = ""
        if not self.content["stages"].get(stage):
            self.content["stages"].pop(stage, None)
        self._write()
        print(f"FAILED {stage}: {reason}", flush=True)

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self.content, indent=1) + "\n")


def _same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    measured = {"copy_gb_s": 0.0}
    return one | measured == other | measured


def print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
