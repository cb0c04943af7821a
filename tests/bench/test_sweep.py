"""Sweeps over fake servers: measured cells, withheld speeds, failing servers, resumed and interrupted runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import answer_ids
from fakes import fake_arm, go, key, make_plan, marked, render
from rich.console import Console

from sglang_dflash.bench import sweep
from sglang_dflash.bench.board import Board
from sglang_dflash.bench.frame import frame, measure
from sglang_dflash.bench.records import Cell, Run
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Session, as_openai

pytestmark = pytest.mark.slow


def cells_of(run: Run) -> dict:
    return {cell.key: cell for cell in run.cells}


def test_every_cell_is_measured_and_kept(tmp_path):
    """Fails where a cell is missing, gets the wrong prompts, makes its pass again, or is not in the file on disk."""
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--chunk", "3"), repeats=2)
    run = go(plan, tmp_path)
    assert [cell.key for cell in run.cells] == [
        key(arm, load, repeat) for arm in ("off", "dflash") for load in (1.0, 2.0) for repeat in (0, 1)
    ]
    assert all(not cell.failure and len(cell.records) == 4 for cell in run.cells)
    assert all(len(cell.answers) == (0 if cell.key.repeat else 4) for cell in run.cells)
    answer, timed = cells_of(run)[key("dflash")].answers[2], cells_of(run)[key("dflash")].records[2]
    prompt = render(as_openai(plan.datasets["letters"][2].turns[0].messages), {})
    assert answer.ids == answer_ids(prompt, 6)
    assert (answer.tokens, answer.cached_tokens, answer.steps, answer.accept_histogram) == (6, 4, 2, [0, 0, 2])
    assert (timed.id, timed.tokens, timed.prompt_tokens, timed.ids) == (answer.id, 6, len(prompt), [])
    acceptance = cells_of(run)[key("dflash")].acceptance
    assert (acceptance.tau, acceptance.by_position) == (3.0, [8, 8])
    assert Run.load(tmp_path / "run.json").cells == run.cells
    assert [server["arm"] for server in run.servers] == ["off", "dflash"]


def test_later_turns_hold_the_answers_to_the_earlier_ones(tmp_path):
    """Fails where a turn is not asked, or is timed before the first turns or without its history."""
    sessions = [Session.of_texts(f"s{i}", ["one", "two"]) for i in range(2)]
    plan = make_plan(tmp_path, fake_arm("off"), datasets={"letters": sessions}, loads=(1.0,))
    (cell,) = go(plan, tmp_path).cells
    assert [record.id for record in cell.answers] == ["s0/0", "s0/1", "s1/0", "s1/1"]
    assert [record.id for record in cell.records] == ["s0/0", "s1/0", "s0/1", "s1/1"]
    said = f"user:one\nassistant:{cell.answers[0].text}\nuser:two\n"
    assert cell.answers[1].ids == answer_ids([ord(letter) for letter in said], 6)
    assert cell.records[2].prompt_tokens == len(said)


def test_agent_sessions_pause_and_are_timed_as_they_are_played(tmp_path):
    """Fails where a session has no pauses, starts before a place is free, or its parts of counters are wrong."""
    sessions = [Session.of_texts(f"s{i}", ["task", "go on", "more"]) for i in range(3)]
    fields = {"workload": "agent", "loads": (2.0,), "counts": {2.0: 3}, "think_s": 0.2}
    arms = fake_arm("off"), fake_arm("dflash", "--wrong-from", "4")
    off, dflash = go(make_plan(tmp_path, *arms, datasets={"letters": sessions}, **fields), tmp_path).cells
    assert [record.id for record in off.records] == [f"s{i}/{turn}" for i in range(3) for turn in range(3)]
    assert off.answers == [] and off.records[0].ids and off.wall_s > 0.2
    assert off.records[6].start_s >= min(off.records[2].end_s, off.records[5].end_s) - 0.01
    assert off.records[1].start_s - off.records[0].end_s > 0.01
    assert off.prefilled == sum(record.prompt_tokens - 4 for record in off.records)
    equality = dflash.equality
    assert (equality.compared, equality.different, equality.unjudged, equality.withheld) == (3, 3, 6, True)


def test_an_open_loop_is_measured(tmp_path):
    """Fails where a rate is taken for a number of requests."""
    fields = {"workload": "open-loop", "loads": (0.4, 40.0), "counts": {0.4: 1, 40.0: 4}}
    run = go(make_plan(tmp_path, fake_arm("off"), fake_arm("dflash"), **fields), tmp_path)
    assert [len(cell.records) for cell in run.cells] == [1, 4, 1, 4] and not any(cell.failure for cell in run.cells)


@pytest.mark.parametrize(
    ("flags", "ties", "different", "example"),
    [
        ([], 0, 4, "token 4 is .*; the lower of their logits is 1.00e\\+00 below the best"),
        (["--gap", "0.3", "--dtype", "bfloat16"], 4, 0, ""),
        (["--gap", "1e-6"], 0, 4, "4 ties in 24 tokens are more than float32 rounding explains"),  # 1 in 10,000 may be
    ],
    ids=["wrong", "ties", "too many ties"],
)
def test_tokens_that_differ_withhold_speeds(tmp_path, flags, ties, different, example):
    """Fails where a wrong token is not detected or not named, or a tie within rounding withholds speeds."""
    arm = fake_arm("dflash", "--wrong-from", "4", *flags)
    run = go(make_plan(tmp_path, fake_arm("off"), arm, repeats=2, loads=(1.0,)), tmp_path)
    equality = cells_of(run)[key("dflash")].equality
    assert (equality.compared, equality.identical) == (4, 0)
    assert (equality.ties, equality.different, equality.withheld) == (ties, different, bool(different))
    assert re.search(example, " ".join(equality.examples))
    row = frame(run).set_index("arm").loc["dflash"]
    hidden = [row[name] != row[name] for name in ("tok_s", "tok_s_low", "speedup_off")]
    assert hidden == [bool(different)] * 3 and not cells_of(run)[key("off")].equality.withheld


@pytest.mark.parametrize("case", ["sampled", "other engine", "simulated"])
def test_arms_that_need_not_agree_keep_their_speeds(tmp_path, case):
    """Fails where sampling, another engine or simulated acceptance withholds a speed. The share is still counted."""
    engine = "vllm" if case == "other engine" else "sglang"
    environment = {"SGLANG_SIMULATE_ACC_LEN": "4"} if case == "simulated" else {}
    arm = fake_arm("theirs", "--wrong-from", "4", engine=engine, environment=environment)
    sampling = Sampling(6, temperature=1.0) if case == "sampled" else Sampling(6)
    run = go(make_plan(tmp_path, fake_arm("off"), arm, sampling=sampling), tmp_path)
    cell = cells_of(run)[key("theirs")]
    assert (cell.equality.compared, cell.equality.identical, cell.equality.withheld) == (4, 0, False)
    assert any("simulated" in note for note in run.notes) == (case == "simulated")
    assert any("could not be emptied" in note for note in run.notes) == (case == "other engine")
    assert [record.tokens for record in cell.records] == [6] * 4


def test_a_server_that_dies_costs_its_cell_only(tmp_path):
    """Fails where the sweep ends, the cell counts as measured, or the last lines of the log are lost."""
    dying = fake_arm("dflash", "--die-at", "9")  # 3 requests warm it up; the pass has 4
    run = go(make_plan(tmp_path, fake_arm("off"), dying, fake_arm("last")), tmp_path)
    cells = cells_of(run)
    assert "the server ended" in cells[key("dflash")].failure
    assert cells[key("dflash")].log_tail[-1] == "the fake server falls over"
    assert cells[key("last", 2.0)].failure == "" and len(cells) == 6
    # The server is started again for its next cell, and dies again.
    assert "the server ended" in cells[key("dflash", 2.0)].failure


def test_a_server_that_does_not_start_costs_its_cells(tmp_path):
    """Fails where the other arms are not measured, the server's message is lost, or missing references are not told."""
    run = go(make_plan(tmp_path, fake_arm("off", "--refuse-start"), fake_arm("dflash")), tmp_path)
    assert "does not want to start" in cells_of(run)[key("off", 2.0)].failure
    assert not cells_of(run)[key("dflash")].failure
    assert any("4 of 4 answers could not be compared" in note for note in run.notes)


