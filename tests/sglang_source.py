"""Where the source of the installed SGLang is, for tests that read it without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_FOUND = find_spec("sglang")
assert _FOUND is not None and _FOUND.submodule_search_locations is not None, "SGLang is not installed"
SGLANG = Path(_FOUND.submodule_search_locations[0])
