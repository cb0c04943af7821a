#!/usr/bin/env bash
# Checks our worker in SGLang on a GPU: tokens, step times, launches per step. A call takes less than ten minutes; the
# next call resumes.
# Usage: bash scripts/gpu_check.sh [--list] [--stage NAME] [--budget-s 540] [--output DIR]
# SGLANG_DFLASH_PYTHON names the Python (default python3).
set -euo pipefail
exec "${SGLANG_DFLASH_PYTHON:-python3}" "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/gpu_check.py" "$@"
