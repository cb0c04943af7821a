"""What is quoted of a server's log, where a command says why the server ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.serving import last_error

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (TRACEBACK + "ValueError: the flag is wrong\nstopping: now\n", "ValueError: the flag is wrong"),
        (TRACEBACK + "a.b.OddError: first\n" + TRACEBACK + "KeyError: 'second'\n", "KeyError: 'second'"),
        (
            TRACEBACK + "ImportError: \n\n[ops] no library was found\n- tried x\n",
            "ImportError: [ops] no library was found",
        ),
        (TRACEBACK + "ImportError:\n", "ImportError:"),
        ("loading weights\nkilled\n\n", "killed"),
        ("", "it wrote nothing"),
        (None, "it wrote nothing"),
    ],
)
def test_the_sentence_that_says_why(log: str | None, said: str, tmp_path: Path) -> None:
    """Fails where an earlier line, a later one that names no error, or an error without its message is quoted."""
    path = tmp_path / "server.log"
    if log is not None:
        path.write_text(log)
    assert last_error(path) == f"{said} (log: {path})"
