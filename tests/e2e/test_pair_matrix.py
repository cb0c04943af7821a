"""A prefill server and a decode server under many settings: `scripts/test.sh --matrix`."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from arms import (
    ADMIT_ALL,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    MAX_NEW_TOKENS,
    PLAIN,
    POISONED,
    POISONED_EVERY_WIDTH,
    POOL,
    SPECULATE,
    TIERS,
    TINY_POOL,
    Baseline,
    to_the_limit,
)
from changed_models import sliding_draft
from reference_pair import ReferencePair
from test_lifecycle import assert_pool_empties
from test_pairs import assert_plain_steps
from test_parameters import FLAGS, SEEDED, prompts
from two_servers import Pair, need_mooncake, running_pair

from equality import assert_equal_tokens, tau
from parameters import GREEDY, SAMPLED, Request, ask, ask_oracle, assert_alike, processor_body, requests_of
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Client

__all__ = ["prompts"]  # a fixture
pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.xdist_group("pair matrix")]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
HYBRID = ["--model-path", str(HYBRID_TARGET), "--speculative-draft-model-path", str(HYBRID_DRAFT)]
PAGES = ["--page-size", "16", "--chunked-prefill-size", "64"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Flags of both servers and of each, and their environment."""

    flags: list[str]
    environment: dict[str, str]
    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)


CPU_TENSOR = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
CELLS = {
    "page 1": Cell([], TINY_ENVIRONMENT),
    "page 1, overlap, cpu_tensor": Cell([], TINY_OVERLAPPING, decode=CPU_TENSOR),
    "page 16": Cell(PAGES, TINY_ENVIRONMENT),
    "page 16, overlap": Cell(PAGES, TINY_OVERLAPPING),
    "page 16, cpu_tensor": Cell(PAGES, TINY_ENVIRONMENT, decode=CPU_TENSOR),
    "two ranks": Cell([*PAGES, "--tp-size", "2"], TINY_ENVIRONMENT),
    "two ranks and one": Cell(PAGES, TINY_ENVIRONMENT, prefill=["--tp-size", "2"]),
    "one rank and two": Cell(PAGES, TINY_ENVIRONMENT, decode=["--tp-size", "2"]),
    "host memory on the first": Cell(PAGES, TINY_OVERLAPPING, prefill=TIERS[:7]),
    "priorities": Cell(PAGES, TINY_OVERLAPPING, decode=["--enable-priority-scheduling"]),
    "prefixes on the second": Cell(PAGES, TINY_OVERLAPPING, decode=["--disaggregation-decode-enable-radix-cache"]),
    "hybrid": Cell([*HYBRID, "--max-mamba-cache-size", "64"], TINY_ENVIRONMENT),
}


@pytest.mark.parametrize("name", CELLS)
def test_pairs_under_other_settings(name: str, baseline: Baseline, oracle: ReferencePair, tmp_path: Path) -> None:
    """Fails where a request arrives, or comes back from a backup, with less than its whole KV of both models: asked in
    a crowd, again with its beginning cached, and in turns of a conversation; all retracted now and then."""
    need_mooncake()
    cell, prompts = CELLS[name], baseline.long_prompts
    pair = ReferencePair(HYBRID_TARGET, HYBRID_DRAFT) if name == "hybrid" else oracle
    flags = [*PLAIN, *SPECULATE, *TINY_POOL, *cell.flags]
    environment = cell.environment | ADMIT_ALL | POISONED | RETRACT
    retracted = 0
    with running_pair(flags, tmp_path, environment, cell.prefill, cell.decode) as running:
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                crowd = list(pool.map(lambda prompt: running.client.generate(prompt, **to_the_limit(prompt)), prompts))
            assert_plain_steps(pair, prompts, crowd)
            retracted += sum(answer.meta["num_retractions"] for answer in crowd)
        for prompt, _ in baseline.conversation[:3]:
            assert_plain_steps(pair, [prompt], [running.client.generate(prompt, max_new_tokens=20)])
        assert_pool_empties(running.client)
    assert retracted, "nothing was retracted"


