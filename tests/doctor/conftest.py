"""Puts the changed models of the end-to-end tests and the planted drafts on the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]
