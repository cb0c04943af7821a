#!/usr/bin/env bash
# Runs the tests. Usage: bash scripts/test.sh [--quick | --families | --matrix] [pytest arguments]
#   (nothing)  all usual tests: those without servers, then those with servers, each server in one of two processes
#   --quick    the tests without servers, but for the slow ones
#   --families all target families under all settings; leaves a table in build/families.md
#   --matrix   only the long matrices, which no other run includes; each leaves a table in build/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # or each of some hundred processes would compile the package anew

SERVERS="tests/e2e tests/families tests/rehearsal tests/checking tests/doctor" # tests/conftest.py holds tests with servers to them
USUAL="not matrix and not families and not cuda"
case "${1:-}" in
    --quick)
        shift
        exec "$PYTHON" -m pytest -m "not server and not slow and $USUAL" -n 2 --dist worksteal "$@"
        ;;
    --families)
        shift
        exec "$PYTHON" -m pytest -m "server or families" -n 2 --dist loadgroup --no-loadscope-reorder tests/families "$@"
        ;;
    --matrix)
        shift
        exec "$PYTHON" -m pytest -m matrix "$@"
        ;;
esac
if [ $# -gt 0 ]; then # somebody looks for certain tests
    exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m pytest -m "not server and $USUAL" -n 2 --dist worksteal --durations=15
exec "$PYTHON" -m pytest -m "server and $USUAL" -n 2 --dist loadgroup --no-loadscope-reorder --durations=40 $SERVERS
