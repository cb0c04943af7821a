"""Prints the rows of each stage as a table and keeps them in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dflash.bench.machine import commit


class Report:
    """Writes the JSON file after every stage, so that an aborted run keeps its results."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu_ops.json"
        self.content: dict[str, Any] = {"commit": commit(), "machine": facts, "stages": {}, "failures": {}}
        self._write()

    def add(self, stage: str, rows: list[dict[str, Any]]) -> None:
        self.content["stages"][stage] = rows
        self._write()
        print_table(rows)

    def fail(self, stage: str, reason: str) -> None:
        self.content["failures"][stage] = reason
        self._write()
        print(f"FAILED {stage}: {reason}", flush=True)

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")


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
