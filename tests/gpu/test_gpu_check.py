"""Tests gpu-check's logic without a GPU: `stand_in.py` replaces the servers and the checker; SGLang never runs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from stand_in import TAU

from sglang_dflash.bench.records import Cell, CellKey, Run
from sglang_dflash.gpu import order, profile_stage, sweep_stages
from sglang_dflash.gpu.budget import MARGIN, Budget, BudgetBoard, OutOfTimeError
from sglang_dflash.gpu.check import (
    BACKENDS,
    CUT,
    REHEARSAL,
    REHEARSED_BACKENDS,
    REHEARSED_MODELS,
    Check,
    checks,
    run_check,
)
from sglang_dflash.gpu.equality_stage import equality
from sglang_dflash.gpu.profile_stage import profile
from sglang_dflash.gpu.results import Results, Stage
from sglang_dflash.gpu.setting import Setting
from sglang_dflash.gpu.sweep_stages import smoke, step_times
from sglang_dflash.serving import Client, Server, ServerError

STAND_IN = Path(__file__).with_name("stand_in.py")
COMMAND = [sys.executable, "-m", "sglang_dflash.cli", "gpu-check"]
pytestmark = pytest.mark.slow
FACTS = {"commit": "abc", "versions": {"torch": "0"}, "machine": {"gpus": ["none"], "cpu": "some"}}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sweep_stages, "STEP_LOADS", (1, 4))
    monkeypatch.setattr(sweep_stages, "STEP_REPEATS", 1)
    monkeypatch.setattr(profile_stage, "PROFILE_LOADS", (1, 4))
    monkeypatch.setattr(profile_stage, "PREFILLED_S", 0.1)


class Clock:
    """A clock that advances by `per_look` seconds at every reading."""

    def __init__(self, per_look: float = 0.0) -> None:
        self.now, self.per_look = 0.0, per_look

    def __call__(self) -> float:
        self.now += self.per_look
        return self.now


def make_setting(folder: Path, budget: Budget | None = None, backends: tuple[str, ...] = ("triton",)) -> Setting:
    screen = Console(file=(folder / "screen.txt").open("a"), width=200)
    budget = budget or Budget(1000.0)
    raw, models = folder / "raw", folder / "models"
    return Setting(raw, models, budget, screen, backends, "", STAND_IN, "a dry run", keep=lambda stage: None)


# Time.


def test_nothing_is_begun_that_does_not_fit():
    """Fails where a cell that is too long starts, or a call ends before it has finished any cell."""
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.begin("long", 500.0)
    budget.finished()
    budget.begin("short", 50.0)
    with pytest.raises(OutOfTimeError, match="long needs about 500 s, 100 s are left"):
        budget.begin("long", 500.0)
    clock.now = 100.0
    with pytest.raises(OutOfTimeError):
        Budget(0.0, clock).begin("anything", 0.0)
    with pytest.raises(OutOfTimeError):
        budget.check("a start")
    budget.check("a cell", grace_s=1.0)


def test_a_cell_is_estimated_from_its_own_arm(tmp_path):
    """Fails where a fast arm's cell is left because a slow arm takes long."""
    played = {"off": {1.0: 20.0, 8.0: 6.0}, "dflash": {1.0: 5.0}}
    run = Run("test", "closed", {})
    for arm, cells in played.items():
        run.cells += [Cell(CellKey(arm, "fa3", True, "tiny", load, 0), wall_s=wall_s) for load, wall_s in cells.items()]
    board = BudgetBoard(Console(file=io.StringIO()), 9, 3, Budget(100.0), run, lambda: None)
    seconds = [board.cell_s("dflash", 1.0), board.cell_s("dflash", 8.0), board.cell_s("builtin", 1.0)]
    assert seconds == pytest.approx([MARGIN * 5.0, MARGIN * 6.0, MARGIN * 20.0])
    assert board.cell_s("dflash", 32.0) == board.cell_s("", None) == pytest.approx(MARGIN * 20.0)


