"""The policy of rows on made-up machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_dflash.core.policy import SameRows, Step
from sglang_dflash.core.rows import STANDS, RowPolicy, RowSettings
from tools.measure.worlds import CPU, H200, K, World, rate

MACHINES = {"cpu": CPU, "h200": H200}
SKILLS = {"poor": 0.15, "fair": 0.5, "good": 0.93}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("at_once", [1, 4, 16])
@pytest.mark.parametrize("skill", SKILLS)
def test_as_fast_as_the_best_fixed_width(machine, at_once, skill):
    """Fails where the policy loses more than 7 % to the width that is best for this load, which nobody knows before."""
    skills = [SKILLS[skill]] * max(12, 6 * at_once)
    own = rate(World(MACHINES[machine], seed=1).serve(RowPolicy(K), skills, at_once))
    fixed = [rate(World(MACHINES[machine], seed=1).serve(SameRows(width), skills, at_once)) for width in (1, 2, 4, K)]
    print(f"{machine:5} {at_once:2} {skill:5} {own / max(fixed):.2f} of the best of", [f"{one:.0f}" for one in fixed])
    assert own >= 0.93 * max(fixed), (own, fixed)


class Knowing(SameRows):
    """Drafts the requests whose names are in a set, and nobody else."""

    def __init__(self, drafted: set[str]) -> None:
        super().__init__(K)
        self.drafted = drafted

    def draft(self, names):
        drafting = super().draft(names)
        requests = [place for place, name in enumerate(names) if name in self.drafted]
        return drafting._replace(requests=requests, width=K if requests else 1)


@pytest.mark.parametrize("machine", MACHINES)
def test_half_of_the_requests_are_worth_it(machine):
    """Fails where bad drafts of some requests keep good ones of others from being drafted: below 0.9 of a policy that
    knows which are which."""
    skills = [0.93, 0.15] * 40
    good = {f"request {number}" for number in range(1, 81, 2)}
    own = rate(World(MACHINES[machine], seed=2).serve(RowPolicy(K), skills, 8))
    knowing = rate(World(MACHINES[machine], seed=2).serve(Knowing(good), skills, 8))
    assert own >= 0.9 * knowing, (own, knowing)


def test_a_step_that_drafts_nobody_has_one_row_each():
    """Fails where poor drafts are verified on a machine whose rows are dear."""
    policy, dear = RowPolicy(K), replace(CPU, free_rows=0, row_s=20e-3)
    steps = World(dear).run(policy, dict.fromkeys("abcd", 0.1), 60)[20:]
    assert sum(step.drafting.width == 1 for step in steps) > 0.8 * len(steps)
    assert all(step.lens.tolist() == [1] * 4 for step in steps if step.drafting.width == 1)


def test_a_decision_to_draft_nobody_ends():
    """Fails where such a decision stands for good, or for a newcomer that is worth drafting."""
    policy, dear = RowPolicy(K), replace(CPU, free_rows=0, row_s=20e-3)
    World(dear).run(policy, dict.fromkeys("abcd", 0.1), 60)
    names = list("abcd")
    while policy.draft(names).width > 1:
        pass
    for name in names:
        policy._request(name).mean[:] = 0.99
    assert any(len(policy.draft(names).requests) == 4 for _ in range(STANDS))

    policy = RowPolicy(K)
    World(dear).run(policy, dict.fromkeys("abcd", 0.1), 60)
    policy._request("good").mean[:] = 0.99
    while policy.draft(names).width > 1:
        pass
    assert policy.draft([*names[:3], "good"]).requests == [3]


def test_rows_follow_the_draft_within_a_step():
    """Fails where a sure block gets no more rows than an unsure one of the same step."""
    policy, world = RowPolicy(K), World(replace(CPU, row_s=1e-3))
    world.run(policy, dict.fromkeys("abcd", 0.7), 60)
    policy.draft(["a", "b", "c", "d"])
    policy._drafting, policy._whole = policy._of(K, [0, 1, 2, 3]), False
    chances = np.full((4, K - 1), 0.3)
    chances[1] = 0.99
    lens = policy.verify(chances.cumprod(1))
    assert lens[1] > max(lens[0], lens[2], lens[3])


def test_chances_are_corrected():
    """Fails where a draft that is far too sure of itself is believed for ever."""
    policy, world = RowPolicy(K), World(CPU, heat=3.0)
    world.run(policy, {"a": 0.75}, 400)
    log_probs, right = world.blocks([0.75] * 4000)
    odds = log_probs - np.log1p(-np.exp(np.minimum(log_probs, -1e-6)))
    said = 1 / (1 + np.exp(-odds - policy.offsets(["a"], K - 1)))
    assert abs(said.mean() - right.mean()) < 0.75 * abs(np.exp(log_probs).mean() - right.mean())


def test_nothing_is_learned_of_rows_that_were_not_reached():
    """Fails where a row behind a wrong one, or one that was not verified, changes a depth's chances."""
    policy = RowPolicy(K)
    policy.draft(["a"])
    survival = np.full((1, K - 1), 0.5) ** np.arange(1, K)
    policy.learn(Step(["a"], survival, np.array([4]), np.array([2])))  # row 1 right, row 2 wrong
    moved = policy._calibration.offsets(np.zeros(1), K - 1)[0]
    assert moved[0] > 0 > moved[1] and not moved[2:].any()


