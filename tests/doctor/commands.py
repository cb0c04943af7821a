"""Runs `sglang-dflash doctor` in this process."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest

from sglang_dflash.cli.main import run


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """`shown`: what people see; `report`: the JSON."""

    code: int
    report: dict[str, Any]
    shown: str

    def finding(self, about: str) -> dict[str, Any]:
        return next(one for one in self.report["findings"] if one["about"] == about)

    def levels(self) -> dict[str, str]:
        """The first finding of each name."""
        return {one["about"]: one["level"] for one in reversed(self.report["findings"])}

    def causes(self) -> list[str]:
        return [cause["name"] for cause in self.finding("acceptance")["causes"]]


def doctor(*words: object) -> Diagnosed:
    """The command, its JSON on standard output."""
    out, err = StringIO(), StringIO()
    given = [str(word) for word in words]
    end = given.index("--") if "--" in given else len(given)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["sglang-dflash", "doctor", *given[:end], "--json", "-", *given[end:]])
        with pytest.raises(SystemExit) as ended:
            run()
    report = json.loads(out.getvalue()) if out.getvalue() else {}
    return Diagnosed(ended.value.code or 0, report, err.getvalue())
