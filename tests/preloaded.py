"""Servers for tests that start in seconds: their processes are forked from one that has imported SGLang already.

A start of SGLang takes 40 s on two cores, and imports take 35 s of it: the launcher imports SGLang, and so does each
process that it spawns. Here one process, the zygote, imports SGLang once and stays single-threaded. Every server is a
fork of it that runs `sglang.launch_server` as usual. A process that SGLang spawns is a fork of the untouched zygote,
too. It gets its work by pickle, as a spawned process does, so it inherits nothing but imported modules.

The tests of the command line, of refused starts and of shutdown by SIGTERM start their servers as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import popen_fork, popen_forkserver, reduction, resource_tracker, spawn
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

from sglang_dflash.serving.server import LAUNCH_SGLANG, Server

CHILDREN = 4  # of one process: a scheduler per rank, or their controller, detokenizer, tokenizers
MODULES = (  # of sglang.srt
    "entrypoints.http_server",
    "managers.scheduler",
    "managers.detokenizer_manager",
    "managers.data_parallel_controller",
    "models.registry",
)
# Variables that are read while a module is imported: a server cannot have others.
ZYGOTE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Nursery:
    """Forks that wait, as they were when this process began, for what it will spawn."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(CHILDREN):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, sibling in self._waiting:
                    sibling.close()
                _wait_for_work(theirs)
            theirs.close()
            self._waiting.append((pid, ours))
        spawn_anew = SpawnProcess._Popen

        def popen(process: Any) -> Any:
            return _Popen(process, *self._waiting.pop()) if self._waiting else spawn_anew(process)

        SpawnProcess._Popen = staticmethod(popen)


class _Popen(popen_fork.Popen):
    """`popen_spawn_posix.Popen`, but the child is there already."""

    method = "spawn"
    DupFd = popen_forkserver._DupFd

    def __init__(self, process: Any, pid: int, child: socket.socket) -> None:
        self._fds: list[int] = []
        self.pid = pid
        self._child = child
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: Any) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process._name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, child_end = os.pipe()
        child_reads, we_write = os.pipe()
        fds = [child_reads, child_end, resource_tracker.getfd(), *self._fds]
        socket.send_fds(self._child, [len(fds).to_bytes(2, "big")], fds)
        self._child.close()
        os.close(child_reads)
        os.close(child_end)
        environment = json.dumps(dict(os.environ)).encode()  # as it is now: SGLang sets variables before it spawns
        with open(we_write, "wb", closefd=False) as stream:  # the child takes its closing for our end
            stream.write(len(environment).to_bytes(4, "big") + environment)
            stream.write(data.getbuffer())


def _wait_for_work(parent: socket.socket) -> None:
    """Becomes the process that the parent spawns; ends where it spawns none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, fds, *_ = socket.recv_fds(parent, 2, 64)
    if not message:
        os._exit(0)
    assert len(fds) == int.from_bytes(message, "big")
    parent.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work, _, resource_tracker._resource_tracker._fd, *inherited = fds
    environment = json.loads(_read(work, int.from_bytes(_read(work, 4), "big")))
    os.environ.clear()
    os.environ.update(environment)
    popen_forkserver.forkserver._forkserver._inherited_fds = inherited
    _run(lambda: spawn._main(work, os.dup(work)))


def _read(source: int, count: int) -> bytes:
    """So many bytes, and no more: what follows is another reader's."""
    found = b""
    while len(found) < count:
        found += os.read(source, count - len(found))
    return found


def _run(main: Callable[[], Any]) -> None:
    """Runs `main` with children of its own in waiting, and ends this process as Python ends one."""
    code: Any = 1
    try:
        Nursery()
        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _launch(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Becomes `python -m sglang.launch_server`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["sglang.launch_server", *arguments]
    _run(lambda: runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True))


def _zygote() -> None:
    """Imports SGLang, then forks a server for each line of standard input and answers with its pid."""
    sys.argv[1:] = ["--device", "cpu"]  # SGLang asks for it while it is imported
    sys.path[0] = os.getcwd()  # not the folder of the tests
    for module in MODULES:
        importlib.import_module(f"sglang.srt.{module}")
    importlib.import_module("torch._inductor.compile_fx")  # what compiled forwards need
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after the imports: a fork would lose all but one"
    gc.freeze()
    print("ready", flush=True)
    servers = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            servers.discard(pid)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _launch(**request)
        servers.add(pid)
        print(json.dumps(pid), flush=True)
    for pid in servers:  # the tests have ended without stopping them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


class Zygote:
    """The process that servers are forked from, started when the first one is."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **ZYGOTE_ENVIRONMENT},
                    start_new_session=True,  # Ctrl-C is for the tests, which then stop their servers through it
                )
                while (line := self._process.stdout.readline()) != "ready\n":
                    assert line, "the zygote ended; see above"
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the zygote ended; see above"
            return json.loads(answer)


ZYGOTE = Zygote()


class _Fork:
    """As much of `subprocess.Popen` as `Server` needs, for a server that the zygote has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = ZYGOTE.ask(poll=self.pid)
        return self._code

    def terminate(self) -> None:
        """At once: SGLang takes five seconds over SIGTERM, and nobody here waits for its answers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class PreloadedServer(Server):
    """A `Server` that starts in seconds. Its arguments must have `--device cpu`."""

    def _spawn(self) -> Any:
        arguments = self.command[len(LAUNCH_SGLANG) :]
        return _Fork(ZYGOTE.ask(arguments=arguments, environment=self._environment, log=str(self.log)))


if __name__ == "__main__":
    _zygote()
