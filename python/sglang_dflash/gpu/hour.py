"""Says, call by call, what to send to a GPU machine without a network and what to run there; goes on where it stopped.

For a machine that takes 64 MiB a transfer, the repository included, runs commands of at most ten minutes, hands back
some files after each, and is lost when it idles, or when the time that it is lent for ends. Without --back the machine
counts as a fresh one: it gets what it lacks, and goes on with the stages that are not done. The last line of stdout is
JSON: the next call, or what is done. Needs Python 3.11 or newer, no packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.gpu.archive import cut, pack_results, unpack
from sglang_dflash.gpu.ending import exit_code
from sglang_dflash.gpu.estimates import OPS_S, seconds
from sglang_dflash.gpu.order import CALL_S, OPS_LIMIT_S, PREPARE_S, STEPS, STOP_S, Step, unfinished
from sglang_dflash.gpu.unpack import Bundle

ROOT = Path(__file__).parents[3]
CARRY_S = 120  # limit of a call that only brings a part
ARRIVAL_S = 10  # estimate of a transfer
INSTALL_S = 30  # estimate of what is left to install before a stage
PIECE_BYTES = 1 << 20  # of the caches, to fill what a part leaves free
SPARE_BYTES = 256 << 10  # names, folders and links of the repository
NOTHING = {"machine": "", "device": "", "parts": [], "caches": "", "pieces": [], "failure": "", "said": []}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="folder that tools.offline made")
    parser.add_argument("--back", type=Path, help="folder of the files that the last call handed back")
    parser.add_argument("--out", default="back", help="how the machine calls the folder that comes back (%(default)s)")
    parser.add_argument("--transfer-mib", type=float, default=64, help="limit of a transfer (default %(default)g)")
    parser.add_argument(
        "--left-s", type=float, default=math.inf, help="seconds that the machine is still lent for (default: no end)"
    )
    parser.add_argument("--list", action="store_true", help="list the steps with estimates and states, and stop")
    parser.add_argument("--stand-in", type=Path, help="dry run: a script that replaces SGLang and the checker")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Next:
    """The next call.

    Fields:
        part: the part to bring; "" if none is missing.
        step: what runs in it; None if it only brings a part.
    """

    part: str
    step: Step | None


class Hour:
    """What this side knows: the machine's state, and what it remembers of earlier ones: device, caches, results."""

    def __init__(self, root: Path, bundle: Bundle) -> None:
        self._memory, self.cargo = root / "build" / "gpu-hour", root / "build" / "gpu-send"
        self._root, self._bundle = root, bundle
        self._results = root / "docs" / "gpu"
        self._memory.mkdir(parents=True, exist_ok=True)
        self.commit = self._git("describe", "--always", "--dirty", "--abbrev=12").strip()
        self.state: dict[str, Any] = NOTHING | self._read("device.json")

    def _git(self, *words: str) -> str:
        return subprocess.run(["git", "-C", str(self._root), *words], capture_output=True, text=True, check=True).stdout

    def _read(self, name: str) -> dict[str, Any]:
        place = self._memory / name
        return json.loads(place.read_text()) if place.exists() else {}

    @property
    def folder(self) -> Path:
        """Results of the last machine's device at this commit."""
        return self._results / f"{self.state['device']}-{self.commit}"

    # What came back.

    def take_back(self, back: Path) -> None:
        """
        Raises:
            ValueError: nothing came back, or the installation failed.
        """
        if not (back / "state.json").exists():
            raise ValueError(f"--back {back} has no state.json: the last call handed nothing back. Leave --back out.")
        self.state = json.loads((back / "state.json").read_text())
        (self._memory / "device.json").write_text(json.dumps({"device": self.state["device"]}))
        unpack(back / "results.tar.gz", self._results, overwrite=True)
        self._keep_caches(sorted(back.glob("caches-*-of-?")))
        for sentence in self.state["said"]:
            print(f"the machine says: {sentence}")
        if self.state["failure"]:
            raise ValueError(f"The installation failed. The end of its log:\n{self.state['failure']}")

    def _keep_caches(self, files: list[Path]) -> None:
        """Keeps the newest caches, but no part of them, and not those of a machine that has not got the older ones."""
        held = self._read("caches.json")
        if files and files[0].name.endswith(f"-of-{len(files)}") and (not held or self._has(held)):
            data = b"".join(file.read_bytes() for file in files)
            (self._memory / "caches.tar.gz").write_bytes(data)
            held = {"digest": hashlib.sha256(data).hexdigest()[:16], "machine": self.state["machine"]}
            (self._memory / "caches.json").write_text(json.dumps(held))

    def _has(self, caches: dict[str, str]) -> bool:
        """Whether the machine made these caches or has unpacked them."""
        return caches["machine"] == self.state["machine"] or caches["digest"] == self.state["caches"]

    # What is next.

    def steps(self) -> list[tuple[Step, list[str]]]:
        """The steps that this bundle allows, each with its unfinished stages."""
        groups = {group["name"] for group in self._bundle.manifest["groups"]}
        return [(step, unfinished(step, self.folder)) for step in STEPS if set(step.groups) <= groups]

    def next_call(self) -> Next | None:
        """The first missing part of the unfinished steps; and the first of these steps, if all its parts are there."""
        todo = [step for step, stages in self.steps() if stages]
        if not todo:
            return None
        held = set(self.state["parts"])
        missing = [part for step in todo for part in self._bundle.parts_of(step.groups) if part not in held]
        part = missing[0] if missing else ""
        first = todo[0]
        ready = set(self._bundle.parts_of(first.groups)) <= held | {part}
        return Next(part, first if ready else None)

    def stage(self, call: Next, transfer_bytes: int) -> Next:
        """Fills the folder to carry: the manifest, one part, the results so far, and as much of the caches as fits.

        Returns:
            The call, without its step where that must wait for the rest of the caches.

        Raises:
            ValueError: the repository and the part do not fit together.
        """
        shutil.rmtree(self.cargo, ignore_errors=True)
        self.cargo.mkdir(parents=True)
        shutil.copyfile(self._bundle.folder / "manifest.json", self.cargo / "manifest.json")
        pack_results(self._results, self.commit, self.cargo / "results.tar.gz", (".json",))
        if call.part:
            _link(self._bundle.folder / call.part, self.cargo / call.part)
        room = transfer_bytes - self.tracked_bytes() - _size(self.cargo) - SPARE_BYTES
        if room < 0:
            raise ValueError(
                f"{call.part or 'The results'} and the repository ({self.tracked_bytes() / 2**20:.1f} MiB) are larger "
                f"than a transfer of {transfer_bytes / 2**20:.1f} MiB: make the bundle with a smaller --part-size."
            )
        pieces = self._missing_pieces()
        fitting = pieces[: room // PIECE_BYTES]
        for name, data in fitting:
            (self.cargo / name).write_bytes(data)
        wait = call.step is not None and call.step.groups and len(fitting) < len(pieces) and (fitting or call.part)
        return Next(call.part, None) if wait else call

    def tracked_bytes(self) -> int:
        """Bytes of the files that travel with every call: tracked ones, and untracked ones that git does not ignore."""
        names = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        return sum((self._root / name).lstat().st_size for name in names if name and (self._root / name).exists())

    def _missing_pieces(self) -> list[tuple[str, bytes]]:
        held = self._read("caches.json")
        if not held or self._has(held):
            return []
        chunks = list(cut((self._memory / "caches.tar.gz").read_bytes(), PIECE_BYTES))
        named = [(f"caches-{held['digest']}-{n:03}-of-{len(chunks):03}", chunk) for n, chunk in enumerate(chunks)]
        return [(name, chunk) for name, chunk in named if name not in self.state["pieces"]]


def describe(hour: Hour, call: Next, arguments: argparse.Namespace) -> dict[str, Any]:
    """The call for the person who makes it: what to carry, the command, its limit.

    Raises:
        ValueError: the machine is lent for too short a time yet.
    """
    cargo = hour.cargo.relative_to(ROOT)
    words = ["python3", "-m", "sglang_dflash.gpu.receive", "--cargo", str(cargo), "--commit", hour.commit]
    limit_s, estimate_s = CARRY_S, float(ARRIVAL_S)
    if call.step:
        stages = unfinished(call.step, hour.folder)
        words += ["--run", *stages, *(["--needs", *call.step.groups] if call.step.groups else [])]
        limit_s = OPS_LIMIT_S + STOP_S if stages[0] in OPS_S else CALL_S
        estimate_s += sum(seconds(stage, 3 if call.step.with_builtin else 2) for stage in stages)
        estimate_s += INSTALL_S if call.step.groups else 0
    limit_s = int(min(limit_s, arguments.left_s - ARRIVAL_S))
    if limit_s < (STOP_S + PREPARE_S if call.step else ARRIVAL_S):
        raise ValueError(f"--left-s {arguments.left_s:g} is too short for the next call.")
    words += ["--stand-in", str(arguments.stand_in)] if arguments.stand_in else []
    # Not quoted like the rest: it may be a variable of the machine's shell.
    command = f'PYTHONPATH=python {shlex.join(words)} --limit-s {limit_s} --out "{arguments.out}"'
    return {"carry": str(cargo), "command": command, "limit_s": limit_s, "estimate_s": round(estimate_s)}


def show_steps(hour: Hour) -> None:
    for step, stages in hour.steps():
        for stage in step.stages:
            state = "open" if stage in stages else "done"
            about = seconds(stage, 3 if step.with_builtin else 2)
            print(f"{state}  about {about:3.0f} s  {stage:28} needs {', '.join(step.groups) or 'no bundle'}")


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another disk
        shutil.copyfile(source, place)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> int:
    arguments = parse_arguments()
    if not (arguments.bundle / "manifest.json").exists():
        raise ValueError(f"--bundle {arguments.bundle} has no manifest.json: make it with python3.12 -m tools.offline.")
    bundle = Bundle(arguments.bundle)
    if missing := bundle.missing():
        raise ValueError(f"--bundle {arguments.bundle} lacks {', '.join(missing)}: make it anew.")
    hour = Hour(ROOT, bundle)
    if arguments.back:
        hour.take_back(arguments.back)
    if arguments.list:
        show_steps(hour)
        return 0
    call = hour.next_call()
    if call is None:
        print(f"All steps that this bundle allows are done: {hour.folder}")
        print(json.dumps({"done": str(hour.folder)}))
        return 0
    call = hour.stage(call, int(arguments.transfer_mib * 2**20))
    said = describe(hour, call, arguments)
    wanted = len(hour.state["parts"]), len(bundle.manifest["parts"])
    print(f"parts:    {wanted[0]} of {wanted[1]} are there, {call.part or 'none'} goes along")
    print(f"runs:     {', '.join(unfinished(call.step, hour.folder)) if call.step else 'nothing, it brings a part'}")
    print(f"carry:    {said['carry']} ({_size(hour.cargo) / 2**20:.1f} MiB)")
    print(f"command:  {said['command']}")
    print(f"limit:    {said['limit_s']} s; about {said['estimate_s']} s by estimate")
    print("then:     the same command here with --back and the folder of what came back, within 30 s")
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, error_code=1))
