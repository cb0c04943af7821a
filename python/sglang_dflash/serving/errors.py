"""Turns errors into a sentence and an exit code, in one place for every command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from sglang_dflash.serving.lifetime import stoppable, stopped_by

EXTRAS = {"accelerate": "train", "datasets": "bench,train", "matplotlib": "bench,train", "pandas": "bench"}
"""Package -> the extras of setup.py that bring it; serving needs none of them."""


class ServerError(RuntimeError):
    """A server did not start, stopped answering, or died. The message is one sentence."""


def exit_code(run: Callable[[], int | None], code: int) -> int:
    """Runs a command; an error becomes one line on standard error. SGLANG_DFLASH_TRACEBACK=1 raises it instead.

    SIGTERM, SIGHUP and Ctrl-C end the command and its servers; then the exit code is 128 and the signal's number.

    Args:
        run: returns the exit code, None for 0.
        code: the exit code of an error.
    """
    try:
        with stoppable():
            return run() or 0
    except (ValueError, OSError, ImportError, ServerError, httpx.HTTPError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK") or (isinstance(error, ImportError) and not _extra(error)):
            raise
        print(f"error: {_extra(error) or sentence(error)}", file=sys.stderr)
        return code
    except KeyboardInterrupt as error:
        stopped = stopped_by(error)
        if stopped.said:
            print(stopped.said, file=sys.stderr)
        return 128 + stopped.number


def sentence(error: object, most: int | None = None) -> str:
    """The error on one line, at most `most` characters; its kind if it says nothing."""
    return " ".join((str(error) or type(error).__name__).split())[:most]


def first_line(error: object) -> str:
    """The error's first line; its kind if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _extra(error: BaseException) -> str:
    """The sentence about a package that an extra brings; "" for other errors."""
    name = (getattr(error, "name", None) or "").split(".")[0] if isinstance(error, ImportError) else ""
    if name not in EXTRAS:
        return ""
    extras = EXTRAS[name]
    return f"This command needs {name}, which is not installed; run: pip install 'sglang-dflash[{extras}]'"


def last_error(log: Path) -> str:
    """The sentence in a server's log that tells best why it ended, and where the log is."""
    lines = [line.strip() for line in log_lines(log)] or ["it wrote nothing"]
    last = max((place for place, line in enumerate(lines) if _names_error(line)), default=len(lines) - 1)
    message_follows = lines[last].endswith(":")  # it begins with an empty line
    return f"{' '.join(lines[last : last + 1 + message_follows])} (log: {log})"


def log_lines(log: Path) -> list[str]:
    """The lines of a log that are not blank; none if there is no log."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return [line for line in text.splitlines() if line.strip()]


def _names_error(line: str) -> bool:
    """Such as `ValueError: ...`, the last line of a traceback."""
    name, colon, _ = line.partition(":")
    return bool(colon) and name.split(".")[-1].endswith(("Error", "Exception")) and " " not in name
