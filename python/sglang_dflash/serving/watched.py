"""Starts a command that ends when its starter does, however that one ends.

`python -I -S watched.py run PIPE COMMAND ...` starts a watcher, then becomes COMMAND: it keeps its pid, its group and
its exit code. PIPE is the read end of a pipe whose write end only the starter has. At its end of file the watcher ends
COMMAND's group. A byte before that lets COMMAND go on alone.

Run by path and with the standard library alone, since COMMAND may belong to another environment.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

LOOK_S = 2.0  # between looks whether the group has ended by itself
GRACE_S = 10.0  # from SIGTERM to SIGKILL


def run(pipe: int, command: list[str]) -> None:
    group = os.getpid()
    between = os.fork()
    if between == 0:
        os.setsid()  # neither a terminal nor whoever stops or kills the group reaches the watcher
        if os.fork() == 0:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):  # whoever reads COMMAND's output must see its end
                os.dup2(nowhere, stream)
            os.set_inheritable(pipe, True)
            # Its command line shows what it is; a mere fork would show COMMAND's.
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "watch", str(pipe), str(group)])
        os._exit(0)  # so that the watcher is no child of COMMAND
    os.waitpid(between, 0)
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"OSError: {command[0]} cannot be run: {error.strerror}")


def watch(pipe: int, group: int) -> None:
    """Waits for the end of the starter or of the group."""
    while not select.select([pipe], [], [], LOOK_S)[0]:
        if not _send(group, 0):
            return
    if not os.read(pipe, 1):
        end(group)


def end(group: int) -> None:
    """Ends all processes of a group, stopped ones, too. Its leader may first end the others."""
    with contextlib.suppress(ProcessLookupError):  # the leader may have ended before the others
        os.kill(group, signal.SIGTERM)
    alive = _send(group, signal.SIGCONT)
    deadline = time.monotonic() + GRACE_S
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = _send(group, 0)
    _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    """False where the group has no process left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(int(sys.argv[2]), sys.argv[3:])
    else:
        watch(int(sys.argv[2]), int(sys.argv[3]))
