"""The command line of `sglang-dflash doctor`, what SGLang says of the flags, and where the JSON goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import doctor

from sglang_dflash.checking.cases import PLAIN
from sglang_dflash.checking.report import CaseResult, Report
from sglang_dflash.cli import main
from sglang_dflash.cli.check import ask_the_card
from sglang_dflash.doctor import flags
from sglang_dflash.doctor.flags import MARK, Start, ask_sglang, judge, server_flags
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, AcceptanceStats, ServerInfo, TiePolicy
from sglang_dflash.training.smollm2 import DRAFT as SMOLLM2_DRAFT

PAIR = ["--model-path", TINY_TARGET, "--draft", TINY_DRAFT]
SETTINGS: dict[str, Any] = {
    "algorithm": "DFLASH",
    "worker": "sglang-dflash",
    "device": "cuda",
    "dtype": "bfloat16",
    "attention": "fa3",
    "draft_attention": "fa3",
    "block_size": 8,
    "window": None,
    "overlap": True,
    "radix_cache": True,
    "chunk": 8192,
    "max_running_requests": 48,
    "context": 4096,
    "tp_size": 1,
    "token_bytes": 8000,
    "draft_token_bytes": 2000,
    "free_bytes": 100_000_000,
    "static_share": 0.8,
    "max_total_tokens": None,
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Give the URL of a running server, or --model-path and --draft."),
        (["--model-path", "t"], "--model-path and --draft belong together"),
        (["http://a", "--page-size"], "No such option"),
        (["http://a", "--", "--page-size", "16"], "--page-size follows the URL"),
        (["http://a", "--expect-tau", 1], "--expect-tau is 1; it must be above 1"),
        (["http://a", "--max-new-tokens", 1], "--max-new-tokens is 1; it must be at least 16"),
        (["http://a", "--long-tokens", 1], "--long-tokens is 1; it must be at least 64"),
        (["--model-path", "/nowhere/t", "--draft", TINY_DRAFT], "--model-path /nowhere/t is not a folder"),
        (["--model-path", TINY_TARGET, "--draft", "EMPTY"], "--draft EMPTY has no config.json"),
        (["--model-path", TINY_TARGET, "--draft", "WRONG"], "its config.json is not valid JSON"),
        (["--model-path", TINY_TARGET, "--draft", "LIST"], "its config.json must be a JSON object"),
    ],
)
def test_refuses_in_a_sentence(words: list[object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a user error gives a traceback, several lines, or the exit code of a verdict."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("EMPTY", None), ("WRONG", "{"), ("LIST", "[]")):
        Path(name).mkdir()
        if text is not None:
            (Path(name) / "config.json").write_text(text)
    found = doctor(*words)
    assert found.code == 2 and found.report == {} and said in found.shown and "Traceback" not in found.shown


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a script in the place of the module that asks SGLang; it gets the lines that it prints, and its last act."""

    def put(*reports: dict[str, Any], then: str = "") -> None:
        script = tmp_path / "stand_in_report.py"
        lines = "\n".join(json.dumps(one) for one in reports)
        script.write_text(f"print('noise')\nprint({lines!r}, flush=True)\n{then}\n")
        monkeypatch.setattr(flags, "REPORTER", "stand_in_report")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return put


IMPORTED = {"start": "imported", "said": "SGLang is imported"}


def test_what_sglang_says_of_the_flags(sglang: Any) -> None:
    """Fails where settings, a refusal or an error of the child do not become findings, or exit code 1."""
    sglang(IMPORTED, {"start": "settings", **SETTINGS})
    fine = doctor(*PAIR, "--", "--page-size", "16")
    assert fine.code == 0 and fine.levels()["attention backend"] == "PASS", fine.shown
    assert fine.report["measured"]["start"]["block_size"] == 8
    sglang(IMPORTED, {"start": "refused", "said": "DFLASH cannot start: --x is 1; allowed: 2."})
    refused = doctor(*PAIR)
    assert refused.code == 1 and "FAIL  start: DFLASH cannot start: --x is 1; allowed: 2." in refused.shown
    sglang(then="import sys; sys.exit('usage\\nerror: unrecognized arguments: --x')")
    assert "error: unrecognized arguments: --x" in doctor(*PAIR).finding("start")["said"]
    sglang(IMPORTED, then="raise ValueError('no such model')")
    assert "ValueError: no such model" in doctor(*PAIR).finding("start")["said"]


def test_no_flags_asks_nobody(sglang: Any) -> None:
    """Fails where `--no-flags` starts the child."""
    sglang(IMPORTED, {"start": "refused", "said": "it ran"})
    found = doctor(*PAIR, "--no-flags")
    assert found.code == 0 and "start" not in found.levels()


