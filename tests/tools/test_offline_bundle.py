"""Tests the offline bundle with tiny wheels, no network: parts, resuming, corruption, partial bundles, installation."""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

from sglang_dflash.gpu import unpack
from tiny_bundle import PYTHON, TAG, bundle_writer, make_wheel, noise
from tools.offline import __main__ as make
from tools.offline import contents, parts, resolve, wheels


@pytest.fixture
def bundle(tmp_path):
    """Three wheels in three groups over parts of 4 kB; the last is compressed. Returns the folder and the manifest."""
    sizes = {"aa": ("package", 3000), "bb": ("server", 6000), "cc": ("fa3", 9500)}
    contents = {
        name: (group, {f"{name}.py": b"X = 1\n", f"{name}.bin": noise(size, seed)})
        for seed, (name, (group, size)) in enumerate(sizes.items())
    }
    write = bundle_writer(tmp_path, contents)
    return tmp_path / "bundle", write(), write


def _run(*words: object, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, **kwargs)


def _unpack(*words: object) -> subprocess.CompletedProcess:
    return _run(sys.executable, unpack.__file__, *words)


def test_parts_hold_all_files_in_order(bundle):
    """Fails where a part exceeds its size, a file is not where the manifest says, or groups are out of order."""
    folder, manifest, _ = bundle
    parts = [folder / part["name"] for part in manifest["parts"]]
    assert [part.name for part in parts] == sorted(p.name for p in folder.glob("part-*"))
    assert {part.stat().st_size for part in parts[:-1]} == {4000} and 0 < parts[-1].stat().st_size <= 4000
    joined = b"".join(part.read_bytes() for part in parts)
    assert sum(file["bytes"] for file in manifest["files"]) == len(joined)
    for file in manifest["files"]:
        data = joined[file["offset"] : file["offset"] + file["bytes"]]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
    assert [group["name"] for group in manifest["groups"]] == ["package", "server", "fa3"]
    assert manifest["left_out"] == {"dd": "unneeded"}
    assert str(folder.parent) not in json.dumps(manifest)


def test_a_second_run_rebuilds_what_is_missing_or_wrong_alone(bundle):
    """Fails where correct parts are written again, or broken, missing or stale ones remain."""
    folder, manifest, write = bundle
    names = [part["name"] for part in manifest["parts"]]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b"short")
    (folder / "part-777").write_bytes(b"stale")
    kept = {name: (folder / name).stat().st_ino for name in names[2:]}
    assert write() == manifest
    assert {name: (folder / name).stat().st_ino for name in names[2:]} == kept
    assert sorted(path.name for path in folder.glob("part-*")) == names
    assert _unpack("check", folder).returncode == 0


def test_a_corrupted_part_is_named(bundle):
    """Fails where a flipped byte passes, or one run does not name both the broken and the missing parts."""
    folder, _, _ = bundle
    part = folder / "part-002"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    (folder / "part-003").unlink()
    run = _unpack("check", folder)
    assert run.returncode == 1 and "part-002" in run.stderr and "part-001" not in run.stderr
    assert "missing: part-003" in run.stdout


def test_another_python_is_refused(bundle):
    """Fails where wheels for one Python version are installed into another."""
    folder, manifest, _ = bundle
    (folder / "manifest.json").write_text(json.dumps(manifest | {"python": "3.5"}))
    run = _unpack("check", folder)
    assert run.returncode == 1 and "3.5" in run.stderr


@pytest.mark.parametrize("tag", ["manylinux_2_39_sparc", "manylinux_2_99_{machine}"])
def test_another_platform_is_told(bundle, tag):
    """Fails where wheels for another processor are installed, or an older glibc than the bundle's is not reported."""
    folder, manifest, _ = bundle
    tag = tag.format(machine=platform.machine())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"platform": tag}))
    run = _unpack("check", folder)
    if tag.endswith("sparc"):
        assert run.returncode == 1 and "sparc" in run.stderr and platform.machine() in run.stderr
    else:
        assert run.returncode == 0 and "glibc 2.99" in run.stdout


def test_a_corrupted_manifest_is_named(bundle):
    """Fails where a truncated manifest ends in a traceback."""
    folder, manifest, _ = bundle
    (folder / "manifest.json").write_text(json.dumps(manifest)[:-20])
    run = _unpack("check", folder)
    assert run.returncode == 1 and "manifest.json is corrupted" in run.stderr and "Traceback" not in run.stderr


def test_our_own_wheel_is_packed_anew_where_our_sources_changed(tmp_path):
    """Fails where the cache returns an older build of this package with the same name and version."""
    packed = []
    for build, source in (("one", b"X = 1\n"), ("two", b"X = 2\n")):
        wheel = make_wheel(tmp_path / "own" / build, "ours", {"ours.py": source})
        (file,) = make.pack_all({"ours": wheel}, {"ours": "1.0"}, tmp_path / "packed", False)
        assert file.group == "package"
        with zipfile.ZipFile(file.path) as archive:
            packed.append(archive.read("ours.py"))
    assert packed == [b"X = 1\n", b"X = 2\n"]


