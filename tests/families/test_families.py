"""Targets of other families, tiny and random, with replayed drafts: every answer equals that of speculation off.

The families of `models.py` under the settings of `ARMS`. A usual run takes Qwen3.5 under three of them and each other
family under one; `scripts/test.sh --families` runs all and leaves its table in `build/families.md`.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models import BLOCK_SIZE, FAMILIES, make_draft, make_target

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Answer, Client

pytestmark = pytest.mark.server
PLUGINS = Path(__file__).parent / "plugins"
TABLE = Path(__file__).parents[2] / "build" / "families.md"
TIE_GAP = 1e-5
NEW_TOKENS = 48
CHUNK = 64  # rows after which SGLang keeps a state for the prefix cache

POOL = ["--max-total-tokens", "8192", "--max-running-requests", "8"]
SNAPSHOTS = ["--mamba-track-interval", str(CHUNK), "--mamba-radix-cache-strategy"]
FULL, EVERY = {"SGLANG_DFLASH_WIDTH": "full"}, {"SGLANG_DFLASH_WIDTH": "adaptive", "REPLAYED_WIDTHS": "every"}


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings of a server with speculation on.

    Fields:
        flags, environment: for every family.
        recurrent: further flags for families with recurrent state.
    """

    flags: list[str]
    environment: dict[str, str]
    recurrent: list[str]


ARMS = {
    "every width": Arm(POOL, TINY_ENVIRONMENT | EVERY, ["--max-mamba-cache-size", "64"]),
    "overlap, pages, chunks": Arm(
        [*POOL, "--page-size", "16", "--chunked-prefill-size", str(CHUNK)],
        TINY_OVERLAPPING | FULL,
        ["--max-mamba-cache-size", "64", *SNAPSHOTS, "extra_buffer"],
    ),
    "small pool": Arm(
        ["--max-total-tokens", "900", "--max-running-requests", "8", "--schedule-conservativeness", "0.05"],
        TINY_OVERLAPPING | EVERY,
        ["--max-mamba-cache-size", "44", *SNAPSHOTS, "extra_buffer_lazy"],
    ),
    "whole blocks": Arm(POOL, TINY_ENVIRONMENT | FULL, ["--max-mamba-cache-size", "64"]),
    "overlap, every width": Arm(
        POOL, TINY_OVERLAPPING | EVERY, ["--max-mamba-cache-size", "64", *SNAPSHOTS, "extra_buffer"]
    ),
    "overlap, lazy": Arm(
        POOL, TINY_OVERLAPPING | FULL, ["--max-mamba-cache-size", "64", *SNAPSHOTS, "extra_buffer_lazy"]
    ),
    "small pool, no overlap": Arm(
        ["--max-total-tokens", "900", "--max-running-requests", "8", "--schedule-conservativeness", "0.05"],
        TINY_ENVIRONMENT | FULL,
        ["--max-mamba-cache-size", "28"],
    ),
}
USUAL = [
    ("Qwen3.5", "every width"),
    ("Qwen3.5", "overlap, pages, chunks"),
    ("Qwen3.5", "small pool"),
    ("Qwen3.5 MoE", "every width"),
    ("Qwen3-Next", "overlap, pages, chunks"),
    ("Qwen3 MoE", "overlap, pages, chunks"),
]
REST = [(family, arm) for family in FAMILIES for arm in ARMS if (family, arm) not in USUAL]

CASES: list[dict[str, Any]] = [
    {"stop_token_ids": list(range(0, 1788, 23))},
    {"max_new_tokens": 13},
    {"frequency_penalty": 1.1, "presence_penalty": 0.7, "repetition_penalty": 1.6},
    {"min_new_tokens": 30, "stop_token_ids": list(range(0, 1788, 7))},
    {"logit_bias": {"11": 9.0, "13": -100.0}, "presence_penalty": 1.9},
    {"regex": "[0-9 +=]{5,30}\\."},
    {"regex": "[0-9 +=]{5,12}", "ignore_eos": True},
    {"json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})},
    {"stop": ["e", "a "]},
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what it gets alone with speculation off."""

    prompt: list[int]
    sampling: dict[str, Any]
    ids: list[int]
    finish_reason: str
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A family's models, and the answers of its off arm: first turns, then turns that continue those."""

    target: Path
    draft: Path
    first: list[Asked]
    later: list[Asked]
    answers: Path


def _ask_off(client: Client, prompt: list[int], sampling: dict[str, Any]) -> Asked:
    parameters = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, **sampling}
    body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 2}
    answer = client.post("/generate", body).raise_for_status().json()
    meta = answer["meta_info"]
    gaps = [best[0] - second[0] for best, second in meta["output_top_logprobs"]]
    return Asked(prompt, sampling, answer["output_ids"], meta["finish_reason"]["type"], gaps)


def _ask_on(client: Client, asked: list[Asked], concurrency: int) -> list[Answer]:
    def ask(one: Asked) -> Answer:
        return client.generate(one.prompt, **{"max_new_tokens": NEW_TOKENS, **one.sampling})

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, asked))


