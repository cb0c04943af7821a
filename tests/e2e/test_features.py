"""Features that `features.py` lists as served: tokens equal those of speculation off, and drafts are accepted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from arms import EVERY_WIDTH, MAX_NEW_TOKENS, PENALTIES, PLAIN, POOL, SPECULATE, Baseline, assert_same_steps, on_arms
from changed_models import ADAPTERS, adapters, with_other_weights
from reference_pair import ReferencePair
from safetensors.torch import load_file
from sglang.srt.utils.common import MultiprocessingSerializer
from test_lifecycle import assert_pool_empties, draft_kv_writes
from test_reference_steps import streamed_lengths

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, TINY_TARGET, Client, Completion, Server

pytestmark = pytest.mark.server
WHOLE_BLOCKS_TAU, EVERY_WIDTH_TAU = 2.5, 1.8  # lower bounds; a draft that is never accepted has 1
EIGHT_BIT_GAP = 0.03
"""Logits with KV in FP8: where sums differ in their last bits, values are rounded to another neighbour. Speculation off
has other tokens by the batch, too, at gaps of up to 0.012."""


def ask(client: Client, prompt: list[int], max_new_tokens: int = MAX_NEW_TOKENS, **more: Any) -> Completion:
    """One greedy request; `more` are fields of its body."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    response = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})
    return Completion.from_generate(200, response.raise_for_status().json())


