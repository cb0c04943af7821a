"""Steps of other widths than the block: answers are the same, and what was verified is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from arms import (
    ADMIT_ALL,
    BLOCK_SIZE,
    EVERY_WIDTH,
    MAX_NEW_TOKENS,
    PLAIN,
    POOL,
    SPECULATE,
    TINY_POOL,
    Baseline,
    assert_equal_tokens,
    to_the_limit,
)

from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, Server

pytestmark = pytest.mark.server
COMPILED = {"SGLANG_DFLASH_COMPILE": "1"}


def widths_of(client: Client, prompt: list[int]) -> list[int]:
    """How many steps of one request had 0, 1, .. K rows."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}}
    meta = client.post("/generate", body).raise_for_status().json()["meta_info"]
    widths = meta["spec_cap_lens_histogram"]
    assert sum(widths) == meta["spec_verify_ct"] and widths[0] == 0
    assert meta["spec_cap_length"] == pytest.approx(sum(w * n for w, n in enumerate(widths)) / sum(widths))
    return widths


def test_a_server_that_adapts(baseline: Baseline, tmp_path) -> None:
    """Fails where the policy of a user's server, which measures, changes an answer, or its widths are not told."""
    environment = TINY_ENVIRONMENT | COMPILED | {"SGLANG_DFLASH_WIDTH": "adaptive"}
    log = tmp_path / "server.log"
    with Server([*PLAIN, *POOL, *SPECULATE], log, environment) as server:
        client = server.client()
        for concurrency in (8, 1):
            answers = client.generate_all(baseline.prompts, concurrency, max_new_tokens=MAX_NEW_TOKENS)
            assert_equal_tokens(answers, baseline.answers, baseline.prompts)
        widths_of(client, baseline.prompts[0])
    assert f"verify 1 to {BLOCK_SIZE} rows" in log.read_text()


@pytest.mark.parametrize("overlap", [False, True])
def test_every_width_in_a_pool_that_runs_out(baseline: Baseline, tmp_path, overlap: bool) -> None:
    """Fails where retraction, pages or penalties lean on whole blocks; with overlap, where a step's successor does."""
    environment = (TINY_OVERLAPPING if overlap else TINY_ENVIRONMENT | COMPILED) | ADMIT_ALL | EVERY_WIDTH
    arguments = [*PLAIN, *TINY_POOL, *SPECULATE, "--page-size", "16", "--chunked-prefill-size", "64"]
    with Server([*arguments, "--enable-mixed-chunk"], tmp_path / "server.log", environment) as server:
        client = server.client()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(client.generate, ids, **to_the_limit(ids)) for ids in baseline.long_prompts]
        answers = [one.result() for one in asked]
        assert_equal_tokens(answers, baseline.long_answers, baseline.long_prompts)
        widths = widths_of(client, baseline.prompts[0])
        assert len(widths) == BLOCK_SIZE + 1 and all(widths[1:]), widths
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0, "nothing was retracted"
