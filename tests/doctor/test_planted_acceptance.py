"""`sglang-dflash doctor URL` on servers whose drafts lose acceptance without any error: each fault is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import planted_drafts as plant
import pytest
from changed_models import with_other_weights
from commands import doctor

from preloaded import PreloadedServer
from sglang_dflash.serving import KINDS, TINY_DRAFT, TINY_ENVIRONMENT, TINY_TARGET, held_out_prompts

pytestmark = pytest.mark.server
FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"]
FULL = {"SGLANG_DFLASH_WIDTH": "full"}  # so that numbers do not depend on measured times
PLUGINS = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent / "planted"), os.environ.get("PYTHONPATH"))))
}
TAU = 5.88  # the mean over kinds on the 600 held-out prompts (assets/tiny-pair/README.md)
ASK = ["--expect-tau", TAU, "--seed", 1, "--max-new-tokens", 64]


@contextmanager
def served(folder: Path, draft: Path, *flags: str, target: Path = TINY_TARGET, **environment: str) -> Iterator[str]:
    """The URL of a server of this pair."""
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    arguments = ["--model-path", str(target), *FLAGS, *speculate, *flags]
    with PreloadedServer(arguments, folder / "log", {**TINY_ENVIRONMENT, **environment}) as server:
        yield server.url


@pytest.mark.parametrize("environment", [{}, FULL], ids=["widths adapt", "whole blocks"])
def test_the_embedded_pair_is_healthy(environment: dict[str, str], tmp_path: Path) -> None:
    """Fails where a sound server gets a WARN or FAIL, where tau by kind is far from what was measured, or where the
    break-even tau is not read from a server that times its steps. Where widths adapt, times choose which rows are
    verified, and long chats of three answers may fall short by chance."""
    with served(tmp_path, TINY_DRAFT, "--chunked-prefill-size", "1024", **environment) as url:
        found = doctor(url, *ASK[2:])  # by the draft's card
    levels = found.levels()
    bad = {about for about, level in levels.items() if level not in ("PASS", "SKIP")}
    assert found.code == 0 and not bad - ({"long context"} if not environment else set()), found.shown
    assert "and the card says 5.88" in found.finding("acceptance")["said"]
    kinds = found.report["measured"]["kinds"]
    assert list(kinds) == list(KINDS) and kinds["code"]["tau"] > 6 > 4 > kinds["chat"]["tau"] > 2
    assert all(len(one["by_position"]) == 7 for one in kinds.values())
    assert levels["cached prefix"] == levels["acceptance"] == "PASS" and "chunk" not in levels
    assert " in 2 chunks" in found.finding("long context")["said"]
    assert levels["break-even"] == ("SKIP" if environment else "PASS")


FAULTS = {
    "mask": (plant.dflash(mask_token_id=300), "mask"),
    "taps": (plant.dflash(target_layer_ids=[0, 2, 5]), "taps"),
    "rope theta": (plant.rope_theta(1e5), "theta"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_config_is_the_first_cause(fault: str, tmp_path: Path) -> None:
    """Fails where a draft that lost most of its acceptance to its config passes, or another cause is named first."""
    change, cause = FAULTS[fault]
    with served(tmp_path, plant.changed_config(tmp_path / "draft", change), **FULL) as url:
        found = doctor(url, *ASK)
    assert found.code == 1 and found.finding("acceptance")["level"] == "FAIL", found.shown
    assert found.causes()[0] == cause, found.shown


def test_another_target_is_among_the_causes(tmp_path: Path) -> None:
    """Fails where a draft of another fine-tune passes, or its target is not among the first two causes."""
    target = with_other_weights(TINY_TARGET, tmp_path / "target", ("layers.",))
    prompts = tmp_path / "prompts.jsonl"
    asked = [one.prompt for kind in KINDS for one in held_out_prompts(kind)[:3]]
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    with served(tmp_path, TINY_DRAFT, target=target, **FULL) as url:
        found = doctor(url, *ASK, "--prompts", prompts)
    assert found.code == 1 and "target" in found.causes()[:2], found.shown


def test_zeroed_kv_behind_a_prefix_is_found(tmp_path: Path) -> None:
    """Fails where acceptance collapses behind cached prefixes and doctor does not say so, or blames what is sound."""
    with served(tmp_path, TINY_DRAFT, **FULL, **PLUGINS) as url:
        found = doctor(url, *ASK)
    assert found.code == 1 and found.finding("cached prefix")["level"] == "FAIL", found.shown
    assert found.finding("acceptance")["level"] == "PASS", found.shown


def test_sglang_is_asked_about_flags_and_memory() -> None:
    """Fails where the child does not report what SGLang makes of the flags, backends and pools among it."""
    found = doctor("--model-path", TINY_TARGET, "--draft", TINY_DRAFT, "--", *FLAGS)
    assert found.code == 0 and found.levels()["KV pools"] == "PASS", found.shown
    start = found.report["measured"]["start"]
    assert (start["attention"], start["block_size"], start["context"]) == ("dflash_cpu", 8, 2048)
    assert (start["token_bytes"], start["draft_token_bytes"]) == (6 * 2 * 128 * 4, 2 * 2 * 128 * 4)
