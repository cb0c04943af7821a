#!/usr/bin/env bash
# Fuzzes a DFLASH server of the embedded pair, which must stay up, and whose answers must be right or refusals.
# Usage: bash scripts/fuzz.sh [--requests N] [--seed N] [--fields]
#   (nothing)  2,000 requests with random parameters, some invalid, some aborted, compared with speculation off
#   --fields   extreme values in every field of 19 endpoints; the report names the request that did harm
# The last line on standard output is JSON. Exit codes: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
export PYTHONPATH="$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m fuzz "$@"