def test_a_partial_bundle_gives_what_is_whole(bundle, tmp_path):
    """Fails where a file with a missing part counts as complete, or the state does not show what works."""
    folder, manifest, _ = bundle
    last = manifest["files"][-1]
    (folder / f"part-{last['offset'] // 4000 + 1:03}").unlink()
    (tmp_path / "out").mkdir()
    assert "missing" in _unpack("check", folder).stdout
    run = _unpack("extract", folder, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "aa-1.0-py3-none-any.whl",
        "bb-1.0-py3-none-any.whl",
    ]
    lines = _unpack("state", folder).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["works", "works", "not"]


def test_the_installation(bundle, tmp_path):
    """Fails where a half bundle does not install its complete wheels, the second half does not install the rest, or the
    venv does not see the packages of the Python that created it."""
    folder, manifest, _ = bundle
    held_back = folder / manifest["parts"][-1]["name"]
    shutil.move(held_back, tmp_path / "held-back")
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_DFLASH_PYTHON": sys.executable}
    for path in make.TRAVELLING:
        shutil.copy(path, folder)
    command = ["bash", folder / "install_offline_bundle.sh", folder, tmp_path / "venv"]
    first = _run(*command, env=environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "installed aa" in first.stdout and "installed cc" not in first.stdout
    shutil.move(tmp_path / "held-back", held_back)
    second = _run(*command, env=environment)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "installed cc" in second.stdout and "installed aa" not in second.stdout
    script = "import aa, bb, cc, torch; from importlib.metadata import version; print(version('cc'), aa.__file__)"
    run = _run(tmp_path / "venv" / "bin" / "python", "-c", script, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1.0", str(next((tmp_path / "venv").rglob("aa.py")))]


def test_stripping_and_splitting_a_wheel(tmp_path):
    """Fails where a dropped file stays, RECORD names one that is gone, or two runs differ."""
    wheel = make_wheel(tmp_path / "wheels", "big", {"big/a.so": noise(900, 1), "big/b.so": b"b" * 900, "big/c.py": b""})

    def keep(path: str) -> bool:
        return not contents.matches(path, ("big/b.*",))

    packed = wheels.pack(wheel, tmp_path / "one", keep)
    again = wheels.pack(wheel, tmp_path / "two", keep)
    assert packed.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        recorded = [row[0] for row in csv.reader(archive.read("big-1.0.dist-info/RECORD").decode().splitlines())]
        assert sorted(recorded) == sorted(archive.namelist())
        assert "big/b.so" not in recorded and archive.read("big/a.so") == noise(900, 1)
    part = wheels.split_off(wheel, tmp_path / "one", "fa3", lambda path: not keep(path))
    assert part.name == "big_fa3-1.0-py3-none-any.whl.xz"
    target = resolve.Target(PYTHON, TAG)
    parts.write_bundle([parts.BundleFile(part, "fa3", "big-fa3", "1.0")], tmp_path / "b", 200, target, {})
    place = unpack.Bundle(tmp_path / "b")
    with zipfile.ZipFile(place.extract(place.whole_files()[0], tmp_path)) as archive:
        assert archive.read("big/b.so") == b"b" * 900
        assert sorted(archive.namelist()) == [
            "big/b.so",
            *(f"big_fa3-1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")),
        ]


def test_what_the_machine_has_is_not_brought():
    """Fails where a preinstalled version that a requirement excludes is kept, or a compatible one is packed."""
    needs = ("torch==2.14.1", "numpy>=2", "rich", "attrs>=99; python_version < '3'", "extra-thing; extra == 'x'")
    closure = [
        resolve.Resolved("ours", "1", "", needs),
        resolve.Resolved("torch", "2.14.1", "", ()),
        resolve.Resolved("numpy", "2.3", "", ()),
        resolve.Resolved("attrs", "26", "", ()),
        resolve.Resolved("rich", "15", "", ()),
        resolve.Resolved("z3-solver", "4", "", ()),
    ]
    preinstalled = {"torch": "2.11.0+cu130", "numpy": "2.5.2", "attrs": "1", "ours": ""}
    wanted, left_out = make.select(closure[1:], preinstalled, "3.12")
    assert [d.name for d in wanted] == ["rich"]  # nothing requires another torch
    wanted, left_out = make.select(closure, preinstalled, "3.12")
    assert [d.name for d in wanted] == ["torch", "rich"]
    assert left_out["numpy"] == left_out["attrs"] == "on the machine" and "tilelang" in left_out["z3-solver"]


@pytest.mark.parametrize(("text", "size"), [("60MiB", 60 << 20), ("64MB", 64_000_000), ("1000", 1000)])
def test_part_sizes(text, size):
    """Fails where a unit is misread."""
    assert parts.read_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "0", "60 apples", "-3"])
def test_a_part_size_that_is_none(text):
    """Fails where an invalid size is accepted."""
    with pytest.raises(ValueError, match="--part-size"):
        parts.read_size(text)


def test_platform_tags():
    """Fails where the tag of an older glibc is missing, or a tag of another form passes."""
    tags = resolve.Target("3.12", "manylinux_2_28_x86_64").platforms()
    assert tags[0] == "manylinux_2_28_x86_64" and "manylinux_2_17_x86_64" in tags and "manylinux2014_x86_64" in tags
    assert "manylinux_2_29_x86_64" not in tags
    with pytest.raises(ValueError, match="--platform"):
        resolve.Target("3.12", "win_amd64").platforms()
