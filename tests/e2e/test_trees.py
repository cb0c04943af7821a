"""Trees of 24 rows: answers, acceptance, and which batches get them."""

from __future__ import annotations

import pytest
from arms import BLOCK_SIZE, MAX_NEW_TOKENS, Baseline, on_arms, widths_of
from test_lifecycle import assert_pool_empties

from equality import assert_equal_tokens, steps_by_accept_len, tau
from sglang_dflash.serving import Client

pytestmark = pytest.mark.server
ROWS = 24
CHAIN_TAU = 5.1  # of whole blocks on these prompts; trees of 24 rows have 6.3


@pytest.mark.parametrize("concurrency", [1, 4, 8])
@on_arms("trees")
def test_tokens_equal_with_trees(client: Client, baseline: Baseline, concurrency: int) -> None:
    """Fails where a token differs, in steps of trees, of whole blocks (8 requests), or in between; or where a tree's
    accepted rows lose their KV, so that later drafts are worse than a chain's."""
    answers = client.generate_all(baseline.prompts, concurrency, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    by_accept_len = steps_by_accept_len(answers)
    assert all(by_accept_len[:BLOCK_SIZE]) and not any(by_accept_len[BLOCK_SIZE:]), by_accept_len
    assert tau(answers) > CHAIN_TAU


@on_arms("trees")
def test_what_a_tree_is_for(client: Client, baseline: Baseline) -> None:
    """Fails where a request that needs its rows in a chain gets a tree, or another gets none."""
    rows = widths_of(client, *baseline.prompts[:2])
    assert rows[ROWS] == sum(rows)
    for asked in ({"return_logprob": True}, {"sampling_params": {"frequency_penalty": 0.5, "max_new_tokens": 40}}):
        body = {"input_ids": baseline.prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 40}} | asked
        meta = client.post("/generate", body).raise_for_status().json()["meta_info"]
        assert meta["spec_cap_lens_histogram"] == [0] * BLOCK_SIZE + [meta["spec_verify_ct"]]
    assert_pool_empties(client)
