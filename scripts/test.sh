#!/usr/bin/env bash
# Runs the tests. Usage: bash scripts/test.sh [--quick] [pytest arguments]; --quick leaves the servers out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
cd "$ROOT"
if [ "${1:-}" = "--quick" ]; then
    shift
    set -- -m "not server" "$@"
fi
exec "$PYTHON" -m pytest "$@"
