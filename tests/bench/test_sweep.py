"""Sweeps over fake servers: measured cells, withheld speeds, failing servers, resumed and interrupted runs."""

from __future__ import annotations

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
from fakes import fake_arm, go, key, make_plan, render, servers_of
from rich.console import Console

from sglang_dflash.bench import sweep
from sglang_dflash.bench.board import Board
from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.measures import measure
from sglang_dflash.bench.records import Cell, Run
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Message, Session, Turn, as_openai

pytestmark = pytest.mark.slow


def cells_of(run: Run) -> dict:
    return {cell.key: cell for cell in run.cells}


def test_every_cell_is_measured_and_kept(tmp_path):
    """Fails where a cell is missing, gets the wrong prompts, or is not in the file on disk."""
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--chunk", "3"), repeats=2)
    run = go(plan, tmp_path)
    assert [cell.key for cell in run.cells] == [
        key(arm, load, repeat) for arm in ("off", "dflash") for load in (1.0, 2.0) for repeat in (0, 1)
    ]
    assert all(not cell.failure and len(cell.records) == 4 for cell in run.cells)
    record = cells_of(run)[key("dflash")].records[2]
    assert record.ids == answer_ids(render(as_openai(plan.datasets["letters"][2].turns[0].messages), {}), 6)
    assert (record.tokens, record.cached_tokens, record.steps, record.accept_histogram) == (6, 4, 2, [0, 0, 2])
    acceptance = cells_of(run)[key("dflash")].acceptance
    assert (acceptance.tau, acceptance.by_position, acceptance.drafted) == (3.0, [8, 8], 24)
    assert Run.load(tmp_path / "run.json").cells == run.cells
    assert [server["arm"] for server in run.servers] == ["off", "dflash"]


def test_a_cell_has_its_own_part_of_the_workers_counter(tmp_path):
    """Fails where a cell's count includes the warm-up or other cells, or a server without one gets some."""
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--counts"), warm_up=True)
    cells = cells_of(go(plan, tmp_path))
    for load in (1.0, 2.0):
        prompts = sum(record.prompt_tokens for record in cells[key("off", load)].records)
        assert cells[key("off", load)].prefilled is None
        assert cells[key("dflash", load)].prefilled == prompts - 4 * 4
    assert Run.load(tmp_path / "run.json").cells == list(cells.values())


def test_times_are_those_of_the_stream(tmp_path):
    """Fails where TTFT or TPOT are not the server's delays: 80 ms to the first token, 30 ms between chunks."""
    plan = make_plan(tmp_path, fake_arm("off", "--first-ms", "80", "--step-ms", "30"), loads=(2.0,))
    values = measure(go(plan, tmp_path).cells[0])
    assert 80 <= values["ttft_ms_p50"] < 160
    assert 30 <= values["tpot_ms_p50"] < 45
    # Two at a time, two rounds of 80 + 5 * 30 ms for 4 * 6 tokens.
    assert 24 / 0.80 < values["tok_s"] <= 24 / 0.46


def test_agent_sessions_start_at_a_rate(tmp_path):
    """Fails where sessions of an open loop lack turns, start together, wait for each other, or are not compared; or
    where the warm-up asks for no session at a rate below one half."""
    sessions = [Session.of_texts(f"s{i}", ["task", "go on", "more"]) for i in range(4)]
    fields = {"workload": "agent-open-loop", "loads": (0.4, 40.0), "counts": {0.4: 1, 40.0: 4}, "warm_up": True}
    arms = fake_arm("off", "--first-ms", "150"), fake_arm("dflash", "--first-ms", "150", "--wrong-from", "4")
    cells = cells_of(go(make_plan(tmp_path, *arms, datasets={"letters": sessions}, **fields), tmp_path))
    assert [len(cells[key(arm, load)].records) for arm in ("off", "dflash") for load in (0.4, 40.0)] == [3, 12, 3, 12]
    starts = [record.start_s for record in cells[key("off", 40.0)].records]
    assert starts[3] > starts[0] + 0.01 and starts[9] < starts[2]
    equality = cells[key("dflash", 40.0)].equality
    assert (equality.compared, equality.different, equality.unjudged, equality.withheld) == (4, 4, 8, True)


TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def test_sessions_with_tools_are_asked_through_the_chat_endpoint(tmp_path):
    """Fails where tools, a call or a result do not reach the server, a call's pieces are lost, or ids are not read."""
    said = (("user", "task"), ("tool", "12"), ("user", "go on"), ("user", "more"))
    session = Session("s", tuple(Turn((Message(*one),)) for one in said), tools=(TOOL,))
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash"), datasets={"letters": [session]}, loads=(1.0,))
    run = go(plan, tmp_path)
    off, dflash = run.cells
    assert [record.failure for record in off.records] == [""] * 4
    assert [[call[1:] for call in record.calls] for record in off.records] == [
        [("read", '{"path": "a"}')],
        [],
        *[[("read", '{"path": "a"}')]] * 2,
    ]
    # The call of the third turn got no result, so the fourth request does not have it.
    last = "user:task\nassistant:I will.\ntool:12\nassistant:I will.\nuser:go on\nassistant:I will.\nuser:more\n"
    assert off.records[3].ids == answer_ids([ord(letter) for letter in last], 6)
    assert (dflash.equality.compared, dflash.equality.identical) == (4, 4)
    assert Run.load(tmp_path / "run.json").cells == run.cells


def test_answers_to_a_chat_that_a_server_renders_otherwise_are_not_judged(tmp_path):
    """Fails where answers to other prompts are compared as if they were to the same."""
    session = Session("s", (Turn((Message("user", "task"),)),), tools=(TOOL,))
    arms = fake_arm("off"), fake_arm("dflash", "--more-prompt", "3")
    off, dflash = go(make_plan(tmp_path, *arms, datasets={"letters": [session]}, loads=(1.0,)), tmp_path).cells
    assert (off.records[0].foreign_prompt, dflash.records[0].foreign_prompt) == (False, True)
    assert (dflash.equality.compared, dflash.equality.unjudged, dflash.equality.withheld) == (0, 1, False)


def test_a_call_that_was_cut_ends_no_session(tmp_path):
    """Fails where a call whose arguments are no JSON object reaches the next prompt, or ends the cell."""
    session = Session("s", tuple(Turn((Message(*one),)) for one in (("user", "task"), ("tool", "12"))), tools=(TOOL,))
    arm = fake_arm("off", "--cut-calls")
    (off,) = go(make_plan(tmp_path, arm, datasets={"letters": [session]}, loads=(1.0,)), tmp_path).cells
    assert [record.failure for record in off.records] == ["", ""] and not off.failure
    assert off.records[0].calls[0].arguments == '{"path": '
    last = "user:task\nassistant:I will.\nuser:12\n"
    assert off.records[1].ids == answer_ids([ord(letter) for letter in last], 6)


