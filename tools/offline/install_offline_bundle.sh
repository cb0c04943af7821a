#!/usr/bin/env bash
# Installs an offline bundle into a venv that also sees the machine's own packages.
# Usage: bash install_offline_bundle.sh DIR VENV
# DIR holds manifest.json and some or all parts: complete wheels are installed; run it again when more parts are there.
# SGLANG_DFLASH_PYTHON names the Python whose packages the venv sees (default python3).
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}

[ $# -eq 2 ] || fail "usage: bash install_offline_bundle.sh DIR VENV"
BUNDLE="$(realpath "$1")"
VENV="$(realpath -m "$2")"
BASE="${SGLANG_DFLASH_PYTHON:-python3}"
[ -e "$BUNDLE/manifest.json" ] || fail "$BUNDLE has no manifest.json."
TOOLS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # unpack.py and complete.py lie beside this script in a bundle

"$BASE" "$TOOLS/unpack.py" check "$BUNDLE"
if [ ! -x "$VENV/bin/python" ]; then
    "$BASE" -m venv --system-site-packages --without-pip "$VENV"
fi
mapfile -t folders < <("$BASE" -c 'import site, sysconfig
print(*dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()]), sep="\n")')
"$VENV/bin/python" "$TOOLS/complete.py" paths "${folders[@]}"

SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
WHEELS="$VENV/.bundle"
mkdir -p "$WHEELS/installed"
"$BASE" "$TOOLS/unpack.py" extract "$BUNDLE" "$WHEELS" >"$WHEELS/new"
if [ -s "$WHEELS/new" ]; then
    mapfile -t wheels < <(cut -f1 "$WHEELS/new")
    "$BASE" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps \
        --no-compile --ignore-installed "${wheels[@]}" || fail "pip could not install the wheels in $WHEELS."
    while IFS=$'\t' read -r wheel stamp; do
        touch "$WHEELS/installed/$stamp"
        echo "installed $(basename "$wheel")"
        rm "$wheel"
    done <"$WHEELS/new"
    # On all cores here, instead of in pip or during the first server start. `|| true`: some packages contain files that
    # are not Python 3.
    "$VENV/bin/python" -m compileall -qq -j 0 "$SITE" || true
fi
if [ -d "$SITE/torch" ]; then
    "$VENV/bin/python" "$TOOLS/complete.py" nccl
    "$VENV/bin/python" "$TOOLS/complete.py" torch
fi
"$BASE" "$TOOLS/unpack.py" state "$BUNDLE"
echo "source $VENV/bin/activate"
