# Creates or reuses the virtual environment and sets PYTHON to its interpreter. The other scripts source it.
# Usage: set -euo pipefail; source scripts/venv.sh [extras], e.g. "bench,train" or "dev", which includes all others.
# Folder: SGLANG_DFLASH_VENV, else .venv in this repository.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$(realpath -m "${SGLANG_DFLASH_VENV:-$ROOT/.venv}")"
NEEDED_GB=12

fail() {
    echo "error: $*" >&2
    exit 1
}

right_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in "${SGLANG_DFLASH_PYTHON:-}" python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && right_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 or 3.12 with the venv module; install one, or set SGLANG_DFLASH_PYTHON to it."
}

install_package() {
    "$PYTHON" -m pip install -e "$ROOT${1:+[$1]}" && "$PYTHON" -c 'import sglang, sglang_dflash'
}

# The native ops are built in a fresh environment and whenever their sources change, into a cache. A GPU does without.
build_native() {
    if [ "${SGLANG_DFLASH_BUILD_NATIVE:-1}" != 0 ] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
        "$PYTHON" -P "$ROOT/python/sglang_cpu/ops/build_native.py" >/dev/null ||
            fail "could not build the native ops; SGLANG_DFLASH_BUILD_NATIVE=0 leaves them out."
    fi
}

make_venv() {
    local extras="$1" key stamp python place free_kb
    # The stamp identifies the requirements (in setup.py) and this folder, to which the installed package links.
    key="$(cat "$ROOT/setup.py" <(echo "$ROOT") | sha256sum | cut -c1-16)"
    stamp="$key${extras:+-$extras}"
    PYTHON="$VENV/bin/python"
    if [ -e "$VENV/sglang-dflash-$stamp" ] || [ -e "$VENV/sglang-dflash-$key-dev" ]; then
        return
    fi
    command -v cc >/dev/null || command -v gcc >/dev/null || fail "found no C compiler (cc or gcc); install one."
    place="$(dirname "$VENV")"
    mkdir -p "$place" || fail "cannot create $place."
    if ! "$PYTHON" -c 'from importlib.metadata import version; version("sglang")' 2>/dev/null; then
        free_kb="$(df -Pk "$place" | awk 'NR == 2 { print $4 }')"
        [ "$free_kb" -ge $((NEEDED_GB * 1024 * 1024)) ] ||
            fail "$place has $((free_kb / 1024 / 1024)) GB free; the environment needs $NEEDED_GB GB (set SGLANG_DFLASH_VENV to use another folder)."
    fi
    if ! right_python "$PYTHON"; then
        [ ! -e "$VENV" ] || fail "$VENV exists, but its Python is not 3.11 or 3.12; remove it."
        python="$(find_python)" || exit 1
        echo "Creating the environment $VENV ..."
        "$python" -m venv "$VENV" || fail "$python could not create $VENV."
    fi
    echo "Installing sglang-dflash and SGLang into $VENV (11 GB, about 6 minutes the first time) ..."
    if ! install_package "$extras" 2>&1 | tee "$VENV/pip.log" |
        awk '/^(Collecting|  Downloading|Installing|Successfully)/ { printf "\r\033[K  %.100s", $0; fflush() } END { print "" }'; then
        fail "installation failed; see $VENV/pip.log."
    fi
    rm -f "$VENV"/sglang-dflash-*
    touch "$VENV/sglang-dflash-$stamp"
}

make_venv "${1:-}"
build_native
