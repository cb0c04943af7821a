"""Commands and their servers end when told; a server ends when its starter was killed. The servers are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from sglang_dflash.serving import TINY_TARGET, watched
from sglang_dflash.serving.lifetime import Stopped, TiedProcess, held_back, stoppable

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmark_sglang.py"
CLI = [sys.executable, "-m", "sglang_dflash.cli"]
STAND_IN = Path(__file__).with_name("stand_in")
# What every command that starts a server does.
STARTER = """
import sys, time
from pathlib import Path
from sglang_dflash.serving import Server, exit_code

def work():
    with Server([], Path("server.log")) as server:
        {more}
        print("works", flush=True)
        while True:
            time.sleep(0.1)

sys.exit(exit_code(work, 1))
"""


class Started:
    """A command in a process of its own, which works in a folder and starts stand-ins for SGLang."""

    def __init__(self, command: Sequence[str], folder: Path, *ignored: signal.Signals) -> None:
        path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(folder / "cache")}
        self.folder = folder
        self.output = folder / "said.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: [
                    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
                    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
                ],
            )
        self.servers: list[psutil.Process] = []

    @property
    def said(self) -> str:
        return self.output.read_text()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            time.sleep(0.05)
        self.servers = psutil.Process(self.process.pid).children(recursive=True)

    def asks(self) -> bool:
        """Whether a server was asked for more than whether it is up."""
        return any("asked" in log.read_text() for log in self.folder.rglob("*.log"))

    def send(self, number: int) -> int:
        """Returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def servers_left(self, within_s: float = 0.0) -> list[psutil.Process]:
        deadline = time.monotonic() + within_s
        while left := list(filter(_runs, self.servers)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return left

    def clear(self) -> None:
        """Ends what a test that failed has left, and a server that was let go."""
        self.process.kill()
        self.process.wait()
        for server in filter(_runs, self.servers):
            server.kill()


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: its parent has not looked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """Starts a command; at the end nothing of it is left."""
    made: list[Started] = []

    def start(command: Sequence[str], *ignored: signal.Signals) -> Started:
        made.append(Started(command, tmp_path, *ignored))
        return made[-1]

    yield start
    for one in made:
        one.clear()


@pytest.fixture
def starter(start: Callable[..., Started]) -> Callable[..., Started]:
    """Starts STARTER and waits until its server is up."""

    def go(*ignored: signal.Signals, more: str = "pass", count: int = 2) -> Started:
        one = start([sys.executable, "-c", STARTER.format(more=more)], *ignored)
        one.wait_until(lambda: "works" in one.said)
        assert len(one.servers) == count
        return one

    return go


REGENERATED = ["--target", str(TINY_TARGET), "--max-new-tokens", "8"]
TRAINED = ["--target", str(TINY_TARGET), "--data", "data.jsonl", "--output", "draft", "--layers", "1"]
COMMANDS = {
    "quickstart": [*CLI, "quickstart", "--pair", "tiny"],
    "check": [*CLI, "check"],
    "bench": [sys.executable, str(SCRIPT), "--dataset-name", "code"],
    "regenerate": [*CLI, "regenerate", "data.jsonl", "answers.jsonl", *REGENERATED],
    "train --regenerate": [*CLI, "train", *TRAINED, "--regenerate"],
}


def write_data(folder: Path) -> None:
    rows = [{"prompt": f"Compute {n} * 7.", "response": f"The answer is {7 * n}."} for n in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_ends_a_command_and_its_server(name: str, start: Callable[..., Started], tmp_path: Path) -> None:
    """Fails where SIGTERM leaves the command or its server behind, waits for answers, needs Ctrl-C (which a shell's
    background job ignores), or ends in a traceback or another exit code."""
    write_data(tmp_path)
    command = start(COMMANDS[name], signal.SIGINT)
    command.wait_until(command.asks)
    begin = time.monotonic()
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM, command.said
    assert time.monotonic() - begin < 30
    assert len(command.servers) == 2 and command.servers_left() == []
    assert "stopped" in command.said and "Traceback" not in command.said


def test_sigterm_saves_what_was_trained(start: Callable[..., Started], tmp_path: Path) -> None:
    """Fails where `train` loses its steps upon SIGTERM, or does not say how to go on."""
    write_data(tmp_path)
    words = [
        *TRAINED,
        "--num-taps",
        "2",
        "--block-size",
        "4",
        "--log-every",
        "1",
        "--held-out-limit",
        "2",
        "--epochs",
        "10000",
    ]
    command = start([*CLI, "train", *words], signal.SIGINT)
    metrics = tmp_path / "draft" / "metrics.jsonl"
    command.wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 2)
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM, command.said
    done = metrics.read_text().count("\n")
    assert [path.name for path in (tmp_path / "draft" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    expected = f"Stopped after step {done:,}, which is saved. To go on, give the same command with --resume."
    assert expected in command.said and "Traceback" not in command.said


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_closed_terminal_and_ctrl_c_end_it(number: signal.Signals, starter: Callable[..., Started]) -> None:
    """Fails where a command or its server goes on."""
    command = starter()
    assert command.send(number) == 128 + number
    assert command.servers_left() == [] and "no server of ours was left running" in command.said


def test_nohup_goes_on(starter: Callable[..., Started]) -> None:
    """Fails where a command that was told to ignore a closed terminal ends with it."""
    command = starter(signal.SIGHUP)
    command.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert command.process.poll() is None and len(command.servers_left()) == 2
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM
    assert command.servers_left() == []


def test_a_second_signal_leaves_nothing_behind(starter: Callable[..., Started]) -> None:
    """Fails where an impatient user's second signal lets a server survive that takes long to end."""
    command = starter(more="import os, signal; os.kill(server.pid, signal.SIGSTOP); server.resume = lambda: None")
    command.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert command.process.poll() is None and len(command.servers_left()) == 2
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM
    assert command.servers_left(15) == []


@pytest.mark.parametrize("more", ["pass", "server.pause()"])
def test_a_server_ends_with_its_killed_starter(more: str, starter: Callable[..., Started]) -> None:
    """Fails where SIGKILL of a command leaves its server, at work or paused, as an orphan."""
    command = starter(more=more)
    assert command.send(signal.SIGKILL) == -signal.SIGKILL
    assert command.servers_left(15) == []


def test_a_server_that_starts_ends_with_its_killed_starter(start: Callable[..., Started]) -> None:
    """Fails where there is a moment before a server is up in which it outlives its starter."""
    killed = "server.launch(); print(server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    imports = "import os, signal; from pathlib import Path; from sglang_dflash.serving import Server"
    command = start([sys.executable, "-c", f"{imports}; server = Server([], Path('server.log')); {killed}"])
    assert command.process.wait(60) == -signal.SIGKILL
    group = int(command.said)
    deadline = time.monotonic() + 15
    while members := [one for one in psutil.process_iter() if _runs(one) and os.getpgid(one.pid) == group]:
        assert time.monotonic() < deadline, members
        time.sleep(0.1)


def test_a_server_that_was_let_go_stays(starter: Callable[..., Started]) -> None:
    """Fails where the server of `quickstart --keep` ends with the command."""
    command = starter(more="server.let_go()")
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM
    time.sleep(watched.LOOK_S + 0.5)
    assert len(command.servers_left()) == 2


def test_a_server_in_a_thread_stays(starter: Callable[..., Started]) -> None:
    """Fails where a server ends with the thread that started it, as the kernel's parent-death signal does it."""
    imports = "from concurrent.futures import ThreadPoolExecutor as Pool"
    more = "with Pool() as pool: other = pool.submit(Server([], Path('other.log')).start).result()"
    command = starter(more=f"{imports}\n        {more}", count=4)
    time.sleep(1.0)
    assert len(command.servers_left()) == 4
    assert command.send(signal.SIGTERM) == 128 + signal.SIGTERM
    assert command.servers_left(15) == []


def test_a_stubborn_group_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a server that ignores SIGTERM outlives its starter."""
    monkeypatch.setattr(watched, "GRACE_S", 0.5)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    watched.end(process.pid)
    assert process.wait(10) == -signal.SIGKILL
    watched.end(process.pid)  # of a group that has ended


def test_a_tied_process_is_the_command(tmp_path: Path) -> None:
    """Fails where pid, group or exit code are not the command's own, or its output goes on behind its end."""
    script = "import os; print(os.getpid(), os.getpgid(0)); raise SystemExit(7)"
    process = TiedProcess([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=30)
    assert said.split() == [str(process.pid)] * 2 and process.returncode == 7
    log = tmp_path / "log"
    with log.open("wb") as output:
        assert TiedProcess(["/nowhere/python", "-m", "x"], stderr=output).wait(30) == 1
    assert log.read_text() == "OSError: /nowhere/python cannot be run: No such file or directory\n"


def test_signals_unwind_a_block_and_are_as_before_behind_it() -> None:
    """Fails where a signal does not reach the block, or its handlers outlive it."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with pytest.raises(Stopped) as stopped, stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stopped.value.number == signal.SIGTERM
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP))


def test_the_first_signal_is_held_back(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fails where orderly work is cut off by the first signal or by its echo, or goes on after a later one."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    with pytest.raises(Stopped) as stopped, held_back() as held:
        assert not held.number
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert held.number == signal.SIGINT
        now[0] += 60
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.number == signal.SIGTERM