def test_a_client_that_fails_is_one_sentence(tmp_path, monkeypatch):
    """Fails where the client's error is lost, or counts as an answer."""
    monkeypatch.setenv("FAKE_CLIENT_FAILS", "1")
    (cell,) = go(make_plan(tmp_path, fake_arm("off"), loads=(1.0,)), tmp_path).cells
    assert cell.failure.startswith("SGLang's client ended with code 1: ValueError: this client does not want to work")


@pytest.mark.parametrize("workload", ["closed", "agent"])
def test_a_hung_server_is_given_up(tmp_path, workload):
    """Fails where a sweep waits for a server that sends nothing."""
    begin = time.monotonic()
    arm = fake_arm("off", "--first-ms", "60000")
    (cell,) = go(make_plan(tmp_path, arm, workload=workload, stall_s=1.0, loads=(1.0,)), tmp_path).cells
    assert "no data for 1 s (--stall-s)" in cell.failure
    assert time.monotonic() - begin < 20


def test_refused_requests_are_counted(tmp_path):
    """Fails where a failed request ends its cell, or counts as answered."""
    # 3 requests warm it up; the pass has the numbers 4 to 7, the three that are timed again 8 to 10.
    (cell,) = go(make_plan(tmp_path, fake_arm("off", "--refuse-every", "7"), loads=(2.0,)), tmp_path).cells
    values = measure(cell)
    assert (values["requests"], values["failed"], values["tokens"]) == (4, 1, 18)
    assert "not this one" in cell.records[0].failure and not cell.failure


