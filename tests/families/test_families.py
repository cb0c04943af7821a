"""Targets of other families, tiny and random, with replayed drafts: every answer equals that of speculation off.

The families of `models.py` under the settings of `ARMS`. A usual run takes the cells of `USUAL`;
`scripts/test.sh --families` runs all and leaves its table in `build/families.md`. The tests of a family run in one
process.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_settings import ARMS, POOL, SMALL_POOL, STATES, target_flags
from mla_models import MLA_FAMILIES
from models import FAMILIES, IMAGE, PACKED, VIDEO, VISION_END, VISION_START, make_draft, make_target, plain_twin
from nemotron_models import NEMOTRON_FAMILIES
from PIL import Image
from transformers_answers import greedy_in_transformers, tapped_in_transformers

from equality import BLOCK_SIZE, TIES, ask_off, assert_equal_tokens, steps_by_accept_len, tau
from once import run_folder
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, Client, Completion

pytestmark = pytest.mark.server
TABLE = Path(__file__).parents[2] / "build" / "families.md"
NEW_TOKENS = 48
TAPPED_TOKENS = 17  # as in the plugin
USUAL = [  # recurrent state; experts and sliding windows; latent attention
    ("Qwen3.5", "overlap, pages, chunks"),
    ("Qwen3.5", "small pool"),
    ("gpt-oss", "every width"),
    ("DeepSeek-V3", "overlap, pages, chunks"),
]
QUANTISED = ("every width", "overlap, pages, chunks")  # a quantised target is a plain one once it is loaded
CELLS = [(family, arm) for family in FAMILIES for arm in (QUANTISED if family in PACKED else ARMS)]
REST = [cell for cell in CELLS if cell not in USUAL]

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
    {"temperature": 0.9, "top_k": 1, "frequency_penalty": 0.9},  # sampled, from one token
    {"temperature": 1.4, "top_p": 1e-6, "min_p": 0.5},
]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its images, one for each image token, and its sampling parameters."""

    prompt: list[int]
    sampling: dict[str, Any]
    images: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{len(self.prompt)} prompt ids, {len(self.images)} images, {self.sampling}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """A family's models, and what its off arm answers: to first turns, then to turns that continue those.

    Fields:
        plain: the target that transformers loads; another one if the server's is quantised.
        answers: the file that the replayed draft reads.
    """

    target: Path
    plain: Path
    draft: Path
    first: list[tuple[Request, Completion]]
    later: list[tuple[Request, Completion]]
    answers: Path


def _image(seed: int, height: int, width: int) -> str:
    """A data URL. A token stands for 16 x 16 pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _requests(rng: random.Random, family: str) -> list[Request]:
    """First turns: prompts of several lengths, some with a shared beginning; then the sampling parameters."""

    def drawn(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    shared = drawn(150)
    plain = [drawn(count) for count in (1, 17, 64, 65, 130, 200)]
    plain += [shared[:count] + drawn(5) for count in (63, 100, 128, 150)]
    requests = [Request(prompt, {"ignore_eos": True}) for prompt in plain]
    cases = [Request(drawn(20), case) for case in CASES]
    if not FAMILIES[family].sees:
        return requests + cases
    image = [VISION_START, IMAGE, VISION_END]
    sizes = [(32, 48), (128, 128), (16, 160)]
    if family.startswith("Gemma"):
        # 70 tokens each, without padding: SGLang adds padded patches to an image's first token, transformers does not.
        sizes = [(112, 160), (160, 112), (112, 160)]
    small, large, wide = (_image(seed, *size) for seed, size in enumerate(sizes, 1))
    behind_text, text = drawn(70), drawn(12)
    seen = [
        (image + drawn(9), (small,)),
        (drawn(40) + image + drawn(30), (large,)),  # 64 tokens: a chunk ends within the image
        (drawn(5) + image + drawn(7) + image + drawn(11), (small, wide)),
        # Equal ids and other pixels: the second must not hit the first in the prefix cache.
        (behind_text + image + text, (large,)),
        (behind_text + image + text, (_image(4, *sizes[1]),)),
        (behind_text + image + text + drawn(3), (large,)),  # hits the image
    ]
    requests += [Request(prompt, {"ignore_eos": True}, images) for prompt, images in seen]
    return requests + [Request(image + case.prompt, case.sampling, (small,)) for case in cases]


def _ask(client: Client, request: Request) -> Completion:
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, **request.sampling}
    body = {"input_ids": request.prompt, "image_data": list(request.images) or None, "sampling_params": sampling}
    return Completion.from_generate(200, client.post("/generate", body).raise_for_status().json())


def _ask_all(client: Client, requests: list[Request], concurrency: int) -> list[Completion]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: _ask(client, request), requests))


def _ask_off(client: Client, request: Request) -> tuple[Request, Completion]:
    sampling = {"max_new_tokens": NEW_TOKENS, **request.sampling}
    return request, ask_off(client, request.prompt, request.images, **sampling)


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Family -> its `Baseline`, made when first asked for."""
    made: dict[str, Baseline] = {}

    def baseline(family: str) -> Baseline:
        if family not in made:
            made[family] = _make_baseline(family, tmp_path_factory.mktemp("family"))
        return made[family]

    yield baseline


