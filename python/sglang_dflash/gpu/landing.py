"""The machine's side of an hour: what it has received, installs and holds. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dflash.bench.machine import machine
from sglang_dflash.gpu.archive import unpack
from sglang_dflash.gpu.order import short_name
from sglang_dflash.gpu.unpack import Bundle, stamp

CHECKOUT = Path(__file__).parents[3]
INSTALLER = (
    *(CHECKOUT / "tools" / "offline" / name for name in ("install_offline_bundle.sh", "complete.py")),
    Path(__file__).with_name("unpack.py"),
)
"""What lies beside the parts of a bundle, to install them."""
LOOK_S = 0.2
PIECE = re.compile(r"caches-([0-9a-f]+)-\d+-of-(\d+)")


class Machine:
    """A work folder outside of the repository's copy, which a transfer replaces."""

    def __init__(self, work: Path, commit: str) -> None:
        self.work, self.bundle, self.venv, self.caches = work, work / "bundle", work / "venv", work / "caches"
        self.log = work / "install.log"
        for folder in (self.bundle, self.caches, work / "pieces"):
            folder.mkdir(parents=True, exist_ok=True)
        self._name = work / "machine"
        if not self._name.exists():
            self._name.write_text(secrets.token_hex(8))
        gpus = machine()["gpus"]
        self._device = short_name(gpus[0].split(",")[0]) if gpus else "no-gpu"
        self.results = work / "results" / f"{self._device}-{commit}"
        self.results.mkdir(parents=True, exist_ok=True)

    # Cargo.

    def receive(self, cargo: Path) -> list[str]:
        """Moves the cargo to where no transfer reaches it; returns sentences on what was wrong with it."""
        said = []
        if (cargo / "manifest.json").exists():
            self._take_manifest(cargo / "manifest.json")
        for path in sorted(cargo.glob("part-*")):
            known = {part["name"]: part for part in Bundle(self.bundle).manifest["parts"]}
            if self._sound(path, known[path.name]):
                _move(path, self.bundle / path.name)
            else:
                said.append(f"{path.name} arrived corrupted: send it again")
        if (cargo / "results.tar.gz").exists():
            unpack(cargo / "results.tar.gz", self.work / "results", overwrite=False)
        for path in sorted(cargo.glob("caches-*")):
            _move(path, self.work / "pieces" / path.name)
        self._join_caches()
        return said

    def _take_manifest(self, place: Path) -> None:
        """Parts of another bundle go."""
        _move(place, self.bundle / "manifest.json")
        known = {part["name"]: part for part in Bundle(self.bundle).manifest["parts"]}
        for path in self.bundle.glob("part-*"):
            if path.name not in known or path.stat().st_size != known[path.name]["bytes"]:
                path.unlink()

    def _sound(self, path: Path, part: dict[str, Any]) -> bool:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == part["sha256"]

    def _join_caches(self) -> None:
        pieces = sorted((self.work / "pieces").iterdir())
        found = PIECE.fullmatch(pieces[0].name) if pieces else None
        if found is None or len(pieces) < int(found[2]):
            return
        whole = self.work / "caches.tar.gz"
        whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        unpack(whole, self.caches, overwrite=False)
        (self.work / "caches.unpacked").write_text(found[1])
        for piece in pieces:
            piece.unlink()

    # The installer.

    def start_installer(self) -> None:
        """Installs what is whole and not installed, in a session of its own that outlives the call; at most one at a
        time."""
        if not self._waiting():
            return
        with self._lock() as lock:
            if lock is None:
                return
            for path in INSTALLER:
                shutil.copy(path, self.bundle / path.name)
            script = 'bash "$1" "$2" "$3"; echo $? >"$4"'
            places = (self.bundle / "install_offline_bundle.sh", self.bundle, self.venv, self.work / "install.code")
            with self.log.open("ab") as log:
                subprocess.Popen(
                    ["bash", "-c", script, "install", *map(str, places)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": ""},  # pip must not find the checkout
                    start_new_session=True,
                    pass_fds=(lock,),  # the lock is held until the last of its processes ends
                )

    def finish_installing(self, end: float) -> None:
        """Waits until all that is whole is installed, an installer has failed, or `end` (of the monotonic clock)."""
        self.start_installer()
        while self.installing() and time.monotonic() < end:
            time.sleep(LOOK_S)
            if not self.installing() and not self.failure():
                self.start_installer()  # for what arrived after the last one began

    @contextlib.contextmanager
    def _lock(self) -> Any:
        """A locked file descriptor, or None where an installer runs."""
        place = os.open(self.work / "install.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield place
        except BlockingIOError:
            yield None
        finally:
            os.close(place)

    def installing(self) -> bool:
        with self._lock() as lock:
            return lock is None

    def failure(self) -> str:
        """The last lines of an installer that failed; "" if none did."""
        code = self.work / "install.code"
        if self.installing() or not code.exists() or code.read_text().strip() == "0":
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def _waiting(self) -> list[str]:
        """Wheels that are whole and not installed."""
        if not (self.bundle / "manifest.json").exists():
            return []
        installed = self._installed()
        return [file["name"] for file in Bundle(self.bundle).whole_files() if stamp(file) not in installed]

    def _installed(self) -> set[str]:
        return {path.name for path in (self.venv / ".bundle" / "installed").glob("*")}

    def groups(self) -> list[str]:
        """Groups of the bundle whose every wheel is installed."""
        if not (self.bundle / "manifest.json").exists():
            return []
        bundle, installed = Bundle(self.bundle), self._installed()
        names = [group["name"] for group in bundle.manifest["groups"]]
        return [name for name in names if all(stamp(file) in installed for file in bundle.files_of([name]))]

    # What it tells.

    def state(self, said: Sequence[str]) -> dict[str, Any]:
        unpacked = self.work / "caches.unpacked"
        return {
            "machine": self._name.read_text(),
            "device": self._device,
            "parts": sorted(path.name for path in self.bundle.glob("part-*")),
            "groups": self.groups(),
            "installing": self.installing(),
            "failure": self.failure(),
            "caches": unpacked.read_text() if unpacked.exists() else "",
            "pieces": sorted(path.name for path in (self.work / "pieces").iterdir()),
            "said": list(said),
        }

    def variables(self) -> dict[str, str]:
        """Variables of everything that runs here: all caches in one folder, and no look at a network."""
        folder = str(self.caches)
        return {
            "PYTHONPATH": str(CHECKOUT / "python"),  # the checkout's package, not the bundle's
            "PATH": os.pathsep.join([str(self.venv / "bin"), os.environ["PATH"]]),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_CACHE_DIR": folder,
            "SGLANG_JIT_CACHE_DIR": f"{folder}/jit",
            "TVM_FFI_CACHE_DIR": f"{folder}/tvm-ffi",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "CUDA_CACHE_PATH": f"{folder}/nv",
            "FLASHINFER_WORKSPACE_BASE": folder,
        }

    def end_leftovers(self) -> None:
        """Ends servers that a killed call left: they have sessions of their own, and hold the GPU's memory."""
        mark = f"SGLANG_CACHE_DIR={self.caches}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)


def _move(source: Path, place: Path) -> None:
    """Moves a file, perhaps from another disk; under its name it is always whole."""
    draft = place.with_name(f"{place.name}.arriving")
    shutil.move(source, draft)
    os.replace(draft, place)
