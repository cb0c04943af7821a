"""`sglang-dflash generate`: the answer alone on standard output, its numbers beside it, and errors in one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.cli import generate as command
from sglang_dflash.cli.engines import ENGINES
from sglang_dflash.cli.main import run
from sglang_dflash.serving import PAIRS, TINY_DRAFT, TINY_TARGET

QUESTION = "Compute 9 * 7 + 12 * 7."
ANSWER = "First: 9 * 7 = 63.\nThen: 12 * 7 = 84.\nLast: 63 + 84 = 147.\nThe answer is 147.\n"
TINY = ["--model-path", TINY_TARGET, "--draft", TINY_DRAFT]
BOTH = [
    "transformers",
    pytest.param("mlx", marks=pytest.mark.skipif(not find_spec("mlx_lm"), reason="mlx-lm is not installed: [mlx].")),
]


@pytest.fixture
def call(monkeypatch, capsys) -> Any:
    """Runs the command in this process; returns exit code, standard output and standard error."""

    def call(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["sglang-dflash", "generate", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            run()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.slow
@pytest.mark.parametrize("engine", BOTH)
def test_an_answer(engine: str, call: Any, tmp_path: Path) -> None:
    """Fails where standard output has more or less than the answer, or a number is missing or wrong."""
    file = tmp_path / "made" / "answer.json"
    code, out, err = call(*TINY, "--engine", engine, "--compare", "--json", file, QUESTION)
    assert (code, out) == (0, ANSWER)
    assert re.search(r"^49 tokens, .* tokens/s, tau 5.44 over 9 steps; float32 on cpu$", err, re.M), err
    assert re.search(r"^without drafts: the same answer; .* times as fast$", err, re.M), err
    report = json.loads(file.read_text())
    assert report["text"] == ANSWER.removesuffix("\n") and report["engine"] == engine
    assert report["commit_lens"] == [8, 8, 6, 8, 6, 1, 1, 8, 3] and len(report["ids"]) == 49
    assert report["plain"]["ids"] == report["ids"] and not report["plain"]["commit_lens"]
    assert report["tok_s"] == pytest.approx(48 / report["decode_s"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", BOTH)
def test_limit_temperature_and_dtype(engine: str, call: Any) -> None:
    """Fails where one of these flags has no effect."""
    _, out, err = call(*TINY, "--engine", engine, "--max-new-tokens", 5, "--dtype", "bfloat16", QUESTION)
    assert ANSWER.startswith(out.strip()) and "5 tokens" in err and "bfloat16" in err
    hot = {call(*TINY, "--engine", engine, "--temperature", 3.0, "--max-new-tokens", 30, QUESTION)[1] for _ in range(2)}
    assert len(hot) == 2 and ANSWER not in hot


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "code", "said"), [(1e-6, 0, "tie ("), (1.0, 1, "do not tie (")])
def test_another_answer(gap: float, code: int, said: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where another answer counts as the same, or a tie as another answer."""

    class Wrong(ENGINES["transformers"]):
        def plain(self, prompt: list[int], limit: int, put: Any) -> None:
            super().plain(prompt, limit, lambda ids: put([ids[0] + 1]))

        def gap(self, ids: list[int]) -> float:
            return gap

    monkeypatch.setitem(command.ENGINES, "transformers", Wrong)
    ended, out, err = call(*TINY, "--compare", QUESTION)
    assert ended == code and out == ANSWER and "from token 0 on" in err and said in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*TINY, "--engine", "vllm"], "--engine is vllm; choose from transformers, mlx."),
        ([*TINY, "--dtype", "int4"], "--dtype is int4; choose from"),
        ([*TINY, "--max-new-tokens", 0], "--max-new-tokens is 0"),
        ([*TINY, "--temperature", -1], "--temperature is -1"),
        ([*TINY, "--compare", "--temperature", 1], "--compare"),
        ([*TINY, "--chat-template-kwargs", "no"], "--chat-template-kwargs"),
        (["--model-path", "/nowhere", "--draft", TINY_DRAFT], "--model-path /nowhere is not a folder."),
        (["--model-path", TINY_TARGET, "--draft", "/nowhere"], "--draft /nowhere is not a folder."),
        (["--model-path", TINY_TARGET, "--draft", TINY_TARGET], "architectures"),
        (["--model-path", TINY_TARGET, "--draft", PAIRS["hybrid"][1]], "draft"),
    ],
)
def test_one_sentence(words: list[Any], named: str, call: Any) -> None:
    """Fails where a wrong value, a missing model or a draft of another target ends in a traceback or an answer."""
    code, out, err = call(*words, QUESTION)
    assert (code, out) == (2, "") and named in err
    assert err.startswith("error: ") and err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["mlx", "mlx_lm"])
def test_a_missing_engine(missing: str) -> None:
    """Fails where MLX is needed without --engine mlx, or its absence ends in a traceback."""
    code = f"import sys\nsys.modules[{missing!r}] = None\nfrom sglang_dflash.cli.main import run\nrun()"
    for engine, returned in (("transformers", 0), ("mlx", 2)):
        words = ["generate", *map(str, TINY), "--engine", engine, "--max-new-tokens", "4", QUESTION]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.returncode == returned, done.stderr
    assert done.stderr.startswith("error: --engine mlx needs mlx") and done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'sglang-dflash[mlx]'" in done.stderr and missing in done.stderr