def test_a_cell_that_never_ends_is_left(tmp_path, monkeypatch):
    """Fails where a cell far above its estimate keeps the call from ending, or counts as finished."""
    clock = Clock()
    stage = Stage("steps")
    budget = Budget(100.0, clock)
    begin = budget.begin

    def begun(what: str, needed_s: float) -> None:
        begin(what, needed_s)
        clock.now += 131.0 if what == "off at 1" else 0.0

    monkeypatch.setattr(budget, "begin", begun)
    left = step_times(make_setting(tmp_path, budget), stage, "qwen3-8b", "triton")
    assert left == "off at 1 used all the time that was left" and not stage.rows


# Stages.


def test_step_times_go_on_where_they_stopped(tmp_path, monkeypatch):
    """Fails where a second call repeats or loses a cell, or a step's time is not requests x tau / tok_s."""
    clock = Clock()
    budget = Budget(100.0, clock)
    setting, stage = make_setting(tmp_path, budget), Stage("steps")
    finish = budget.finished

    def finished() -> None:  # three cells, then the time is up
        finish()
        clock.now += 40.0

    monkeypatch.setattr(budget, "finished", finished)
    left = step_times(setting, stage, "qwen3-8b", "triton")
    assert [(row["arm"], row["load"]) for row in stage.rows] == [(arm, 1.0) for arm in ("off", "dflash", "builtin")]
    assert "off at 4" in left and not stage.failures
    before = json.loads((tmp_path / "raw" / "steps.run.json").read_text())["cells"]
    left = step_times(make_setting(tmp_path), stage, "qwen3-8b", "triton")
    assert [(row["arm"], row["load"]) for row in stage.rows] == [
        (arm, load) for arm in ("off", "dflash", "builtin") for load in (1.0, 4.0)
    ]
    assert not left and not stage.failures
    after = json.loads((tmp_path / "raw" / "steps.run.json").read_text())["cells"]
    assert [cell["wall_s"] for cell in after[:3]] == [cell["wall_s"] for cell in before]
    assert not any(record["ids"] for cell in after for record in cell["records"])
    for row in stage.rows:
        tau = 1 if row["arm"] == "off" else TAU
        assert row["step_ms"] == pytest.approx(1e3 * row["load"] * tau / row["tok_s"])
        assert row["speedup_off"] > 0 and row["speedup_builtin"] > 0


def test_servers_of_a_sweep_are_asked_for_the_shape(tmp_path):
    """Fails where an arm serves other weights, backends or block sizes, or acceptance is simulated in the off arm."""
    stage = Stage("steps")
    step_times(make_setting(tmp_path), stage, "llama-3.1-8b", "fa3")
    servers = {
        s["arm"].split(",")[0]: s for s in json.loads((tmp_path / "raw" / "steps.run.json").read_text())["servers"]
    }
    for name, server in servers.items():
        words = " ".join(server["command"])
        assert "llama-3.1-8b/target" in words and "--attention-backend fa3" in words
        assert "--load-format dummy --max-running-requests 32 --cuda-graph-max-bs-decode 32" in words
        assert "--cuda-graph-backend-prefill disabled --mem-fraction-static 0.97 --max-total-tokens" in words
        assert server["environment"].get("SGLANG_SIMULATE_ACC_LEN") == (None if name == "off" else "6.0")
        assert server["environment"]["SGLANG_DFLASH_WORKER"] == ("builtin" if name == "builtin" else "plugin")


def test_smoke_fails_where_tokens_differ(tmp_path, monkeypatch):
    """Fails where an arm passes with tokens other than those of speculation off, or fails with the same tokens."""
    stage = Stage("smoke")
    assert not smoke(make_setting(tmp_path), stage) and not stage.failures
    assert {(row["arm"], row["load"]) for row in stage.rows} == {
        (a, b) for a in ("off", "dflash", "builtin") for b in (1, 8)
    }
    monkeypatch.setenv("STAND_IN_WRONG", "dflash")
    wrong = Stage("wrong")
    smoke(make_setting(tmp_path), wrong)
    assert "token 3" in wrong.failures[0]


def test_smoke_fails_where_another_worker_serves(tmp_path, monkeypatch):
    """Fails where SGLang's own worker could pass for ours, or ours for SGLang's."""
    monkeypatch.setenv("STAND_IN_OURS", "builtin")
    stage = Stage("smoke")
    smoke(make_setting(tmp_path), stage)
    assert [sentence.split(" (")[0] for sentence in stage.failures] == [
        "dflash was served by another worker",
        "builtin was served by our worker",
    ]


