"""Runs the benchmark's command with real servers and the embedded pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from preloaded import PreloadedServer
from sglang_dflash.bench.records import Run
from sglang_dflash.cli import benchmark as command
from sglang_dflash.serving import arms

pytestmark = pytest.mark.server
SCRIPT = Path(__file__).parents[2] / "benchmark_sglang.py"


def benchmark_here(folder: Path, *words: str) -> None:
    """The command in this process, so that its servers are preloaded ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arms, "Server", PreloadedServer)
        patch.setattr(
            sys, "argv", [str(SCRIPT), *words, "--output-md", str(folder / "results.md"), "--logs", str(folder)]
        )
        patch.setenv("OMP_NUM_THREADS", "1")
        with pytest.raises(SystemExit) as ended:
            command.run()
    assert not ended.value.code


def test_a_small_sweep(tmp_path, capsys):
    """Fails where an arm does not run, tokens differ, tau is missing, a file is not written, or SGLang's client counts
    other tokens than the pass.

    Also fails where compiled forwards, speculation off or on, differ from the reference in transformers in tokens or
    steps.
    """
    words = [
        "--env",
        "SGLANG_DFLASH_COMPILE=1",
        "--env",
        "SGLANG_DFLASH_WIDTH=full",
        "--arms",
        "off,dflash,transformers",
        "--dataset-name",
        "arithmetic",
        "--concurrencies",
        "1,4",
    ]
    benchmark_here(tmp_path, *words, "--num-prompts", "6", "--max-new-tokens", "48")
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["cells"], said["failed"]) == (6, 0)
    run = Run.load(tmp_path / "results.json")
    for cell in run.cells:
        equality = cell.equality
        assert (equality.compared, equality.identical + equality.ties) == (6, 6), cell.key
        tau = cell.acceptance.tau
        assert tau == 0 if cell.key.arm == "off" else tau > 2, cell.key
        answers = {answer.id: answer.tokens for answer in cell.answers or cell.records}
        assert {record.id: record.tokens for record in cell.records} == answers, cell.key
        assert all(0 < record.ttft_s < record.end_s for record in cell.records), cell.key
    taus = {cell.key.arm: cell.acceptance.tau for cell in run.cells if cell.key.load == 1}
    assert taus["dflash"] == pytest.approx(taus["transformers"])  # the server takes the reference's steps
    text = (tmp_path / "results.md").read_text()
    assert "dflash" in text and "off" in text
    for log in ("01-off.log", "02-dflash.log"):
        assert "forward is captured" in (tmp_path / log).read_text(), log
    assert (tmp_path / "results.csv").exists() and list(tmp_path.glob("results*.png"))


def test_agent_sessions_hit_the_prefix_cache(tmp_path):
    """Fails where sessions do not grow, cache hits are not recorded, or `--radix-cache off` leaves the cache on.

    Also fails where draft KV is computed of prompt tokens that the target finds in the cache.
    """
    words = ["--arms", "dflash", "--workload", "agent", "--radix-cache", "both", "--dataset-name", "code"]
    words += ["--concurrencies", "2", "--num-prompts", "3", "--max-new-tokens", "48", "--think-s", "0.05"]
    benchmark_here(tmp_path, *words)
    on, off = Run.load(tmp_path / "results.json").cells
    assert on.key.radix and not off.key.radix
    late = [record for record in on.records if record.turn >= 4]
    assert late and sum(r.cached_tokens for r in late) > 0.5 * sum(r.prompt_tokens for r in late)
    assert sum(record.cached_tokens or 0 for record in off.records) == 0
    for cell in (on, off):
        computed = sum(record.prompt_tokens - (record.cached_tokens or 0) for record in cell.records)
        assert cell.prefilled == computed and not any(record.failure for record in cell.records)
    assert off.equality.identical + off.equality.ties + off.equality.unjudged >= off.equality.compared - 1
