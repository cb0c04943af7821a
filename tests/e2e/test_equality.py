"""With speculation on, each answer equals token for token the same request alone with it off; drafts are accepted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from arms import BLOCK_SIZE, FEW_IDS, MAX_NEW_TOKENS, Baseline, on_arms, widths_of

from equality import assert_equal_tokens, steps_by_accept_len, tau
from sglang_dflash.serving import Client, Server, row_counts

pytestmark = pytest.mark.server
MIN_TAU = 2.5


@pytest.mark.parametrize("concurrency", [1, 8])
@on_arms("default", "uncompiled")
def test_tokens_equal_at_the_default(client: Client, baseline: Baseline, concurrency: int) -> None:
    """Fails where one token of any held-out prompt differs under the default policy (auto, measured times)."""
    answers = client.generate_all(baseline.prompts, concurrency, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)


@pytest.mark.parametrize("concurrency", [1, 8])
@on_arms("few ids")
def test_tokens_equal_where_the_draft_knows_few_ids(
    client: Client, server: Server, baseline: Baseline, concurrency: int
) -> None:
    """Fails where a token is lost that the draft cannot propose, or its few ids are hardly ever the right ones; in
    steps of every shape."""
    answers = client.generate_all(baseline.prompts, concurrency, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    assert f"The draft chooses among {FEW_IDS} of" in server.log.read_text()
    assert len({token for answer in answers for token in answer.ids}) > 2 * FEW_IDS
    assert tau(answers) > 1.1


@pytest.mark.parametrize("concurrency", [1, 8])
@on_arms("copies")
def test_tokens_equal_where_text_is_copied(
    client: Client, server: Server, baseline: Baseline, concurrency: int
) -> None:
    """Fails where a token differs in steps of copies, drafts and neither; or where copies are not verified, or not of
    the text: then hardly any of their tokens were accepted. Source text repeats itself."""
    before = row_counts(client)
    prompts, expected = [*baseline.long_prompts, *baseline.prompts], [*baseline.long_answers, *baseline.answers]
    with ThreadPoolExecutor(concurrency) as pool:
        lengths = [len(answer.ids) for answer in expected]
        answers = list(pool.map(lambda ids, most: client.generate(ids, max_new_tokens=most), prompts, lengths))
    assert_equal_tokens(answers, expected, prompts)
    after = row_counts(client)
    assert before is not None and after is not None
    since = after.since(before)
    assert since.copies > 100 and since.copied > since.copies / 2, since
    assert "Text that repeats itself is copied" in server.log.read_text()


@on_arms("default")
def test_a_server_says_what_it_does(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where `meta_info` lacks the rows of the steps, or the log does not say how rows are chosen, and that
    forwards are compiled."""
    widths_of(client, baseline.prompts[0])
    log = server.log.read_text()
    assert "verify the rows that pay, request by request" in log
    counts = row_counts(client)
    assert counts is not None and counts.blocks > 0 and counts.rows >= counts.accepted > 0 and counts.promised > 0
    assert "The target's forward is captured" in log and "The draft's forward is captured" in log


@pytest.mark.parametrize("concurrency", [1, 8])
@on_arms("overlap", "pages")
def test_tokens_equal_speculation_off(client: Client, baseline: Baseline, concurrency: int) -> None:
    """Fails where one token of any held-out prompt differs, or drafts are accepted too rarely."""
    answers = client.generate_all(baseline.prompts, concurrency, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    assert tau(answers) >= MIN_TAU
    by_accept_len = steps_by_accept_len(answers)
    assert all(by_accept_len), f"some accept_len never occurred: {by_accept_len}"
    assert sum(by_accept_len[1:-1]) >= 0.3 * sum(by_accept_len), by_accept_len


@on_arms("short")
def test_tokens_equal_with_a_shorter_block(client: Client, baseline: Baseline) -> None:
    """Fails where half of the trained block, pages of 16 and small chunks do not work together."""
    answers = client.generate_all(baseline.prompts, 8, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    by_accept_len = steps_by_accept_len(answers)
    assert all(by_accept_len[: BLOCK_SIZE // 2]) and not any(by_accept_len[BLOCK_SIZE // 2 :]), by_accept_len


@on_arms("default")
def test_ends_inside_a_block(client: Client, baseline: Baseline) -> None:
    """Fails where max_new_tokens or a stop token cuts a committed block in the wrong place."""
    for limit in range(1, 2 * BLOCK_SIZE + 2):
        prompt, expected = baseline.prompts[limit], baseline.answers[limit]
        cut = client.generate(prompt, max_new_tokens=limit)
        assert cut.ids == expected.ids[:limit]
        assert cut.meta["completion_tokens"] == len(cut.ids)
        position = min(limit, len(expected.ids) - 2)
        stop_id = expected.ids[position]
        stopped = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=[stop_id])
        assert stopped.ids == expected.ids[: expected.ids.index(stop_id) + 1]
        assert stopped.finish_reason == "stop"


@on_arms("default")
def test_stop_string_inside_a_block(client: Client, baseline: Baseline) -> None:
    """Fails where text after a stop string is returned."""
    full = client.generate(baseline.prompts[0], max_new_tokens=MAX_NEW_TOKENS).text
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    stopped = client.generate(baseline.prompts[0], max_new_tokens=MAX_NEW_TOKENS, stop=[stop])
    assert stopped.text == full[: full.index(stop)]
