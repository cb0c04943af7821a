#!/usr/bin/env bash
# Random requests, some invalid, some aborted, against the embedded pair under DFLASH. Usage: bash scripts/fuzz.sh [--requests N] [--seed S]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" ""
exec "$PYTHON" "$ROOT/scripts/fuzz.py" "$@"
