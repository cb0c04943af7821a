"""The wheel is pure Python, and a server that starts from it builds the native ops it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_cpu.ops import build_native
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_TARGET, Server

ROOT = Path(__file__).parents[2]
WHERE = """
import sglang_dflash
from importlib.metadata import entry_points
print(sglang_dflash.__path__[0])
print(*[entry.dist.locate_file("") for entry in entry_points(name="sglang_dflash")], sep="\\n")
"""


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package as its wheel installs it, without what it depends on."""
    source = tmp_path / "source"
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source.mkdir(exist_ok=True) or source)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "python", source / "python", ignore=leave_out)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = {str(path.relative_to(ROOT / "python")) for path in build_native.FOLDER.rglob("*") if path.is_file()}
    assert names <= set(zipfile.ZipFile(wheel).namelist())
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    return tmp_path / "site"


@pytest.mark.server
@pytest.mark.skipif(build_native.reason_not_to_build() is not None, reason="the ops cannot be built here")
def test_a_server_from_the_wheel_builds_its_ops(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where the wheel lacks a source, is bound to a platform, or a first start does not build and use the ops."""
    monkeypatch.chdir(tmp_path)
    environment = {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache"), **TINY_ENVIRONMENT}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    where = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True, check=True).stdout
    assert where.split() == [str(installed / "sglang_dflash"), str(installed), str(installed)]

    pair = ["--model-path", str(TINY_TARGET), "--speculative-draft-model-path", str(TINY_DRAFT)]
    flags = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--speculative-algorithm", "DFLASH"]
    with Server([*pair, *flags], tmp_path / "log").start(timeout_s=800) as server:
        answer = server.client().generate("Compute 9 * 7.", max_new_tokens=8, ignore_eos=True)
    log = server.log.read_text()
    assert len(answer.ids) == 8
    assert log.count(build_native.BUILDING) == log.count("Built sglang-dflash's native CPU ops in ") == 1
    assert "specification instead" not in log and "native ops: " in log
    assert len(list((tmp_path / "cache").rglob("_native.so"))) == 1
