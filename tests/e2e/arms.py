"""The arms that the end-to-end tests compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from equality import BLOCK_SIZE
from sglang_dflash.serving import (
    TINY_DRAFT,
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    TINY_TARGET,
    Client,
    Completion,
    HeldOutPrompt,
    held_out_prompts,
)

MAX_NEW_TOKENS = 160

ON_CPU = ["--device", "cpu", "--dtype", "float32"]
PLAIN = [*ON_CPU, "--model-path", str(TINY_TARGET)]
POOL = ["--max-total-tokens", "16384", "--max-running-requests", "16"]
SPECULATE = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(TINY_DRAFT)]

# Eight requests of up to 256 tokens do not fit into 900 slots, so the host must retract.
TINY_CONTEXT = 256
TINY_POOL = [
    *["--context-length", str(TINY_CONTEXT), "--max-total-tokens", "900", "--max-running-requests", "8"],
    *["--schedule-conservativeness", "0.05"],  # admits all eight, so that the pool runs out
]
# Without this, the host does not admit a new request whose longest answer does not fit.
ADMIT_ALL = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}

# Source text that the embedded target continues to the end of the tiny context; after other functions it often emits
# an end token. With `ignore_eos` instead, the host would plan for the full length and never retract.
_RUN_ON = (16, 145, 148, 14, 71, 49, 24, 172, 37, 175, 63, 15)
_CODE = [prompt.reference.partition("```python\n")[2].partition("```")[0] for prompt in held_out_prompts("code")]
OPENINGS = [f"{_CODE[number].rstrip()}\n\n\n" for number in _RUN_ON]

FULL = {"SGLANG_DFLASH_WIDTH": "full"}  # for tests that compare steps with a reference
COMPILED = {"SGLANG_DFLASH_COMPILE": "1"}
# A width policy for tests only, instead of the measuring one: 1, 2, .. K rows in turn, and copies of any length.
EVERY_WIDTH = {
    "SGLANG_DFLASH_WIDTH": "adaptive",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent / "plugins"), os.environ.get("PYTHONPATH")))),
}

FEW_IDS = 64  # of the embedded pair's 1,792; an answer holds others
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 150}

COPYING = {"SGLANG_DFLASH_COPY": "1"}
TOOL_CALLS = ["--tool-call-parser", "qwen"]
PAGES_AND_CHUNKS = ["--page-size", "16", "--chunked-prefill-size", "64"]

# Flags and environment of each arm. "default" is what a user gets on a CPU: widths adapt, compiled, no overlap.
ON_ARMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "default": ([*POOL, *TOOL_CALLS], TINY_ENVIRONMENT | {"SGLANG_DFLASH_COMPILE": ""}),
    "uncompiled": (POOL, TINY_ENVIRONMENT | COPYING),
    "few ids": (POOL, TINY_ENVIRONMENT | EVERY_WIDTH | COPYING | {"SGLANG_DFLASH_DRAFT_VOCAB": str(FEW_IDS)}),
    "overlap": ([*POOL, "--log-level", "debug"], TINY_OVERLAPPING | FULL),
    "pages": ([*POOL, *PAGES_AND_CHUNKS, "--log-level", "debug"], TINY_OVERLAPPING | FULL),
    "short": ([*POOL, *PAGES_AND_CHUNKS, "--speculative-num-draft-tokens", "4"], TINY_OVERLAPPING | FULL),
    "tiny-pool": (TINY_POOL, TINY_OVERLAPPING | ADMIT_ALL | FULL),
    "tiny-pool-pages": (
        [*TINY_POOL, *PAGES_AND_CHUNKS, "--enable-mixed-chunk"],
        TINY_OVERLAPPING | ADMIT_ALL | EVERY_WIDTH,
    ),
    "tiny-pool-compiled": (
        [*TINY_POOL, *PAGES_AND_CHUNKS, "--enable-mixed-chunk"],
        TINY_ENVIRONMENT | ADMIT_ALL | EVERY_WIDTH | COMPILED | COPYING,
    ),
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the off arms answered.

    Fields:
        prompts, answers: held-out prompts as ids, at the model's own context length.
        long_prompts, long_answers: source text, which runs on until the context of the tiny-pool arm ends.
        penalised_answers: to the same prompts with `PENALTIES`.
        conversation: ids of each turn's whole prompt, and its answer.
        repeating, repeated_answers: prompts of a question, its answer, and the question again.
    """

    prompts: list[list[int]]
    answers: list[Completion]
    long_prompts: list[list[int]]
    long_answers: list[Completion]
    penalised_answers: list[Completion]
    conversation: list[tuple[list[int], Completion]]
    repeating: list[list[int]]
    repeated_answers: list[Completion]


def on_arms(*names: str) -> pytest.MarkDecorator:
    """Runs a test against each named arm; one arm runs at a time."""
    return pytest.mark.parametrize("server", names, indirect=True)


def to_the_limit(prompt: list[int]) -> dict[str, Any]:
    """Sampling parameters with which an answer to `prompt` can fill the tiny context."""
    return {"max_new_tokens": TINY_CONTEXT - len(prompt)}


def assert_same_steps(answer: Completion, commit_lens: Sequence[int]) -> None:
    """Fails where the request's verify steps differ from a reference's with these commit_lens."""
    counts = [commit_lens.count(accept_len + 1) for accept_len in range(BLOCK_SIZE)]
    padded = [*answer.accept_histogram, *[0] * (BLOCK_SIZE - len(answer.accept_histogram))]
    assert (answer.steps, padded) == (len(commit_lens), counts)


def widths_of(client: Client, *prompts: list[int]) -> list[int]:
    """Counts of the requests' steps with 0, 1, .. rows."""
    of_requests = []
    for prompt in prompts:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}}
        meta = client.post("/generate", body).raise_for_status().json()["meta_info"]
        widths = meta["spec_cap_lens_histogram"]
        assert sum(widths) == meta["spec_verify_ct"] and widths[0] == 0
        assert meta["spec_cap_length"] == pytest.approx(sum(w * n for w, n in enumerate(widths)) / sum(widths))
        of_requests.append(widths)
    return [sum(steps) for steps in zip_longest(*of_requests, fillvalue=0)]


def pick(prompts: Sequence[HeldOutPrompt], per_kind: int) -> list[HeldOutPrompt]:
    """The first `per_kind` prompts of every kind."""
    kinds = sorted({prompt.kind for prompt in prompts})
    return [p for kind in kinds for p in [q for q in prompts if q.kind == kind][:per_kind]]
