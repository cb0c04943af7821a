"""Every parameter of a request, with a target of every family: each answer equals that of speculation off."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from family_settings import ARMS, STATES, target_flags
from models import FAMILIES, IMAGE, make_draft, make_target

from parameters import (
    BODIES,
    GREEDY,
    SAMPLED,
    Request,
    ask,
    ask_oracle,
    assert_alike,
    combinations,
    draw,
    mean_commit_len,
    processor_body,
)
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT

pytestmark = [pytest.mark.server, pytest.mark.families]
FLAGS = ["--enable-return-hidden-states", "--enable-custom-logit-processor"]
DRAWN = 24


def _requests() -> list[Request]:
    """Each has a prompt of its own, by which the replayed draft finds its answer. Sampled ones have one token to choose
    from: other samples need --enable-deterministic-inference, which not every family can serve."""
    rng = random.Random(8)
    sure = {name: SAMPLED["temperature"] | SAMPLED[name] | {"top_k": 1} for name in ("top_k", "penalties", "grammar")}
    cases = [(name, sampling, {}) for name, sampling in (GREEDY | sure).items()]
    cases += [(name, {"frequency_penalty": 0.8}, body) for name, body in BODIES.items()]
    cases += [(f"mix {i}", sampling, {}) for i, sampling in enumerate(draw(combinations(), DRAWN))]
    cases += [("processor", {"custom_params": {"window": 3}}, processor_body())]
    return [Request(name, [rng.randrange(1000) for _ in range(20)], *rest) for name, *rest in cases]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter(family: str, tmp_path: Path) -> None:
    """Fails where a parameter is ignored, applied to the wrong row, or changes another request."""
    target = make_target(family, tmp_path / "target")
    draft = make_draft(family, target, tmp_path / "draft")
    requests, arm = _requests(), ARMS["overlap, every width"]
    states = STATES if FAMILIES[family].recurrent else []
    off = [*arm.flags, *FLAGS, *states, "--disable-overlap-schedule", "--disable-radix-cache"]
    with PreloadedServer(target_flags(family, target, off), tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        oracle = ask_oracle(server.client(), requests)
    known = [
        (request.prompt, (answer[0] if isinstance(answer, list) else answer).get("output_ids", []))
        for request, answer in zip(requests, oracle, strict=True)
    ]
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({"image_token": IMAGE, "answers": known}))
    on = [*arm.flags, *FLAGS, *(arm.recurrent if FAMILIES[family].recurrent else [])]
    on += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    environment = arm.environment | {"REPLAYED_ANSWERS": str(answers), "REPLAYED_TAPS": str(tmp_path / "taps.pt")}
    with PreloadedServer(target_flags(family, target, on), tmp_path / "on.log", environment) as server:
        client = server.client()
        for concurrency in (1, 8):
            client.flush_when_idle()  # a cached prompt has no hidden states
            got = ask(client, requests, concurrency)
            assert_alike(requests, oracle, got)
            tau = mean_commit_len(got)
            print(f"{family}: {len(requests)} requests, {concurrency} at a time, tau {tau:.2f}")
            assert tau > 1.3