def _text(ids: list[int]) -> list[int]:
    """Without tokens that stand for an image: a random model may emit one, and a prompt needs an image for each."""
    return [id for id in ids if id < VISION_START]


def _make_baseline(family: str, folder: Path) -> Baseline:
    target = make_target(family, folder / "target")
    draft = make_draft(family, target, folder / "draft")
    rng = random.Random(5)
    requests = _requests(rng, family)
    flags = [*POOL, *(STATES if FAMILIES[family].recurrent else [])]
    arguments = target_flags(family, target, [*flags, "--disable-overlap-schedule", "--disable-radix-cache"])
    with PreloadedServer(arguments, folder / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        first = [_ask_off(client, request) for request in requests]
        turns = [
            Request(
                request.prompt + _text(answer.ids[:kept]) + [rng.randrange(1000) for _ in range(3)],
                {"ignore_eos": True},
                request.images,
            )
            for request, answer in first[: -len(CASES)]
            for kept in (NEW_TOKENS, 29)
        ]
        later = [_ask_off(client, turn) for turn in turns]
    answers = folder / "answers.json"
    known = [(request.prompt, answer.ids) for request, answer in first + later]
    answers.write_text(json.dumps({"image_token": IMAGE, "answers": known}))
    plain = plain_twin(target) if FAMILIES[family].packed else target
    return Baseline(target, plain, draft, first, later, answers)


@dataclass(slots=True)
class Compared:
    """What was equal for one family.

    Fields:
        settings: names of `ARMS`.
        answers: of all settings.
    """

    settings: list[str] = field(default_factory=list)
    answers: list[Completion] = field(default_factory=list)

    def row(self, family: str) -> str:
        counts = " ".join(map(str, steps_by_accept_len(self.answers)))
        return f"| {family} | {len(self.settings)} | {len(self.answers)} | {tau(self.answers):.2f} | {counts} |"


def _ran_whole(family: str, compared: Compared) -> bool:
    return len(compared.settings) == sum(name == family for name, _ in CELLS)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Compared]]:
    """Family -> what was equal. Those that ran under all their settings are written to TABLE, by each process of the
    run for all that have ended."""
    table: dict[str, Compared] = {}
    yield table
    whole = {family: compared for family, compared in table.items() if _ran_whole(family, compared)}
    rows = [compared.row(family) for family, compared in whole.items()]
    of_run = run_folder(tmp_path_factory) / "families"
    of_run.mkdir(exist_ok=True)
    (of_run / f"{os.getpid()}.md").write_text("\n".join(rows))
    rows = [row for part in sorted(of_run.glob("*.md")) for row in part.read_text().splitlines()]
    if rows:
        head = [
            "| family | settings | equal answers | mean commit_len | steps by accept_len, 0 to 7 |",
            "|---|---|---|---|---|",
        ]
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(head + rows) + "\n")
        print(f"\n{TABLE}:\n{TABLE.read_text()}")


