"""KV comes back from host memory and from a store in both models: same tokens, and same steps, as if it were fresh."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from arms import ADMIT_ALL, PLAIN, POISONED, SPECULATE, STORE, TIERS, Baseline, on_arms, to_the_limit
from changed_models import with_other_weights
from kept_steps import assert_steps_kept, digests_of, prefilled, whole_pages
from reference_pair import ReferencePair
from test_features import ask
from test_lifecycle import assert_pool_empties, crowd_the_pool

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, Client, Completion, Server

pytestmark = pytest.mark.server
READ = 100  # tokens of an answer that the next prompt holds


def longer(baseline: Baseline) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of some 130 tokens, and what follows: the baseline's long answers, the first READ tokens read."""
    both = list(zip(baseline.long_prompts, baseline.long_answers, strict=True))
    long = [(prompt, answer.ids) for prompt, answer in both if answer.finish_reason == "length"]
    assert len(long) >= 8
    return [[*prompt, *ids[:READ]] for prompt, ids in long[:8]], [ids[READ:] for _, ids in long[:8]]


def ask_each(client: Client, prompts: list[list[int]]) -> list[Completion]:
    return [client.generate(prompt, **to_the_limit(prompt)) for prompt in prompts]


def found_in(answer: Completion, tier: str) -> int:
    return (answer.meta.get("cached_tokens_details") or {}).get(tier, 0)


