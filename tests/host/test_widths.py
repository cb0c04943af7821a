"""Which servers plan their steps, in which shape, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stand_ins import Group

from sglang_dflash.core.copying import Copying, Text
from sglang_dflash.core.plan import Planner
from sglang_dflash.core.policy import Copied, Drafting, Fixed
from sglang_dflash.host import planned_step, widths
from sglang_dflash.host.shared_plan import SharedPlan


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (widths.WIDTH, widths.TREE, widths.COPY, "SGLANG_SIMULATE_ACC_LEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "device", "tp_size", "policy"),
    [
        (None, "cpu", 1, Planner),
        ("adaptive", "cpu", 1, Planner),
        ("1", "cpu", 1, Fixed),
        ("8", "cpu", 1, Fixed),
        ("full", "cpu", 1, type(None)),
        (None, "cpu", 2, SharedPlan),
        ("4", "cpu", 2, SharedPlan),
        ("full", "cpu", 2, type(None)),
        (None, "cuda", 1, type(None)),
    ],
)
def test_who_plans(monkeypatch, value, device, tp_size, policy):
    """Fails where steps are planned with graphs of one size, or by each rank for itself, or not where they can be."""
    if value is not None:
        monkeypatch.setenv(widths.WIDTH, value)
    widths.check(device, 8)
    assert type(widths.choose_planner(8, device, Group(tp_size))) is policy


def test_simulated_acceptance_has_whole_blocks(monkeypatch):
    """Fails where a mean commit_len of 4 would be drawn in blocks of 2."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    assert widths.choose_planner(8, "cpu", Group(1)) is None


@pytest.mark.parametrize(
    ("value", "overlap", "copies"),
    [(None, False, False), ("1", False, True), ("0", False, False), (None, True, False), ("1", True, False)],
)
def test_who_copies(monkeypatch, value, overlap, copies):
    """Fails where the newest tokens are not on the host and something is copied all the same, or where copies
    are not asked for, or are asked for in vain."""
    if value is not None:
        monkeypatch.setenv(widths.COPY, value)
    monkeypatch.setattr(widths, "get_schedule", lambda: SimpleNamespace(disable_overlap_schedule=not overlap))
    widths.check("cpu", 8)
    copying = widths.choose_copying(8, 100)
    assert (copying is not None) == copies
    assert widths.choose_planner(8, "cpu", Group(1), copying).copying is copying


@pytest.mark.parametrize(("width", "policy"), [("1", Planner), ("4", Fixed), ("full", type(None))])
def test_copies_without_a_draft(monkeypatch, width, policy):
    """Fails where one row a request excludes copies, runs the draft beside them, or other fixed widths copy."""
    monkeypatch.setenv(widths.WIDTH, width)
    planner = widths.choose_planner(8, "cpu", Group(1), Copying(widths.LONGEST_COPY, 100))
    assert type(planner) is policy
    if policy is Planner:
        planner.copying.see({name: Text([1, 2, 3], []) for name in "ab"})
        for _ in range(40):
            assert planner.begin(["a", "b"]).width == 1
            planner.choose(None)
            planner.end(torch.tensor([[0], [1]]), torch.tensor([1, 1], dtype=torch.int32))


def test_ranks_share_long_copies():
    """Fails where the ranks exchange too few rows for a copy that is longer than a block."""
    group, ids = Group(2), list(range(widths.LONGEST_COPY))

    def run(rank: int) -> tuple[Drafting, list[int]]:
        shared = widths.choose_planner(8, "cpu", group, Copying(widths.LONGEST_COPY, 100))
        if shared._policy is not None:
            planner = shared._policy
            planner._requests, planner._drafting = ["a"], Drafting(1, [], (Copied(0, ids),))
            planner.begin = lambda *_: planner._drafting
        return shared.begin(["a"]), shared.choose(None).lens

    assert group.run(run) == [(Drafting(1, [], (Copied(0, ids),)), [len(ids) + 1])] * 2


@pytest.mark.parametrize(("keeps_states", "most"), [(False, widths.LONGEST_COPY), (True, 7)])
def test_how_long_copies_are(monkeypatch, keeps_states, most):
    """Fails where a recurrent state is needed behind a row for which none is kept."""
    monkeypatch.setenv(widths.COPY, "1")
    monkeypatch.setattr(widths, "get_schedule", lambda: SimpleNamespace(disable_overlap_schedule=True))
    assert widths.choose_copying(8, 100, keeps_states).most == most


@pytest.mark.parametrize(
    ("name", "value", "device", "words"),
    [
        (widths.WIDTH, "9", "cpu", "'9'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "0", "cpu", "'0'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "wide", "cpu", "'wide'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "4", "cuda", "SGLANG_DFLASH_WIDTH=4 needs --device cpu, not cuda"),
        (widths.WIDTH, "4", "cuda", "because an accelerator.*Use full, or adaptive"),
        (widths.WIDTH, "adaptive", "npu", "needs --device cpu, not npu, because an accelerator"),
        (widths.COPY, "often", "cpu", "SGLANG_DFLASH_COPY is 'often'; allowed: 0 .no copies, the default., 1 "),
        (widths.TREE, "-2", "cpu", "'-2'; allowed: 0 .chains., 1 .*, or a number of rows from 2"),
        (widths.TREE, "many", "cpu", "'many'; allowed: 0 .chains., 1 .*, or a number of rows from 2"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, name, value, device, words):
    """Fails where an unknown or impossible value is silently replaced by another."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        widths.check(device, 8)


@pytest.mark.parametrize(
    ("tree", "recurrent", "deterministic", "most", "words"),
    [
        (None, False, False, None, None),
        ("1", False, False, None, None),
        ("", False, False, None, None),
        ("0", False, False, None, "SGLANG_DFLASH_TREE=0"),
        (None, True, False, None, "recurrent state"),
        (None, False, True, None, "--enable-deterministic-inference"),
        (None, False, False, 1, "one candidate for each row"),
    ],
)
def test_who_gets_trees(monkeypatch, tree, recurrent, deterministic, most, words):
    """Fails where rows form trees over a recurrent state, in another order of keys than plain decoding's, or against
    the user's wish; or where they form chains for no reason."""
    if tree is not None:
        monkeypatch.setenv(widths.TREE, tree)
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic))
    monkeypatch.setattr(planned_step, "get_exec", lambda: exec_)
    monkeypatch.setattr(planned_step, "mambaish_config", lambda config: object() if recurrent else None)
    target, draft = SimpleNamespace(model_config=None), SimpleNamespace(most_candidates=most)
    reason = planned_step.why_chains(target, draft)
    assert reason is None if words is None else words in reason
    step = planned_step.PlannedStep(Fixed(8), target, draft, None)
    assert step._candidates == (planned_step.CANDIDATES if words is None else 1)
