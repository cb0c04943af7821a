"""Paths of the embedded pairs, and the prompts that were held out of their training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"
_FOLDERS = {"tiny": _ASSETS / "tiny-pair", "hybrid": _ASSETS / "tiny-hybrid-pair"}
PAIRS = {name: (folder / "target", folder / "draft") for name, folder in _FOLDERS.items()}
"""Name -> target and draft: Qwen3, and Qwen3.5, which has recurrent state. Both pairs know the same prompts."""
TINY_TARGET, TINY_DRAFT = PAIRS["tiny"]
KINDS = ("arithmetic", "code", "chat")
TINY_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""One compute thread, for servers that share their cores with tests, with clients or with each other. Do not use it to
measure what a server does by default."""
TINY_OVERLAPPING = {**TINY_ENVIRONMENT, "SGLANG_DFLASH_OVERLAP": "1"}
"""The same, with overlap scheduling as on CUDA; on a CPU it is off by default."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A question whose answer is not in the training data. `kind`: arithmetic, code or chat."""

    id: str
    kind: str
    prompt: str
    reference: str


def held_out_prompts(kind: str | None = None) -> list[HeldOutPrompt]:
    """All held-out prompts, or those of one kind, in a fixed order."""
    lines = (_FOLDERS["tiny"] / "heldout.jsonl").read_text().splitlines()
    prompts = [HeldOutPrompt(**json.loads(line)) for line in lines]
    return [prompt for prompt in prompts if kind in (None, prompt.kind)]


def held_out_prompts_in_turn() -> list[HeldOutPrompt]:
    """All held-out prompts, the kinds in turn: one of each kind, then the next of each."""
    kinds = [held_out_prompts(kind) for kind in KINDS]
    return [prompt for row in zip_longest(*kinds) for prompt in row if prompt is not None]