@on_arms("tiers")
def test_hits_in_host_memory(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where KV of either model comes back changed or not at all, or the draft's is computed again."""
    prompts, expected = longer(baseline)
    fresh = ask_each(client, prompts)  # each fills a quarter of the pool
    before = prefilled(client)
    again = ask_each(client, prompts)
    assert [answer.ids for answer in (*fresh, *again)] == expected * 2
    for answers in (fresh, again):
        assert_steps_kept(server, oracle, prompts, answers)
    hits = [found_in(answer, "host") for answer in again]
    assert sum(hit >= READ for hit in hits) >= 4, hits
    assert prefilled(client) - before == sum(map(len, prompts)) - sum(answer.cached_tokens for answer in again)


@on_arms("tiers")
def test_hits_in_a_store(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails as the test above, where the KV was written to a file and read from it."""
    prompts, expected = longer(baseline)
    ask_each(client, prompts)
    client.flush_when_idle()  # of device and host memory
    before = prefilled(client)
    again = ask_each(client, prompts)
    assert [answer.ids for answer in again] == expected
    assert_steps_kept(server, oracle, prompts, again)
    assert all(found_in(answer, "storage") >= READ for answer in again), [found_in(a, "storage") for a in again]
    assert prefilled(client) - before == sum(map(len, prompts)) - sum(answer.cached_tokens for answer in again)


@on_arms("tiers")
def test_steps_after_retraction(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where a retracted request comes back with less than its whole KV, in either model."""

    def run_on(prompt: list[int]) -> Completion:
        return client.generate(prompt, **to_the_limit(prompt))

    crowd = crowd_the_pool(run_on, baseline.long_prompts, baseline.long_answers)
    assert_steps_kept(server, oracle, baseline.long_prompts, crowd)
    assert_pool_empties(client)


@on_arms("tiers")
def test_steps_after_preemption(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails as the test above, for a preempted request."""
    low, high = baseline.long_prompts, baseline.long_prompts[:3]
    with ThreadPoolExecutor(len(low) + len(high)) as pool:

        def send(prompts: list[list[int]], priority: int) -> list:
            limits = [to_the_limit(prompt)["max_new_tokens"] for prompt in prompts]
            both = zip(prompts, limits, strict=True)
            return [pool.submit(ask, client, prompt, limit, priority=priority) for prompt, limit in both]

        first = send(low, 0)
        wait(first, return_when=FIRST_COMPLETED)
        answers = [future.result() for future in (*first, *send(high, 100))]
    prompts = [*low, *high]
    assert_equal_tokens(answers, [*baseline.long_answers, *baseline.long_answers[:3]], prompts)
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0, "nothing was preempted"
    assert_steps_kept(server, oracle, prompts, answers)
    assert_pool_empties(client)


WHOLE = ["page 1", "by layers", "write back", "window", "sliding", "draft in FP8", "trees", "on ranks", "hybrid"]


@pytest.mark.matrix
@on_arms(*(f"tiers{' ' if name.startswith('on') else ', '}{name}" for name in WHOLE))
def test_tiers_under_other_settings(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where KV comes back changed, in either model, under one of these settings: tokens, steps, or the draft's
    KV of a prompt, bit by bit on every rank."""
    prompts, _ = longer(baseline)
    runs = [ask_each(client, prompts), ask_each(client, prompts)]
    client.flush_when_idle()
    runs.append(ask_each(client, prompts))
    for answers, tier in zip(runs[1:], ("host", "storage"), strict=True):
        assert [answer.ids for answer in answers] == [answer.ids for answer in runs[0]]
        assert [answer.accept_histogram for answer in answers] == [answer.accept_histogram for answer in runs[0]]
        assert sum(found_in(answer, tier) >= READ // 2 for answer in answers) >= 4, [found_in(a, tier) for a in answers]
    assert tau(runs[0]) > 1.5
    digests, compared = digests_of(server), 0
    for answers in runs[1:]:
        for fresh, again, prompt in zip(runs[0], answers, prompts, strict=True):
            if again.cached_tokens >= whole_pages(prompt):  # what a recurrent target computes anew may have other bits
                assert sorted(digests[again.meta["id"]]) == sorted(digests[fresh.meta["id"]])
                compared += 1
    assert compared >= 8


@pytest.mark.matrix
@on_arms("tiers, page 1")
def test_sessions_come_back(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where a session whose KV was pushed out of the device's pool goes on with other KV of either model."""
    crowd, _ = longer(baseline)
    opened = client.post("/open_session", {"capacity_of_str_len": 10000, "streaming": False})
    session, last, history = opened.raise_for_status().json(), None, list[int]()
    for prompt in baseline.prompts[:3]:
        history += prompt
        answer = ask(client, prompt, 20, session_params={"id": session, "rid": last})
        alone = ask(client, history, 20)
        assert answer.meta["prompt_tokens"] == len(history) and answer.ids == alone.ids
        assert answer.accept_histogram == alone.accept_histogram
        assert_steps_kept(server, oracle, [history], [alone])
        history, last = [*history, *answer.ids], answer.meta["id"]
        ask_each(client, crowd)
    client.post("/close_session", {"session_id": session}).raise_for_status()


@pytest.mark.matrix
@on_arms("tiers, every width")
def test_tiers_at_every_width(client: Client, baseline: Baseline) -> None:
    """Fails where rows that were chosen, not whole blocks, leave KV that comes back changed: tokens alone."""
    prompts, expected = longer(baseline)
    for flush in (False, False, True):
        if flush:
            client.flush_when_idle()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: client.generate(prompt, **to_the_limit(prompt)), prompts))
        assert [answer.ids for answer in answers] == expected
        assert tau(answers) > 1.2


@pytest.mark.matrix
@on_arms("tiers", "tiers, page 1")
def test_every_length_misses_and_hits(
    client: Client, server: Server, baseline: Baseline, oracle: ReferencePair
) -> None:
    """Fails where some length of a cached prefix, within a page or a block, loses KV of either model."""
    (prompt, *_), _ = longer(baseline)
    prompts = [[number, *prompt[: 1 + number]] for number in range(128)]
    for tier in ("none", "any", "storage"):
        if tier == "storage":
            client.flush_when_idle()
        answers = [client.generate(each, max_new_tokens=12) for each in prompts]
        assert_steps_kept(server, oracle, prompts, answers)
        if tier == "storage":
            assert sum(found_in(answer, tier) > 0 for answer in answers) > 90


def changed_draft(folder: Path) -> Path:
    return with_other_weights(TINY_DRAFT, folder, ("k_proj", "v_proj"))


@pytest.mark.matrix
def test_a_store_for_many_servers(baseline: Baseline, oracle: ReferencePair, tmp_path: Path) -> None:
    """Fails where a server does not find what another one has stored, or finds what is of another draft, of KV of
    another dtype, or of no draft at all."""
    prompts, expected = longer(baseline)
    tiers = [*PLAIN, *TIERS, "--page-size", "16"]
    environment = {**TINY_ENVIRONMENT, **ADMIT_ALL, **POISONED, STORE: str(tmp_path / "store")}
    other = changed_draft(tmp_path / "other")
    servers: dict[str, tuple[list[str], Path, int]] = {
        "first": (SPECULATE, TINY_DRAFT, 0),
        "second": (SPECULATE, TINY_DRAFT, READ),
        "other": ([*SPECULATE[:2], "--speculative-draft-model-path", str(other)], other, 0),
        "fewer bits": ([*SPECULATE, "--speculative-draft-kv-cache-dtype", "fp8_e4m3"], TINY_DRAFT, 0),
        "off": ([], TINY_DRAFT, 0),
        "second again": (SPECULATE, TINY_DRAFT, READ),
    }
    for name, (flags, draft, least) in servers.items():
        with PreloadedServer([*tiers, *flags], tmp_path / f"{name}.log", environment) as server:
            answers = ask_each(server.client(), prompts)
            assert [answer.ids for answer in answers] == expected, name
            found = [found_in(answer, "storage") for answer in answers]
            assert min(found) >= least and (least > 0 or max(found) == 0), (name, found)
            if flags and name != "fewer bits":
                pair = oracle if draft == TINY_DRAFT else ReferencePair(draft=draft)
                assert_steps_kept(server, pair, prompts, answers)
            server.client().flush_when_idle()  # waits until all is stored
