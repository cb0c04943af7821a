"""Builds the native CPU ops of `csrc/` into a cache, once for this torch, this compiler and these sources.

`python -m sglang_cpu.ops.build_native` prints the path of the library, which it builds if it is missing.
`SGLANG_DFLASH_BUILD_NATIVE=0` builds nothing; `SGLANG_DFLASH_SANITIZE=address,undefined` builds a library of its own
with sanitizers (scripts/sanitize.sh).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

SWITCH = "SGLANG_DFLASH_BUILD_NATIVE"
SANITIZE = "SGLANG_DFLASH_SANITIZE"
THE_OPS = "sglang-dflash's native CPU ops"
BUILDING = f"Building {THE_OPS}"
FOLDER = Path(__file__).parents[1] / "csrc"
OPS = (
    "attention_op",
    "linear_op",
    "expert_op",
    "recurrent_op",
    "row_ops",
    "dispatch",
)
SOURCES = ("bindings.cpp", *(f"{name}.cpp" for name in OPS))
KERNELS = "kernels.cpp"  # compiled once per instruction set
# Vectors pass only between inline functions, so their calling convention (-Wpsabi) does not matter.
FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"scalar": ()}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": ("-mavx2", "-mfma"),
        "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
    }
# torch is loaded first, so its libraries are found without a path. One of them is its OpenMP runtime, the only one
# whose threads torch.set_num_threads counts.
LIBRARIES = ("-ltorch_cpu", "-lc10")
MOST_COMPILERS = 4  # at once: one takes up to 1 GB of memory


class CannotBuildError(RuntimeError):
    """The ops are not built. The message is half a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of the compiler.

    Fields:
        source: below `FOLDER`.
        object: the file that it becomes.
        flags: without the folders of headers.
        torch: whether it needs the headers of torch.
    """

    source: str
    object: str
    flags: tuple[str, ...]
    torch: bool


def built() -> Path | None:
    """The library that was built for this environment; None if there is none."""
    cxx = compiler()
    library = None if cxx is None else _library(cxx)
    return library if library is not None and os.path.exists(library) else None


def build(say: Callable[[str], None]) -> Path:
    """The library for this environment, built if there is none. Of several processes one builds, the others wait.

    Args:
        say: is told in a line what is built, and in another how long that took.

    Raises:
        CannotBuildError: there is none, and it cannot be built.
    """
    if (found := built()) is not None:
        return found
    try:
        if (reason := reason_not_to_build()) is not None:
            raise CannotBuildError(reason)
        cxx = compiler()
        assert cxx is not None
        library = _library(cxx)
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_name("lock"), say):
            if not library.exists():
                _build(library, cxx, say)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise CannotBuildError(f"the cache of libraries cannot be written ({error})") from error
    return library


def compiler() -> str | None:
    """The C++ compiler, `CXX` first; None if there is none."""
    return next((path for name in (os.environ.get("CXX"), "c++", "g++") if name and (path := shutil.which(name))), None)


def reason_not_to_build() -> str | None:
    """The reason why the native ops cannot be built, as half a sentence; None if they can."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH} is 0"
    if platform.system() != "Linux":
        return f"they need Linux, and this is {platform.system()}"
    cxx = compiler()
    if cxx is None:
        return "no C++ compiler was found (CXX, c++ or g++)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <atomic>\nint main() { return 0; }\n")
        widest = list(INSTRUCTION_SETS.values())[-1]
        for flags in (("-std=c++20", "-fopenmp", *FLAGS), ("-std=c++17", *FLAGS, *widest)):
            if subprocess.run([cxx, *flags, source, "-o", f"{folder}/probe"], capture_output=True).returncode:
                return f"{cxx} does not work with {' '.join(flags)} (GCC 10 or newer does)"
    return None


def sources_digest() -> str:
    """A name for the bytes of all sources. The library has it as `SOURCES`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in FOLDER.rglob("*") if path.suffix in (".cpp", ".h")):
        digest.update(f"{path.relative_to(FOLDER)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _library(cxx: str) -> Path:
    """Where the library stands that this compiler builds."""
    try:
        version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    except OSError:
        version = ""  # a build with this compiler says why it cannot start
    torch = (_torch() / "version.py").read_text()  # its version, its commit and what it was built for
    parts = (torch, cxx, version, _units(), LIBRARIES, _sanitizers())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "sglang-dflash", "native", key, "_native.so")


def _torch() -> Path:
    """The folder of the torch that serves."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _sanitizers() -> tuple[str, ...]:
    sanitize = os.environ.get(SANITIZE)
    return (f"-fsanitize={sanitize}",) if sanitize else ()


def _units() -> list[Unit]:
    sanitizers = _sanitizers()
    flags = (*FLAGS, *sanitizers, *(("-fno-omit-frame-pointer", "-g", "-O1") if sanitizers else ()))
    # torch's headers need these; without OpenMP, at::parallel_for is a plain loop.
    torch_flags = (*flags, "-std=c++20", "-O1", "-fopenmp", f'-DSOURCES="{sources_digest()}"')
    units = [Unit(source, source.replace("/", "-") + ".o", torch_flags, torch=True) for source in SOURCES]
    for isa, isa_flags in INSTRUCTION_SETS.items():
        own_flags = (*flags, "-std=c++17", *isa_flags, f"-DISA={isa}", f"-DTABLE=k{isa.capitalize()}")
        units.append(Unit(KERNELS, f"kernels-{isa}.o", own_flags, torch=False))
    return units


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The kernel releases the lock of a process that was killed."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"Waiting for another process that builds {THE_OPS} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(library: Path, cxx: str, say: Callable[[str], None]) -> None:
    """Compiles and links; the library is complete or not there at all."""
    say(f"{BUILDING} (a minute or two, once) ...")
    began = time.monotonic()
    for left in library.parent.glob("objects-*"):  # of a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="objects-", dir=library.parent) as folder:
        headers = (f"-I{_torch()}/include",)

        def compile_unit(unit: Unit) -> str:
            target = f"{folder}/{unit.object}"
            _run([cxx, *unit.flags, *(headers if unit.torch else ()), "-c", str(FOLDER / unit.source), "-o", target])
            return target

        try:
            with ThreadPoolExecutor(min(MOST_COMPILERS, len(os.sched_getaffinity(0)))) as pool:
                objects = list(pool.map(compile_unit, _units()))
            fresh = Path(folder, library.name)
            libraries = (f"-L{_torch()}/lib", *LIBRARIES, *_sanitizers())
            _run([cxx, "-shared", *objects, *libraries, "-o", str(fresh)])
        except subprocess.CalledProcessError as error:
            log = library.with_name("build.log")
            log.write_text(f"{shlex.join(error.cmd)}\n{error.output}")
            raise CannotBuildError(f"the compiler failed: {_last_error(error.output)} (log: {log})") from error
        fresh.replace(library)
    say(f"Built {THE_OPS} in {time.monotonic() - began:.0f} s.")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def _last_error(output: str) -> str:
    """The compiler's last line that names an error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line]
    return ["it wrote nothing", *lines, *named][-1]


def _main() -> int:
    try:
        print(build(lambda line: print(line, file=sys.stderr, flush=True)))
    except CannotBuildError as reason:
        print(f"error: {THE_OPS} are not built: {reason}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