def test_prompts_that_do_not_fit_are_failures_of_their_own(tmp_path):
    """Fails where a request exceeds the server's context of 512."""
    sessions = [Session.of_texts("edge", ["x" * 500]), Session.of_texts("long", ["x" * 600])]
    plan = make_plan(tmp_path, fake_arm("off"), loads=(1.0,), counts={1.0: 2}, datasets={"letters": sessions})
    long, edge = go(plan, tmp_path).cells[0].records
    assert "the context has 512" in long.failure
    assert edge.tokens == 512 - 500 - len("user:\n")


def test_a_resumed_run_measures_only_what_is_missing(tmp_path):
    """Fails where finished cells run again, failed cells do not, or the reference arm's answers are lost."""
    broken = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--die-at", "1"))
    go(broken, tmp_path)
    held = Run.load(tmp_path / "run.json")
    kept = [cell for cell in held.cells if not cell.failure]
    assert [cell.key.arm for cell in kept] == ["off", "off"]
    mended = replace(broken, arms=(fake_arm("off", "--refuse-start"), fake_arm("dflash")))
    run = go(mended, tmp_path, held)
    assert all(not cell.failure for cell in run.cells) and len(run.cells) == 4
    assert run.cells[:2] == kept
    assert cells_of(run)[key("dflash")].equality.identical == 4


def test_cells_from_before_their_reference_are_judged_late(tmp_path):
    """Fails where a resumed run shows speeds although its new reference arm shows that the tokens are wrong."""
    wrong = fake_arm("dflash", "--wrong-from", "2")
    run = go(make_plan(tmp_path, wrong), tmp_path)
    assert cells_of(run)[key("dflash")].equality.reference == "dflash"
    run = go(make_plan(tmp_path, fake_arm("off"), wrong), tmp_path, run)
    equality = cells_of(run)[key("dflash")].equality
    assert (equality.reference, equality.different, equality.withheld) == ("off", 4, True)


