"""The plan of a sweep, made before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sglang_dflash.bench.records import CellKey
from sglang_dflash.serving import Arm
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Session


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Fields:
        arms: in the order of their start.
        target: the model whose tokenizer renders prompts and counts texts.
        workload: a key of WORKLOADS, which says what `loads` are.
        datasets: sessions by dataset name; a cell plays the first `counts[load]` of them.
        interleave: run every arm once per repeat, instead of all repeats of an arm in a row.
        together: the servers of all arms start at once and stay up; the arms take turns at every cell, and those that
            are not asked are paused.
        seed: of arrival times.
        think_s: mean pause before a later turn of an agent session.
        stall_s: seconds without data after which a server counts as lost.
        start_s: seconds within which a server must be up.
        logs: folder of the servers' logs.
    """

    arms: tuple[Arm, ...]
    target: str
    workload: str
    loads: tuple[float, ...]
    datasets: dict[str, list[Session]]
    counts: dict[float, int]
    repeats: int
    interleave: bool
    together: bool
    sampling: Sampling
    seed: int
    think_s: float
    stall_s: float
    start_s: float
    logs: Path

    def servers(self, done: set[CellKey]) -> list[tuple[Arm, list[CellKey]]]:
        """The servers to ask, in order, each with the cells that it still has to run."""
        every = list(range(self.repeats))
        if self.together:
            todo = [turn for repeat in every for turn in self._turns(repeat)]
        else:
            rounds = [[repeat] for repeat in every] if self.interleave else [every]
            todo = [(arm, self._keys(arm, one)) for one in rounds for arm in self.arms]
        left = [(arm, [key for key in keys if key not in done]) for arm, keys in todo]
        return [(arm, keys) for arm, keys in left if keys]

    def _turns(self, repeat: int) -> list[tuple[Arm, list[CellKey]]]:
        """Every cell of a repeat, arm by arm; another arm begins in each repeat, the reference in the first."""
        first = repeat % len(self.arms)
        arms = [*self.arms[first:], *self.arms[:first]]
        cells = zip(*(self._keys(arm, [repeat]) for arm in arms), strict=True)
        return [(arm, [key]) for keys in cells for arm, key in zip(arms, keys, strict=True)]

    def _keys(self, arm: Arm, repeats: Sequence[int]) -> list[CellKey]:
        return [
            CellKey(arm.name, arm.backend, arm.radix, dataset, load, repeat)
            for dataset, load, repeat in product(self.datasets, self.loads, repeats)
        ]

    def sessions(self, key: CellKey) -> list[Session]:
        return self.datasets[key.dataset][: self.counts[key.load]]
