"""A plugin of SGLang that makes our worker verify rows at random, whatever they bring: answers must not change.

Requests are left out of drafts at random, blocks have any width, and of each block any number of rows is verified. Of
those that are left out, any number of copied tokens is verified, where the server copies. A request whose id is
`plain-N-...` runs alone instead: N plain steps, then whole blocks.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dflash.core.policy import Drafting, Step


class RandomRows:
    """A `Policy`."""

    weighs = True

    def __init__(self, block_size: int, chance: random.Random, together: bool = False) -> None:
        """together: all requests of a step are drafted, or none, and blocks have one of the widths that graphs have."""
        self.together, self.widths = together, [block_size, block_size // 2, block_size // 4]
        self.block_size, self.chance, self.given = block_size, chance, itertools.count()
        self.drafting = Drafting(1, [], 0)
        self.lens: np.ndarray = np.empty(0, dtype=int)
        self.learned: list[Step] = []
        self.copies: np.ndarray | None = None
        self.plain: Counter[str] = Counter()  # steps of requests that begin with plain ones
        self.whole = False

    def draft(self, names: Sequence[str], copies: np.ndarray | None = None) -> Drafting:
        self.whole = len(names) == 1 and names[0].startswith("plain-")
        self.copies = copies
        if self.whole:
            self.plain.update(names)
            plain = self.plain[names[0]] <= int(names[0].split("-")[1])
            self.drafting = Drafting(1, [], 1) if plain else Drafting(self.block_size, [0], self.block_size)
            return self.drafting
        chance, everyone = self.chance, list(range(len(names)))
        some = everyone if chance.random() < 0.6 else sorted(chance.sample(everyone, chance.randint(1, len(everyone))))
        width = chance.choice(
            [1, self.block_size, self.block_size, self.block_size, chance.randint(2, self.block_size)]
        )
        if self.together:
            some, width = everyone, chance.choice([*self.widths, 1])
        drafted = some if width > 1 else []
        # The number of rows is for devices that choose the rows themselves.
        rows = chance.randint(len(names), len(names) + len(drafted) * (width - 1))
        self.drafting = Drafting(width, drafted, rows)
        return self.drafting

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return np.zeros((len(names), depths), np.float32)

    def verify(self, survival: np.ndarray) -> np.ndarray:
        requests, width = len(self.drafting.requests), self.drafting.width
        assert survival.shape == (requests, width - 1) and (np.diff(survival) <= 0).all()
        share = 0.0 if self.whole else self.chance.random()
        if share < 0.3:
            self.lens = np.full(requests, width)
        elif share < 0.5:
            self.lens = np.array([1 + next(self.given) % width for _ in range(requests)])
        else:
            self.lens = np.array([self.chance.randint(1, width) for _ in range(requests)])
        return self.lens

    def verify_all(self, survival: np.ndarray) -> np.ndarray:
        assert self.copies is not None
        copied = [0 if self.whole else self.chance.randint(0, int((one > 0).sum())) for one in self.copies]
        lens: np.ndarray = 1 + np.array(copied)
        lens[self.drafting.requests] = self.verify(survival)
        return lens

    def learn(self, step: Step) -> None:
        self.learned = [step]

    def see_draft(self, rows: int, seconds: float) -> None:
        assert rows > 0 <= seconds

    def see_rest(self, rows: int, seconds: float) -> None:
        assert rows > 0 <= seconds

    def step_seconds(self) -> None:
        """None: `/server_info` has no times."""


def activate() -> None:
    """Entry point: changes the policy before the scheduler's process makes its worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _use, HookType.BEFORE)


def _use(*_: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    from sglang_dflash.host.worker import build

    # Each rank would choose other rows, if they did not follow the first.
    chance = random.Random(20261123 + get_parallel().tp_rank)

    def policy(block_size: int, widths: Any = None, together: bool = False, **_: Any) -> RandomRows:
        return RandomRows(block_size, chance, together)

    build.RowPolicy = policy  # type: ignore[assignment,misc]
