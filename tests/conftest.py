"""What all tests share: servers run uncompiled where a test does not ask, because compiling takes seconds a start."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_DFLASH_COMPILE", "0")
