"""Cuts a bundle's files into parts of a given size, with checksums; keeps existing parts that are correct."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.offline.contents import GROUPS
from tools.offline.resolve import Target, sha256

CHUNK = 1 << 20
UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A packed wheel and where it belongs."""

    path: Path
    group: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Span:
    """Where a file lies in the joined parts. `offset` and `bytes` are in bytes."""

    name: str
    group: str
    distribution: str
    version: str
    offset: int
    bytes: int
    sha256: str


def read_size(text: str) -> int:
    """Parses `60MiB`, `64MB` or `1000` into bytes."""
    digits = text.rstrip("KMGiBkmgb")
    unit = text[len(digits) :].upper()
    if not digits.isdecimal() or unit not in UNITS or int(digits) == 0:
        raise ValueError(f"--part-size {text!r}: give a number of bytes, or one with a unit, as in 60MiB.")
    return int(digits) * UNITS[unit]


def write_bundle(
    files: Sequence[BundleFile], folder: Path, part_size: int, target: Target, left_out: dict[str, str]
) -> dict[str, Any]:
    """Writes part-000, part-001, ... and manifest.json into `folder`; returns the manifest.

    Args:
        files: already in the order of the groups.
        left_out: distribution -> why the bundle does not contain it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spans, offset = [], 0
    for file in files:
        size = file.path.stat().st_size
        origin = (file.group, file.distribution, file.version)
        spans.append(Span(file.path.name, *origin, offset, size, sha256(file.path)))
        offset += size
    parts = []
    for number, pieces in enumerate(_cut([file.path for file in files], spans, part_size)):
        parts.append(_write_part(folder / f"part-{number:03}", pieces))
    for stale in folder.glob("part-*"):
        if stale.name not in {part["name"] for part in parts}:
            stale.unlink()
    manifest = {
        "format": 1,
        "python": target.python,
        "platform": target.platform,
        "part_bytes": part_size,
        "groups": [
            asdict(group) | {"bytes": sum(s.bytes for s in spans if s.group == group.name)}
            for group in GROUPS
            if any(span.group == group.name for span in spans)
        ],
        "files": [asdict(span) for span in spans],
        "parts": parts,
        "left_out": dict(sorted(left_out.items())),
    }
    unfinished = folder / "manifest.json.unfinished"
    unfinished.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(unfinished, folder / "manifest.json")
    return manifest


Piece = tuple[Path, int, int]
"""A file, the offset in it, and the number of bytes to take."""


def _cut(paths: Sequence[Path], spans: Sequence[Span], part_size: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    room = part_size
    for path, span in zip(paths, spans, strict=True):
        begin = 0
        while begin < span.bytes:
            taken = min(room, span.bytes - begin)
            pieces.append((path, begin, taken))
            begin, room = begin + taken, room - taken
            if room == 0:
                yield pieces
                pieces, room = [], part_size
    if pieces:
        yield pieces


def _read(pieces: list[Piece]) -> Iterator[bytes]:
    for path, begin, size in pieces:
        with path.open("rb") as file:
            file.seek(begin)
            while size:
                chunk = file.read(min(CHUNK, size))
                assert chunk, f"{path} became shorter while it was read"
                size -= len(chunk)
                yield chunk


def _write_part(place: Path, pieces: list[Piece]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for chunk in _read(pieces):
        digest.update(chunk)
    entry = {"name": place.name, "bytes": sum(piece[2] for piece in pieces), "sha256": digest.hexdigest()}
    if not (place.exists() and place.stat().st_size == entry["bytes"] and sha256(place) == entry["sha256"]):
        unfinished = place.with_name("unfinished")
        with unfinished.open("wb") as out:
            for chunk in _read(pieces):
                out.write(chunk)
        os.replace(unfinished, place)
    return entry
