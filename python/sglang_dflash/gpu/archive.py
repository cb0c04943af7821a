"""Writes files that are whole at any time; packs results and caches for the way back, and unpacks them.

Standard library only.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE_BYTES = 15 << 20  # of the 16 MiB that a file may have on its way back
CACHE_FILES = 3  # of the 8 files and 64 MiB that may come back
LOG_BYTES = 200_000  # the end of a log
GZIP_LEVEL = 1


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes the file under another name first, so that it is whole whenever this process is killed."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(draft, path)


def pack_results(folder: Path, commit: str, place: Path, suffixes: Iterable[str]) -> None:
    """Packs `folder`/DEVICE-COMMIT of every device: files with these suffixes, in this order. Traces stay behind."""
    folders = sorted(folder.glob(f"*-{commit}"))
    files = [path for suffix in suffixes for held in folders for path in sorted(held.rglob(f"*{suffix}"))]
    _pack(folder, files, place, FILE_BYTES)


def pack_caches(folder: Path, out: Path) -> int:
    """Writes `out`/caches-0-of-2, caches-1-of-2, ...; returns how many files did not fit."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    # Triton's are many and small; inductor's are the last to miss.
    files.sort(key=lambda path: ("inductor" in path.parts, "triton" not in path.parts))
    whole = folder.with_name("caches.tar.gz")
    left_out = _pack(folder, files, whole, CACHE_FILES * FILE_BYTES)
    chunks = list(cut(whole.read_bytes(), FILE_BYTES))
    for number, chunk in enumerate(chunks):
        write_whole(out / f"caches-{number}-of-{len(chunks)}", chunk)
    return left_out


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def _pack(folder: Path, files: Iterable[Path], place: Path, limit: int) -> int:
    """Writes the archive under another name first. Files beyond the limit are left out; returns their number."""
    draft = place.with_name(f"{place.name}.part")
    left_out = 0
    with draft.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=GZIP_LEVEL) as archive:
        for path in files:
            try:
                member, data = archive.gettarinfo(path, str(path.relative_to(folder))), path.read_bytes()
            except FileNotFoundError:  # a temporary file
                continue
            data = data[-LOG_BYTES:] if path.suffix == ".log" else data
            if raw.tell() + len(data) > limit - (64 << 10):  # what gzip still holds back
                left_out += 1
                continue
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    os.replace(draft, place)
    return left_out


def unpack(archive: Path, folder: Path, overwrite: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as held:
        for member in held:
            if overwrite or not (folder / member.name).exists():
                held.extract(member, folder, filter="data")