def _flags(family: str, target: Path, flags: list[str]) -> list[str]:
    return ["--device", "cpu", "--model-path", str(target), "--dtype", "float32", *flags]


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Family -> its `Baseline`, made when first asked for."""
    made: dict[str, Baseline] = {}

    def baseline(family: str) -> Baseline:
        if family not in made:
            made[family] = _make_baseline(family, tmp_path_factory.mktemp("family"))
        return made[family]

    yield baseline


def _make_baseline(family: str, folder: Path) -> Baseline:
    target = make_target(family, folder / "target")
    draft = make_draft(target, folder / "draft")
    rng = random.Random(5)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    shared = drawn(150)
    plain = [drawn(count) for count in (1, 17, 64, 65, 130, 200)]
    plain += [shared[:count] + drawn(5) for count in (63, 100, 128, 150)]
    requests = [(prompt, {"ignore_eos": True}) for prompt in plain] + [(drawn(20), case) for case in CASES]
    recurrent = ["--max-mamba-cache-size", "64"] if FAMILIES[family].recurrent else []
    arguments = _flags(family, target, [*POOL, *recurrent, "--disable-overlap-schedule", "--disable-radix-cache"])
    with PreloadedServer(arguments, folder / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        first = [_ask_off(client, *request) for request in requests]
        turns = [
            (one.prompt + one.ids[:kept] + drawn(3), {"ignore_eos": True}) for one in first[:10] for kept in (48, 29)
        ]
        later = [_ask_off(client, *turn) for turn in turns]
    answers = folder / "answers.json"
    answers.write_text(json.dumps([(one.prompt, one.ids) for one in first + later]))
    return Baseline(target, draft, first, later, answers)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    rows = [
        "| family | settings | requests | tau | steps by accept_len |",
        "|---|---|---|---|---|",
    ]
    yield rows
    if len(rows) > len(USUAL) + 2:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(rows) + "\n")
        print(f"\n{TABLE}:\n" + "\n".join(rows))


def _differences(answers: list[Answer], asked: list[Asked]) -> tuple[list[str], int]:
    """What differs, and how many differences are ties of the off arm's two best logits."""
    found, ties = [], 0
    for answer, expected in zip(answers, asked, strict=True):
        if answer.ids == expected.ids and answer.finish_reason == expected.finish_reason:
            continue
        pairs = enumerate(zip(answer.ids, expected.ids, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), -1)
        if index >= 0 and expected.gaps[index] < TIE_GAP:
            ties += 1
            continue
        found.append(f"{len(expected.prompt)} prompt ids, {expected.sampling}: token {index}, {answer.finish_reason}")
    return found, ties


def _abort_some(client: Client, prompts: list[list[int]]) -> None:
    """Leaves the server with requests that ended in the middle of a block."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        for prompt in prompts:
            pool.submit(client.generate, prompt, max_new_tokens=400, ignore_eos=True)
        time.sleep(0.3)
        client.post("/abort_request", {"rid": "", "abort_all": True}).raise_for_status()


def _run(family: str, arm: str, baseline: Baseline, folder: Path, rows: list[str]) -> None:
    settings = ARMS[arm]
    flags = [*settings.flags, *(settings.recurrent if FAMILIES[family].recurrent else [])]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(baseline.draft)]
    path = os.pathsep.join(filter(None, (str(PLUGINS), os.environ.get("PYTHONPATH"))))
    environment = settings.environment | {"REPLAYED_ANSWERS": str(baseline.answers), "PYTHONPATH": path}
    asked, answers = [], []
    with PreloadedServer(_flags(family, baseline.target, flags), folder / "on.log", environment) as server:
        client = server.client()
        for concurrency, turns in ((1, (baseline.first,)), (8, (baseline.first, baseline.later))):
            for turn in turns:
                asked += turn
                answers += _ask_on(client, turn, concurrency)
            if concurrency == 1:
                _abort_some(client, [one.prompt for one in baseline.first[:4]])
                client.flush_when_idle()
    counts = [0] * BLOCK_SIZE
    for answer in answers:
        for accept_len, count in enumerate(answer.accept_histogram):
            counts[accept_len] += count
    tau = 1 + sum(place * count for place, count in enumerate(counts)) / sum(counts)
    rows.append(f"| {family} | {arm} | {len(asked)} | {tau:.2f} | {' '.join(map(str, counts))} |")
    found, ties = _differences(answers, asked)
    assert not found, found
    assert ties <= 1 + sum(len(answer.ids) for answer in answers) // 10_000
    assert all(counts), f"some accept_len never occurred: {counts}"
    assert sum(answer.meta["cached_tokens"] > 0 for answer in answers) > len(answers) / 8, "no prefix was hit"


@pytest.mark.parametrize(("family", "arm"), USUAL, ids=[" / ".join(cell) for cell in USUAL])
def test_tokens_equal_speculation_off(family: str, arm: str, baselines: Any, tmp_path: Path, rows: list[str]) -> None:
    """Fails where one token differs, alone or among eight: state not rolled back, a snapshot of the wrong row, a stop,
    a parameter or a grammar in the middle of a block."""
    _run(family, arm, baselines(family), tmp_path, rows)


@pytest.mark.families
@pytest.mark.parametrize(("family", "arm"), REST, ids=[" / ".join(cell) for cell in REST])
def test_tokens_equal_under_all_settings(
    family: str, arm: str, baselines: Any, tmp_path: Path, rows: list[str]
) -> None:
    """The same under the remaining settings."""
    _run(family, arm, baselines(family), tmp_path, rows)