def test_a_dead_band_keeps_whole_blocks():
    """Fails where whole blocks are left for a gain within the noise of times."""
    flat = replace(CPU, row_s=1e-6)
    steps = World(flat).run(RowPolicy(K), dict.fromkeys("abcd", 0.8), 100)[10:]
    assert np.mean([step.lens.sum() == 4 * K for step in steps]) > 0.95


def test_newcomers_are_drafted_in_their_first_steps():
    """Fails where a request must wait for a probe although its drafts are good."""
    policy, world = RowPolicy(K), World(replace(CPU, row_s=1e-3, draft_s=1e-3))
    world.run(policy, dict.fromkeys("abcdefg", 0.05), 60)
    first = world.run(policy, dict.fromkeys("abcdefg", 0.05) | {"new": 0.95}, 6)
    assert all(7 in step.drafting.requests for step in first[:2])
    assert sum(7 in step.drafting.requests for step in first) > 4


def test_newcomers_are_left_alone_where_drafting_pays_for_nobody():
    """Fails where every new request costs two blocks although no request before it was worth one."""
    policy, world = RowPolicy(K), World(replace(CPU, row_s=8e-3))
    world.run(policy, {f"old {n}": 0.1 for n in range(10)}, 60)
    steps = world.run(policy, {f"new {n}": 0.1 for n in range(10)}, 20)
    assert sum(len(step.drafting.requests) for step in steps) < 10


def test_a_request_that_gets_good_is_found():
    """Fails where a request that was not drafted is never drafted again."""
    policy, world = RowPolicy(K), World(replace(CPU, row_s=1e-3, draft_s=1e-3))
    world.run(policy, dict.fromkeys("abcd", 0.05), 100)
    steps = world.run(policy, dict.fromkeys("bcd", 0.05) | {"a": 0.97}, 400)
    assert np.mean([3 in step.drafting.requests for step in steps[-50:]]) > 0.8


def test_what_is_untrimmed_is_verified_whole():
    """Fails where a forward that takes equally many rows gets others, or some requests are drafted and others not."""
    policy = RowPolicy(K, together=True, trims=False)
    for step in World(CPU).run(policy, {"a": 0.9, "b": 0.2, "c": 0.5}, 100):
        assert step.drafting.requests in ([], [0, 1, 2])
        assert step.lens.tolist() == [step.drafting.width] * 3


def test_a_disturbed_time_changes_little():
    """Fails where a pause of the whole process makes a policy avoid a number of rows for long."""
    policy, world = RowPolicy(K), World(CPU)
    before = world.run(policy, dict.fromkeys("abcd", 0.93), 50)[-1].drafting
    policy.see_rest(4 * K, 60.0)
    assert world.run(policy, dict.fromkeys("abcd", 0.93), 3)[-1].drafting == before


NOTHING = np.empty((0, 0))  # survival, where nobody is drafted


def copy_of(chance: float, tokens: int = K - 1) -> np.ndarray:
    """Survival of a copy each of whose tokens has this chance. [K - 1]."""
    return np.where(np.arange(K - 1) < tokens, chance ** np.arange(1, K), 0.0)


