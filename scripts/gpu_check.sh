#!/usr/bin/env bash
# Our worker in SGLang on a GPU, in stages of less than ten minutes that go on where they stopped: right, how fast, how many launches.
# Usage: bash scripts/gpu_check.sh [--list] [--stage NAME] [--budget-s 540] [--output DIR]; SGLANG_DFLASH_PYTHON names the Python (default python3).
set -euo pipefail
exec "${SGLANG_DFLASH_PYTHON:-python3}" "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/gpu_check.py" "$@"
