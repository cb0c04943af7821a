"""Which SGLang we are made for, and which DFLASH worker the user asked for."""

from __future__ import annotations

import os
from importlib import metadata

SUPPORTED_SGLANG = "0.5.23"
WORKER_VARIABLE = "SGLANG_DFLASH_WORKER"


def builtin_worker_requested() -> bool:
    """True where `SGLANG_DFLASH_WORKER=builtin` asks for SGLang's own worker.

    Raises:
        SystemExit: the variable holds something else than `builtin` or `plugin`.
    """
    choice = os.environ.get(WORKER_VARIABLE, "plugin")
    if choice not in ("plugin", "builtin"):
        raise SystemExit(f"{WORKER_VARIABLE}={choice!r} is not known: use 'plugin' (ours, the default) or 'builtin'.")
    return choice == "builtin"


def require_supported_sglang() -> None:
    """Ends the process where the installed SGLang is not the pinned one: its internals move every release.

    Raises:
        SystemExit: another version is installed.
    """
    installed = metadata.version("sglang")
    if installed != SUPPORTED_SGLANG:
        raise SystemExit(
            f"sglang-dflash works with sglang=={SUPPORTED_SGLANG} and found {installed}: "
            f"install that version, or uninstall sglang-dflash."
        )
