"""How commands end: signals unwind them, so that they stop their servers, and no server outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_WATCHED = str(Path(__file__).with_name("watched.py"))
_REPEATS_S = 5.0
Handler = Callable[[int, FrameType | None], None]


class Stopped(KeyboardInterrupt):
    """A signal told this process to end.

    Args:
        number: of the signal.
        said: the sentence for the user; empty if the user has it already.
    """

    def __init__(self, number: int, said: str = "stopped; no server of ours was left running") -> None:
        super().__init__(number)
        self.number, self.said = number, said


def stopped_by(error: KeyboardInterrupt) -> Stopped:
    """The signal behind an interrupt; Ctrl-C comes as a plain one."""
    return error if isinstance(error, Stopped) else Stopped(signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises KeyboardInterrupt.

    SIGHUP stays ignored where it was (nohup), and so does Ctrl-C (a background job of a shell); SIGTERM does not.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled(stop, signal.SIGTERM, signal.SIGHUP):
        yield


@dataclass(slots=True)
class Held:
    """The signal that came in a `held_back` block; 0 if none did."""

    number: int = 0


@contextmanager
def held_back() -> Iterator[Held]:
    """In this block the first signal, also Ctrl-C, is noted alone, so that work can come to an orderly end. A second
    one raises."""
    held, since = Held(), 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal since
        now = time.monotonic()
        # Ctrl-C reaches a process under torchrun twice: from the terminal, and from torchrun, which passes it on.
        if held.number and now - since > _REPEATS_S:
            raise Stopped(number)
        if not held.number:
            held.number, since = number, now

    with _handled(note, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        yield held


@contextmanager
def _handled(handler: Handler, *numbers: int) -> Iterator[None]:
    """Only the main thread has handlers; in others this does nothing."""
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former or signal.SIG_DFL)


class TiedProcess(subprocess.Popen):  # type: ignore[type-arg]
    """A process in a session of its own. Its whole group ends with this process, also if this one is killed."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        read, write = os.pipe()
        self._tie = os.fdopen(write, "wb", buffering=0)
        run = [sys.executable, "-I", "-S", _WATCHED, "run", str(read)]
        try:
            super().__init__([*run, *command], pass_fds=(read,), start_new_session=True, **options)
        finally:
            os.close(read)

    def let_go(self) -> None:
        """From now on the process outlives this one."""
        self._tie.write(b".")
        self._tie.close()

    def end(self) -> None:
        """Kills the group, unless the command has ended already."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
