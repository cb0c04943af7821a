"""The planner on made-up machines and drafts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from made_up_machines import MACHINES, MIXES, START, K, Machine, Step, World, fixed_rates, mix, rate

from sglang_dflash.core.policy import NOTHING, Drafting, Fixed

PLANNED = 0.97  # least share of the best fixed width's rate
# The planner takes times for a line over rows: it finds out late how far rows are free. And whether a dear draft pays
# may hang by a few percent.
SLOWER = {
    ("free rows", 4, "middling"): 0.75,
    ("free rows", 4, "easy"): 0.95,
    ("free rows", 16, "easy"): 0.95,
    ("dear draft", 16, "easy"): 0.95,
}
CASES = [
    (machine, requests, case, heat)
    for machine in MACHINES
    for requests in (1, 4, 8, 16)
    for case in MIXES
    for heat in (0.5, 1.0, 2.0)
    if (heat == 1.0 or (requests == 8 and case != "hard" and machine != "noise"))
    and not (case == "half" and requests == 1)
]


@pytest.mark.parametrize(("machine", "requests", "case", "heat"), CASES)
def test_as_fast_as_the_best_fixed_width(machine, requests, case, heat):
    """Fails where the time or the tokens of a row are misjudged, plain decoding is never tried, probes cost more than
    a few percent, or a draft that is too sure of itself, or not sure enough, is believed."""
    world = World(MACHINES[machine], heat)
    steps = world.run(world.planner(), MIXES[case](requests), 220)[START:]
    rates = fixed_rates(steps)
    share = rate(steps) / max(rates)
    assert share >= SLOWER.get((machine, requests, case), PLANNED), (share, rates)
    if case == "half" and machine in ("cheap rows", "middling rows", "noise"):
        assert share >= 1.1, (share, rates)  # each request has its own rows


@pytest.mark.parametrize(
    ("machine", "skills"),
    [("dear rows", mix(0, 8)), ("free rows", mix(16)), ("dear draft", mix(16)), ("dear draft", mix(0, 1))],
)
def test_hardly_slower_than_plain_decoding(machine, skills):
    """Fails where probes, or drafts that do not pay, cost a server more than 1.5 % in the long run."""
    world = World(MACHINES[machine])
    steps = world.run(world.planner(), skills, 600)[200:]
    rates = fixed_rates(steps)
    assert max(rates) == rates[0]
    assert rate(steps) >= 0.985 * rates[0], (rate(steps), rates)


def test_learns_within_twenty_steps():
    """Fails where the first steps do not show the times and the chances, or take longer than `START`."""
    for machine, skills in (("dear rows", mix(0, 8)), ("cheap rows", mix(8)), ("middling rows", mix(4, 4))):
        world = World(MACHINES[machine])
        planner = world.planner()
        first, later = (world.run(planner, skills, count) for count in (START, 60))
        assert {1, K} <= {step.drafting.width for step in first}
        assert rate(later) >= 0.96 * max(fixed_rates(later)), (machine, rate(later), fixed_rates(later))


def test_same_text_and_times_same_plans():
    """Fails where a plan hangs on chance, or on the order of a set."""
    runs = []
    for _ in range(2):
        world = World(MACHINES["noise"])
        runs.append([step.shape for step in world.run(world.planner(), mix(3, 3, 2), 80)])
    assert runs[0] == runs[1]


def test_a_pause_is_no_step():
    """Fails where the time of a prefill, or of waiting for requests, counts as step time: if a step took seconds,
    every row would pay."""
    rates = []
    for pauses in (False, True):
        world = World(MACHINES["dear rows"])
        planner, steps = world.planner(), []
        for index in range(200):
            steps.append(world.step(planner, mix(2, 2)))
            if pauses and index % 2:
                planner.interrupt(50)
                world.now += 10.0
        rates.append(rate(steps[START:]))
    assert rates[1] >= 0.98 * rates[0], rates


@pytest.mark.parametrize("before", [mix(0, 4), {f"easy-{i}": 0.02 for i in range(4)}])
def test_better_drafts_are_noticed(before):
    """Fails where a planner stays with plain decoding after drafts have become good, of the same or other requests."""
    world = World(MACHINES["dear rows"])
    planner = world.planner()
    plain = world.run(planner, before, 250)[-100:]
    assert np.mean([step.drafting.width == 1 for step in plain]) > 0.8
    steps = world.run(planner, mix(4), 500)[-150:]
    assert rate(steps) >= PLANNED * max(fixed_rates(steps)) > 1.2 * fixed_rates(steps)[0]


@pytest.mark.parametrize("machine", ["cheap rows", "middling rows"])
@pytest.mark.parametrize("at_once", [4, 8, 16])
def test_better_newcomers_are_noticed(machine, at_once):
    """Fails where requests whose drafts are good get plain steps for as long as they last, because those before them
    had poor ones."""
    shares = []
    for seed in range(3):
        world = World(MACHINES[machine], seed=seed)
        planner = world.planner()
        world.serve(planner, [0.15] * 12 * at_once, at_once)
        steps = world.serve(planner, [0.9] * 3 * at_once, at_once)
        shares.append(rate(steps) / max(fixed_rates(steps)))
    assert np.mean(shares) >= 0.78, shares


def test_worse_drafts_are_noticed():
    """Fails where a request goes on with wide blocks after its text has become hard."""
    world = World(MACHINES["dear rows"])
    planner = world.planner()
    world.run(planner, mix(4), 150)
    steps = world.run(planner, dict.fromkeys(mix(4), 0.05), 150)[-100:]
    assert rate(steps) >= PLANNED * fixed_rates(steps)[0]


@pytest.mark.parametrize("machine", ["cheap rows", "middling rows", "dear rows"])
def test_a_disturbed_step_is_forgotten(machine):
    """Fails where one step that took 30 times as long changes the plans of the steps to come."""
    for index in (0, 1, 5, 20, 100):
        rates = []
        for disturbed in (1.0, 30.0):
            world = World(MACHINES[machine])
            planner, skills = world.planner(), mix(4, 4)
            world.run(planner, skills, index)
            world.step(planner, skills, disturbed)
            rates.append(rate(world.run(planner, skills, 60)))
        assert rates[1] >= 0.95 * rates[0], (index, rates)


def assert_sound(step: Step, max_rows: int, candidates: int) -> None:
    """The rows of a plan hang together."""
    planned, drafting = step.planned, step.drafting
    starts = planned.row_starts.tolist()
    lens = planned.lens
    assert lens == [end - begin for begin, end in pairwise(starts)] and min(lens) >= 1
    assert max(lens) == planned.width <= max_rows
    assert planned.requests.tolist() == [request for request, count in enumerate(lens) for _ in range(count)]
    assert drafting.requests == sorted(set(drafting.requests))
    parents, depths, ranks = (t.tolist() for t in (planned.parents, planned.depths, planned.ranks))
    assert planned.length == 1 + max(depths)
    chains = True
    for request, (first, end) in enumerate(pairwise(starts)):
        assert (parents[first], depths[first], ranks[first]) == (-1, 0, -1)
        if request not in drafting.requests:
            assert end == first + 1
        for row in range(first + 1, end):
            assert 0 <= parents[row] < row - first
            assert depths[row] == depths[first + parents[row]] + 1 < drafting.width
            assert 0 <= ranks[row] < candidates
            chains &= parents[row] == row - first - 1
        assert len(set(zip(parents[first:end], ranks[first:end], strict=True))) == end - first
    assert (planned.row_mask is None) == chains


def test_requests_come_and_go():
    """Fails where a plan has the rows, the chances or the lessons of another request, because the batch has changed
    since: whoever comes, goes, or stands elsewhere is drafted by its own text."""
    world = World(MACHINES["middling rows"])
    planner, chance = world.planner(), np.random.default_rng(1)
    everyone = list(mix(12, 12).items())
    steps: list[Step] = []
    drafted = {"easy": [0, 0], "hard": [0, 0]}  # times drafted, times there
    for index in range(400):
        order = chance.permutation(len(everyone))[: chance.integers(1, 12)]
        skills = dict(everyone[place] for place in order)
        steps.append(world.step(planner, skills))
        assert_sound(steps[-1], K, 4)
        if index < 100:
            continue  # those it has not met before are taken for average
        for place, name in enumerate(skills):
            counts = drafted[name.split("-")[0]]
            counts[0] += place in steps[-1].drafting.requests
            counts[1] += 1
    assert rate(steps[START:]) >= 1.1 * max(fixed_rates(steps[START:]))
    shares = {name: count / there for name, (count, there) in drafted.items()}
    assert shares["easy"] > 0.9 and shares["hard"] < 0.5, shares


def test_work_before_the_draft_is_not_its_time():
    """Fails where the draft seems as dear as what earlier steps have left to do before it."""
    skills = mix(4, 0)
    worlds = World(MACHINES["middling rows"]), World(MACHINES["middling rows"])
    worlds[1].before_draft_s = 0.05
    plans = [[step.drafting for step in world.run(world.planner(), skills, 200)] for world in worlds]
    assert plans[0] == plans[1]
    assert sum(drafting.width > 1 for drafting in plans[0]) > 100


def test_places_in_the_batch_do_not_matter():
    """Fails where the decision about a batch outlives it, when other requests stand at the same places."""
    world = World(MACHINES["middling rows"])
    planner, skills = world.planner(), mix(4, 4)
    world.run(planner, skills, 100)
    easy = []
    for index in range(60):
        order = dict(reversed(skills.items())) if index % 2 else skills
        drafting = world.step(planner, order).drafting
        if 0 < len(drafting.requests) < 8:
            easy.append(np.mean([list(order)[place] in list(skills)[:4] for place in drafting.requests]))
    assert len(easy) > 30 and np.mean(easy) > 0.9, easy


@pytest.mark.parametrize("machines", [("middling rows", "dear rows"), ("dear rows", "cheap rows")])
def test_a_machine_that_changes(machines):
    """Fails where steps that have become dear, or cheap, because other work has come or gone, are planned for as
    before."""
    before, after = (MACHINES[name] for name in machines)
    world = World(before)
    planner = world.planner()
    world.run(planner, mix(8), 300)
    world.machine = after
    steps = world.run(planner, mix(8), 600)[-200:]
    assert rate(steps) >= PLANNED * max(fixed_rates(steps)), (rate(steps), fixed_rates(steps))


def test_another_load_is_planned_for_at_once():
    """Fails where the plan of a small batch outlives it, or the other way round."""
    world = World(MACHINES["free rows"])
    planner = world.planner()
    for requests in (1, 16):
        world.run(planner, mix(requests), 120)
    for requests in (1, 16, 1, 16):
        steps = world.run(planner, mix(requests), 40)
        assert rate(steps) >= 0.9 * max(fixed_rates(steps)), (requests, rate(steps), fixed_rates(steps))


def test_requests_left_out_have_one_row():
    """Fails where a request without a block is verified beyond its anchor, or where nobody is ever left out."""
    world = World(MACHINES["middling rows"])
    steps = world.run(world.planner(), mix(4, 4), 150)
    for step in steps:
        assert_sound(step, K, 4)
    assert any(0 < len(step.drafting.requests) < 8 for step in steps)


def test_counts_by_depth_add_up():
    """Fails where the counts by depth are of other rows, chances or accepted drafts than the plan's sums, in steps that
    leave requests out and in trees."""
    world = World(MACHINES["middling rows"])
    planner = world.planner()
    steps = world.run(planner, mix(4, 4), 150)
    assert any(0 < len(step.drafting.requests) < 8 for step in steps)
    planner.settle()
    counts = planner.counts
    assert counts.blocks == sum(len(step.drafting.requests) for step in steps)
    sums = [sum(getattr(one, name) for one in counts.by_depth) for name in ("rows", "promised", "accepted")]
    assert (sums[0], sums[2]) == (counts.rows, counts.accepted) and counts.rows > 0
    assert sums[1] == pytest.approx(counts.promised)
    assert len(counts.by_depth) <= K - 1


def test_one_candidate_gives_chains():
    """Fails where a draft with one candidate for each row gives anything but chains, whose attention needs no mask."""
    world = World(MACHINES["cheap rows"], candidates=1)
    steps = world.run(world.planner(), mix(2, 2), 100)
    for step in steps:
        assert_sound(step, K, 1)
        assert step.planned.row_mask is None
    assert any(step.planned.lens[0] != step.planned.lens[-1] for step in steps)


@pytest.mark.parametrize("rows", range(1, K + 1))
def test_a_fixed_number_of_rows(rows):
    """Fails where a plan to compare with has other rows than it says, or trees."""
    world = World(MACHINES["cheap rows"])
    for step in world.run(Fixed(rows), mix(2, 1), 5):
        assert_sound(step, rows, 4)
        assert step.planned.lens == [rows] * 3 and step.planned.row_mask is None
        assert step.drafting == (Drafting(rows, [0, 1, 2]) if rows > 1 else NOTHING)


def test_candidates_give_trees():
    """Fails where the second best candidates are never verified, or bring nothing, on a machine with cheap rows."""
    rates = []
    for candidates in (1, 4):
        world = World(MACHINES["cheap rows"], candidates=candidates)
        rates.append(rate(world.run(world.planner(), mix(0, 0, 4), 200)[START:]))
    assert rates[1] > 1.05 * rates[0], rates


@pytest.mark.parametrize(("block_size", "max_rows"), [(8, 5), (8, 1), (8, 16), (2, None), (16, None)])
def test_max_rows_is_kept(block_size, max_rows):
    """Fails where a request has more rows than the host has room for, or cannot use all of them."""
    world = World(Machine(row_s=1e-5), block_size=block_size)
    most = max_rows or block_size
    steps = world.run(world.planner(max_rows), mix(2, 1, 1), 80)
    for step in steps:
        assert_sound(step, most, 4)
        assert step.drafting.width <= block_size
    assert max(step.planned.width for step in steps) == most


@pytest.mark.parametrize("spoiled", [float("-inf"), float("nan")])
def test_candidates_without_a_chance(spoiled):
    """Fails where a candidate of probability 0, or of logits that are no numbers, is verified, or spoils the plans of
    the candidates and requests beside it."""
    world, chance = World(MACHINES["cheap rows"]), np.random.default_rng(0)
    planner, skills = world.planner(), mix(4)

    def spoil(log_probs: np.ndarray) -> np.ndarray:
        for request in range(len(log_probs)):  # whole requests, rows, and the less likely candidates of rows
            kind, depth = chance.integers(20), chance.integers(log_probs.shape[1])
            if kind == 0:
                log_probs[request] = spoiled
            elif kind < 4:
                log_probs[request, depth, chance.integers(log_probs.shape[2]) :] = spoiled
        said.append(log_probs.copy())
        return log_probs

    world.spoil = spoil
    said: list[np.ndarray] = []
    steps, verified = [], 0
    for _ in range(200):
        said.clear()
        step = world.step(planner, skills)
        steps.append(step)
        assert_sound(step, K, 4)
        behind = step.planned.ranks >= 0
        places = [step.drafting.requests.index(request) for request in step.planned.requests[behind].tolist()]
        if places:
            rows = said[0][places, step.planned.depths[behind] - 1, step.planned.ranks[behind]]
            assert np.isfinite(rows).all()
            verified += len(rows)
    assert verified > 2000
    assert rate(steps[START:]) >= 0.85 * max(fixed_rates(steps[START:]))  # which know the spoiled candidates


def test_nothing_has_a_chance():
    """Fails where a draft that gives no finite number ends the server, or is asked again and again."""
    world = World(MACHINES["dear rows"])
    world.spoil = lambda log_probs: np.full_like(log_probs, float("-inf"))
    steps = world.run(world.planner(), mix(4), 200)
    assert all(step.planned.lens == [1] * 4 for step in steps)
    assert rate(steps[START:]) >= PLANNED * fixed_rates(steps[START:])[0]


def test_the_wrong_number_of_requests_is_refused():
    """Fails where the outcome of another batch is taken for the planned one's."""
    world = World(MACHINES["cheap rows"])
    planner = world.planner()
    planner.begin(["a", "b"])
    planned = planner.choose(None)
    with pytest.raises(AssertionError):
        planner.end(planned.row_starts[:1, None], torch.ones(1, dtype=torch.int32))
