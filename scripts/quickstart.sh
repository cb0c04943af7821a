#!/usr/bin/env bash
# From a fresh clone to streamed answers: installs the package, then runs `sglang-dflash quickstart`.
# Usage: bash scripts/quickstart.sh [--keep] [--pair smollm2|tiny|hybrid]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" "bench,train"
exec "$PYTHON" -m sglang_dflash.cli quickstart "$@"
