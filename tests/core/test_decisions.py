"""When the planner decides anew who is drafted, and what it does with newcomers until then."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from made_up_machines import MACHINES, World, mix

from sglang_dflash.core.plan import Planner, PlanTuning
from sglang_dflash.core.policy import NOTHING, Drafting


def decisions_of(planner: Planner, world: World, skills: Mapping[str, float]) -> list[list[str]]:
    """The requests of each decision that the planner makes from now on. It takes steps up to the first one."""
    decide, decided_for = planner._decide, list[list[str]]()
    planner._decide = lambda: (decided_for.append(list(planner._requests)), decide())
    planner._probe = lambda: None  # after a probe it decides, too
    while not decided_for:
        world.step(planner, skills)
    return decided_for


def test_new_requests_are_taken_for_what_others_are():
    """Fails where a new request must show first what its drafts are worth, or where each new one is drafted."""
    for machine, skills, drafted in (("middling rows", mix(4), True), ("dear rows", mix(0, 4), False)):
        world = World(MACHINES[machine])
        planner = world.planner()
        world.run(planner, skills, 100)
        for turn in range(4):
            new = {f"{name}-{turn}": skill for name, skill in skills.items()}
            steps = world.run(planner, new, 6)
            shares = [len(step.drafting.requests) / len(new) for step in steps]
            assert (np.mean(shares) > 0.8) if drafted else (np.mean(shares) < 0.3), shares


def test_requests_that_leave_cost_no_decision():
    """Fails where, with nobody drafted, each request that leaves makes the planner decide anew, or where a crowd that
    has halved is still planned for as it was."""
    world = World(MACHINES["dear rows"])
    planner, skills = world.planner(), mix(0, 8)
    world.run(planner, skills, 200)
    decided_for = decisions_of(planner, world, skills)
    assert planner._decided == NOTHING
    for left in (7, 6, 5, 4):
        world.step(planner, dict(list(skills.items())[:left]))
    assert [len(requests) for requests in decided_for] == [8, 4]


@pytest.mark.parametrize("drafts_newcomers", [True, False])
def test_a_recent_decision_takes_in_newcomers(drafts_newcomers):
    """Fails where, shortly after a decision, each request that comes or leaves makes the planner decide anew; where a
    newcomer is treated as another request than one that was never drafted; or where a request that was drafted before
    counts as new."""
    world = World(MACHINES["middling rows"])
    planner = world.planner(tuning=PlanTuning(sure_ratio=math.inf))
    world.run(planner, mix(4), 100)
    decided_for = decisions_of(planner, world, mix(4))

    def step(*names: str) -> list[str]:
        drafting = world.step(planner, dict.fromkeys(names, 0.9)).drafting
        return [names[i] for i in drafting.requests]

    begin = ["easy-1", "easy-2", "easy-3", "new-0"]
    step(*begin)
    assert decided_for[1:] == [begin]  # the decision before it knew nothing of newcomers
    planner._decided = Drafting(planner._decided.width, [0, 1, 2, 3] if drafts_newcomers else [0, 1, 2])
    names = ["new-1", "easy-2", "easy-3", "new-0"]
    assert step(*names) == (names if drafts_newcomers else ["easy-2", "easy-3"])
    names = ["easy-3", "new-1", "new-0"]
    for _ in range(planner._tuning.settled_steps - 2):
        assert step(*names) == (names if drafts_newcomers else ["easy-3"])
    names[2] = "new-2"
    assert step(*names) == (names if drafts_newcomers else ["easy-3"])
    assert len(decided_for) == 2
    step(*names)
    assert decided_for[2:] == [names]
    names.append("easy-0")  # it was drafted before
    step(*names)
    assert decided_for[3:] == [names]


def test_a_sure_decision_takes_in_every_newcomer():
    """Fails where drafts are worth twice the rate of plain steps, and yet a newcomer makes the planner decide anew,
    is not drafted, or counts only if the decision knew others like it."""
    world = World(MACHINES["cheap rows"])
    planner = world.planner()
    world.run(planner, mix(4), 100)
    decided_for = decisions_of(planner, world, mix(4))
    names = [f"easy-{i}" for i in range(4)]
    for step in range(planner._tuning.decision_steps - 1):
        names[step % 4] = f"new-{step}" if step % 3 else f"easy-{step % 4}"
        drafting = world.step(planner, dict.fromkeys(names, 0.9)).drafting
        assert drafting.requests == [0, 1, 2, 3]
    assert len(decided_for) == 1
    world.step(planner, dict.fromkeys(names, 0.9))
    assert decided_for[1:] == [names]


def test_plain_probes_come_half_as_often_where_a_decision_is_sure():
    """Fails where steps without drafts are tried as often where they bring half as much as where they may be as
    good."""
    plain = []
    for ratio in (0.0, math.inf):
        world = World(MACHINES["cheap rows"])
        planner = world.planner(tuning=PlanTuning(sure_ratio=ratio))
        world.run(planner, mix(4), 100)
        plain.append(sum(step.drafting == NOTHING for step in world.run(planner, mix(4), 1000)))
    assert plain[1] > 20 and 0.4 < plain[0] / plain[1] < 0.6, plain


def test_a_decision_that_leaves_somebody_out_is_not_sure():
    """Fails where newcomers are drafted unseen although the decision drafts only some requests."""
    world = World(MACHINES["dear rows"])
    planner = world.planner(tuning=PlanTuning(sure_ratio=0.0))
    world.run(planner, mix(2, 2), 200)
    decisions_of(planner, world, mix(2, 2))
    assert planner._decided.requests == [0, 1] and not planner._sure
    world.run(planner, mix(2), 200)
    decisions_of(planner, world, mix(2))
    assert planner._decided.requests == [0, 1] and planner._sure


@pytest.mark.parametrize("after", [4, 16])
def test_another_load_is_decided_anew(after):
    """Fails where a decision for eight requests goes on for half or twice as many. after: requests."""
    world = World(MACHINES["middling rows"])
    planner, skills = world.planner(), mix(8)
    world.run(planner, skills, 100)
    planner._probe = lambda: None  # after a probe it decides, too
    new = {f"new-{i}": 0.9 for i in range(16)}
    decided = dict(list(skills.items())[:7]) | {"new-0": 0.9}
    world.step(planner, decided)
    decided_at = planner._decided_at
    world.step(planner, dict(list(skills.items())[:5]) | {"new-0": 0.9})
    assert planner._decided_at == decided_at
    world.step(planner, dict(list((decided | new).items())[-after:]))
    assert planner._decided_at == planner._steps - 1


def test_a_probe_that_is_too_dear_is_not_reckoned_in_each_step():
    """Fails where the price of a probe is found anew before its budget has grown so far, although nothing changed."""
    world = World(MACHINES["dear rows"])
    planner, skills, too_dear = world.planner(), mix(0, 8), []
    world.run(planner, skills, 200)
    wide_probe = planner._wide_probe

    def probe() -> tuple[Drafting, float]:
        found = wide_probe()
        too_dear.append(found[1] > planner._probe_budget_s)
        return found

    planner._wide_probe = probe
    decisions = 0
    for _ in range(320):
        world.step(planner, skills)
        decisions += planner._decided_at == planner._steps - 1
    assert 0 < sum(too_dear) <= decisions + 1
