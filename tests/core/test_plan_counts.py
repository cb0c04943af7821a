"""What is counted of planned steps, and how it is said."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
import torch

from sglang_dflash.core.plan import Planner
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts
from sglang_dflash.core.policy import Fixed


def test_a_fixed_plan_counts_its_steps() -> None:
    """Fails where drafts that no step accepted are counted, or a step is missed."""
    policy = Fixed(3)
    for commit_lens in ([1, 1], [3, 2]):
        policy.begin(["a", "b"])
        policy.choose(torch.full((2, 2, 4), 0.5).log())
        policy.end(torch.zeros(2, 3, dtype=torch.int64), torch.tensor(commit_lens))
    counts = policy.counts
    assert (counts.steps, counts.blocks, counts.rows, counts.depth, counts.accepted) == (2, 4, 8, 8, 3)
    assert counts.promised == pytest.approx(4 * 0.75)


def test_what_is_learned_for_a_reader_is_planning() -> None:
    """Fails where counts are completed for a reader in time that no count has."""
    planner = Planner(4, clock=map(float, itertools.count()).__next__)
    planner.settle()
    assert planner.counts.planning_s == planner.counts.seconds > 0


@pytest.mark.parametrize("said", [-torch.inf, -60.0, 0.0])
def test_a_fixed_plan_keeps_its_rows(said: float) -> None:
    """Fails where a draft that is sure of nothing shortens the chains, or makes trees of them."""
    policy = Fixed(4)
    policy.begin(["a"])
    rows = policy.choose(torch.full((1, 3, 2), said))
    assert rows.lens == [4] and rows.row_mask is None and rows.parents.tolist() == [-1, 0, 1, 2]
    assert policy.counts.promised == pytest.approx(3.0 if said == 0 else 0.0, abs=1e-6)


def test_what_has_happened_since() -> None:
    """Fails where counts of before the last report are reported again, or a copy goes on counting."""
    before = PlanCounts(10, 2.0, 0.5, 8, 16, 12, 6.0, 5)
    now, kept = before.copy(), before.copy()
    now.steps, now.accepted = 50, 9
    assert before == kept and now.since(before) == PlanCounts(steps=40, accepted=4)
    assert PlanCounts.total([before, before, PlanCounts()]) == PlanCounts(20, 4.0, 1.0, 16, 32, 24, 12.0, 10)


def test_in_words() -> None:
    """Fails where means are not those of a block."""
    words = (
        "8 blocks in 10 steps, on average 2.00 rows and 1.50 deep; of a block, 0.75 drafts were promised and 0.62 "
        "accepted"
    )
    assert str(PlanCounts(10, 2.0, 0.05, 8, 16, 12, 6.0, 5)) == f"{words}; planning took 2.5% of the time"
    assert str(PlanCounts(10, 0.0, 0.0, 8, 16, 12, 6.0, 5)) == words
    assert str(PlanCounts(steps=3)) == "nothing was drafted in 3 steps"
    copies = "4 copies of 6.00 tokens, of which 4.25 were promised and 5.00 accepted"
    assert str(PlanCounts(9, 0.0, 0.0, 8, 16, 12, 6.0, 5, 4, 24, 17.0, 20)) == f"{words.replace('10', '9')}; {copies}"
    assert str(PlanCounts(9, copies=4, copied_rows=24, copied_promised=17.0, copied_accepted=20)) == (
        f"0 blocks in 9 steps; {copies}"
    )


def test_depths_are_summed_and_said() -> None:
    """Fails where depths that only one of two counts has are lost, or where JSON changes what was counted."""
    some, more = DepthCounts(10, 5.0, 4), DepthCounts(30, 20.0, 19)
    before, now = PlanCounts(by_depth=[some]), PlanCounts(by_depth=[more, some])
    assert now.since(before).by_depth == [DepthCounts(20, 15.0, 15), some]
    assert PlanCounts.total([before, now]).by_depth == [DepthCounts(40, 25.0, 23), some]
    assert PlanCounts.from_json(json.loads(json.dumps(asdict(now)))) == now
    first, second = now.calibration().split("; ")
    assert first == "depth 1: 30 rows, promised 0.67, accepted 0.63" and second.startswith("depth 2: 10 rows,")
    assert PlanCounts().calibration() == ""
    with pytest.raises(TypeError):
        PlanCounts.from_json({"of another version": 1})
