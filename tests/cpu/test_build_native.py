"""The native ops are built once into a cache, and where they cannot be built one line says why.

A script stands in for the compiler. test_native_build.py tests what the real one made.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from sglang_cpu import ops
from sglang_cpu.ops import build_native, native
from sglang_dflash.cli import quickstart
from sglang_dflash.serving import Server

# Notes each call, waits for the file `go`, and writes what -o names. With the file `fails` it refuses our sources.
COMPILER = """#!/bin/sh
cd {folder}
[ "$1" = --version ] && cat version && exit
case "$*" in
*probe.cpp*) ;;
*)
    echo "$*" >>calls
    while [ ! -e go ]; do sleep 0.02; done
    if [ -e fails ]; then
        echo "ops.cpp:7:1: error: no such luck"
        echo "compilation terminated."
        exit 1
    fi
    ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && : >"$2"
    shift
done
exit 0
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Our compiler, and an empty cache below the folder that is yielded."""
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    (tmp_path / "version").write_text("stand-in 1.0\n")
    (tmp_path / "go").touch()
    for name in (build_native.SWITCH, build_native.SANITIZE, native.LIBRARY, native.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    (tmp_path / "go").touch()  # no stand-in stays behind


def start() -> subprocess.Popen[str]:
    """A process that builds; it imports no torch."""
    command = [sys.executable, "-P", build_native.__file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines() if (place / "calls").exists() else []


def wait_for_a_call(place: Path) -> None:
    deadline = time.monotonic() + 60
    while not calls(place):
        assert time.monotonic() < deadline, "the compiler was never called"
        time.sleep(0.02)


def test_two_processes_build_once(place: Path) -> None:
    """Fails where the second process builds as well, does not say that it waits, or misses the first one's result."""
    (place / "go").unlink()
    first = start()
    wait_for_a_call(place)
    second = start()
    assert second.stderr.readline() == "Waiting for another process that builds sglang-dflash's native CPU ops ...\n"
    (place / "go").touch()
    told, waited = first.communicate(), second.communicate()
    assert (first.returncode, second.returncode) == (0, 0), (told, waited)
    assert told[0] == waited[0] == f"{build_native.built()}\n"
    begun, ended = told[1].splitlines()
    assert begun == "Building sglang-dflash's native CPU ops (a minute or two, once) ..."
    assert ended.startswith("Built sglang-dflash's native CPU ops in ") and waited[1] == ""
    assert len(calls(place)) == len(build_native._units()) + 1, "each unit once, and one link"


def test_a_killed_build_is_done_anew(place: Path) -> None:
    """Fails where a killed build leaves a library or blocks the next one."""
    (place / "go").unlink()
    killed = start()
    wait_for_a_call(place)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert build_native.built() is None
    (place / "go").touch()
    lines: list[str] = []
    library = build_native.build(lines.append)
    assert [line.split()[0] for line in lines] == ["Building", "Built"]
    assert sorted(path.name for path in library.parent.iterdir()) == ["_native.so", "lock"]


