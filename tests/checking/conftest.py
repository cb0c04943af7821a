"""Nothing but the way to the planted bugs."""

import sys
from pathlib import Path

PLANTED = Path(__file__).parent / "planted"
sys.path.insert(0, str(PLANTED))
