#!/usr/bin/env bash
# Checks style, types and shell syntax: ruff check, ruff format, mypy on core, ops, host and sglang_cpu, bash -n.
# --fix applies ruff's fixes first.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
cd "$ROOT"
if [ "${1:-}" = "--fix" ]; then
    "$PYTHON" -m ruff check --fix .
    "$PYTHON" -m ruff format .
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
for script in scripts/*.sh .ci/run; do
    bash -n "$script"
done
