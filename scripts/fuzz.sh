#!/usr/bin/env bash
# Random requests against the embedded pair under DFLASH. Usage: bash scripts/fuzz.sh [--fields] [--requests N] [--seed S]
#   (nothing)  random parameters, some invalid, some aborted; answers are compared with speculation off
#   --fields   extreme values in every field of 15 endpoints; the server must survive
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" "bench,train"
exec "$PYTHON" "$ROOT/scripts/fuzz.py" "$@"
