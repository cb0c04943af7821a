"""Sweeps whose servers are up together and take turns."""

from __future__ import annotations

import os
from dataclasses import replace

import httpx
from fakes import fake_arm, go, key, make_plan, marked, render
from rich.console import Console

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.records import Cell, Run
from sglang_dflash.bench.sweep import Sweep
from sglang_dflash.serving import Arm


def test_arms_that_stand_together_take_turns_at_every_cell(tmp_path):
    """Fails where a server is started anew for a cell, works while another is asked, or is left behind; or where the
    same arm is always first."""
    mark = "--mark", str(tmp_path)
    arms = fake_arm("off", *mark), fake_arm("dflash", *mark), fake_arm("hung", "--refuse-start")
    plan = make_plan(tmp_path, *arms, repeats=2, together=True)
    states: list[list[str]] = []

    def look(cell: Cell) -> None:
        states.append(sorted(server.status() for server in marked(tmp_path)))

    run = Run("test", plan.workload, {})
    board = Board(Console(file=(tmp_path / "screen.txt").open("a"), width=200), 12, 1)
    board.finished = look  # type: ignore[method-assign]
    Sweep(plan, run, render, tmp_path / "run.json").go(lambda cells, starts: board)
    names = ["off", "dflash", "hung"]
    order = [key(arm, load) for load in (1.0, 2.0) for arm in names]
    order += [key(arm, load, 1) for load in (1.0, 2.0) for arm in (*names[1:], names[0])]
    assert [cell.key for cell in run.cells] == order
    assert all(("does not want to start" in cell.failure) == (cell.key.arm == "hung") for cell in run.cells)
    assert all(cell.equality.identical == 4 for cell in run.cells if cell.key.arm == "dflash" and not cell.key.repeat)
    assert [server["arm"] for server in run.servers] == ["off", "dflash"]
    assert len([log for log in plan.logs.iterdir() if "client" not in log.name]) == 3
    working = [state for state, cell in zip(states, run.cells, strict=True) if cell.key.arm != "hung"]
    assert all(state[1:] == ["stopped"] and state[0] != "stopped" for state in working)
    assert not marked(tmp_path)


def test_a_standing_server_that_dies_costs_its_cell_only(tmp_path):
    """Fails where the other cells of the arm are lost, where its server starts anew at each of them, or where other
    arms are asked while they are paused."""
    arms = fake_arm("off"), fake_arm("dflash", "--die-at", "12")  # after 1 + 4 + 4 requests
    run = go(make_plan(tmp_path, *arms, together=True, loads=(1.0,), repeats=3), tmp_path)
    failures = {(cell.key.arm, cell.key.repeat): bool(cell.failure) for cell in run.cells}
    assert [failures["dflash", repeat] for repeat in range(3)] == [False, True, False]
    assert not any(failures["off", repeat] for repeat in range(3))
    assert [server["arm"] for server in run.servers] == ["off", "dflash", "dflash"]


def test_a_standing_server_that_dies_between_cells_costs_none(tmp_path):
    """Fails where a server that ended while it was paused fails its next cells."""
    mark = "--mark", str(tmp_path)
    plan = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", *mark), together=True)
    run = Run("test", plan.workload, {})
    board = Board(Console(file=(tmp_path / "screen.txt").open("a"), width=200), 4, 1)

    def kill(cell: Cell) -> None:
        if cell.key == key("off"):
            for server in marked(tmp_path):
                server.kill()
                os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)

    board.finished = kill  # type: ignore[method-assign]
    Sweep(plan, run, render, tmp_path / "run.json").go(lambda cells, starts: board)
    assert [cell.failure for cell in run.cells] == [""] * 4
    assert [server["arm"] for server in run.servers] == ["off", "dflash", "dflash"]


def test_standing_servers_that_do_not_come_up_say_so_at_every_cell(tmp_path):
    """Fails where one arm that cannot be launched ends the sweep, or a server that did not answer in time is started or
    waited for again, or is said to have ended."""
    arms = fake_arm("late", "--hang-start"), replace(fake_arm("missing"), launch=("no-such-command",))
    run = go(make_plan(tmp_path, *arms, together=True, start_s=4.0), tmp_path)
    assert ["did not answer within 4 s" in cell.failure for cell in run.cells] == [True, False] * 2
    assert all("no-such-command" in cell.failure for cell in run.cells[1::2])
    assert len(list((tmp_path / "logs").iterdir())) == 2 and not run.servers


def test_running_servers_take_turns_as_well(tmp_path):
    """Fails where an arm with a URL is warmed up at every cell, or is paused."""
    server = fake_arm("running").server(tmp_path / "running.log")
    with server.start(20.0):
        running = Arm("running", "other", launch=(), url=server.url)
        run = go(make_plan(tmp_path, fake_arm("off"), running, together=True), tmp_path)
        served = httpx.get(f"{server.url}/server_info").json()["asked"]
        assert not server.ended()
    assert [(cell.key.arm, cell.failure) for cell in run.cells] == [("off", ""), ("running", "")] * 2
    assert served == sum(len(cell.records) + len(cell.answers) for cell in run.cells[1::2]) + 3  # of one warm-up


def test_a_resumed_run_of_standing_servers_starts_those_that_are_needed(tmp_path):
    """Fails where an arm whose cells are all there is started, or a finished run starts anything."""
    broken = make_plan(tmp_path, fake_arm("off"), fake_arm("dflash", "--die-at", "1"), together=True)
    go(broken, tmp_path)
    mended = replace(broken, arms=(fake_arm("off", "--refuse-start"), fake_arm("dflash")), logs=tmp_path / "again")
    run = go(mended, tmp_path, Run.load(tmp_path / "run.json"))
    assert len(run.cells) == 4 and not any(cell.failure for cell in run.cells)
    assert sorted(log.name for log in (tmp_path / "again").iterdir()) == ["01-dflash.client.log", "01-dflash.log"]
    screen = (tmp_path / "screen.txt").read_text()
    assert go(mended, tmp_path, run).cells == run.cells
    assert (tmp_path / "screen.txt").read_text() == screen
