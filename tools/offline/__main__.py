"""Packs the wheels that a machine without a network needs to run this package with SGLang, in parts with checksums.

Run it where pip works, with the target machine's Python version. A second run resumes the first. The output folder is
self-contained: install it with its own `install_offline_bundle.sh DIR VENV`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("packaging") is None:
    sys.exit(f"error: the package `packaging` is missing: {sys.executable} -m pip install packaging")

from tools.offline import contents, resolve, wheels
from tools.offline.parts import BundleFile, read_size, write_bundle

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAVELLING = (
    ROOT / "python" / "sglang_dflash" / "gpu" / "unpack.py",
    *(HERE / name for name in ("complete.py", "install_offline_bundle.sh")),
)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--cache", type=Path, help="folder of downloads and packed wheels (default OUTPUT-cache)")
    parser.add_argument("--python", default="3.12", help="the target machine's Python version (default %(default)s)")
    parser.add_argument("--platform", default="manylinux_2_39_x86_64", help="its newest tag (default %(default)s)")
    parser.add_argument("--part-size", default="38MiB", help="maximum size of a part (default %(default)s)")
    parser.add_argument("--with-fa3", action="store_true", help="include fa3: 130 MB more")
    parser.add_argument(
        "--preinstalled",
        type=Path,
        default=HERE / "preinstalled" / "cuda-13.0-torch-2.11.txt",
        help="list of the packages that the machine has (default: %(default)s)",
    )
    arguments = parser.parse_args(words)
    arguments.cache = arguments.cache or arguments.output.with_name(f"{arguments.output.name}-cache")
    return arguments


def select(
    closure: list[resolve.Resolved], preinstalled: dict[str, str], python: str
) -> tuple[list[resolve.Resolved], dict[str, str]]:
    """The distributions to pack; and distribution -> reason for those left out."""
    wanted, left_out = [], {}
    for distribution in closure:
        name = distribution.name
        version = preinstalled.get(name)
        if name in contents.LEFT_OUT:
            left_out[name] = contents.LEFT_OUT[name]
        elif version is not None and (not version or resolve.fits(name, version, closure, python)):
            left_out[name] = "on the machine"
        else:
            wanted.append(distribution)
    return wanted, left_out


def pack_all(found: dict[str, Path], versions: dict[str, str], folder: Path, with_fa3: bool) -> list[BundleFile]:
    """Packs the wheels; returns the bundle's files in order: this package, then by group, small files first.

    Args:
        found: distribution -> its wheel. This package is the first; its folder is named after the hash of its sources.
    """
    package = next(iter(found))
    thinning = [f"sm_{contents.GPU_ARCHITECTURE}", (HERE / "thin.py").read_text()]

    def pack(name: str) -> list[BundleFile]:
        wheel = found[name]
        group, split = contents.SPLIT_OFF.get(name, ("", ()))
        dropped = (*contents.STRIPPED.get(name, ()), *split)
        print(f"packing {wheel.name}", flush=True)
        # The folder's name is the cache key: what becomes of files, or for this package the hash of its sources.
        key = "\n".join([*dropped, *thinning])
        place = folder / hashlib.sha256(key.encode()).hexdigest()[:8]
        place = folder / wheel.parent.name if name == package else place
        packed = wheels.pack(wheel, place, lambda path: not contents.matches(path, dropped))
        own = contents.group_of(name, wheels.is_pure(wheel), wheel.stat().st_size)
        files = [BundleFile(packed, own, name, versions[name])]
        if split and with_fa3:
            part = wheels.split_off(wheel, place, group, lambda path: contents.matches(path, split))
            files.append(BundleFile(part, group, f"{name}-{group}", versions[name]))
        return files

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of the time goes into xz, which works outside of the GIL
        files = [file for packed in pool.map(pack, found) for file in packed]
    order = [group.name for group in contents.GROUPS]
    rest = sorted(files[1:], key=lambda f: (order.index(f.group), f.path.stat().st_size, f.path.name))
    return [*files[:1], *rest]


def print_table(manifest: dict[str, Any], folder: Path) -> None:
    for group in manifest["groups"]:
        members = [file for file in manifest["files"] if file["group"] == group["name"]]
        print(f"{group['name']:12} {group['bytes'] / 1e6:8.1f} MB {len(members):4} wheels; {group['works']}")
    total = sum(part["bytes"] for part in manifest["parts"])
    print(f"{folder}: {len(manifest['parts'])} parts, {total / 1e6:.1f} MB")


def main() -> None:
    arguments = parse_arguments()
    target = resolve.Target(arguments.python, arguments.platform)
    part_size = read_size(arguments.part_size)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    print("resolving", flush=True)
    own = resolve.build_own_wheel(ROOT, arguments.cache / "own")
    key = f"{target.python}-{target.platform}-{hashlib.sha256(wheels.requirements(own)).hexdigest()[:16]}"
    closure = resolve.resolve([f"{own}[gpu,train]"], target, arguments.cache / f"resolved-{key}.json")
    wanted, left_out = select(closure, resolve.read_preinstalled(arguments.preinstalled), target.python)
    package = wheels.distribution_of(own)
    wanted = [distribution for distribution in wanted if distribution.name != package]
    print(f"{len(closure)} distributions, {len(wanted) + 1} to pack", flush=True)
    found = resolve.download(wanted, target, arguments.cache / "wheels")
    versions = {distribution.name: distribution.version for distribution in closure}
    files = pack_all({package: own} | found, versions, arguments.cache / "packed", arguments.with_fa3)
    manifest = write_bundle(files, arguments.output, part_size, target, left_out)
    for path in TRAVELLING:
        shutil.copy(path, arguments.output / path.name)
    print_table(manifest, arguments.output)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