def test_what_is_built_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a second start builds again, or SGLANG_DFLASH_BUILD_NATIVE=0 hides a library that is there."""
    library = build_native.build(lambda line: None)
    before = calls(place)
    monkeypatch.setenv(build_native.SWITCH, "0")
    assert build_native.build(pytest.fail) == build_native.built() == library
    assert calls(place) == before


def test_another_source_torch_compiler_or_sanitizer_is_another_library(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where a library is loaded that other sources, another torch, compiler or flags have made."""
    shutil.copytree(build_native.FOLDER, place / "csrc")
    monkeypatch.setattr(build_native, "FOLDER", place / "csrc")
    library = build_native.build(lambda line: None)

    def changed() -> bool:
        return build_native.built() is None

    header = place / "csrc/vec.h"
    text = header.read_text()
    header.write_text(text.replace("the", "teh", 1))
    assert changed(), "one byte of a source"
    header.write_text(text)
    assert build_native.built() == library
    (place / "version").write_text("stand-in 1.1\n")
    assert changed(), "the compiler's version"
    (place / "version").write_text("stand-in 1.0\n")
    monkeypatch.setenv(build_native.SANITIZE, "address")
    assert changed(), "sanitizers"
    monkeypatch.delenv(build_native.SANITIZE)
    with monkeypatch.context() as patch:
        (place / "torch").mkdir()
        (place / "torch/version.py").write_text("__version__ = '99.0'\n")
        patch.setattr(build_native, "_torch", lambda: place / "torch")
        assert changed(), "torch"
    monkeypatch.setattr(build_native, "FLAGS", (*build_native.FLAGS, "-g"))
    assert changed(), "a flag"


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as it is before it has looked for the native ops."""
    monkeypatch.setattr(native, "isa", cache(native.isa.__wrapped__))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (
            "unwritable cache",
            r"the cache of libraries cannot be written \(.*Not a directory: '.*/cache/sglang-dflash/.*'\)",
        ),
        ("no compiler", r"no C\+\+ compiler was found \(CXX, c\+\+ or g\+\+\)"),
        ("old compiler", r".*/c\+\+ does not work with -std=c\+\+20 .* \(GCC 10 or newer does\)"),
        ("failing compiler", r"the compiler failed: ops.cpp:7:1: error: no such luck \(log: (?P<log>.*/build.log)\)"),
        ("another system", "they need Linux, and this is Darwin"),
        ("switched off", "SGLANG_DFLASH_BUILD_NATIVE is 0"),
    ],
)
def test_without_a_library_torch_serves_and_one_line_says_why(
    place: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str, reason: str
) -> None:
    """Fails where an obstacle ends the start, stays silent, or is told twice."""
    match obstacle:
        case "unwritable cache":
            (place / "cache").touch()
        case "no compiler":
            monkeypatch.delenv("CXX")
            monkeypatch.setenv("PATH", "/nowhere")
        case "old compiler":
            (place / "c++").write_text("#!/bin/sh\nexit 1\n")
        case "failing compiler":
            (place / "fails").touch()
        case "another system":
            monkeypatch.setattr(build_native.platform, "system", lambda: "Darwin")
        case "switched off":
            monkeypatch.setenv(build_native.SWITCH, "0")
    lines: list[str] = []
    native.build(lines.append)
    began = [f"{build_native.BUILDING} (a minute or two, once) ..."] if obstacle == "failing compiler" else []
    assert lines[:-1] == began, lines
    found = re.fullmatch(
        f"sglang-dflash's native CPU ops are not built, so the slower specification serves: {reason}.", lines[-1]
    )
    assert found, lines[-1]
    if obstacle == "failing compiler":
        assert Path(found["log"]).read_text().endswith("error: no such luck\ncompilation terminated.\n")
    assert native.described() == "not built, the specification instead"
    assert ops.choose_kernels(torch.float32) is ops.REFERENCE_KERNELS


@pytest.mark.usefixtures("unloaded", "place")
@pytest.mark.parametrize("variable", [native.SWITCH, native.LIBRARY])
def test_what_is_not_asked_for_is_not_built(place: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Fails where SGLANG_DFLASH_NATIVE=0, or a library of the user's own, still costs a build."""
    monkeypatch.setenv(variable, "0")
    native.build(pytest.fail)
    assert not calls(place) and not (place / "cache").exists()


def test_quickstart_says_what_it_waits_for(tmp_path: Path) -> None:
    """Fails where the first start seems to hang while the ops are built, or names the build when it is over."""
    server = Server([], tmp_path / "log")
    assert quickstart.doing(server) == "starting the server"
    server.log.write_text(f"[2026-01-01 00:00:00] {build_native.BUILDING} (a minute or two, once) ...\n")
    assert quickstart.doing(server) == "building the native CPU ops, once"
    with server.log.open("a") as log:
        log.write("[2026-01-01 00:01:00] Built sglang-dflash's native CPU ops in 60 s.\n")
    assert quickstart.doing(server) == "starting the server"


def test_the_sources_are_all_compiled() -> None:
    """Fails where a new .cpp is compiled nowhere."""
    named = {*build_native.SOURCES, build_native.KERNELS}
    assert named == {str(path.relative_to(build_native.FOLDER)) for path in build_native.FOLDER.rglob("*.cpp")}
