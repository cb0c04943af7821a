"""A server as a child process, by default SGLang's: starts it on a free port, waits for it, stops it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from sglang_dflash.serving.client import Client
from sglang_dflash.serving.errors import ServerError, log_lines
from sglang_dflash.serving.lifetime import TiedProcess

STOP_SECONDS = 8.0  # SGLang takes five when idle, and waits for its requests; container engines kill after ten
PORTS = range(20000, 30000)
LAUNCH_SGLANG = (sys.executable, "-m", "sglang.launch_server")


class Server:
    """`python -m sglang.launch_server`, or another server's command, with the given arguments, on 127.0.0.1.

    Use it as a context manager; leaving it stops the server and every process it started. If this process is killed,
    the server ends, too.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        launch: Sequence[str] = LAUNCH_SGLANG,
        health: str = "/health_generate",
    ) -> None:
        """
        Args:
            arguments: the command's arguments, without host and port.
            log: file for the server's output; overwritten.
            environment: variables to set on top of this process's own.
            launch: the command before the arguments; it must take --host and --port.
            health: the path that answers 200 once the server is up.
        """
        self.arguments = list(arguments)
        self._launch = list(launch)
        self._health = health
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, **(environment or {})}
        self._process: TiedProcess | None = None
        self._launched_s = 0.0

    @property
    def command(self) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [*self._launch, *self.arguments, *address]

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self, timeout_s: float = 420.0, on_wait: Callable[[float], None] = lambda seconds: None) -> Self:
        """Starts the server and waits until it answers.

        Args:
            timeout_s: a server that does not answer within this time after its launch is stopped. The first start on a
                CPU takes a minute or two longer, because it builds the native ops.
            on_wait: called about twice a second with the seconds waited.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        self.launch()
        return self.wait(timeout_s, on_wait)

    def launch(self) -> None:
        """Starts the process and waits for nothing."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._launched_s = time.monotonic()
        self._process = self._spawn()

    def wait(self, timeout_s: float, on_wait: Callable[[float], None] = lambda seconds: None) -> Self:
        """Waits until the launched server answers; see `start`."""
        try:
            while not self._answers():
                waited = time.monotonic() - self._launched_s
                if self.ended():
                    raise ServerError(f"The server ended before it answered: {self.last_words()} (log: {self.log})")
                if waited > timeout_s:
                    raise ServerError(f"The server did not answer within {timeout_s:.0f} s (log: {self.log})")
                on_wait(waited)
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def _spawn(self) -> TiedProcess:
        """Starts the process in a session of its own: stopping its group also stops scheduler and detokenizer."""
        with self.log.open("wb") as output:
            return TiedProcess(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self._health}", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def client(self, timeout_s: float = 600.0) -> Client:
        return Client(self.url, timeout_s)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended, or ends `within_s` from now. A dying process closes its streams first."""
        deadline = time.monotonic() + within_s
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def last_words(self) -> str:
        """The last line the server wrote: for a refused start, the sentence that says why."""
        return (self.log_tail(1) or ["it wrote nothing"])[0]

    def log_tail(self, count: int) -> list[str]:
        """The last `count` lines of the log that are not empty."""
        return [line.strip() for line in log_lines(self.log)[-count:]]

    def pause(self) -> None:
        """Stops all processes of the server until `resume`: a waiting scheduler would use a core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A paused server works within this block."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            _signal_group(self._process, number)

    def terminate(self) -> None:
        """Asks the server to end, and waits for nothing."""
        self.resume()
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """Terminates the server, which ends its children; kills the whole group if that takes over STOP_SECONDS."""
        if self._process is None:
            return
        self.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        try:
            while _group_alive(self._process):
                if time.monotonic() > deadline:
                    _signal_group(self._process, signal.SIGKILL)
                time.sleep(0.05)
        except BaseException:  # such as a second Ctrl-C: stop waiting, but leave no process behind
            _signal_group(self._process, signal.SIGKILL)
            raise
        self._process = None

    def let_go(self) -> None:
        """From now on the server outlives this process; nothing here stops it."""
        if self._process is not None:
            self._process.let_go()
            self._process = None

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stop_all(servers: Sequence[Server]) -> None:
    """Stops servers at the same time; all of them, even if one does not stop."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.terminate()


class RunningServer:
    """A server that somebody else started: nothing here starts or stops it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self, timeout_s: float = 600.0) -> Client:
        return Client(self.url, timeout_s)

    def ended(self, within_s: float = 0.0) -> bool:
        return False

    def last_words(self) -> str:
        return f"{self.url} does not answer any more"


def _group_alive(process: TiedProcess) -> bool:
    process.poll()  # reap the leader, or it stays in its group as a zombie
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(process: TiedProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_port() -> int:
    """A free port below Linux's ephemeral ports: the server opens dozens of those before it binds this one."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No port from {PORTS.start} to {PORTS.stop - 1} is free.")
