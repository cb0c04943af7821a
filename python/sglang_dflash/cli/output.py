"""Where a command's report goes: people's lines to a console, the JSON to a file or to standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

STDOUT = Path("-")
"""The value of --json that means standard output; the lines for people then go to standard error."""
WIDE = 160  # columns where nobody watches: wide lines are fine


def console_for(json_file: Path | None) -> Console:
    console = Console(stderr=json_file == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def put_json(json_file: Path | None, whole: dict[str, Any], short: dict[str, Any]) -> None:
    """Writes the whole report to the file, and the short one as the last line of standard output; with `-`, the whole
    report is all of standard output.

    Raises:
        OSError: the file cannot be written.
    """
    if json_file == STDOUT:
        print(json.dumps(whole, indent=1))
        return
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(short))