def test_tokens_that_differ_withhold_speeds(tmp_path):
    """Fails where a wrong token that is not a tie is not detected, or not named."""
    run = go(make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--wrong-from", "4")), tmp_path)
    equality = cells_of(run)[key("dflash")].equality
    assert (equality.compared, equality.identical, equality.different, equality.ties) == (4, 0, 4, 0)
    assert equality.withheld
    assert "token 4" in equality.examples[0] and "1.00e+00" in equality.examples[0]
    row = frame(run).set_index(["arm", "load"]).loc[("dflash", 1.0)]
    assert row["withheld"] and row["tok_s"] != row["tok_s"] and row["speedup_off"] != row["speedup_off"]
    assert not cells_of(run)[key("off", 2.0)].equality.withheld


def test_ties_are_counted_not_withheld(tmp_path):
    """Fails where a tie within bfloat16's rounding withholds speeds or is not counted."""
    arm = fake_arm("dflash", "--wrong-from", "4", "--gap", "0.3", "--dtype", "bfloat16")
    equality = cells_of(go(make_plan(tmp_path, fake_arm("off"), arm), tmp_path))[key("dflash")].equality
    assert (equality.identical, equality.ties, equality.different, equality.withheld) == (0, 4, 0, False)


def test_many_ties_are_none(tmp_path):
    """Fails where four ties in 24 tokens are excused in float32, which allows one in 10,000."""
    arm = fake_arm("dflash", "--wrong-from", "4", "--gap", "1e-6")
    equality = cells_of(go(make_plan(tmp_path, fake_arm("off"), arm), tmp_path))[key("dflash")].equality
    assert (equality.ties, equality.different, equality.withheld) == (0, 4, True)
    assert equality.examples == ["4 ties in 24 tokens are more than float32 rounding explains"]


@pytest.mark.parametrize("case", ["sampled", "other engine", "simulated"])
def test_arms_that_need_not_agree_keep_their_speeds(tmp_path, case):
    """Fails where sampling, another engine or simulated acceptance withholds a speed. The share is still counted."""
    engine = "other" if case == "other engine" else "sglang"
    environment = {"SGLANG_SIMULATE_ACC_LEN": "4"} if case == "simulated" else {}
    arm = fake_arm("theirs", "--wrong-from", "4", engine=engine, environment=environment)
    sampling = Sampling(6, temperature=1.0) if case == "sampled" else Sampling(6)
    run = go(make_plan(tmp_path, fake_arm("off"), arm, sampling=sampling), tmp_path)
    equality = cells_of(run)[key("theirs")].equality
    assert (equality.compared, equality.identical, equality.withheld) == (4, 0, False)
    assert any("simulated" in note for note in run.notes) == (case == "simulated")


@pytest.mark.parametrize("dying_ms", ["0", "400"])
def test_a_server_that_dies_costs_its_cell_only(tmp_path, dying_ms):
    """Fails where the sweep ends, the cell counts as measured, or the last lines of the log are lost."""
    dying = fake_arm("dflash", "--die-at", "3", "--dying-ms", dying_ms)
    run = go(make_plan(tmp_path, fake_arm("off"), dying, fake_arm("last")), tmp_path)
    cells = cells_of(run)
    assert "the server ended" in cells[key("dflash")].failure
    assert cells[key("dflash")].log_tail[-1] == "the fake server falls over"
    assert cells[key("last", 2.0)].failure == "" and len(cells) == 6
    # The server is started again for its next cell, and dies again.
    assert "the server ended" in cells[key("dflash", 2.0)].failure


def test_a_server_that_does_not_start_costs_its_cells(tmp_path):
    """Fails where the other arms are not measured, or the server's message is lost."""
    cells = cells_of(go(make_plan(tmp_path, fake_arm("off", "--refuse-start"), fake_arm("dflash")), tmp_path))
    assert "does not want to start" in cells[key("off", 2.0)].failure
    assert not cells[key("dflash")].failure


def test_a_request_that_gets_nothing_any_more_fails_alone(tmp_path):
    """Fails where one lost stream blocks the sweep, or fails the cell although other streams continue."""
    begin = time.monotonic()
    arm = fake_arm("off", "--stall-at", "2", "--step-ms", "200")
    (cell,) = go(make_plan(tmp_path, arm, stall_s=1.0, loads=(2.0,)), tmp_path).cells
    assert [record.failure for record in cell.records if record.failure] == ["no data for 1 s (--stall-s)"]
    assert (cell.failure, len(cell.records)) == ("", 4)
    assert time.monotonic() - begin < 30


def test_a_hung_server_is_not_asked_again_and_again(tmp_path):
    """Fails where every request of a cell waits for a server that sends nothing in any stream."""
    begin = time.monotonic()
    arm = fake_arm("off", "--first-ms", "60000")
    (cell,) = go(make_plan(tmp_path, arm, stall_s=1.0, loads=(1.0,)), tmp_path).cells
    assert "no data for 1 s" in cell.failure and len(cell.records) == 1
    assert time.monotonic() - begin < 20


def test_answers_without_a_reference_are_named(tmp_path):
    """Fails where tokens that could not be compared look as if they were equal."""
    run = go(make_plan(tmp_path, fake_arm("off", "--refuse-start"), fake_arm("dflash", "--wrong-from", "2")), tmp_path)
    assert any("4 of 4 answers could not be compared" in note for note in run.notes)


def test_cells_from_before_their_reference_are_judged_late(tmp_path):
    """Fails where a resumed run shows speeds although its new reference arm shows that the tokens are wrong."""
    wrong = fake_arm("dflash", "--wrong-from", "2")
    run = go(make_plan(tmp_path, wrong), tmp_path)
    assert cells_of(run)[key("dflash")].equality.reference == "dflash"
    run = go(make_plan(tmp_path, fake_arm("off"), wrong), tmp_path, run)
    equality = cells_of(run)[key("dflash")].equality
    assert (equality.reference, equality.different, equality.withheld) == ("off", 4, True)


def test_refused_requests_are_counted(tmp_path):
    """Fails where a failed request ends its cell, or counts as answered."""
    (cell,) = go(make_plan(tmp_path, fake_arm("off", "--refuse-every", "4"), loads=(2.0,)), tmp_path).cells
    values = measure(cell)
    assert (values["requests"], values["failed"], values["tokens"]) == (4, 1, 18)
    assert "not this one" in next(record.failure for record in cell.records if record.failure)


def test_prompts_that_do_not_fit_are_failures_of_their_own(tmp_path):
    """Fails where a request exceeds the server's context of 512."""
    sessions = [Session.of_texts("long", ["x" * 600]), Session.of_texts("edge", ["x" * 500])]
    plan = make_plan(tmp_path, fake_arm("off"), loads=(1.0,), counts={1.0: 2}, datasets={"letters": sessions})
    long, edge = go(plan, tmp_path).cells[0].records
    assert "the context has 512" in long.failure
    assert edge.tokens == 512 - 500 - len("user:\n")


def test_interleaved_arms_take_turns(tmp_path):
    """Fails where a repeat of one arm is not followed by the same repeat of the other arm."""
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash"), loads=(1.0,), repeats=2, interleave=True)
    order = [(cell.key.arm, cell.key.repeat) for cell in go(plan, tmp_path).cells]
    assert order == [("off", 0), ("dflash", 0), ("off", 1), ("dflash", 1)]


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
    assert len(list(plan.logs.glob("*"))) == started and servers_of(tmp_path) == []
    assert Run.load(tmp_path / "run.json").cells == run.cells


SLOW_SWEEP = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes import fake_arm, go, make_plan
folder = Path({folder!r})
arms = fake_arm("off", *{mark!r}), fake_arm("dflash", "--step-ms", "500", "--mark", {folder!r})
go(make_plan(folder, *arms, together={together}), folder)
"""


def in_the_middle(folder: Path, together: bool = False) -> subprocess.Popen:
    """A sweep in a process of its own: two cells are finished and the third is running, or the first and the second, if
    the arms' servers are up together."""
    done = 1 if together else 2
    mark = ("--mark", str(folder)) if together else ()
    tests = str(Path(__file__).parent)
    script = SLOW_SWEEP.format(tests=tests, folder=str(folder), together=together, mark=mark)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores SIGINT
    )
    results = folder / "run.json"
    deadline = time.monotonic() + 60
    while not results.exists() or len(Run.load(results).cells) < done or not servers_of(folder):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    return process


def test_a_killed_sweep_leaves_a_run_to_resume(tmp_path):
    """Fails where kill -9 in the middle of a cell loses or damages the cells before it, or leaves the server."""
    process = in_the_middle(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 15
    while servers_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    held = Run.load(tmp_path / "run.json")
    kept = list(held.cells)
    assert [cell.key for cell in kept] == [key("off"), key("off", 2.0)]
    run = go(make_plan(tmp_path, fake_arm("off"), fake_arm("dflash")), tmp_path, held)
    assert run.cells[:2] == kept and len(run.cells) == 4
    assert not any(cell.failure for cell in run.cells)


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_stops_the_server_and_keeps_finished_cells(tmp_path, together):
    """Fails where an interrupt leaves a server behind, a paused one included, or loses finished cells."""
    process = in_the_middle(tmp_path, together)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert len(Run.load(tmp_path / "run.json").cells) == (1 if together else 2)
    assert servers_of(tmp_path) == []
