"""Tiny wheels and bundles, made without a network."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.offline import parts, resolve, wheels

PYTHON = "{}.{}".format(*sys.version_info)
TAG = f"manylinux_2_17_{platform.machine()}"
PART_BYTES = 4000


def make_wheel(
    folder: Path, name: str, files: dict[str, bytes], tag: str = "py3-none-any", version: str = "1.0"
) -> Path:
    info = f"{name}-{version}.dist-info"
    content = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    rows = [
        (path, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), len(data))
        for path, data in content.items()
    ]
    record = io.StringIO()
    csv.writer(record).writerows([*rows, (f"{info}/RECORD", "", "")])
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(place, "w") as out:
        for path, data in content.items():
            out.writestr(path, data)
        out.writestr(f"{info}/RECORD", record.getvalue())
    return place


def noise(size: int, seed: int) -> bytes:
    return hashlib.shake_256(bytes([seed])).digest(size)


def bundle_writer(folder: Path, contents: dict[str, tuple[str, dict[str, bytes]]]) -> Callable[[], dict[str, Any]]:
    """A function that writes `folder`/bundle, in parts of PART_BYTES, and returns its manifest.

    Args:
        contents: distribution -> its group and its files. Wheels of more than 9 kB are compressed.
    """
    wheels.XZ_FROM_BYTES, before = 9000, wheels.XZ_FROM_BYTES
    files = []
    for name, (group, content) in contents.items():
        packed = wheels.pack(make_wheel(folder / "wheels", name, content), folder / "packed", lambda path: True)
        files.append(parts.BundleFile(packed, group, name, "1.0"))
    wheels.XZ_FROM_BYTES = before
    target = resolve.Target(PYTHON, TAG)
    return lambda: parts.write_bundle(files, folder / "bundle", PART_BYTES, target, {"dd": "unneeded"})
