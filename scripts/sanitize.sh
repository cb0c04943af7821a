#!/usr/bin/env bash
# Builds the native ops with AddressSanitizer and UndefinedBehaviorSanitizer, then runs their tests on that build.
# Usage: bash scripts/sanitize.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" dev
cd "$ROOT"
CXX="${CXX:-c++}"
SGLANG_DFLASH_NATIVE_LIBRARY="$(
    SGLANG_DFLASH_SANITIZE=address,undefined "$PYTHON" -P python/sglang_cpu/ops/build_native.py
)"
# Python is not sanitized, so the sanitizer runtimes must be preloaded. detect_leaks=0: Python and torch keep memory
# until exit on purpose. A finding ends the tests: ASan's default; UBSan needs halt_on_error=1.
export SGLANG_DFLASH_NATIVE_LIBRARY LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so)"
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
TESTS=(
    tests/cpu/test_native_{attention,linear,rows}.py
    tests/cpu/test_{experts,recurrent,selective_scan}.py
    tests/ops/test_{best_log_probs,native_acceptance}.py
)
for isa in "" scalar; do
    SGLANG_DFLASH_ISA="$isa" "$PYTHON" -m pytest -p no:cacheprovider "${TESTS[@]}" "$@"
done
