"""Rewrites wheels for the bundle: drops unneeded files, splits some off, thins libraries, compresses large wheels.

Two runs over the same wheel give the same bytes, so an aborted run can resume.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import lzma
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.offline.contents import GPU_ARCHITECTURE
from tools.offline.thin import thin

EPOCH = (1980, 1, 1, 0, 0, 0)
XZ_FROM_BYTES = 4_000_000
XZ_PRESET = 6  # a tenth smaller than with 2, in three times the time


def distribution_of(wheel: Path) -> str:
    return str(canonicalize_name(wheel.name.split("-")[0]))


def requirements(wheel: Path) -> bytes:
    """The wheel's Requires-Dist lines."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).splitlines()
    return b"\n".join(line for line in lines if line.startswith(b"Requires-Dist:"))


def is_pure(wheel: Path) -> bool:
    return all(tag.abi == "none" and tag.platform == "any" for tag in parse_wheel_filename(wheel.name)[3])


def pack(wheel: Path, folder: Path, keep: Callable[[str], bool]) -> Path:
    """The wheel as packed into the bundle: `folder`/<its name>, or .whl.xz around a stored archive for large wheels.

    Args:
        keep: whether a file of the wheel is needed.
    """
    with zipfile.ZipFile(wheel) as source:
        whole = all(keep(name) for name in source.namelist())
    plain, packed = folder / wheel.name, folder / f"{wheel.name}.xz"
    if plain.exists() or packed.exists():
        return plain if plain.exists() else packed
    folder.mkdir(parents=True, exist_ok=True)
    if wheel.stat().st_size < XZ_FROM_BYTES:
        if whole:
            return _placed(plain, lambda part: _copy(wheel, part))
        return _placed(plain, lambda part: _rewrite(wheel, part, keep, zipfile.ZIP_DEFLATED))
    return _placed(packed, lambda part: _compress(wheel, part, keep))


def split_off(wheel: Path, folder: Path, suffix: str, keep: Callable[[str], bool]) -> Path:
    """Packs the files of `wheel` that `keep` accepts as a separate wheel, <distribution>-<suffix>; returns its path."""
    name, version, tags = wheel.name.removesuffix(".whl").split("-", 2)
    place = folder / f"{name}_{suffix}-{version}-{tags}.whl.xz"
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}_{suffix}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}-{suffix}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: sglang-dflash\nRoot-Is-Purelib: false\n"
        + "".join(f"Tag: {tag}\n" for tag in sorted(map(str, parse_wheel_filename(wheel.name)[3]))),
    }

    def write(part: Path) -> None:
        stored = part.with_suffix(".stored")
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as out:
            rows = [_copy_member(source, out, member) for member in source.infolist() if keep(member.filename)]
            for path, text in metadata.items():
                out.writestr(_member(path), text)
                rows.append((path, _digest(text.encode()), str(len(text.encode()))))
            _write_record(out, f"{info}/RECORD", rows)
        _xz(stored, part)

    return _placed(place, write)


def _placed(place: Path, write: Callable[[Path], None]) -> Path:
    """Writes `place` under another name and renames it, so that a file of that name is always complete."""
    part = place.with_name(f"{place.name}.unfinished")
    write(part)
    os.replace(part, place)
    return place


def _copy(wheel: Path, place: Path) -> None:
    shutil.copyfile(wheel, place)


def _compress(wheel: Path, place: Path, keep: Callable[[str], bool]) -> None:
    stored = place.with_suffix(".stored")
    _rewrite(wheel, stored, keep, zipfile.ZIP_STORED)
    _xz(stored, place)


def _xz(stored: Path, place: Path) -> None:
    with stored.open("rb") as source, lzma.open(place, "wb", preset=XZ_PRESET) as out:
        shutil.copyfileobj(source, out, 1 << 20)
    stored.unlink()


def _rewrite(wheel: Path, place: Path, keep: Callable[[str], bool], compression: int) -> None:
    """Copies the wheel with only the kept files and a matching RECORD."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(place, "w", compression) as out:
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        rows = [
            _copy_member(source, out, member)
            for member in source.infolist()
            if member.filename != record and not member.is_dir() and keep(member.filename)
        ]
        _write_record(out, record, rows)


def _copy_member(source: zipfile.ZipFile, out: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[str, str, str]:
    """Copies one file, a library without what the target machine never reads; returns its row of RECORD."""
    copied = _member(member.filename, member.external_attr)
    copied.compress_type = out.compression
    data = source.read(member)
    if ".so" in Path(member.filename).suffixes:
        data = thin(data, GPU_ARCHITECTURE)
    out.writestr(copied, data)
    return member.filename, _digest(data), str(len(data))


def _member(name: str, attributes: int = 0o644 << 16) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, EPOCH)
    member.external_attr = attributes
    return member


def _write_record(out: zipfile.ZipFile, record: str, rows: list[tuple[str, str, str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
    member = _member(record)
    member.compress_type = out.compression
    out.writestr(member, text.getvalue())


def _digest(data: bytes) -> str:
    return _encoded(hashlib.sha256(data).digest())


def _encoded(digest: bytes) -> str:
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