def test_a_pair_at_every_width(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where tokens differ with rows that are chosen, not whole blocks."""
    need_mooncake()
    flags, environment = [*PLAIN, *SPECULATE, *TINY_POOL, *PAGES], TINY_OVERLAPPING | ADMIT_ALL | POISONED_EVERY_WIDTH
    with running_pair(flags, tmp_path, environment | RETRACT) as running, ThreadPoolExecutor(8) as pool:
        prompts = baseline.long_prompts
        crowd = list(pool.map(lambda prompt: running.client.generate(prompt, **to_the_limit(prompt)), prompts))
    assert_equal_tokens(crowd, baseline.long_answers, prompts)
    assert tau(crowd) > 1.2


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    need_mooncake()
    folder = tmp_path_factory.mktemp("pair")
    with running_pair([*PLAIN, *POOL, *SPECULATE, *PAGES, *FLAGS], folder, TINY_OVERLAPPING | POISONED) as running:
        yield running


def test_every_length_twice(plain_pair: Pair, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where some length of a prompt, or of its cached beginning, within a page or a block, loses KV."""
    prompt = [*baseline.long_prompts[0], *baseline.long_answers[0].ids]
    prompts = [[number, *prompt[: 1 + number]] for number in range(128)]
    for _ in range(2):
        answers = plain_pair.client.generate_all(prompts, 4, max_new_tokens=12)
        assert_plain_steps(oracle, prompts, answers)


def test_aborts_in_transfer(plain_pair: Pair, baseline: Baseline) -> None:
    """Fails where an abort at any moment disturbs another request, keeps slots on either server, or ends one."""
    client, rng = plain_pair.client, random.Random(7)

    def doomed(number: int) -> None:
        rid, prompt = f"doomed-{number}", rng.choice(baseline.long_prompts)
        killer = threading.Timer(rng.uniform(0.0, 1.0), lambda: client.post("/abort_request", {"rid": rid}))
        killer.start()
        sampling = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
        client.post("/generate", {"rid": rid, "input_ids": prompt, "sampling_params": sampling})
        killer.join()

    with ThreadPoolExecutor(24) as pool:
        for number in range(20):
            pool.submit(doomed, number)
        survivors = client.generate_all(baseline.prompts[::3], 4, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens(survivors, baseline.answers[::3], baseline.prompts[::3])
    assert_pool_empties(client)
    assert_pool_empties_of(plain_pair, client)


def assert_pool_empties_of(pair: Pair, client: Client) -> None:
    """The prefill server's load after one more request of both."""
    client.generate("Hello", max_new_tokens=1)
    assert not any(load["num_used_tokens"] for load in pair.prefill.client().get("/v1/loads")["loads"])


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_every_parameter_on_two_servers(prompts: list[list[int]], seeded: bool, tmp_path: Path) -> None:
    """Fails where a parameter is lost on the way, or applied to another request. The off arm is a pair, too: what the
    decode server of SGLang does not know of the first token is missing in both."""
    need_mooncake()
    if seeded:
        asked = [
            Request(r.name, r.prompt, r.sampling | {"sampling_seed": 7 + i})
            for i, r in enumerate(requests_of(SAMPLED, prompts))
        ]
    else:
        processor = Request("processor", prompts[0], {"custom_params": {"window": 3}}, processor_body())
        asked = [*requests_of(GREEDY, prompts), processor]
    asked = [request for request in asked if request.sampling.get("n", 1) == 1]
    flags = [*PLAIN, *POOL, *PAGES, *(SEEDED if seeded else FLAGS)]
    with running_pair([*flags, "--disable-overlap-schedule"], tmp_path / "off", TINY_ENVIRONMENT) as off:
        expected = ask_oracle(off.client, asked)
    environment = TINY_ENVIRONMENT if seeded else TINY_OVERLAPPING
    with running_pair([*flags, *SPECULATE], tmp_path / "on", environment | POISONED) as on:
        for concurrency in (1, 8):
            assert_alike(asked, expected, ask(on.client, asked, concurrency))


def test_other_drafts_are_refused(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where a decode server takes KV from a prefill server without a draft, or with another one, or ends."""
    need_mooncake()
    other = sliding_draft(tmp_path / "other")
    impatient = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20", **TINY_ENVIRONMENT}
    for name, prefill, sentence in (
        ("none", [], "it has no draft, and this server has "),
        ("other", [*SPECULATE[:2], "--speculative-draft-model-path", str(other)], "the same --speculative-draft-model"),
    ):
        folder = tmp_path / name
        with running_pair([*PLAIN, *POOL], folder, impatient, prefill, SPECULATE) as running:
            refused = running.client.ask({"input_ids": baseline.prompts[0], "sampling_params": {"max_new_tokens": 4}})
            assert not refused.answered, refused
            assert not running.decode.ended() and not running.prefill.ended()
        assert sentence in (folder / "decode.log").read_text()
