"""Loads sessions from a hub dataset, a prompt file, or the embedded pair's held-out prompts."""

from __future__ import annotations

import random
from pathlib import Path

from sglang_dflash.serving import KINDS
from sglang_dflash.serving.prompts import bundled_prompts, read_prompts
from sglang_dflash.serving.sessions import Session
from sglang_dflash.workloads.hub_datasets import HUB, hub_rows


def load(name: str, count: int | None, seed: int) -> list[Session]:
    """The first `count` sessions of a dataset, in an order that depends only on `name` and `seed`.

    A hub dataset is shuffled with `seed`: a few sessions are a random sample of it, and the first ones of a larger
    sample. A file and the bundled prompts keep their order. There are never more sessions than the dataset has,
    because a repeated prompt would hit the prefix cache.

    Args:
        name: a key of HUB, the path of a .jsonl file, one of KINDS, or `tiny`.
        count: maximum number of sessions; None for all.

    Raises:
        ValueError: the dataset is unknown, cannot be loaded here, or has wrong content. The message is one sentence.
    """
    if count is not None and count < 1:
        raise ValueError(f"--dataset-name {name}: {count} prompts requested; the number must be at least 1.")
    if name.endswith(".jsonl"):
        return read_prompts(Path(name), "--dataset-name", count)
    if name in HUB:
        return _hub_sessions(name, count, seed)
    if name in KINDS or name == "tiny":
        return bundled_prompts(None if name == "tiny" else name)[:count]
    raise ValueError(
        f"--dataset-name {name} is unknown; it must be one of {', '.join((*HUB, *KINDS, 'tiny'))}, or a file whose "
        "name ends in .jsonl."
    )


def _hub_sessions(name: str, count: int | None, seed: int) -> list[Session]:
    rows = hub_rows(name)
    # Not random.sample: its first picks depend on the sample size.
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    if not order:
        raise ValueError(f"--dataset-name {name} has no prompts; it must have at least one.")
    try:
        return [Session.of_texts(f"{name}-{index}", HUB[name].texts(rows[index])) for index in order[:count]]
    except KeyError as error:
        raise ValueError(
            f"--dataset-name {name}: {HUB[name].repo} has no column {error}; give the prompts as a .jsonl file."
        ) from None
