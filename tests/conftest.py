"""For all tests: steps are compared with a reference's, so blocks are whole unless a test asks for other widths."""

from __future__ import annotations

import os

os.environ["SGLANG_DFLASH_WIDTH"] = "full"
