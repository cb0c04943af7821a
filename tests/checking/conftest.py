"""Puts the planted bugs on the import path."""

import sys
from pathlib import Path

PLANTED = Path(__file__).parent / "planted"
sys.path.insert(0, str(PLANTED))