def test_a_better_copy_takes_the_place_of_a_block():
    """Fails where a request is drafted although its copy promises more than its blocks, or a worse copy keeps it from
    being drafted; or where the copy's likely rows are not verified, or rows that it does not have are."""
    policy, world = RowPolicy(K), World(CPU)
    world.run(policy, {"a": 0.8}, 60)
    assert policy.draft(["a"], copy_of(0.2)[None]).requests == [0]
    for tokens in (1, 3, K - 1):
        policy._requests["a"].mean[:] = copy_of(0.4)
        assert policy.draft(["a"], copy_of(0.99, tokens)[None]).requests == []
        assert policy.verify_all(NOTHING).tolist() == [1 + tokens]


def test_one_rule_for_drafts_and_copies():
    """Fails where a row is verified and a likelier one is not, whichever of them is copied; where all rows or none are;
    or where a request that is neither drafted nor copied gets a row."""
    policy, world = RowPolicy(K), World(replace(CPU, row_s=6e-3, free_rows=0))
    world.run(policy, dict.fromkeys("abcd", 0.9), 60)
    copies = np.stack([copy_of(0.0), copy_of(0.97), copy_of(0.0), copy_of(0.8)])
    for name, mean in zip("abcd", (0.9, 0.2, 0.0, 0.3), strict=True):
        policy._requests[name].mean[:] = copy_of(mean)
    policy.draft("abcd", copies)
    policy._drafting, policy._whole = policy._of(K, [0]), False
    chances = np.stack([copy_of(0.9), copies[1], np.zeros(K - 1), copies[3]])
    lens = policy.verify_all(chances[:1])
    seen = np.arange(1, K) < lens[:, None]
    assert chances[seen].min() >= chances[~seen].max() and lens[2] == 1
    assert 1 < lens[0] < K and lens[1] > 1 and 1 < lens[3] < K
    assert policy.verify(chances[:1]).tolist() == [lens[0]]


def test_a_copy_serves_where_drafting_does_not_pay():
    """Fails where a request whose blocks are not worth their draft gets no copy either, because it promises less."""
    policy, world = RowPolicy(K), World(replace(CPU, draft_s=60e-3))
    world.run(policy, {"a": 0.6}, 80)
    mean, copies = policy._requests["a"].mean.sum(), copy_of(0.95, 1)[None]
    assert copies.sum() < mean
    steps = []
    for _ in range(20):
        drafting = policy.draft(["a"], copies)
        steps.append((drafting.requests, policy.verify_all(copy_of(0.5)[None] if drafting.requests else NOTHING)[0]))
    assert steps.count(([], 2)) > 15, steps


def test_times_are_learned_before_anything_is_copied():
    """Fails where the first steps, by which plain ones and whole blocks are timed, verify copied rows."""
    policy, world = RowPolicy(K), World(CPU)
    copies = copy_of(0.99)[None]
    assert policy.draft(["a"], copies).requests == [0]
    assert policy.verify_all(copy_of(0.5)[None]).tolist() == [K]
    assert policy.draft(["a"], copies).requests == []
    assert policy.verify_all(NOTHING).tolist() == [1]
    world.run(policy, {"a": 0.5}, 20)
    assert policy.draft(["a"], copies).requests == []
    assert policy.verify_all(NOTHING).tolist() == [K]


def test_requests_are_forgotten():
    """Fails where a server keeps every request that it ever served."""
    policy = RowPolicy(K, settings=RowSettings())
    for number in range(3000):
        policy.draft([f"request {number}"])
    assert len(policy._requests) <= 1024
    many = [f"another {number}" for number in range(2000)]
    policy.draft(many)
    assert policy.offsets(many, K - 1).shape == (2000, K - 1)


def test_one_size_for_few_and_many_rows_is_known_at_once():
    """Fails where a policy goes on trying plain steps because one graph serves them and whole blocks alike."""
    policy = RowPolicy(K, [K], together=True, size_of=lambda rows: -(-rows // K) * K)
    steps = World(CPU).run(policy, {"a": 0.95}, 20)
    assert all(step.drafting.requests == [0] for step in steps[6:])


def test_the_times_of_a_plain_and_a_drafted_step():
    """Fails where they are told before both were measured, or a drafted step leaves out its draft."""
    policy = RowPolicy(K)
    assert policy.step_seconds() is None and SameRows(K).step_seconds() is None
    for _ in range(2):  # the first use of a size counts nothing
        policy.see_draft(K, 2e-3)
        policy.see_rest(K, 9e-3)
    assert policy.step_seconds() is None
    for _ in range(2):
        policy.see_rest(1, 5e-3)
    assert policy.step_seconds() == pytest.approx((5e-3, 11e-3))