def test_tokens_come_first_and_every_backend_once():
    """Fails where times are taken before tokens are compared, the hour on a machine begins in another order, or the
    tokens of a backend are not compared."""
    names = [check.name for check in checks(BACKENDS)]
    assert names[:4] == [stage for step in order.STEPS[1:5] for stage in step.stages]
    assert names[:2] == ["smoke", "equality-triton-bfloat16"]
    cells = {*(f"equality-{backend}-bfloat16" for backend in BACKENDS), "equality-triton-float16"}
    assert {name for name in names if name.startswith("equality")} == cells and len(set(names)) == len(names)


def test_equality_is_asked_for_a_small_pool_without_prefill_graphs(tmp_path):
    """Fails where the embedded pair gets a pool of 30 million slots, a start captures prefills, or sampling needs
    headers that only the flashinfer group brings."""
    for backend, dtype in (("triton", "float16"), ("triton", "bfloat16"), ("flashinfer", "bfloat16")):
        stage = Stage(f"equality-{backend}-{dtype}")
        assert not equality(make_setting(tmp_path), stage, backend, dtype) and not stage.failures
        asked = json.loads((tmp_path / "raw" / stage.stage / "asked.json").read_text())
        words = " ".join(asked)
        assert f"--dtype {dtype} --attention-backend {backend} --max-total-tokens 65536" in words
        assert "--cuda-graph-backend-prefill disabled" in words
        assert ("--sampling-backend pytorch" in words) == (backend != "flashinfer")


def test_servers_inherit_variables(tmp_path, monkeypatch):
    """Fails where a variable of the check does not reach the servers that it starts."""
    monkeypatch.setenv("OF_THE_CHECK", "seen")
    show = (sys.executable, "-c", "import os; print(os.environ['OF_THE_CHECK'])")
    with pytest.raises(ServerError, match="before it answered: seen"):
        Server([], tmp_path / "log", {"OTHER": "1"}, show).start()


def test_a_difference_fails_equality(tmp_path, monkeypatch):
    """Fails where a difference is ignored, or a second call keeps the first one's row."""
    stage = Stage("equality")
    monkeypatch.setenv("STAND_IN_LOSSY", "flashinfer")
    assert not equality(make_setting(tmp_path), stage, "flashinfer", "bfloat16")
    assert stage.failures == ["1 of 12 requests"] and not stage.rows[0]["lossless"]
    monkeypatch.delenv("STAND_IN_LOSSY")
    assert not equality(make_setting(tmp_path), stage, "flashinfer", "bfloat16")
    assert not stage.failures and [row["lossless"] for row in stage.rows] == [True]


def test_a_check_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """Fails where a check runs beyond the budget, then counts as done or failed, or what it has found is lost."""
    monkeypatch.setenv("STAND_IN_SLOW", "60")
    stage = Stage("equality")
    left = equality(make_setting(tmp_path, Budget(3.0)), stage, "triton", "bfloat16")
    assert "used all the time" in left and not stage.rows and not stage.failures
    assert stage.notes == ["Speculation on, one at a time: 6 identical, 0 ties, 0 different, 0 refused"]


def test_the_builtin_worker_is_left_out_before_a_server_is_started(tmp_path):
    """Fails where a stage starts a server that cannot start, does not say which arm it lacks and why, or does not make
    up for it where that arm can start."""
    setting, stage = replace(make_setting(tmp_path), no_builtin="no headers"), Stage("steps")
    assert not step_times(setting, stage, "qwen3-8b", "triton") and not stage.failures
    assert {row["arm"] for row in stage.rows} == {"off", "dflash"}
    assert stage.absent == ["builtin"] and "no headers" in stage.notes
    assert not step_times(make_setting(tmp_path), stage, "qwen3-8b", "triton")
    assert {row["arm"] for row in stage.rows} == {"off", "dflash", "builtin"}
    assert not stage.absent and "no headers" not in stage.notes
    counts = Stage("profile")
    assert not profile(setting, counts, "qwen3-8b") and not counts.failures
    assert {row["arm"] for row in counts.rows} == {"off", "dflash"} and counts.absent == ["builtin"]


