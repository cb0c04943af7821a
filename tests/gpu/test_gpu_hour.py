"""Tests the first hour on a GPU machine: its order, its limits, and a dry run of all calls on a stand-in machine."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stand_in_machine import BACK_BYTES, BACK_FILE_BYTES, BACK_FILES, MIB, StandInMachine

from sglang_dflash.gpu import archive, estimates, hour, landing, ops, order
from sglang_dflash.gpu.check import BACKENDS, checks
from sglang_dflash.gpu.landing import Machine
from sglang_dflash.gpu.unpack import Bundle
from tiny_bundle import PART_BYTES, bundle_writer, noise
from tools.offline.__main__ import parse_arguments
from tools.offline.parts import read_size

ROOT = Path(__file__).parents[2]
TRANSFER_BYTES = 64 * MIB
GROUPS = {"package": ("aa", 1500), "server": ("bb", 4000), "fa3": ("cc", 3000)}


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=one", "-c", "user.email=one@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _bundle(folder: Path) -> Bundle:
    """A bundle of tiny wheels. Its flashinfer has no headers, and hides the one of the Python below."""
    contents = {
        name: (group, {f"{name}.py": b"", f"{name}.bin": noise(size, size % 251)})
        for group, (name, size) in GROUPS.items()
    }
    contents["aa"][1]["flashinfer/__init__.py"] = b""
    bundle_writer(folder, contents)()
    return Bundle(folder / "bundle")


# Limits.


def test_a_part_travels_with_the_repository():
    """Fails where the repository's tracked files and a part of the default size exceed a transfer of 64 MiB."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = sum((ROOT / name).lstat().st_size for name in _git(ROOT, "ls-files", "-z").split("\0") if name)
    part = read_size(parse_arguments(["--output", "bundle"]).part_size)
    spare = hour.SPARE_BYTES + hour.PIECE_BYTES
    assert tracked + part + spare <= TRANSFER_BYTES, (
        f"{tracked} bytes of tracked files, a part of {part} and {spare} to spare are "
        f"{tracked + part + spare - TRANSFER_BYTES} bytes more than the {TRANSFER_BYTES} of a transfer"
    )


def test_what_comes_back_is_allowed_to(tmp_path, monkeypatch):
    """Fails where results or caches exceed the files or bytes that may come back, or the first of them are left out."""
    assert archive.FILE_BYTES <= BACK_FILE_BYTES
    assert 3 + archive.CACHE_FILES <= BACK_FILES  # state.json, results.tar.gz, log.txt
    assert (1 + archive.CACHE_FILES) * archive.FILE_BYTES <= BACK_BYTES - 2 * MIB
    monkeypatch.setattr(archive, "FILE_BYTES", 100_000)
    caches, out = tmp_path / "caches", tmp_path / "out"
    for folder, count in (("triton", 4), ("inductor", 8)):
        for number in range(count):
            place = caches / folder / str(number)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(os.urandom(40_000))
    out.mkdir()
    left_out = archive.pack_caches(caches, out)
    files = sorted(out.iterdir())
    assert len(files) <= archive.CACHE_FILES and max(file.stat().st_size for file in files) <= 100_000
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join(file.read_bytes() for file in files))
    archive.unpack(whole, tmp_path / "again", overwrite=False)
    kept = [path for path in (tmp_path / "again").rglob("*") if path.is_file()]
    assert left_out == 12 - len(kept) > 0 and sum("triton" in path.parts for path in kept) == 4


# The order.


def test_every_stage_has_a_place_in_the_hour():
    """Fails where a stage is in no step, a step names a stage that does not exist, or the first steps are others."""
    planned = {stage for step in order.STEPS for stage in step.stages}
    assert planned == set(ops.STAGES) | {check.name for check in checks(BACKENDS)}
    assert list(estimates.OPS_S) == list(ops.STAGES)
    assert [(step.stages, step.groups) for step in order.STEPS[:5]] == [
        (("block_layout", "acceptance", "accept_chain", "context_kv"), ()),
        (("smoke",), ("package", "server")),
        (("equality-triton-bfloat16",), ("package", "server")),
        (("steps-qwen3-8b-triton",), ("package", "server")),
        (("profile-qwen3-8b",), ("package", "server")),
    ]
    first = sum(estimates.seconds(stage, 2) for stage in order.STEPS[0].stages)
    assert first <= order.OPS_LIMIT_S and estimates.PROFILE_LOADS == (1, 8) and estimates.STEP_LOADS == (1, 8, 32)
    assert all(estimates.seconds(stage, 2) <= order.CALL_S - order.STOP_S for stage in planned)