class ClockBoard(Board):
    """Moves a made-up clock: each start of servers takes `start_s`, each cell one second."""

    def __init__(self, console: Console, start_s: float) -> None:
        super().__init__(console, 8, 2)
        self.now_s, self._each_s = 0.0, start_s

    @contextmanager
    def starting(self, label: str) -> Iterator[Callable[[float], None]]:
        with super().starting(label) as on_wait:
            yield on_wait
        self.now_s += self._each_s

    def finished(self, cell: Cell) -> None:
        self.now_s += 1.0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("deadline_s", "start_s", "done"), [(2.5, 0, 3), (1, 1, 0), (0, 1, 0)])
def test_nothing_begins_after_the_deadline(tmp_path, monkeypatch, together, deadline_s, start_s, done):
    """Fails where a cell or a server starts too late, a server is left behind, or what is done is not on disk."""
    arms = [fake_arm(name, "--mark", str(tmp_path)) for name in ("off", "dflash")]
    plan = make_plan(tmp_path, *arms, repeats=2, together=together)
    board = ClockBoard(Console(file=(tmp_path / "screen.txt").open("a")), start_s)
    run = Run("test", plan.workload, {})
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: board.now_s))
        sweep.Sweep(plan, run, render, tmp_path / "run.json", deadline_s).go(lambda cells, starts: board)
    assert len(run.cells) == done and not any(cell.failure for cell in run.cells)
    started = 0 if not deadline_s else 2 if together else 1
    assert len([log for log in plan.logs.glob("*") if "client" not in log.name]) == started
    assert marked(tmp_path) == [] and Run.load(tmp_path / "run.json").cells == run.cells


SLOW_SWEEP = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes import fake_arm, go, make_plan
folder = Path({folder!r})
arms = fake_arm("off", *{mark!r}), fake_arm("dflash", "--step-ms", "120", "--mark", {folder!r})
go(make_plan(folder, *arms, together={together}), folder)
"""


def in_the_middle(folder: Path, together: bool = False) -> subprocess.Popen:
    """A sweep in a process of its own, whose client asks the second arm: the cells before that are finished."""
    mark = ("--mark", str(folder)) if together else ()
    tests = str(Path(__file__).parent)
    script = SLOW_SWEEP.format(tests=tests, folder=str(folder), together=together, mark=mark)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores SIGINT
    )
    deadline = time.monotonic() + 60
    while not list((folder / "logs").glob("*dflash.client.log")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    return process


def left_behind(folder: Path, within_s: float) -> bool:
    """Whether a server lives on."""
    deadline = time.monotonic() + within_s
    while marked(folder):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_sweep_leaves_a_run_to_resume(tmp_path):
    """Fails where kill -9 in the middle of a cell loses or damages the cells before it, or leaves the server."""
    process = in_the_middle(tmp_path)
    process.kill()
    process.wait()
    assert not left_behind(tmp_path, 15.0)
    held = Run.load(tmp_path / "run.json")
    kept = list(held.cells)
    assert [cell.key for cell in kept] == [key("off"), key("off", 2.0)]
    run = go(make_plan(tmp_path, fake_arm("off"), fake_arm("dflash")), tmp_path, held)
    assert run.cells[:2] == kept and len(run.cells) == 4
    assert not any(cell.failure for cell in run.cells)


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_stops_server_and_client_and_keeps_finished_cells(tmp_path, together):
    """Fails where an interrupt leaves a server behind, a paused one included, or loses finished cells."""
    process = in_the_middle(tmp_path, together)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert len(Run.load(tmp_path / "run.json").cells) == (1 if together else 2)
    assert not left_behind(tmp_path, 0.0)
