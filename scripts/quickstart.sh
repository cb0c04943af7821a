#!/usr/bin/env bash
# From a fresh clone to streamed answers: installs the package, serves an embedded pair with DFLASH, compares with
# speculation off. --keep leaves a server running; --pair hybrid serves a Qwen3.5 pair instead of Qwen3.
# Usage: bash scripts/quickstart.sh [--keep] [--pair dense|hybrid]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" "bench,train"
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
