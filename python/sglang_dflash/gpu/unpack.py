"""Verifies a bundle's parts and extracts the complete wheels.

Standard library only, because it is copied into the bundle.

Usage: python3 unpack.py check DIR           lists missing parts; fails if a part is corrupted
       python3 unpack.py extract DIR TARGET  writes the complete wheels to TARGET, prints their names in order
       python3 unpack.py state DIR           prints what works with the parts that are there
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 20


class Bundle:
    """The parts of one folder, read as one stream with holes where parts are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        except ValueError:
            raise SystemExit(f"error: {folder / 'manifest.json'} is corrupted; copy it again.") from None
        self.part_bytes: int = self.manifest["part_bytes"]

    def missing(self) -> list[str]:
        return [part["name"] for part in self.manifest["parts"] if not (self.folder / part["name"]).exists()]

    def corrupted(self) -> list[str]:
        """Parts that exist but do not match the manifest."""
        return [
            part["name"]
            for part in self.manifest["parts"]
            if (path := self.folder / part["name"]).exists()
            and (path.stat().st_size != part["bytes"] or _sha256(path) != part["sha256"])
        ]

    def whole_files(self) -> list[dict[str, Any]]:
        """Files with no missing part, in the order of the bundle."""
        absent = {int(name.removeprefix("part-")) for name in self.missing()}
        return [file for file in self.manifest["files"] if not absent & set(self._parts_of(file))]

    def files_of(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        return [file for file in self.manifest["files"] if file["group"] in groups]

    def parts_of(self, groups: Sequence[str]) -> list[str]:
        """Names of the parts that hold these groups, in order."""
        numbers = {number for file in self.files_of(groups) for number in self._parts_of(file)}
        return [f"part-{number:03}" for number in sorted(numbers)]

    def _parts_of(self, file: dict[str, Any]) -> range:
        first = file["offset"] // self.part_bytes
        return range(first, (file["offset"] + max(file["bytes"], 1) - 1) // self.part_bytes + 1)

    def read(self, file: dict[str, Any]) -> Iterator[bytes]:
        offset, left = file["offset"], file["bytes"]
        while left:
            number, begin = divmod(offset, self.part_bytes)
            with (self.folder / f"part-{number:03}").open("rb") as part:
                part.seek(begin)
                chunk = part.read(min(CHUNK, left))
            assert chunk, f"part-{number:03} ends before {file['name']} does"
            offset, left = offset + len(chunk), left - len(chunk)
            yield chunk

    def extract(self, file: dict[str, Any], target: Path) -> Path:
        """Writes a wheel to `target`, decompressed if needed; checks the bundle file's checksum. Returns its path."""
        place = target / file["name"].removesuffix(".xz")
        unfinished = place.with_name(f"{place.name}.unfinished")
        digest, decompressor = hashlib.sha256(), lzma.LZMADecompressor()
        with unfinished.open("wb") as out:
            for chunk in self.read(file):
                digest.update(chunk)
                out.write(decompressor.decompress(chunk) if file["name"].endswith(".xz") else chunk)
        if digest.hexdigest() != file["sha256"]:
            unfinished.unlink()
            raise SystemExit(f"error: {file['name']} does not match the manifest; copy its parts again.")
        os.replace(unfinished, place)
        return place

    def states(self) -> list[tuple[str, int, int, str]]:
        """Per group: its name, its complete files, all its files, and what works with it."""
        whole = {file["name"] for file in self.whole_files()}
        rows = []
        for group in self.manifest["groups"]:
            names = [file["name"] for file in self.files_of([group["name"]])]
            rows.append((group["name"], sum(name in whole for name in names), len(names), group["works"]))
        return rows


def stamp(file: dict[str, Any]) -> str:
    """Name of the empty file that the shell script leaves in VENV/.bundle/installed for an installed wheel."""
    return f"{file['name']}-{file['sha256'][:16]}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(bundle: Bundle) -> None:
    running = "{}.{}".format(*sys.version_info)
    if running != bundle.manifest["python"]:
        raise SystemExit(f"error: the bundle is for Python {bundle.manifest['python']}; this is {running}.")
    _check_platform(bundle.manifest["platform"])
    missing, corrupted = bundle.missing(), bundle.corrupted()
    if missing:
        print(f"missing: {', '.join(missing)} (of {len(bundle.manifest['parts'])} parts)", flush=True)
    if corrupted:
        raise SystemExit(f"error: corrupted, copy again: {', '.join(corrupted)}.")


def _check_platform(tag: str) -> None:
    """Checks a tag such as manylinux_2_39_x86_64. Another processor is an error; an older glibc is only reported,
    because most wheels need less."""
    _, major, minor, machine = tag.split("_", 3)
    if platform.system() != "Linux" or platform.machine() != machine:
        here = f"{platform.system()} on {platform.machine()}"
        raise SystemExit(f"error: the bundle is for Linux on {machine} ({tag}); this is {here}.")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split(".")[:2])) < (int(major), int(minor)):
        print(f"the bundle is for glibc {major}.{minor}, this machine has {version}: pip refuses wheels that need more")


def state(bundle: Bundle) -> None:
    complete = True
    for name, whole, total, works in bundle.states():
        complete = complete and whole == total
        print(f"{'works' if complete else 'not yet':8} {name}: {whole} of {total} wheels; {works}")


def main(command: str, folder: str, target: str = "") -> None:
    bundle = Bundle(Path(folder))
    if command == "check":
        check(bundle)
    elif command == "state":
        state(bundle)
    elif command == "extract":
        place = Path(target)
        installed = {path.name for path in (place / "installed").glob("*")}
        for file in bundle.whole_files():
            if stamp(file) not in installed:
                print(bundle.extract(file, place), stamp(file), sep="\t", flush=True)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:4])