def assert_served(client: Client, baseline: Baseline, min_tau: float) -> list[Completion]:
    answers = client.generate_all(baseline.prompts, 8, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    assert tau(answers) >= min_tau
    return answers


@on_arms("ranks")
def test_tensor_parallel(client: Client, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where ranks disagree, or a rank uses another rank's share of the vocabulary or the heads; also where a
    request's logits must be gathered, for its logprobs."""
    assert_served(client, baseline, WHOLE_BLOCKS_TAU)
    for prompt, expected in zip(baseline.prompts[:3], baseline.answers[:3], strict=True):
        sampling = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = client.post("/generate", body).raise_for_status().json()
        assert answer["output_ids"] == expected.ids
    client.flush_when_idle()
    assert_like(client, oracle, baseline.prompts[::12])
    assert_pool_empties(client)


@pytest.mark.matrix
@on_arms("ranks at every width")
def test_tensor_parallel_rows(client: Client, baseline: Baseline) -> None:
    """Fails as `test_a_short_head_on_ranks`, with a plain draft and the whole vocabulary."""
    assert_ranks_agree(client, baseline, 1.5)


def assert_ranks_agree(client: Client, baseline: Baseline, min_tau: float) -> None:
    """Fails where a rank chooses rows for itself, or commits other tokens than the first; with sampled requests, too,
    whose tokens each rank would draw for itself."""
    assert_served(client, baseline, min_tau)
    sampled = client.generate_all(baseline.prompts[:8], 8, max_new_tokens=MAX_NEW_TOKENS, temperature=1.3)
    assert all(len(answer.ids) > 1 for answer in sampled)
    assert_served(client, baseline, min_tau)  # the ranks still agree
    assert_pool_empties(client)


@on_arms("replicas")
def test_replicas(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where a replica answers differently, only one replica answers, or steps are not counted."""
    answers = assert_served(client, baseline, 1.0)  # widths follow measured times, which must not decide a test
    log = server.log.read_text()
    assert all(re.search(rf" DP{rank}[ \]].*Prefill batch", log) for rank in (0, 1)), "one replica did all the work"
    lengths = streamed_lengths(client, baseline.prompts[0])
    assert lengths[-1] == len(baseline.answers[0].ids)
    metrics = httpx.get(f"{client.url}/metrics").raise_for_status().text
    counts = re.findall(r"^sglang:spec_verify_calls_total\{.*\} ([\d.e+]+)$", metrics, re.MULTILINE)
    assert sum(map(float, counts)) >= sum(answer.steps for answer in answers)


@on_arms("busy")
def test_mixed_chunks(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where a request that decodes in another's prefill batch continues wrongly, or none does so."""
    log_start = server.log.stat().st_size
    answers = assert_served(client, baseline, EVERY_WIDTH_TAU)
    assert not any(answer.meta["num_retractions"] or answer.cached_tokens for answer in answers)
    decoded_along = sum(draft_kv_writes(server, log_start)) - sum(map(len, baseline.prompts))
    assert decoded_along >= 50
    assert_pool_empties(client)


@on_arms("busy")
def test_penalties_in_mixed_chunks(client: Client, baseline: Baseline) -> None:
    """Fails where a token committed in another request's prefill batch is not counted."""
    limit = PENALTIES["min_new_tokens"]
    with ThreadPoolExecutor(8) as pool:
        sampling = {**PENALTIES, "max_new_tokens": limit}
        answers = list(pool.map(lambda prompt: client.generate(prompt, **sampling), baseline.long_prompts))
    cut = [answer.cut(limit) for answer in baseline.penalised_answers]
    assert_equal_tokens(answers, cut, baseline.long_prompts)
    assert sum(answer.steps for answer in answers) < sum(len(answer.ids) for answer in answers)


@on_arms("busy")
def test_preemption(client: Client, baseline: Baseline) -> None:
    """Fails where a preempted request comes back wrong, or none is preempted."""
    low, high = baseline.prompts, baseline.prompts[::6]
    with ThreadPoolExecutor(len(low) + len(high)) as pool:
        first = [pool.submit(ask, client, prompt, priority=0) for prompt in low]
        wait(first, return_when=FIRST_COMPLETED)  # 24 requests, four at a time: some run, others wait
        second = [pool.submit(ask, client, prompt, priority=100) for prompt in high]
        answers = [future.result() for future in (*first, *second)]
    assert_equal_tokens(answers, [*baseline.answers, *baseline.answers[::6]], [*low, *high])
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0, "nothing was preempted"
    assert_pool_empties(client)


@on_arms("sliding")
def test_sliding_draft(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where a layer's window, its causality in the block or YaRN's positions differ from the reference in any
    step."""
    assert_like(client, ReferencePair(draft=draft), [*baseline.prompts[::4], baseline.conversation[-1][0]])
    client.flush_when_idle()
    assert_served(client, baseline, WHOLE_BLOCKS_TAU)


@on_arms("dressed")
def test_dressed_draft(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where Gemma's norms, scaled values, sinks or a position's mask embedding are applied in another way than in
    the reference, by the draft's layers or by its context KV; also where sinks, or positions that all see one
    embedding, change so few drafts that the test would not see it."""
    reference, prompts = ReferencePair(draft=draft), baseline.prompts[::4]
    assert_like(client, reference, prompts)
    client.flush_when_idle()
    assert_served(client, baseline, WHOLE_BLOCKS_TAU)
    dressed = reference.generate(prompts, MAX_NEW_TOKENS)
    rows = reference.draft.mask_embedding
    reference.draft.mask_embedding = rows[:1]
    alike = reference.generate(prompts, MAX_NEW_TOKENS)
    reference.draft.mask_embedding = rows
    for layer in reference.draft.layers:
        layer.self_attn.attention_sink_bias.data.fill_(-1e4)
    without_sinks = reference.generate(prompts, MAX_NEW_TOKENS)
    for others in (alike, without_sinks):
        assert sum(a.commit_lens != b.commit_lens for a, b in zip(dressed, others, strict=True)) >= 3


@on_arms("sliding")
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(client: Client, baseline: Baseline, mode: str) -> None:
    """Fails where a paused request continues wrongly, or KV slots stay in use."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, client, prompt) for prompt in baseline.prompts]
        wait(asked, return_when=FIRST_COMPLETED)  # seven others run now
        client.post("/pause_generation", {"mode": mode}).raise_for_status()
        time.sleep(0.3)
        client.post("/continue_generation", {}).raise_for_status()
        answers = [future.result() for future in asked]
    done = [index for index, answer in enumerate(answers) if answer.finish_reason != "abort"]
    assert (len(done) < len(answers)) == (mode == "abort")
    assert (sum(answers[i].meta["num_retractions"] for i in done) > 0) == (mode == "retract")  # only `retract` retracts
    assert_equal_tokens(
        [answers[i] for i in done], [baseline.answers[i] for i in done], [baseline.prompts[i] for i in done]
    )
    assert_pool_empties(client)


@pytest.mark.parametrize(
    ("server", "streaming"),
    [("sliding", False), ("sliding", True), ("uncompiled", True)],
    ids=["plain", "streaming", "streaming without overlap"],
    indirect=["server"],
)
def test_sessions(client: Client, baseline: Baseline, streaming: bool) -> None:
    """Fails where a turn does not continue exactly the tokens of the previous answer, or reads KV that nobody wrote:
    without overlap, no step follows that would write the last token's."""
    for start in range(0, len(baseline.prompts) - 3, 8):
        opened = client.post("/open_session", {"capacity_of_str_len": 10000, "streaming": streaming})
        session, last, history = opened.raise_for_status().json(), None, list[int]()
        for prompt in baseline.prompts[start : start + 3]:
            history += prompt
            answer = ask(client, prompt, 40, session_params={"id": session, "rid": last}, return_logprob=True)
            assert answer.meta["prompt_tokens"] == len(history)
            alone = ask(client, history, 40, return_logprob=True)
            assert answer.ids == alone.ids
            logprobs, expected = ([one[0] for one in each.meta["output_token_logprobs"]] for each in (answer, alone))
            assert logprobs == pytest.approx(expected, abs=1e-3)  # one wrong key moves them before a token changes
            history += answer.ids
            last = answer.meta["id"]
        client.post("/close_session", {"session_id": session}).raise_for_status()
    assert_pool_empties(client)


@on_arms("sliding")
def test_thresholds_stay(client: Client) -> None:
    """Fails where a call can make acceptance lossy while the server runs and reports success."""
    for value, updated in ((0.5, False), (1.0, True)):
        change = {"server_args": {"speculative_accept_threshold_single": value}}
        assert client.post("/set_internal_state", change).raise_for_status().json() == [updated]


def assert_like(client: Client, reference: ReferencePair, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Fails where tokens or steps differ from those of this pair. Returns the ids."""
    expected = reference.generate(prompts, MAX_NEW_TOKENS)
    for prompt, answer in zip(prompts, expected, strict=True):
        served = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        assert served.ids == answer.ids
        assert_same_steps(served, answer.commit_lens)
    return [answer.ids for answer in expected]


def update_from_tensors(client: Client, model: Path, **selector: str) -> None:
    """Sends all tensors of a model; a selector gets the start of the session, as from the host's engine."""
    tensors = list(load_file(model / "model.safetensors").items())
    client.post("/begin_weight_update", selector).raise_for_status()
    body = {"serialized_named_tensors": [MultiprocessingSerializer.serialize(tensors, output_str=True)]}
    client.post("/update_weights_from_tensor", body).raise_for_status()
    client.post("/end_weight_update", {}).raise_for_status()


def assert_draft_changes(client: Client, draft: Path, changed: Path, prompts: Sequence[list[int]]) -> None:
    """Gives the served draft the weights of `changed`, and then its own again. Fails where a step keeps old ones, or
    where the draft's folder passes for a target's."""
    refusal = client.post("/update_weights_from_disk", {"model_path": str(changed)})
    assert refusal.status_code == 400 and "selector 'draft'" in refusal.json()["message"]
    update_from_tensors(client, changed, selector="draft")
    assert_like(client, ReferencePair(draft=changed), prompts)
    update_from_tensors(client, draft, selector="draft")
    assert_like(client, ReferencePair(draft=draft), prompts[:1])


@pytest.fixture
def shared_tensors() -> Iterator[None]:
    """Tensors that a process can read although it is not a child of this one."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


@on_arms("sliding")
def test_target_weights_change(
    client: Client, baseline: Baseline, draft: Path, tmp_path: Path, shared_tensors: None
) -> None:
    """Fails where the target keeps old weights, or its new weights reach the draft."""
    prompts = baseline.prompts[::12]
    changed = with_other_weights(TINY_TARGET, tmp_path / "target", ("layers.2.", "layers.3."))
    client.post("/update_weights_from_disk", {"model_path": str(changed)}).raise_for_status()
    try:
        ids = assert_like(client, ReferencePair(changed, draft), prompts)
        assert ids != [answer.ids for answer in baseline.answers[::12]]
    finally:
        update_from_tensors(client, TINY_TARGET)
    assert_like(client, ReferencePair(draft=draft), prompts)


@on_arms("sliding")
def test_draft_weights_change(
    client: Client, baseline: Baseline, draft: Path, tmp_path: Path, shared_tensors: None
) -> None:
    """Fails where the draft keeps old weights, in its layers or in its context KV, or its new weights reach the
    target."""
    changed = with_other_weights(draft, tmp_path / "draft", ("k_proj", "v_proj", "k_norm", "fc", "mlp"))
    assert_draft_changes(client, draft, changed, baseline.prompts[::12])


def test_lora_and_kv_in_fewer_bits(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where an adapter reaches another request or the draft's head, or 8-bit KV is read differently from
    speculation off."""
    adapted = [*PLAIN, *POOL, "--kv-cache-dtype", "fp8_e4m3", "--lora-paths", *adapters(tmp_path)]
    on_flags = [*SPECULATE, "--speculative-draft-kv-cache-dtype", "bfloat16"]
    requests = [(prompt, adapter) for prompt in baseline.prompts[::6] for adapter in (None, *ADAPTERS)]

    def ask_all(client: Client, **more: Any) -> list[Completion]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda request: ask(client, request[0], 60, lora_path=request[1], **more), requests))

    with PreloadedServer(adapted, tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        off = ask_all(server.client(), return_logprob=True, top_logprobs_num=2)
    plain, first, second = (off[index :: 1 + len(ADAPTERS)] for index in range(3))
    for one, other in ((plain, first), (plain, second), (first, second)):
        assert sum(a.ids != b.ids for a, b in zip(one, other, strict=True)) > len(plain) / 3, "adapters change nothing"
    with PreloadedServer([*adapted, *on_flags], tmp_path / "on.log", TINY_OVERLAPPING | EVERY_WIDTH) as server:
        answers = ask_all(server.client())
        assert_pool_empties(server.client())
    assert_equal_tokens(answers, off, requests, EIGHT_BIT_GAP)
    assert tau(answers[:: 1 + len(ADAPTERS)]) >= EVERY_WIDTH_TAU
    assert tau(answers) > 1.2
