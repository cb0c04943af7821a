"""The greedy answers of transformers' own models: what a family's baseline must say, with images, too."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from models import FAMILIES, IMAGE, VISION
from PIL import Image
from remote.processing_kimi_k25 import MediaProcessor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4ImageProcessor,
    Qwen2VLImageProcessor,
)

from sglang_dflash.reference import FeatureTaps


def greedy_in_transformers(family: str, target: Path, requests: list[Any], count: int) -> list[list[int]]:
    """The first `count` ids of each answer by transformers' own model of the family."""
    kind = AutoModelForImageTextToText if FAMILIES[family].sees else AutoModelForCausalLM
    model = kind.from_pretrained(target, dtype=torch.float32).eval()
    remote = FAMILIES[family].remote
    answers = []
    for request in requests:
        ids, more = request.prompt, {}
        if request.images:
            more, counts = _processed(family, target, request.images)
            tokens = iter(counts)
            ids = [id for token in ids for id in [token] * (next(tokens) if token == IMAGE else 1)]
            if not remote:
                more["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE).int()
        prompt = torch.tensor([ids])
        answer = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, **more)
        answers.append(answer[0, len(ids) :].tolist())
    return answers


def tapped_in_transformers(family: str, target: Path, prompt: list[int]) -> torch.Tensor:
    """[T, taps * H]: what the family's draft reads of the prompt, by transformers' model."""
    kind = AutoModelForImageTextToText if FAMILIES[family].sees else AutoModelForCausalLM
    model = kind.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad(), FeatureTaps(model, FAMILIES[family].taps) as taps:
        model(torch.tensor([prompt]))
        return taps.take()[0]


def _processed(family: str, target: Path, images: tuple[str, ...]) -> tuple[dict[str, Any], list[int]]:
    """What transformers' model takes for these images, and how many tokens each of them is."""
    pixels = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in images]
    if family.startswith("Gemma"):
        more = dict(Gemma4ImageProcessor.from_pretrained(target)(pixels, return_tensors="pt"))
        return more, list(map(int, more.pop("num_soft_tokens_per_image")))
    processor = MediaProcessor() if FAMILIES[family].remote else Qwen2VLImageProcessor.from_pretrained(target)
    more = dict(processor(pixels, return_tensors="pt"))
    return more, (more["image_grid_thw"].prod(1) // VISION["spatial_merge_size"] ** 2).tolist()