def test_a_stage_without_the_builtin_worker_is_gone_on_with_where_it_can_start(tmp_path):
    """Fails where the missing arm is never made up for, or the stage is repeated before its headers are there."""
    (tmp_path / "steps-qwen3-8b-triton.json").write_text(json.dumps({"state": "done", "absent": ["builtin"]}))
    steps = [step for step in order.STEPS if "steps-qwen3-8b-triton" in step.stages]
    assert ["steps-qwen3-8b-triton" in order.unfinished(step, tmp_path) for step in steps] == [False, True]


def test_a_stage_of_our_ops_that_was_killed_is_run_again(tmp_path):
    """Fails where half a stage counts as a whole one, or a stage that failed or was ended in time runs again."""
    content = {"stages": {"block_layout": [{}], "acceptance": [{}]}, "failures": {"context_kv": "x"}}
    (tmp_path / "gpu_ops.json").write_text(json.dumps(content | {"running": "acceptance"}))
    assert order.unfinished(order.STEPS[0], tmp_path) == ["acceptance", "accept_chain"]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A small git checkout with a file of one MiB."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / ".gitignore").write_text("build/\n")
    (folder / "file").write_bytes(bytes(MIB))
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "one")
    return folder


def test_a_part_that_does_not_fit_is_told(checkout, tmp_path):
    """Fails where a transfer is prepared that the machine will refuse."""
    here = hour.Hour(checkout, _bundle(tmp_path))
    with pytest.raises(ValueError, match=r"part-000 and the repository \(1.0 MiB\)"):
        here.stage(hour.Next("part-000", None), MIB + hour.SPARE_BYTES)
    here.stage(hour.Next("part-000", None), 2 * MIB)
    assert (here.cargo / "part-000").stat().st_size == PART_BYTES


def test_an_hour_ends(checkout, tmp_path):
    """Fails where stages that this bundle allows are left out at the end, or those that it does not are waited for."""
    here = hour.Hour(checkout, _bundle(tmp_path))
    ran = []
    while call := here.next_call():
        if call.part:
            here.state = here.state | {"parts": [*here.state["parts"], call.part]}
        here.folder.mkdir(parents=True, exist_ok=True)
        for stage in order.unfinished(call.step, here.folder) if call.step else ():
            ran.append(stage)
            (here.folder / f"{stage}.json").write_text(json.dumps({"state": "done", "absent": ["builtin"]}))
        ran_ops = {stage: [] for stage in ran if stage in ops.STAGES}
        (here.folder / "gpu_ops.json").write_text(json.dumps({"stages": ran_ops, "failures": {}, "running": ""}))
    allowed = [stage for step in order.STEPS if "flashinfer" not in step.groups for stage in step.stages]
    assert ran == allowed


