"""How the scripts of the kit end when they are told to. Standard library only."""

from __future__ import annotations

import signal
from types import FrameType


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that what was measured is kept."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
