"""Serving installs nothing that only measuring and training need; a missing package ends in a sentence."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from sglang_dflash.serving.errors import EXTRAS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HIDE = """
import runpy, sys
for name in {hidden!r}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
sys.argv = {argv!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def run_without(hidden: list[str], script: str, *words: object) -> subprocess.CompletedProcess:
    argv = [script, *map(str, words)]
    code = HIDE.format(hidden=hidden, argv=argv, script=str(ROOT / script))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


CLI = "python/sglang_dflash/cli/__main__.py"


@pytest.mark.parametrize(
    ("missing", "script", "words", "code"),
    [
        ("pandas", "benchmark_sglang.py", ["--arms", "off"], 2),
        ("matplotlib", "benchmark_sglang.py", ["--arms", "off"], 2),
        ("datasets", CLI, ["train", "--target", "t", "--data", "DATA", "--output", "o"], 1),
        ("accelerate", CLI, ["train", "--target", "t", "--data", "DATA", "--output", "o"], 1),
    ],
)
def test_a_missing_extra_is_named(missing: str, script: str, words: list[str], code: int, tmp_path: Path) -> None:
    """Fails if a package that is not installed ends in a traceback, or without the command that installs it."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Hi", "response": "Ho"}) + "\n")
    done = run_without([missing], script, *(data if word == "DATA" else word for word in words))
    assert done.returncode == code and done.stdout == "", done.stderr
    needs = f"error: This command needs {missing}, which is not installed; run: pip install 'sglang-dflash["
    assert done.stderr.startswith(needs) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("script", ["benchmark_sglang.py", CLI])
def test_help_needs_no_extra(script: str) -> None:
    """Fails if a command cannot explain itself where serving alone is installed."""
    words = ["--help"] if script != CLI else ["check", "--help"]
    assert run_without(list(EXTRAS), script, *words).returncode == 0


def test_extras_are_those_of_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if serving pulls in a package of an extra, or a sentence names an extra without the package."""
    seen: dict[str, dict] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: seen.update(given))
    runpy.run_path(str(ROOT / "setup.py"))

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[<>=\[]", line)[0] for line in lines}

    assert not names(seen["install_requires"]) & {*EXTRAS, "openai"}
    for package, extras in EXTRAS.items():
        assert all(package in names(seen["extras_require"][extra]) for extra in [*extras.split(","), "dev"])