def test_caches_fill_what_parts_leave_free(checkout, tmp_path):
    """Fails where caches exceed a transfer, are sent twice, or a server starts before the last of them is there."""
    here = hour.Hour(checkout, _bundle(tmp_path))
    memory = checkout / "build" / "gpu-hour"
    data = noise(3 * hour.PIECE_BYTES // 2, 1) + bytes(hour.PIECE_BYTES)
    (memory / "caches.tar.gz").write_bytes(data)
    (memory / "caches.json").write_text(json.dumps({"digest": "ab12", "machine": "older"}))
    call = hour.Next("part-000", order.STEPS[1])
    room = MIB + hour.SPARE_BYTES + 64_000  # repository, spare, part and manifest
    sent = {}
    for _ in range(2):
        staged = here.stage(call, room + 2 * hour.PIECE_BYTES)
        pieces = {path.name: path.read_bytes() for path in here.cargo.glob("caches-*")}
        assert not set(pieces) & set(sent)
        sent |= pieces
        here.state = here.state | {"pieces": sorted(sent)}
        assert (staged.step is None) == (len(sent) < 3)
    assert sorted(sent) == [f"caches-ab12-{n:03}-of-003" for n in range(3)]
    assert b"".join(sent[name] for name in sorted(sent)) == data


def test_no_call_is_longer_than_the_machine_is_lent_for(checkout, tmp_path, monkeypatch):
    """Fails where a call is cut by the end of the loan, so that what it measured does not come back."""
    monkeypatch.setattr(hour, "ROOT", checkout)
    here, smoke = hour.Hour(checkout, _bundle(tmp_path)), hour.Next("", order.STEPS[1])
    for left_s, limit_s in ((130.0, 130 - hour.ARRIVAL_S), (math.inf, order.CALL_S)):
        said = hour.describe(here, smoke, Namespace(stand_in=None, out="back", left_s=left_s))
        assert said["limit_s"] == limit_s and f"--limit-s {limit_s} " in said["command"]
    with pytest.raises(ValueError, match="--left-s 79 is too short"):
        hour.describe(here, smoke, Namespace(stand_in=None, out="back", left_s=79.0))


# The machine.


def test_a_corrupted_part_is_asked_for_again(tmp_path, monkeypatch):
    """Fails where a part that arrived wrong counts as there."""
    bundle, cargo = _bundle(tmp_path), tmp_path / "cargo"
    shutil.copytree(bundle.folder, cargo)
    (cargo / "part-001").write_bytes(b"x" * PART_BYTES)
    machine = Machine(tmp_path / "work", "abc")
    assert machine.receive(cargo) == ["part-001 arrived corrupted: send it again"]
    assert "part-001" not in (state := machine.state([]))["parts"] and "part-000" in state["parts"]


INSTALLER = """
import sys, time
from pathlib import Path
from sglang_dflash.gpu.unpack import Bundle, stamp
whole = Bundle(Path(sys.argv[1])).whole_files()
print("begins", len(whole), flush=True)
time.sleep(1)
for file in whole:
    place = Path(sys.argv[2], ".bundle", "installed", stamp(file))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
print("ends", flush=True)
"""


def test_one_installer_runs_at_a_time_until_all_is_installed(tmp_path, monkeypatch):
    """Fails where a second installer starts beside the first, or wheels that arrived meanwhile stay uninstalled."""
    bundle, cargo = _bundle(tmp_path), tmp_path / "cargo"
    (tmp_path / "installer.py").write_text(INSTALLER)
    script = tmp_path / "install_offline_bundle.sh"
    script.write_text(f'PYTHONPATH={ROOT}/python {sys.executable} {tmp_path}/installer.py "$@"')
    monkeypatch.setattr(landing, "INSTALLER", (script,))
    machine = Machine(tmp_path / "work", "abc")
    last = bundle.manifest["parts"][-1]["name"]
    shutil.copytree(bundle.folder, cargo, ignore=shutil.ignore_patterns(last))
    machine.receive(cargo)
    machine.start_installer()
    while "begins" not in machine.log.read_text():
        time.sleep(0.02)
    shutil.copy(bundle.folder / last, cargo / last)
    machine.receive(cargo)
    other = Machine(tmp_path / "work", "abc")
    other.start_installer()
    assert machine.installing() and not machine.groups()
    other.finish_installing(time.monotonic() + 20)
    assert not machine.installing() and machine.groups() == list(GROUPS)
    lines = machine.log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begins", "ends", "begins", "ends"], lines


# A dry run of the whole hour.


@dataclass
class DryRun:
    """The two sides: a checkout with a bundle, and the machine; and what was called so far."""

    checkout: Path
    bundle: Path
    machine: StandInMachine
    back: Path | None = None
    ran: list[list[str]] = field(default_factory=list)
    brought: list[str] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return next((self.checkout / "docs" / "gpu").glob("*"), self.checkout)

    def rows(self, stage: str) -> list[dict[str, Any]]:
        """Rows of a stage that have come back."""
        place = self.results / f"{stage}.json"
        return json.loads(place.read_text())["rows"] if place.exists() else []

    def next(self) -> dict[str, Any]:
        words = [sys.executable, "-m", "sglang_dflash.gpu.hour", "--bundle", self.bundle, "--out", "$BACK"]
        words += ["--stand-in", "tests/gpu/stand_in.py", *(["--back", self.back] if self.back else [])]
        environment = os.environ | {"PYTHONPATH": str(self.checkout / "python")}
        run = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stdout + run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    def call(self, call: dict[str, Any], cut: Callable[[Path], bool] = lambda out: False) -> bool:
        """Makes the call; returns whether its stages could begin: on a lost machine they cannot."""
        words = call["command"].split(" ")
        begin = words.index("--run") + 1 if "--run" in words else len(words)
        self.brought += [path.name for path in (self.checkout / call["carry"]).glob("part-*")]
        code, said, self.back = self.machine.call(call["command"], call["carry"], call["limit_s"], cut)
        if json.loads((self.back / "state.json").read_text())["said"]:
            assert code == 1 and "not installed yet" in said
            return False
        assert code in (0, -9), said
        self.ran += [stages] if (stages := list(_until_flag(words[begin:]))) else []
        return True


def _until_flag(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--"):
            return
        yield word


@pytest.fixture
def dry_run(tmp_path) -> Iterator[DryRun]:
    checkout = tmp_path / "checkout"
    for name in ("tools", "python", "tests/gpu", "tests/bench"):
        shutil.copytree(
            ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        )
    (checkout / ".gitignore").write_text("/build/\n__pycache__/\n/docs/gpu/*/raw/\n")
    _git(checkout, "init", "-q")
    _git(checkout, "add", "-A")
    _git(checkout, "commit", "-qm", "one")
    bundle = _bundle(tmp_path)
    machine = StandInMachine(checkout, tmp_path / "machine", TRANSFER_BYTES)
    yield DryRun(checkout, bundle.folder, machine)
    if machine.folder.exists():
        machine.lose()


def _measured(stage: str) -> Callable[[Path], bool]:
    """Whether the results in an output folder have a row of this stage."""

    def look(out: Path) -> bool:
        try:
            with tarfile.open(out / "results.tar.gz") as held:
                (name,) = [name for name in held.getnames() if name.endswith(f"/{stage}.json")]
                return bool(json.load(held.extractfile(name))["rows"])
        except (OSError, ValueError):
            return False

    return look


@pytest.mark.slow
def test_the_first_hour_goes_on_where_it_stopped(dry_run):
    """Fails where a call breaks a rule of the machine; where a machine that is lost in the middle, or a call that is
    killed, costs a finished stage or cell, a cache, or leaves a server; or where the order is another."""
    steps, kernel = "steps-qwen3-8b-triton", "caches/triton/kernel"
    made, before = b"", 0
    for _ in range(40):
        call = dry_run.next()
        if dry_run.rows("equality-fa3-bfloat16"):
            break
        stage = call["command"].partition("--run ")[2].split(" ")[0]
        if stage == steps and not dry_run.rows(steps):
            if dry_run.call(call, _measured(steps)):
                left = set(dry_run.machine.processes())
                assert left, "the killed call should leave a server"
            continue
        if not dry_run.call(call):
            continue
        if stage == steps:
            assert not left & set(dry_run.machine.processes())
        if stage == "equality-triton-bfloat16":
            made = (dry_run.machine.work / kernel).read_bytes()
            before = len(dry_run.brought)
            dry_run.machine.lose()
        if stage == "equality-fa3-bfloat16":
            assert (dry_run.machine.work / kernel).read_bytes() == made
    else:
        pytest.fail(f"40 calls did not bring the hour to its seventh step: {dry_run.ran}")
    assert dry_run.ran == [
        ["block_layout", "acceptance", "accept_chain", "context_kv"],
        ["smoke"],
        ["equality-triton-bfloat16"],
        [steps],
        [steps],
        ["profile-qwen3-8b"],
        ["equality-fa3-bfloat16"],
    ]
    assert "--run steps-qwen3-8b-fa3 --needs package server fa3" in call["command"]
    names = [part["name"] for part in Bundle(dry_run.bundle).manifest["parts"]]
    assert dry_run.brought[:before] == names and sorted(dry_run.brought[before:]) == names
    assert {row["arm"] for row in dry_run.rows(steps)} == {"off", "dflash"}
    held = json.loads((dry_run.results / f"{steps}.json").read_text())
    assert held["state"] == "done" and held["absent"] == ["builtin"]
    assert any("FlashInfer's headers" in note for note in held["notes"]), held["notes"]
    assert len(held["commands"]) == 2 and "## equality-fa3-bfloat16" in (dry_run.results / "README.md").read_text()
    assert dry_run.results.name.startswith("nvidia-fake-1-")
