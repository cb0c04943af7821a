"""How the commands for GPU machines end: errors and signals become exit codes. Standard library only."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


def exit_code(main: Callable[[], int], stopped: str = "", error_code: int = 2) -> int:
    """Runs `main` and returns its exit code.

    SIGTERM ends it as Ctrl-C does, so that what was measured is kept.

    Args:
        stopped: the sentence for an interruption, whose exit code is 130.
        error_code: the exit code of a ValueError, which is printed as one sentence.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return error_code
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
