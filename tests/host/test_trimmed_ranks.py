"""Rows that are trimmed under tensor parallelism: ranks whose clocks and chances differ verify the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_worker import BATCH, BLOCK, COLUMNS, VOCAB, decode_batch, worker_of
from stand_ins import Group, configured, one_rank

from sglang_dflash import ops
from sglang_dflash.core.policy import Drafting
from sglang_dflash.core.rows import RowPolicy
from sglang_dflash.host.start import widths
from sglang_dflash.host.worker import build, trimmed_rows
from sglang_dflash.host.worker.shared_policy import SharedPolicy
from sglang_dflash.host.worker.trimmed_rows import TrimmedRows

RANKS, STEPS = 3, 12


class OwnPolicy:
    """Says on each rank something else."""

    weighs = True

    def __init__(self, rank: int) -> None:
        self._rng = np.random.default_rng(rank)
        self.learned: list[Any] = []

    def draft(self, names: Sequence[str]) -> Drafting:
        rows = int(self._rng.choice([BATCH, 8, 12, 20, BATCH * BLOCK]))
        everybody = list(range(len(names))) if rows > BATCH else []
        return Drafting(BLOCK if everybody else 1, everybody, rows)

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return self._rng.normal(size=(len(names), depths)).astype(np.float32)

    def learn(self, step: Any) -> None:
        self.learned.append(step)

    def see_draft(self, *_: Any) -> None:
        pass

    see_rest = see_draft


def steps_of_ranks(monkeypatch: pytest.MonkeyPatch, group: Group) -> list[list[tuple[Any, ...]]]:
    """Of each rank, what its steps verify: ids, positions and slots of all rows, and the rows of each request."""
    table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
    kernels = ops.choose_kernels("cpu", torch.float32)
    parallel = SimpleNamespace(tp_group=group)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda values, src, group: group.broadcast(values, src))
    policies = [OwnPolicy(rank) for rank in range(RANKS)]
    workers = []
    for policy in policies:
        group.local.rank = len(workers)
        one = worker_of(table, kernels)
        monkeypatch.setattr(trimmed_rows, "get_parallel", lambda: parallel)
        parts = (one._target, one._draft, VOCAB - 1, kernels)
        one.step_rows = TrimmedRows(BLOCK, SharedPolicy(policy, group), *parts)
        one.step_rows._sizes, one.step_rows._slots = [8, 16, 24], BATCH
        workers.append(one)

    def run(rank: int) -> list[tuple[Any, ...]]:
        noise, seen = torch.Generator().manual_seed(rank), []
        head = workers[rank]._draft._head
        weighed = head.weighed

        def with_noise(hidden: torch.Tensor, ids: torch.Tensor) -> ops.Drafts:
            drafts = weighed(hidden, ids)
            return drafts._replace(log_probs=drafts.log_probs * torch.rand(drafts.log_probs.shape, generator=noise))

        head.weighed = with_noise
        for _ in range(STEPS):
            step_rows = workers[rank].step_rows
            rows = step_rows.propose(decode_batch()).rows
            step_rows.learn(rows, torch.ones(BATCH, dtype=torch.int32))
            layout = step_rows.verify_fields(rows)["ragged_verify_layout"]
            forward = [values.tolist() for values in rows.forward_rows()]
            seen.append((*forward, layout.verify_lens.tolist(), layout.graph_num_tokens))
        return seen

    steps = group.run(run)
    assert policies[0].learned and not any(policy.learned for policy in policies[1:])
    return steps


@pytest.fixture(autouse=True)
def _of_one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(TrimmedRows, "made", False)
    with configured(), one_rank(), torch.no_grad():
        yield


def test_ranks_verify_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a rank follows its own clock, offsets or chances: its rows would be added to other requests'."""
    first, *others = steps_of_ranks(monkeypatch, Group(RANKS))
    assert all(steps == first for steps in others)
    assert len({size for *_, size in first}) == 3 and any(len(set(lens)) > 1 for *_, lens, _ in first), first


def test_chances_of_their_own_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where this file could not fail: the device's chances are not exchanged."""

    class Mute(Group):
        """Only the CPUs talk."""

        def __init__(self, world_size: int) -> None:
            super().__init__(world_size)
            self._talking = Group(world_size)
            self._talking.local = self.local

        @property
        def cpu_group(self) -> Group:
            return self._talking

        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            pass

    first, *others = steps_of_ranks(monkeypatch, Mute(RANKS))
    assert any(steps != first for steps in others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_worker_is_built_so(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Fails where a rank is given a policy of its own."""
    monkeypatch.setenv(widths.WIDTH, widths.AUTO)
    monkeypatch.setattr(build, "can_trim", lambda *_: True)
    monkeypatch.setattr(build, "get_parallel", lambda: SimpleNamespace(tp_group=Group(ranks)))
    monkeypatch.setattr(build, "TrimmedRows", lambda *parts: parts)
    monkeypatch.setattr(widths, "on_graphs", lambda device: True)
    _, policy, *_ = build._step_rows(SimpleNamespace(device="cpu"), None, BLOCK, None, 0, None)
    assert isinstance(policy, SharedPolicy if ranks > 1 else RowPolicy)
