"""A language server whose images another server encodes: `--language-only` before `--encoder-only`."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from family_settings import ARMS, POOL, target_flags
from models import IMAGE, VISION_END, VISION_START, make_draft, make_target
from PIL import Image

from equality import ask_off, assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, Completion, Server, greedy_body
from sglang_dflash.serving.server import _free_port

pytestmark = pytest.mark.server
FAMILY = "Qwen3-VL"
ANSWER = {"max_new_tokens": 40, "ignore_eos": True}
LOOPBACK = {"SGLANG_HOST_IP": "127.0.0.1"}


def image_of(seed: int, height: int, width: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_language_only(tmp_path: Path) -> None:
    """Fails where an image that another server has encoded is drafted over or answered differently from one that the
    server encodes itself, with speculation off. Drafts are replayed."""
    target = make_target(FAMILY, tmp_path / "target")
    draft, rng = make_draft(FAMILY, target, tmp_path / "draft"), random.Random(3)
    image = [VISION_START, IMAGE, VISION_END]

    def text(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    asked = [(text(30), []), (text(70), [])]
    asked += [(text(9) + image + text(12), [image_of(seed, 32, 48)]) for seed in (1, 2)]
    asked += [(image + text(3) + image + text(20), [image_of(3, 64, 64), image_of(4, 16, 160)])]
    off = target_flags(FAMILY, target, [*POOL, "--disable-overlap-schedule"])
    with PreloadedServer(off, tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        expected = [ask_off(client, prompt, images, **ANSWER) for prompt, images in asked]
    answers = tmp_path / "answers.json"
    known = [(prompt, answer.ids) for (prompt, _), answer in zip(asked, expected, strict=True)]
    answers.write_text(json.dumps({"image_token": IMAGE, "answers": known}))
    replay = {"REPLAYED_ANSWERS": str(answers), "REPLAYED_TAPS": str(tmp_path / "taps.pt")}

    transfer = ["--encoder-transfer-backend", "zmq_to_tokenizer"]
    encoder = PreloadedServer(
        target_flags(FAMILY, target, ["--encoder-only", *transfer]),
        tmp_path / "encoder.log",
        TINY_ENVIRONMENT | LOOPBACK,
        health="/health",
    )
    language = ["--language-only", "--encoder-urls", encoder.url, "--encoder-bootstrap-port", str(_free_port())]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    on: Server = PreloadedServer(
        target_flags(FAMILY, target, [*POOL, *transfer, *language, *speculate]),
        tmp_path / "on.log",
        ARMS["every width"].environment | LOOPBACK | replay,
    )
    with encoder, on:
        client = on.client()
        bodies = [greedy_body(prompt, **ANSWER) | {"image_data": images or None} for prompt, images in asked]
        got: list[Completion] = client.ask_all(bodies, 1) + client.ask_all(bodies, 4)
    assert all(answer.answered for answer in got), got
    assert_equal_tokens(got, expected * 2, [str(prompt) for prompt, _ in asked] * 2)
    assert tau(got) > 1.5
    assert "local mm processing" not in (tmp_path / "on.log").read_text(), "the language server encoded images itself"
