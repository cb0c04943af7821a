"""Finds and downloads the wheels that a machine needs: pip resolves, installed packages are removed, pip downloads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that gets the bundle: its Python version (such as 3.12) and its newest platform tag."""

    python: str
    platform: str

    def platforms(self) -> list[str]:
        """All tags that the machine accepts. pip compares tags literally, so every older glibc is listed."""
        found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", self.platform)
        if not found:
            raise ValueError(f"--platform {self.platform!r}: expected a tag such as manylinux_2_39_x86_64.")
        newest, machine = int(found[1]), found[2]
        tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
        return [*tags, *(f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux"))]

    def pip_arguments(self) -> list[str]:
        platforms = [word for tag in self.platforms() for word in ("--platform", tag)]
        return ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python, *platforms]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A distribution of the closure: canonical name, version, sha256 of its wheel ("" if unknown), requirements."""

    name: str
    version: str
    sha256: str
    requires: tuple[str, ...]


def pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def build_own_wheel(root: Path, folder: Path) -> Path:
    """Builds this package's wheel under `folder`, or reuses it while the sources stay the same.

    The wheel is pure Python. It has no native ops, because they run on CPUs only and fit only the torch they are built
    with.
    """
    sources = [root / "setup.py", root / "README.md", *sorted((root / "python").rglob("*"))]
    digest = hashlib.sha256()
    for path in sources:
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    place = folder / digest.hexdigest()[:16]
    if not list(place.glob("*.whl")):
        pip("wheel", "--no-deps", "--wheel-dir", str(place), str(root), SGLANG_DFLASH_BUILD_NATIVE="0")
    (wheel,) = place.glob("*.whl")
    return wheel


def resolve(requirements: Sequence[str], target: Target, cache: Path) -> list[Resolved]:
    """All distributions that the requirements need on the target, as pip resolves them; read from `cache` if it exists.

    pip evaluates markers for the Python that runs it, so its version must be the target's.
    """
    if sys.version_info[:2] != tuple(map(int, target.python.split("."))):
        raise ValueError(f"Run this with Python {target.python}: pip resolves for the Python that runs it.")
    if not cache.exists():
        with tempfile.TemporaryDirectory() as folder:
            report, nowhere = Path(folder) / "report.json", Path(folder) / "target"
            pip(
                *("install", "--dry-run", "--ignore-installed", "--target", str(nowhere), "--report", str(report)),
                *target.pip_arguments(),
                *requirements,
            )
            cache.write_text(json.dumps([_entry(item) for item in json.loads(report.read_text())["install"]], indent=1))
    return [Resolved(e["name"], e["version"], e["sha256"], tuple(e["requires"])) for e in json.loads(cache.read_text())]


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    """What we keep of an entry of pip's report; where it came from is dropped."""
    archive = item["download_info"].get("archive_info", {})
    return {
        "name": canonicalize_name(item["metadata"]["name"]),
        "version": item["metadata"]["version"],
        "sha256": archive.get("hashes", {}).get("sha256", ""),
        "requires": item["metadata"].get("requires_dist", []),
    }


def read_preinstalled(path: Path) -> dict[str, str]:
    """Distribution -> version; "" if the list gives none, which counts as compatible with every requirement."""
    entries = {}
    for line in path.read_text().splitlines():
        entry = line.split("#")[0].strip()
        if entry:
            name, _, version = entry.partition("==")
            entries[str(canonicalize_name(name))] = version
    return entries


def fits(name: str, version: str, resolved: Sequence[Resolved], python: str) -> bool:
    """Whether all requirements on `name` among the resolved distributions allow this version."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for distribution in resolved:
        for line in distribution.requires:
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) != name:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            # Compare without the local part: 2.11.0+cu130 counts as 2.11.0.
            if not requirement.specifier.contains(Version(version).public, prereleases=True):
                return False
    return True


def download(wanted: Sequence[Resolved], target: Target, folder: Path) -> dict[str, Path]:
    """Downloads the wheels that are not yet complete in `folder`; returns distribution -> wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [d for d in wanted if not _whole(d, folder)]
    if missing:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
            listed.write("\n".join(f"{d.name}=={d.version}" for d in missing))
            listed.flush()
            pip("download", "--no-deps", "--dest", str(folder), *target.pip_arguments(), "-r", listed.name)
    found = {d.name: _whole(d, folder) for d in wanted}
    absent = sorted(name for name, wheel in found.items() if wheel is None)
    if absent:
        raise RuntimeError(f"Wheels are missing in {folder}, or differ from what pip resolved: {', '.join(absent)}.")
    return {name: wheel for name, wheel in found.items() if wheel is not None}


def _whole(distribution: Resolved, folder: Path) -> Path | None:
    for path in folder.glob("*.whl"):
        name, version, *_ = path.name.split("-")
        if canonicalize_name(name) == distribution.name and Version(version) == Version(distribution.version):
            if not distribution.sha256 or sha256(path) == distribution.sha256:
                return path
            path.unlink()
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
