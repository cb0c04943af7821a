"""Ranks that share a plan: all of them verify what the first one plans, whatever their own clocks say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from random_trees import Playing
from stand_in_worker import BLOCK
from stand_ins import Group

from sglang_dflash.core.plan import Planner
from sglang_dflash.core.policy import Fixed, Policy
from sglang_dflash.host.shared_plan import SharedPlan

NAMES = ["a", "b", "c", "d", "e"]
CANDIDATES = 3
MOST_ROWS = 2 * BLOCK  # of a copy, which may be longer than a block


def _random(rank: int) -> Policy:
    rng, right = random.Random(100 + rank), {name: [rank] * BLOCK for name in NAMES}
    return Playing(
        rng, CANDIDATES, right, lambda name: [rng.randrange(9) for _ in range(rng.randint(1, MOST_ROWS - 1))]
    )


def _planner(rank: int) -> Policy:
    """Its clock runs at random, so that ranks decide differently."""
    rng, now = random.Random(rank), [0.0]

    def clock() -> float:
        now[0] += rng.uniform(1e-4, 1e-2)
        return now[0]

    return Planner(BLOCK, clock=clock)


def _steps(policy: Policy, count: int) -> list[Any]:
    """What the policy says in `count` steps, in which requests come and go."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    said: list[Any] = []
    for _ in range(count):
        names = sorted(rng.sample(NAMES, rng.randint(1, len(NAMES))))
        drafting = policy.begin(names)
        log_probs = None
        if drafting.width > 1:
            policy.draft_begins()
            logits = torch.randn(len(drafting.requests), drafting.width - 1, 9, generator=generator)
            log_probs = logits.log_softmax(-1).sort(-1, descending=True).values[..., :CANDIDATES].contiguous()
        rows = policy.choose(log_probs)
        said.append((drafting, rows))
        paths = rows.row_starts[:-1, None].repeat(1, rows.length)
        policy.end(paths, torch.ones(len(names), dtype=torch.int32))
        if rng.random() < 0.1:
            policy.interrupt(50)
    return said


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    return bool(one == other)


@pytest.mark.parametrize("make", [_random, _planner, lambda rank: Fixed(2 + rank)], ids=["random", "planner", "fixed"])
def test_all_ranks_follow_the_first(make: Any) -> None:
    """Fails where a rank drafts other requests, copies other tokens, or verifies other rows, than the first plans."""
    group, count = Group(3), 60

    def run(rank: int) -> tuple[SharedPlan, list[Any]]:
        shared = SharedPlan(make(rank), MOST_ROWS, group)
        return shared, _steps(shared, count)

    (first, alone), *others = group.run(run)
    expected = _steps(make(0), count)
    for said in (alone, *(said for _, said in others)):
        for (drafting, rows), (own_drafting, own_rows) in zip(said, expected, strict=True):
            assert drafting == own_drafting
            assert all(map(_same, rows, own_rows)), (rows, own_rows)
    assert sum(len(drafting.requests) for drafting, _ in expected) > 20
    if make is not _random:
        assert first.counts.steps == count and all(other.counts.steps == 0 for other, _ in others)


def test_ranks_that_plan_for_themselves_differ() -> None:
    """Fails where the ranks above would agree anyway, so that their test shows nothing."""
    assert [drafting for drafting, _ in _steps(_planner(0), 60)] != [
        drafting for drafting, _ in _steps(_planner(1), 60)
    ]
