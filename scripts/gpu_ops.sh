#!/usr/bin/env bash
# Checks and times our GPU ops with the machine's own torch and Triton, and measures the lowest time of a step.
# Needs no SGLang, installs nothing.
# Usage: bash scripts/gpu_ops.sh [--output DIR] [--dry-run] [--stages NAME...]
# SGLANG_DFLASH_PYTHON names the Python (default python3).
set -euo pipefail
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/../python" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
exec "${SGLANG_DFLASH_PYTHON:-python3}" -m sglang_dflash.gpu.ops "$@"
