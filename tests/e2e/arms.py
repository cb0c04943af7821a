"""The arms that the end-to-end tests compare."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from changed_models import dflash2_draft, domino_draft, dressed_draft, sliding_draft

from equality import BLOCK_SIZE
from sglang_dflash.serving import (
    PAIRS,
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
COPIES = {"SGLANG_DFLASH_COPIES": "1"}
COMPILED = {"SGLANG_DFLASH_COMPILE": "1"}


def _with_plugins(*folders: str) -> str:
    """A PYTHONPATH with folders of plugins beside this file."""
    paths = [str(Path(__file__).parent / folder) for folder in folders]
    return os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH"))))


# A policy of rows for tests only, instead of the measuring one: any rows of any requests.
EVERY_WIDTH = {"SGLANG_DFLASH_WIDTH": "auto", "PYTHONPATH": _with_plugins("plugins")}
# The draft's KV is NaN wherever nobody has written it.
POISONED = FULL | {"PYTHONPATH": _with_plugins("poisoned")}
POISONED_EVERY_WIDTH = EVERY_WIDTH | {"PYTHONPATH": _with_plugins("plugins", "poisoned")}

FEW_IDS = 64  # of the embedded pair's 1,792; an answer holds others
REGEX = {"regex": "[0-9 +=]{5,30}\\.", "max_new_tokens": 40}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 150}

TOOL_CALLS = ["--tool-call-parser", "qwen"]
PAGES_AND_CHUNKS = ["--page-size", "16", "--chunked-prefill-size", "64"]

# Four running requests at most, so that others wait, join in chunks and are preempted.
BUSY = [
    *["--max-running-requests", "4", "--chunked-prefill-size", "32", "--enable-mixed-chunk"],
    *["--page-size", "16", "--speculative-draft-window-size", "24"],
    *["--disable-radix-cache", "--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1"],
]
# KV in host memory and in a store. A pool that prompts soon push each other out of; short prompts are looked up, too.
TIERS = [
    *["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-ratio", "4"],
    *["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'],
    *["--context-length", str(TINY_CONTEXT), "--max-total-tokens", "900", "--max-running-requests", "8"],
    *["--schedule-conservativeness", "0.05"],
    *["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1"],
]
STORE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
SESSIONS = "--enable-streaming-session"
# Without snapshots a prompt that is asked again hits nothing: its state is kept at the end of its answer alone.
SNAPSHOTS = ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"]
HYBRID_TARGET, HYBRID_DRAFT = PAIRS["hybrid"]
DEBUG = ["--log-level", "debug"]
RANKS = ["--tp-size", "2"]


def hybrid_draft(folder: Path) -> Path:
    return Path(shutil.copytree(HYBRID_DRAFT, folder))


@dataclass(frozen=True, slots=True)
class Arm:
    """A server with speculation on.

    Fields:
        draft: makes the draft in an empty folder; None: the embedded one.
    """

    flags: list[str]
    environment: dict[str, str]
    draft: Callable[[Path], Path] | None = None


# Tests of all files share an arm's server. "default" is what a user gets on a CPU: widths adapt, compiled, no overlap.
ARMS: dict[str, Arm] = {
    "default": Arm(TOOL_CALLS, TINY_ENVIRONMENT | {"SGLANG_DFLASH_COMPILE": ""}),
    "uncompiled": Arm([SESSIONS], TINY_ENVIRONMENT),
    "few ids": Arm([], TINY_ENVIRONMENT | EVERY_WIDTH | {"SGLANG_DFLASH_DRAFT_VOCAB": str(FEW_IDS)}),
    "copies": Arm([*PAGES_AND_CHUNKS, "--enable-mixed-chunk"], TINY_ENVIRONMENT | EVERY_WIDTH | COPIES),
    "overlap": Arm([*DEBUG, "--enable-metrics"], TINY_OVERLAPPING | FULL),
    "pages": Arm([*PAGES_AND_CHUNKS, *DEBUG], TINY_OVERLAPPING | FULL),
    "short": Arm([*PAGES_AND_CHUNKS, "--speculative-num-draft-tokens", "4"], TINY_OVERLAPPING | FULL),
    "tiny-pool": Arm(TINY_POOL, TINY_OVERLAPPING | ADMIT_ALL | FULL),
    "tiny-pool-pages": Arm(
        [*TINY_POOL, *PAGES_AND_CHUNKS, "--enable-mixed-chunk"], TINY_OVERLAPPING | ADMIT_ALL | EVERY_WIDTH
    ),
    "tiny-pool-compiled": Arm(
        [*TINY_POOL, *PAGES_AND_CHUNKS, "--enable-mixed-chunk"],
        TINY_ENVIRONMENT | ADMIT_ALL | EVERY_WIDTH | COMPILED,
    ),
    "ranks": Arm([*RANKS, "--page-size", "16"], TINY_OVERLAPPING | FULL),
    "replicas": Arm(["--dp-size", "2", "--enable-metrics", "--stream-interval", "4"], TINY_ENVIRONMENT),
    "busy": Arm([*BUSY, *DEBUG], TINY_OVERLAPPING | EVERY_WIDTH),
    "sliding": Arm(["--schedule-policy", "lpm", SESSIONS, *DEBUG], TINY_OVERLAPPING | FULL, sliding_draft),
    "dressed": Arm([], TINY_OVERLAPPING | FULL, dressed_draft),
    "dflash2": Arm(DEBUG, TINY_OVERLAPPING | FULL, dflash2_draft),
    "few ids on ranks": Arm(
        RANKS, TINY_OVERLAPPING | EVERY_WIDTH | {"SGLANG_DFLASH_DRAFT_VOCAB": "256"}, dflash2_draft
    ),
    "domino": Arm(PAGES_AND_CHUNKS, TINY_OVERLAPPING | FULL, domino_draft),
    "tiers": Arm([*TIERS, "--page-size", "16"], TINY_OVERLAPPING | ADMIT_ALL | POISONED),
    "trees": Arm(DEBUG, TINY_OVERLAPPING | {"SGLANG_DFLASH_TREE": "24"}),
    # Only with --matrix.
    "ranks at every width": Arm(RANKS, TINY_OVERLAPPING | EVERY_WIDTH),
    "dflash2 at every width": Arm(PAGES_AND_CHUNKS, TINY_ENVIRONMENT | EVERY_WIDTH, dflash2_draft),
    "dflash2 on ranks": Arm(RANKS, TINY_OVERLAPPING | FULL, dflash2_draft),
    "domino on ranks": Arm(RANKS, TINY_OVERLAPPING | FULL, domino_draft),
    "tiers, page 1": Arm(TIERS, TINY_ENVIRONMENT | ADMIT_ALL | POISONED),
    "tiers, by layers": Arm(
        [*TIERS, "--page-size", "16", "--hicache-mem-layout", "layer_first"], TINY_OVERLAPPING | ADMIT_ALL | POISONED
    ),
    "tiers, write back": Arm(
        [*TIERS, "--page-size", "16", "--hicache-write-policy", "write_back"], TINY_OVERLAPPING | ADMIT_ALL | POISONED
    ),
    "tiers, window": Arm(
        [*TIERS, "--page-size", "16", "--speculative-draft-window-size", "24"], TINY_OVERLAPPING | ADMIT_ALL | POISONED
    ),
    "tiers, sliding": Arm([*TIERS, *PAGES_AND_CHUNKS], TINY_OVERLAPPING | ADMIT_ALL | POISONED, sliding_draft),
    "tiers, draft in FP8": Arm(
        [*TIERS, "--speculative-draft-kv-cache-dtype", "fp8_e4m3"], TINY_ENVIRONMENT | ADMIT_ALL | POISONED
    ),
    "tiers, trees": Arm(TIERS, TINY_ENVIRONMENT | ADMIT_ALL | POISONED | {"SGLANG_DFLASH_TREE": "24"}),
    "tiers on ranks": Arm([*TIERS, "--page-size", "16", *RANKS], TINY_OVERLAPPING | ADMIT_ALL | POISONED),
    "tiers, hybrid": Arm(
        [*TIERS, "--model-path", str(HYBRID_TARGET), "--max-mamba-cache-size", "64", *SNAPSHOTS],
        TINY_ENVIRONMENT | ADMIT_ALL | POISONED,
        hybrid_draft,
    ),
    "tiers, every width": Arm(
        [*TIERS, "--page-size", "16", "--enable-mixed-chunk", "--chunked-prefill-size", "64"],
        TINY_OVERLAPPING | ADMIT_ALL | POISONED_EVERY_WIDTH,
    ),
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the off arms answered.

    Fields:
        prompts, answers: held-out prompts as ids, at the model's own context length.
        long_prompts, long_answers: source text, which runs on until the context of the tiny-pool arm ends.
        penalised_answers: to the same prompts with `PENALTIES`.
        regex_answers: to the first three of them with `REGEX`.
        conversation: ids of each turn's whole prompt, and its answer.
    """

    prompts: list[list[int]]
    answers: list[Completion]
    long_prompts: list[list[int]]
    long_answers: list[Completion]
    penalised_answers: list[Completion]
    regex_answers: list[Completion]
    conversation: list[tuple[list[int], Completion]]


def on_arms(*names: str) -> pytest.MarkDecorator:
    """Runs a test against each named arm of `ARMS`; one runs at a time in a process."""
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
