#!/usr/bin/env bash
# The native ops under AddressSanitizer and UndefinedBehaviorSanitizer, built into a folder of their own; their tests run against that build.
# Usage: bash scripts/sanitize.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
cd "$ROOT"
CXX="${CXX:-c++}"
FOLDER="$ROOT/build/sanitized"
SGLANG_DFLASH_SANITIZE=address,undefined "$PYTHON" setup.py -q build_ext --build-lib "$FOLDER" --build-temp "$FOLDER/objects"
SGLANG_DFLASH_NATIVE_LIBRARY="$(echo "$FOLDER"/sglang_dflash/ops/_native*.so)"
# Python is not sanitized, so that the runtimes must be loaded first. It and torch keep memory until the end on purpose:
# detect_leaks=0. A finding ends the tests; ASan does so by itself, UBSan is told to.
export SGLANG_DFLASH_NATIVE_LIBRARY LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so)"
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
for isa in "" scalar; do
    SGLANG_DFLASH_ISA="$isa" "$PYTHON" -m pytest -p no:cacheprovider tests/ops/test_native_{attention,linear,rows}.py "$@"
done