def test_a_profile_counts_every_arm(tmp_path):
    """Fails where an arm or a load has no counts, or the trace request is not one that SGLang accepts."""
    stage = Stage("profile")
    left = profile(make_setting(tmp_path), stage, "qwen3-8b")
    assert not left and not stage.failures
    assert [(row["arm"], row["load"]) for row in stage.rows] == [
        (arm, load) for arm in ("off", "dflash", "builtin") for load in (1, 4)
    ]
    assert {row["span"] for row in stage.rows if row["arm"] != "off"} == {"step[VERIFY bs=1]", "step[VERIFY bs=4]"}
    assert all((row["launches"], row["graphs"], row["waits"]) == (2, 1, 1) for row in stage.rows)


def test_nothing_is_profiled_while_a_server_starts_or_another_works(tmp_path, monkeypatch):
    """Fails where a trace is taken before all servers are up, or beside a server that is not paused."""
    servers, traced = [], []
    wait, take = Server.wait, profile_stage.take_trace

    def waited(server: Server, *arguments: Any) -> Server:
        servers.append(wait(server, *arguments))
        return server

    def taken(client: Client, *arguments: Any) -> Path:
        states = {server.url: psutil.Process(server.pid).status() for server in servers}
        traced.append([url for url, state in states.items() if state != psutil.STATUS_STOPPED] == [client.url])
        assert len(servers) == 3
        return take(client, *arguments)

    monkeypatch.setattr(Server, "wait", waited)
    monkeypatch.setattr(profile_stage, "take_trace", taken)
    stage = Stage("profile")
    assert not profile(make_setting(tmp_path), stage, "qwen3-8b") and not stage.failures
    assert traced == [True] * 6 and all(server.ended() for server in servers)


# What is kept, and the command.


def test_whatever_breaks_a_stage_is_a_sentence_of_it(tmp_path, capsys):
    """Fails where an unexpected error also prevents the later stages, or each call repeats the failed stage."""

    def broken(setting: Setting, stage: Stage) -> str:
        stage.rows.append({"arm": "off"})
        raise KeyError("tau")

    results = Results(tmp_path, ["one"])
    stage = run_check(Check("one", "", broken), make_setting(tmp_path), results, FACTS)
    assert stage.state == results.load("one").state == "failed" and stage.rows == [{"arm": "off"}]
    assert stage.failures == ["KeyError: 'tau'"] and "Traceback" in capsys.readouterr().err


def test_an_interrupted_stage_is_gone_on_with(tmp_path):
    """Fails where an interrupted stage counts as done or failed."""

    def stopped(setting: Setting, stage: Stage) -> str:
        raise KeyboardInterrupt

    results = Results(tmp_path, ["one"])
    with pytest.raises(KeyboardInterrupt):
        run_check(Check("one", "", stopped), make_setting(tmp_path), results, FACTS)
    held = results.load("one")
    assert (held.state, held.left) == ("partial", "interrupted")


def test_a_stage_asked_for_in_other_words_stays_as_it_is(tmp_path):
    """Fails where a sweep resumes with other flags, or results with the first flags then count as failed."""
    results = Results(tmp_path, ["smoke"])
    (check,) = [check for check in checks(("triton",)) if check.name == "smoke"]
    assert run_check(check, make_setting(tmp_path), results, FACTS).state == "done"
    with pytest.raises(ValueError, match=r"server.flags"):
        run_check(check, replace(make_setting(tmp_path), server_flags="--other"), results, FACTS)
    held = results.load("smoke")
    assert held.state == "done" and held.rows and not held.failures


def test_a_rehearsal_is_small_and_says_what_it_is(tmp_path):
    """Fails where a CPU rehearsal's numbers are not marked as such, or it runs the loads of a GPU."""
    setting = replace(make_setting(tmp_path, backends=REHEARSED_BACKENDS), rehearsal=True)
    (check,) = [c for c in checks(REHEARSED_BACKENDS, REHEARSED_MODELS) if c.name.startswith("profile")]
    stage = run_check(check, setting, Results(tmp_path, [check.name]), FACTS)
    assert stage.state == "done" and {row["load"] for row in stage.rows} == {1, 4}
    assert stage.notes[0] == REHEARSAL and REHEARSAL in (tmp_path / "README.md").read_text()
    assert {arm.variables["SGLANG_DFLASH_COMPILE"] for arm in profile_stage._arms(setting, "t", "d")} == {"0"}
    refused = _command("--device", "cpu", "--stage", "smoke")
    assert refused.returncode == 2 and "--output" in refused.stderr