def _abort_some(client: Client, prompts: list[list[int]]) -> None:
    """Leaves the server with requests that ended in the middle of a block."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        for prompt in prompts:
            pool.submit(client.generate, prompt, max_new_tokens=400, ignore_eos=True)
        time.sleep(0.3)
        client.post("/abort_request", {"rid": "", "abort_all": True}).raise_for_status()


def _ask_wrongly(client: Client) -> None:
    """Requests with images, videos or audio that are refused; the server must survive them."""
    image, good = [VISION_START, IMAGE, VISION_END], _image(1, 32, 48)
    for prompt, images in (
        ([5, *image, 10**7], [good]),  # such ids stand for images within the server
        ([5, *image], ["data:image/png;base64,AAAA"]),
    ):
        body = {"input_ids": prompt, "image_data": images, "sampling_params": {"max_new_tokens": 4}}
        assert client.post("/generate", body).status_code == 400, (prompt, images)
    for data in ({"video_data": ["data:video/mp4;base64,AAAA"]}, {"audio_data": "data:audio/wav;base64,AAAA"}):
        body = {"input_ids": [5, *image], "sampling_params": {"max_new_tokens": 4}, **data}
        refused = client.post("/generate", body)
        assert refused.status_code == 400 and "not served on a CPU" in refused.text, (data, refused.text)


def _run(family: str, arm: str, baseline: Baseline, folder: Path, table: dict[str, Compared]) -> None:
    settings = ARMS[arm]
    flags = [*settings.flags, *(settings.recurrent if FAMILIES[family].recurrent else [])]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(baseline.draft)]
    tapped = folder / "taps.pt"
    environment = settings.environment | {"REPLAYED_ANSWERS": str(baseline.answers), "REPLAYED_TAPS": str(tapped)}
    answers: list[Completion] = []
    asked: list[tuple[Request, Completion]] = []
    with PreloadedServer(target_flags(family, baseline.target, flags), folder / "on.log", environment) as server:
        client = server.client()
        for concurrency, turns in ((1, (baseline.first,)), (8, (baseline.first, baseline.later))):
            for turn in turns:
                asked += turn
                answers += _ask_all(client, [request for request, _ in turn], concurrency)
            if concurrency == 1:
                _abort_some(client, [request.prompt for request, _ in baseline.first[:4]])
                if FAMILIES[family].sees:
                    _ask_wrongly(client)
                client.flush_when_idle()
    if arm == "compiled":
        untraced = FAMILIES[family].experts or family in (*MLA_FAMILIES, *NEMOTRON_FAMILIES)
        said = "forward runs uncompiled: " if untraced else "forward is captured"
        if family.startswith("Gemma 3"):
            said = "forward could not be captured"  # SGLang compiles its rotary embedding
        assert f"The target's {said}" in (folder / "on.log").read_text()
    if family not in table:  # a replayed draft is accepted whatever it reads
        (prompt,) = [request.prompt for request, _ in baseline.first if len(request.prompt) == TAPPED_TOKENS]
        expected = tapped_in_transformers(family, baseline.plain, prompt)
        torch.testing.assert_close(torch.load(tapped), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    counts = steps_by_accept_len(answers)
    assert_equal_tokens(answers, [expected for _, expected in asked], [str(request) for request, _ in asked])
    assert all(counts[:BLOCK_SIZE]), f"some accept_len never occurred: {counts}"
    table.setdefault(family, Compared()).settings.append(arm)
    table[family].answers += answers
    if settings.flags is SMALL_POOL:  # running requests need all of it, so few prefixes stay
        print(f"{family}, {arm}: {sum(answer.meta['num_retractions'] for answer in answers)} retractions")
        assert any(answer.meta["num_retractions"] for answer in answers), "nothing was retracted"
    else:
        assert sum(answer.meta["cached_tokens"] > 0 for answer in answers) > len(answers) / 8, "no prefix was hit"


def of_family(family: str, *arm: str) -> Any:
    """A case of a family."""
    return pytest.param(family, *arm, id=" / ".join([family, *arm]), marks=pytest.mark.xdist_group(f"family {family}"))


USUAL_FAMILIES = list(dict.fromkeys(family for family, _ in USUAL))


def _emits_a_picture(ids: list[int]) -> int:
    """The place of the first token that stands for an image or a video, which a random model may emit. Transformers'
    Gemma 4 reads such a token as padding, SGLang as itself, so behind it answers differ."""
    return next((place for place, one in enumerate(ids) if one in (IMAGE, VIDEO)), len(ids))


def _compare_with_transformers(family: str, baseline: Baseline) -> None:
    asked = [(request, answer) for request, answer in baseline.first if request.sampling == {"ignore_eos": True}]
    expected = greedy_in_transformers(family, baseline.plain, [request for request, _ in asked], 16)
    for (request, answer), whole in zip(asked, expected, strict=True):
        ids = whole[: _emits_a_picture(whole) + 1]
        different = next(
            (i for i, (ours, theirs) in enumerate(zip(answer.ids, ids, strict=False)) if ours != theirs), None
        )
        assert different is None or answer.gaps[different] < TIES.tie_gap, f"token {different}: {request}"


@pytest.mark.parametrize("family", [of_family(name) for name in USUAL_FAMILIES])
def test_the_baseline_is_transformers_greedy_answer(family: str, baselines: Any) -> None:
    """Fails where our CPU bodies are wrong and only agree with themselves: a gate, a norm, rotary sections, an image's
    positions."""
    _compare_with_transformers(family, baselines(family))


@pytest.mark.families
@pytest.mark.parametrize("family", [of_family(name) for name in FAMILIES if name not in USUAL_FAMILIES])
def test_the_baselines_of_the_others_too(family: str, baselines: Any) -> None:
    """The same for the remaining families."""
    _compare_with_transformers(family, baselines(family))


@pytest.mark.parametrize(("family", "arm"), [of_family(*cell) for cell in USUAL])
def test_tokens_equal_speculation_off(
    family: str, arm: str, baselines: Any, tmp_path: Path, table: dict[str, Compared]
) -> None:
    """Fails where one token differs, alone or among eight: state not rolled back, a snapshot of the wrong row, a stop,
    a parameter or a grammar in the middle of a block."""
    _run(family, arm, baselines(family), tmp_path, table)


@pytest.mark.families
@pytest.mark.parametrize(("family", "arm"), [of_family(*cell) for cell in REST])
def test_tokens_equal_under_all_settings(
    family: str, arm: str, baselines: Any, tmp_path: Path, table: dict[str, Compared]
) -> None:
    """The same under the remaining settings."""
    _run(family, arm, baselines(family), tmp_path, table)
