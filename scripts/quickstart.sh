#!/usr/bin/env bash
# From a fresh clone to streamed answers: installs the package, serves the embedded pair with DFLASH, compares with
# speculation off. --keep leaves a server running.
# Usage: bash scripts/quickstart.sh [--keep]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" ""
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
