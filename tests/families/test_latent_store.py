"""Targets with latent attention over a store: their KV is equal on all ranks, that of the draft is not."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from family_settings import target_flags
from models import make_draft, make_target

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT

pytestmark = [pytest.mark.server, pytest.mark.matrix]
FAMILY = "Moonlight"
POISONED = Path(__file__).parents[1] / "e2e" / "poisoned"
TIERS = [
    *["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-ratio", "4"],
    *["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}', "--max-total-tokens", "900"],
    *["--page-size", "16", "--tp-size", "2"],
]


def test_every_rank_stores_its_share(tmp_path: Path) -> None:
    """Fails where a rank gets another rank's share of the draft's KV from a store, or none at all. A random draft is
    never accepted, so the digests in the log decide."""
    target = make_target(FAMILY, tmp_path / "target")
    draft = make_draft(FAMILY, target, tmp_path / "draft")
    flags = [*TIERS, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    environment = {
        **TINY_ENVIRONMENT,
        "SGLANG_DFLASH_WIDTH": "full",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(POISONED), os.environ.get("PYTHONPATH")))),
    }
    rng = random.Random(4)
    prompts = [[rng.randrange(1000) for _ in range(150)] for _ in range(8)]
    with PreloadedServer(target_flags(FAMILY, target, flags), tmp_path / "server.log", environment) as server:
        client = server.client()
        runs = []
        for _ in range(2):
            runs.append([client.generate(prompt, max_new_tokens=20, ignore_eos=True) for prompt in prompts])
            client.flush_when_idle()
        log = server.log.read_text()
    for fresh, again in zip(*runs, strict=True):
        assert fresh.ids == again.ids
        assert again.meta["cached_tokens_details"]["storage"] >= 128
        first, second = (re.findall(rf"draft KV of {one.meta['id']}: (\w+)", log) for one in (fresh, again))
        assert len(first) == 2 and first[0] != first[1]  # of both ranks
        assert sorted(first) == sorted(second)
