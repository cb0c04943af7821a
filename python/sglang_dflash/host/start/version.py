"""The SGLang release that we support, and the DFLASH worker that the user asked for."""

from __future__ import annotations

import os
from importlib import metadata

SUPPORTED_SGLANG = "0.5.23"
WORKER_VARIABLE = "SGLANG_DFLASH_WORKER"


def builtin_worker_requested() -> bool:
    """True if `SGLANG_DFLASH_WORKER=builtin` asks for SGLang's own worker.

    Raises:
        SystemExit: the variable is neither `builtin` nor `plugin`.
    """
    choice = os.environ.get(WORKER_VARIABLE, "plugin")
    if choice not in ("plugin", "builtin"):
        raise SystemExit(f"{WORKER_VARIABLE}={choice!r} is not known: use 'plugin' (ours, the default) or 'builtin'.")
    return choice == "builtin"


def serves_dflash() -> bool:
    """Whether this server decodes with DFLASH. Hooks are in place with other algorithms, and without one, too."""
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm == "DFLASH")


def require_supported_sglang() -> None:
    """Ends the process if the installed SGLang is not the pinned release: its internals change in every release.

    Raises:
        SystemExit: another version is installed.
    """
    installed = metadata.version("sglang")
    if installed != SUPPORTED_SGLANG:
        raise SystemExit(
            f"sglang-dflash needs sglang=={SUPPORTED_SGLANG}, but {installed} is installed: "
            f"install that version, or uninstall sglang-dflash."
        )
