#!/usr/bin/env bash
# From a fresh clone to streamed answers: installs, serves the embedded pair with DFLASH, compares with it off.
# Usage: bash scripts/quickstart.sh [--keep]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" ""
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