def test_results_of_another_commit_are_not_gone_on_with(tmp_path):
    """Fails where results of two commits end up in one file."""
    results = Results(tmp_path, ["smoke"])
    check = next(check for check in checks(BACKENDS) if check.name == "smoke")
    results.save(Stage("smoke", commit="older", commands=["x"]))
    with pytest.raises(ValueError, match="older"):
        run_check(check, make_setting(tmp_path), results, FACTS)


def test_the_readme_has_what_the_jsons_have(tmp_path):
    """Fails where a table, a failure, the commit or a kernel's name is missing, or NaN reaches the JSON."""
    results = Results(tmp_path, ["one", "two", "three"])
    results.save(Stage("one", [{"arm": "off", "tau": float("nan")}], [], ["a note"], "", **FACTS, commands=["bash x"]))
    rows = [{"arm": "dflash", "load": 8, "launches": 10.0, "launched": {"_accept_kernel": 1.0}}]
    results.save(Stage("two", rows, ["it broke"], [], "", **FACTS, commands=["bash y"]))
    assert json.loads((tmp_path / "one.json").read_text())["rows"] == [{"arm": "off", "tau": None}]
    text = (tmp_path / "README.md").read_text()
    for words in ("| one | done |", "| two | failed |", "| three | - |", "Commit abc", "failed: it broke", "a note"):
        assert words in text, text
    assert "dflash at 8: _accept_kernel x 1" in text and "| dflash | 8 | 10 |" in text and "`bash y`" in text


@pytest.mark.parametrize(
    ("name", "how"), [("steps-qwen3-8b-triton", signal.SIGTERM), ("profile-qwen3-8b", signal.SIGKILL)]
)
def test_a_call_that_is_cut_keeps_what_it_measured(name, how, tmp_path):
    """Fails where a cell that was measured before the call was ended, or killed, is in no result, or the stage then
    counts as done."""
    words = ["--output", str(tmp_path), "--stand-in", str(STAND_IN), "--commit", "abc", "--stage", name]
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.DEVNULL, start_new_session=True)
    place = tmp_path / f"{name}.json"
    while process.poll() is None and not (place.exists() and json.loads(place.read_text())["rows"]):
        time.sleep(0.02)
    os.kill(process.pid, how)
    assert process.wait() == (130 if how == signal.SIGTERM else -9)
    _end_servers(tmp_path)
    held = json.loads(place.read_text())
    assert held["rows"] and held["state"] == "partial", held["left"]
    assert held["left"] == ("interrupted" if how == signal.SIGTERM else CUT)


def _end_servers(folder: Path) -> None:
    """Ends the stand-ins that a killed call left: their logs lie in its folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(STAND_IN) in (process / "cmdline").read_text() and os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if mine and mine.startswith(str(folder)):
            os.kill(int(process.name), signal.SIGKILL)


def _command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True)


def test_the_command_runs_a_stage_and_says_what_is_left(tmp_path):
    """Fails where exit codes, files or --list do not show the state of a check."""
    common = ["--output", str(tmp_path), "--backends", "triton"]
    dry = [*common, "--stand-in", str(STAND_IN), "--commit", "abc"]
    run = _command(*dry, "--stage", "smoke")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["stages"] == {"smoke": "done"}
    assert json.loads((tmp_path / "smoke.json").read_text())["commit"] == "abc"
    assert "## smoke" in (tmp_path / "README.md").read_text()
    run = _command(*dry, "--budget-s", "0")
    assert run.returncode == 3, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["stages"]["equality-triton-bfloat16"] == "partial"
    listed = {line.split()[0]: line for line in _command(*common, "--list").stdout.splitlines()}
    assert "done" in listed["smoke"] and "partial" in listed["equality-triton-bfloat16"]
    assert "not begun" in listed["profile-qwen3-8b"] and all(" about " in line for line in listed.values())
    assert _command(*dry[:-1], "another", "--stage", "smoke").returncode == 2
    assert _command("--stage", "nonesuch").returncode == 2
