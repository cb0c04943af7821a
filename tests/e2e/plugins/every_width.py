"""A plugin of SGLang that makes our worker plan steps of every shape, whatever they bring: answers must not change.

Requests are left out of drafts at random, blocks have any width, and trees grow along random chances, to as many rows
as there are or to 1, 2, .. K in turn. Where a server copies, requests that are left out copy from where their last
tokens stood before, from anywhere, or from another request.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def activate() -> None:
    """Entry point: changes the policy before the scheduler's process makes its worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _plan_at_random, HookType.BEFORE
    )


def _plan_at_random(*_: Any) -> None:
    import torch
    from sglang.srt.runtime_context import get_parallel

    from sglang_dflash import ops
    from sglang_dflash.core import plan, policy

    kernels = ops.choose_kernels("cpu").plans
    # Each rank would plan something else, if they did not follow the first.
    chance, turns = random.Random(20261123 + get_parallel().tp_rank), itertools.count()

    def begin(planner: plan.Planner, requests: Sequence[str], *_: Any) -> policy.Drafting:
        planner._requests = list(requests)
        everyone = list(range(len(requests)))
        some = everyone if chance.random() < 0.6 else sorted(chance.sample(everyone, chance.randint(1, len(everyone))))
        width = planner._block_size if chance.random() < 0.6 else chance.randint(1, planner._block_size)
        if planner.copying is not None and chance.random() < 0.3:
            width = 1
        drafted = some if width > 1 else []
        left = [place for place in everyone if place not in drafted] if planner.copying is not None else []
        copies = [policy.Copied(place, copy(planner, requests[place])) for place in left if chance.random() < 0.8]
        planner._drafting = policy.Drafting(width, drafted, tuple(copied for copied in copies if copied.ids))
        return planner._drafting

    def copy(planner: plan.Planner, name: str) -> list[int]:
        offer, room = planner.copying.offer(name), planner.copying._texts[name].room
        if offer is not None and chance.random() < 0.8:
            return offer.ids[: chance.randint(1, len(offer.ids))]
        if chance.random() < 0.3:
            name = chance.choice(planner._requests)
        text = [*planner.copying._texts[name].prompt, *planner.copying._texts[name].answer]
        first, count = chance.randrange(len(text)), chance.randint(0, max(0, min(room, planner.copying.most)))
        # The ids that the host puts in the place of pictures are no tokens.
        return [token for token in text[first : first + count] if 0 <= token < planner.copying._vocab_size]

    def choose(planner: plan.Planner, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        batch, copies = len(planner._requests), planner._drafting.copies
        if log_probs is None:
            return policy.undrafted(batch, copies)
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        chances = torch.rand(log_probs.shape, generator=generator).sort(-1, descending=True).values
        if chance.random() < 0.5:
            chances[:, :, 0] = 1.0  # deep
        trees = kernels.best_first(chances, planner._block_size)
        lens = (trees.reaches > 0).sum(1).tolist()
        if chance.random() < 0.5:
            lens = [min(1 + next(turns) % planner._block_size, count) for count in lens]
        return kernels.take_rows(trees, planner._drafting.requests, lens, batch, *policy.chains_of(copies))

    def end(planner: plan.Planner, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        for copied in planner._drafting.copies:
            planner.counts.copies += 1
            planner.counts.copied_rows += len(copied.ids)
            planner.counts.copied_accepted += int(commit_lens[copied.request]) - 1

    plan.Planner.begin, plan.Planner.choose, plan.Planner.end = begin, choose, end