def test_the_flags_of_the_pair() -> None:
    """Fails where the child is asked about another server than the user would start."""
    given = server_flags("t", "d", ["--device", "cuda", "--page-size", "16"])
    assert given == [
        *("--model-path", "t", "--device", "cuda", "--page-size", "16", "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", "d"),
    ]
    own = server_flags("t", "d", ["--device", "cpu", "--speculative-algorithm", "EAGLE"])
    assert own.count("--speculative-algorithm") == 1 and "d" not in own


def levels(weights: int | None = 1_000_000, **values: Any) -> dict[str, str]:
    found = judge(Start("settings", values={**SETTINGS, **values}), weights)
    return {one.about: str(one.level) for one in found if one.level != "PASS"}


def test_settings_that_cost_speed() -> None:
    """Fails where a setting that makes every step wait, or another worker, passes."""
    assert levels() == {}
    assert levels(attention="flashinfer") == levels(draft_attention="flashinfer") == {"attention backend": "WARN"}
    assert levels(overlap=False) == {"attention backend": "WARN"}
    assert levels(device="cpu", attention="dflash_cpu", draft_attention="dflash_cpu", overlap=False) == {}
    assert levels(device="cpu", dtype="float16") == {"dtype": "WARN"}
    assert levels(worker="builtin") == levels(algorithm="EAGLE") == {"start": "WARN"}


def test_memory_of_the_pools() -> None:
    """Fails where weights that leave nothing, a pool that does not fit, or one below a context pass."""
    assert levels(weights=80_000_000) == {"KV pools": "FAIL"}
    assert levels(weights=60_000_000) == {"KV pools": "WARN"}  # 2,000 tokens
    assert levels(max_total_tokens=20_000) == {"KV pools": "WARN"}  # 7,900 fit
    assert levels(max_total_tokens=5_000) == {}
    assert levels(weights=None) == levels(static_share=None) == {"KV pools": "SKIP"}


def test_a_child_that_hangs_is_ended(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where doctor waits for ever, or leaves the child behind."""
    monkeypatch.setattr(flags, "LONGEST_S", 1.0)
    sglang(IMPORTED, then="import time; time.sleep(600)")
    waited: list[float] = []
    assert ask_sglang([], waited.append).kind == "failed" and waited


def test_json_to_a_file_and_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Fails where `-` makes a file of that name, people's lines come between the JSON, or a folder is not made."""
    monkeypatch.chdir(tmp_path)

    def shown(*words: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["sglang-dflash", "doctor", *map(str, PAIR), "--no-flags", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert not ended.value.code
        return capsys.readouterr()

    out, err = shown("--json", "-")
    assert json.loads(out)["verdict"] == "PASS" and "PASS  draft weights" in err and not Path("-").exists()
    out, err = shown("--json", "new/report.json")
    assert json.loads(Path("new/report.json").read_text())["findings"]
    assert "PASS  draft weights" in out and json.loads(out.splitlines()[-1])["verdict"] == "PASS" and not err


def test_the_mark_is_the_reporter_s() -> None:
    """Fails where the child's lines are not recognised any more."""
    source = (Path(flags.__file__).parents[1] / "host/start/start_report.py").read_text()
    assert f"MARK = {MARK!r}" in source and flags.REPORTER == "sglang_dflash.host.start.start_report"


def _checked(draft: Path, tau: float, adapts: bool = False) -> Report:
    """A check whose plain requests had this tau, of 100 steps."""
    info = ServerInfo("/t", "1", "float32", "DFLASH", str(draft), 8, False, False, 4096)
    report = Report(info, info, TiePolicy.of("float32", None))
    stats = AcceptanceStats(steps=100, drafted=700, accepted=round(100 * (tau - 1)))
    report.results.append(CaseResult(PLAIN, 1, 3, 0, 0, 10, {}, 0, 0, adapts, stats, []))
    return report


def test_check_says_where_tau_is_far_below_the_card(tmp_path: Path) -> None:
    """Fails where `check` is silent then, or doubts a tau near the card's least kind, one of narrow steps, or a draft
    without a card."""

    def said(draft: Path, tau: float, adapts: bool = False) -> list[str]:
        report = _checked(draft, tau, adapts)
        ask_the_card(report)
        return [note for note in report.notes() if "doctor" in note]

    (sentence,) = said(SMOLLM2_DRAFT, 1.2)
    assert "tau is 1.20, far below the draft's card (own 1.52, code 1.67" in sentence and "\n" not in sentence
    assert said(SMOLLM2_DRAFT, 1.5) == said(SMOLLM2_DRAFT, 1.2, adapts=True) == said(tmp_path, 1.2) == []
