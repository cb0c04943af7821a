"""Two processes under torchrun: one set of weights, and the gradient of both halves of the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training.trainer import train

pytestmark = pytest.mark.slow

# Runs the command line as torchrun does; each process also writes a digest of its final weights.
WORKER = """
import hashlib, os, runpy, signal
from sglang_dflash.training import trainer

run = trainer.Trainer.run

def watched(self):
    acceptance = run(self)
    digest = hashlib.sha256()
    for weight in self.draft.parameters():
        digest.update(weight.detach().numpy().tobytes())
    with open(os.environ["DIGESTS"] + os.environ["RANK"], "w") as file:
        file.write(f"{self.accelerator.num_processes} {digest.hexdigest()} {acceptance.steps}")
    return acceptance

step = trainer.Trainer._step

def signalled(self, number, queue):
    if os.environ["RANK"] == os.environ.get("SIGNALLED") and number == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, number, queue)

trainer.Trainer.run = watched
trainer.Trainer._step = signalled
runpy.run_module("sglang_dflash.cli", run_name="__main__")
"""
# Enough anchors for every position: then the anchors do not depend on the process that draws them.
SAME = {"anchors": 4096, "batch_size": 1, "max_length": 48, "max_steps": 2, "warm_up": 0.0, "save_every": 1}


def run_pair(folder: Path, data_file: Path, **changes: Any) -> subprocess.CompletedProcess:
    """Two processes; the variable SIGNALLED names the one that gets SIGTERM in its second step."""
    (folder / "worker.py").write_text(WORKER)
    flags = {**SAME, **changes, "target": TINY_TARGET, "data": data_file, "output": folder / "draft", "layers": 1}
    flags |= {"num_taps": 2, "block_size": 4, "log_every": 1, "held_out": 0.1, "held_out_limit": 3}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--standalone", str(folder / "worker.py"), "train"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DIGESTS": str(folder / "rank-")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, data_file, datasets_cache) -> Path:
    """The output folder of two steps in two processes."""
    folder = tmp_path_factory.mktemp("pair")
    done = run_pair(folder, data_file)
    assert done.returncode == 0, done.stderr[-9000:]
    return folder


def test_a_signal_to_one_process_stops_both_in_one_step(data_file, tmp_path, monkeypatch):
    """Fails if the processes part: then one waits for the other for ever, or a checkpoint lacks one's share."""
    monkeypatch.setenv("SIGNALLED", "1")
    done = run_pair(tmp_path, data_file, max_steps=6, save_every=100)
    assert done.returncode and done.stderr.count("Stopped after step 2, which is saved.") == 1, done.stderr[-9000:]
    saved = tmp_path / "draft" / "checkpoints" / "step-00000002"
    assert {path.name for path in saved.glob("random_states_*")} == {f"random_states_{n}.pkl" for n in range(2)}


def test_both_processes_end_with_the_same_weights(pair):
    """Fails if a process trains on its own, or counts only its own held-out steps."""
    first, second = ((pair / f"rank-{rank}").read_text() for rank in range(2))
    assert first == second
    assert first.startswith("2 ")


def test_two_processes_are_two_micro_batches(pair, options, tmp_path):
    """Fails if the gradient is not the mean of both processes' gradients, or only one process's loss is recorded. The
    baseline is one process that accumulates the same two conversations."""
    train(options(**SAME, accumulate=2, output=str(tmp_path / "alone"), held_out_limit=3))
    moments = []
    for folder in (pair / "draft", tmp_path / "alone"):
        state = torch.load(folder / "checkpoints" / "step-00000001" / "optimizer.bin", weights_only=True)["state"]
        moments.append([state[index]["exp_avg"] for index in sorted(state)])
    for one, other in zip(*moments, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6 * float(other.abs().max()) + 1e-9)
    rows = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (pair / "draft", tmp_path / "alone")]
    losses = [[row["loss"] for row in map(json.loads, lines) if "loss" in row] for lines in rows]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)
