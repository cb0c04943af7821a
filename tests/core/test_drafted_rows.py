"""The rows of drafted requests and what they teach, with made-up drafts whose true chances are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from sglang_dflash import ops
from sglang_dflash.core.drafted_rows import DraftedRows
from sglang_dflash.core.places import Places
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.ops.platt_scaling import SUREST

KERNELS = ops.choose_kernels("cpu", torch.float32)
DEPTHS = 4
Truth = Callable[[np.ndarray], np.ndarray]


def logit(chances: np.ndarray) -> np.ndarray:
    return np.log(chances / (1 - chances))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


class Learner:
    """Drafted rows, with what they learn from. The best rows are verified, whatever their chance."""

    def __init__(self, depths: int = DEPTHS, rows: int = 6, requests: int = 64, blocks: int = 8) -> None:
        """rows: most rows of a request. blocks: that wait to be learned, at first."""
        self.places, self.counts = Places(requests), PlanCounts()
        self.tables = ops.PlanTables.none(requests, 4, rows, depths, blocks)
        self.rows = DraftedRows(self.tables, self.places, self.counts)

    def plan(self, log_probs: torch.Tensor, names: Sequence[str], drafted: list[int], batch: int) -> ops.PlannedRows:
        self.rows.make_room(len(names))
        return self.rows.plan(log_probs, names, drafted, batch, 0.0)

    def learn(self, path: torch.Tensor) -> None:
        self.rows.end(path)
        self.rows.learn()

    def chances(self, log_probs: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Of all candidates, by what was learned."""
        places, tables = self.places.of(names), self.tables
        return KERNELS.plans.platt(log_probs, tables.shared, tables.own, places, ops.PlattTuning().max_logit)


class Draft:
    """Says probabilities, of which `truth` makes the chances; the best six rows of every tree are verified."""

    def __init__(self, learner: Learner, candidates: int = 1) -> None:
        self.learner, self.candidates = learner, candidates
        self.chance = np.random.default_rng(0)

    def say(self, requests: int) -> np.ndarray:
        """[requests, DEPTHS, candidates], falling in the last dimension."""
        first = self.chance.uniform(0.15, 0.95, (requests, DEPTHS, 1))
        return np.concatenate((first, np.minimum(first, (1 - first) * 0.6)), -1)[..., : self.candidates]

    def run(self, truth: Truth, steps: int, names: Sequence[str] = ("a", "b"), left_out: int = 1) -> None:
        """left_out: requests of the batch that are not drafted, before and after all others."""
        batch = len(names) + 2 * left_out
        drafted = list(range(left_out, left_out + len(names)))
        for _ in range(steps):
            said = self.say(len(names))
            log_probs = torch.from_numpy(np.log(said).astype(np.float32))
            rows = self.learner.plan(log_probs, names, drafted, batch)
            self.learner.learn(self.follow(rows, drafted, truth(said)))

    def follow(self, rows: ops.PlannedRows, drafted: list[int], chances: np.ndarray) -> torch.Tensor:
        """The paths with a target that takes each candidate with its chance, at most one of each depth."""
        taken = (self.chance.random(chances.shape[:2])[..., None] >= chances.cumsum(-1)).sum(-1)
        path = rows.row_starts[:-1, None].repeat(1, rows.length)
        for place, request in enumerate(drafted):
            first, end = rows.row_starts[request : request + 2].tolist()
            accepted = {first}
            for row in range(first + 1, end):
                depth = int(rows.depths[row])
                if first + int(rows.parents[row]) in accepted and taken[place, depth - 1] == rows.ranks[row]:
                    accepted.add(row)
                    path[request, depth] = row
        return path

    def error(self, truth: Truth, names: Sequence[str] = ("a", "b")) -> np.ndarray:
        """[DEPTHS, candidates]: mean distance of the chances from the true ones."""
        distances = []
        for _ in range(50):
            said = self.say(len(names))
            chances = self.learner.chances(torch.from_numpy(np.log(said).astype(np.float32)), names).numpy()
            distances.append(np.abs(chances - truth(said)).mean(0))
        return np.mean(distances, 0)


def line(slope: float, offset: float | np.ndarray = 0.0) -> Truth:
    return lambda said: sigmoid(slope * logit(said) + offset)


def test_at_first_the_draft_is_believed():
    """Fails where chances differ from the draft's probabilities before anything was observed."""
    assert Draft(Learner(), candidates=2).error(lambda said: said).max() < 1e-5


@pytest.mark.parametrize(
    ("slope", "offset"), [(1.0, 0.0), (0.5, 0.0), (2.0, 0.0), (1.0, -1.5), (1.0, 1.5), (0.5, -1.0)]
)
def test_hot_and_cold_drafts(slope, offset):
    """Fails where the chances of a draft that is too sure of itself, not sure enough, or always a bit too high, stay
    wrong, or where those of an honest draft do not stay right."""
    draft = Draft(Learner())
    before = draft.error(line(slope, offset)).mean()
    draft.run(line(slope, offset), 1500)
    error = draft.error(line(slope, offset))
    assert error.max() < 0.08 and error.mean() < max(0.045, 0.4 * before), (before, error)


def test_a_few_steps_help():
    """Fails where calibration takes hundreds of steps to be better than none."""
    draft = Draft(Learner())
    before = draft.error(line(1.0, -1.5)).mean()
    draft.run(line(1.0, -1.5), 15)
    assert draft.error(line(1.0, -1.5)).mean() < 0.6 * before


def test_depths_have_offsets_of_their_own():
    """Fails where rows of one depth count for another."""
    truth = line(1.0, np.array([0.5, 0.0, 0.0, -1.5])[:, None])
    draft = Draft(Learner())
    draft.run(truth, 2000)
    assert draft.error(truth).max() < 0.07, draft.error(truth)


def test_requests_have_offsets_of_their_own():
    """Fails where an easy and a hard request are not told apart, or are mixed up in a batch of which some requests have
    no draft. A new request must lie between them."""
    truth = line(1.0, np.array([1.5, 0.0, -1.5])[:, None, None])
    draft, names = Draft(Learner()), ("easy", "honest", "hard")
    draft.run(truth, 300, names)
    half = torch.full((4, DEPTHS, 1), 0.5).log()
    easy, honest, hard, new = draft.learner.chances(half, (*names, "new")).mean((1, 2)).tolist()
    assert easy == pytest.approx(float(sigmoid(np.array(1.5))), abs=0.1)
    assert hard == pytest.approx(float(sigmoid(np.array(-1.5))), abs=0.1)
    assert honest == pytest.approx(0.5, abs=0.1) and new == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("offset", [-1.5, -0.5])
def test_other_candidates_than_the_first_have_an_offset(offset):
    """Fails where the second best candidates' chances are those of the first, or move these."""
    truth = line(1.0, np.array([0.0, offset]))
    draft = Draft(Learner(), candidates=2)
    draft.run(truth, 1500)
    assert draft.error(truth).max() < 0.07, draft.error(truth)


def test_chances_fall_with_the_rank():
    """Fails where a second candidate that was right more often than the first comes before it: best-first search
    counts on falling chances."""
    draft = Draft(Learner(), candidates=2)
    draft.run(lambda said: np.stack((0.1 * said[..., 0], 0.9 * np.ones_like(said[..., 0])), -1), 300)
    said = torch.from_numpy(np.log(draft.say(16)).astype(np.float32))
    chances = draft.learner.chances(said, [str(i) for i in range(16)])
    assert (chances.diff(dim=-1) <= 0).all()
    assert chances.dtype == torch.float32 and chances.shape == said.shape


def test_certain_and_impossible_candidates():
    """Fails where a probability of 0 or 1 makes chances that are no numbers, where one that is no number has any
    chance, or where a draft that is sure is believed before it was right."""
    nothing, broken = float("-inf"), float("nan")
    said = torch.tensor([[0.0, nothing], [nothing, nothing], [-1e-9, -30.0], [-0.5, broken]])[None]
    chances = Learner().chances(said, ["a"])[0]
    assert chances[0, 0] == chances[2, 0] == pytest.approx(float(sigmoid(np.array(SUREST))))
    assert chances[:, 1].tolist() == [0.0, 0.0, pytest.approx(0.0, abs=1e-5), 0.0] and chances[1, 0] == 0
    assert ((chances >= 0) & (chances <= 1)).all()


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_that_is_always_certain(right):
    """Fails where a draft that says 1 is believed after it was wrong for long, or where parameters leave all bounds."""
    learner = Learner(depths=1, rows=2)
    log_probs = torch.zeros(1, 1, 1)
    for _ in range(2000):
        assert learner.plan(log_probs, ["a"], [0], 1).lens == [2]
        learner.learn(torch.tensor([[0, 1 if right else 0]]))
    chance = float(learner.chances(log_probs, ["a"]))
    assert chance > 0.99 if right else chance < 0.1


def test_rows_behind_a_rejected_one_say_nothing():
    """Fails where a row that was never asked for counts as wrong."""
    learner = Learner(depths=2, rows=3)
    half = torch.full((1, 2, 1), 0.5).log()
    for _ in range(50):
        assert learner.plan(half, ["a"], [0], 1).lens == [3]
        learner.learn(torch.tensor([[0, 0, 0]]))
    first, second = learner.chances(half, ["new"]).flatten().tolist()
    assert first < 0.3 and second == pytest.approx(0.5, abs=0.01)


def test_old_observations_are_forgotten():
    """Fails where a draft that was right for long must be wrong as long before that is noticed."""
    draft = Draft(Learner())
    draft.run(line(1.0, 1.0), 3000)
    draft.run(line(1.0, -1.0), 600)
    assert draft.error(line(1.0, -1.0)).max() < 0.1, draft.error(line(1.0, -1.0))


def test_offsets_of_the_latest_requests_are_kept():
    """Fails where a server that runs for long keeps a number for every request it ever had, or drops the wrong ones."""
    draft = Draft(Learner(requests=3))
    draft.run(line(1.0, -2.0), 60, ["a", "b"])
    draft.run(line(1.0), 20, ["c"])
    draft.run(line(1.0, -2.0), 20, ["a"])
    draft.run(line(1.0), 20, ["d"])
    half = torch.full((4, DEPTHS, 1), 0.5).log()
    a, b, c, unknown = draft.learner.chances(half, ["a", "b", "c", "unknown"])[:, 0, 0].tolist()
    assert b == unknown  # dropped
    assert a < c and a != unknown != c
    assert len(draft.learner.places) == 3
    assert int(draft.learner.tables.offers.kept[draft.learner.places.get("d")]) == 20  # not those of another before it


def test_steps_may_wait():
    """Fails where steps that are learned together teach anything else than one by one, where those that find no room
    are lost, or where a step drafts more requests than there is room for."""
    names = [f"request-{i}" for i in range(11)]
    at_once, one_by_one = Learner(blocks=8), Learner(blocks=64)
    for learner in (at_once, one_by_one):
        draft = Draft(learner)
        for step in range(20):
            some = names[: 11 if step == 9 else 3] if step != 5 else names[4:6]
            drafted = list(range(len(some)))
            said = draft.say(len(some))
            log_probs = torch.from_numpy(np.log(said).astype(np.float32))
            rows = learner.plan(log_probs, some, drafted, len(some))
            learner.rows.end(draft.follow(rows, drafted, said**0.5))
            if learner is one_by_one:
                learner.rows.learn()
        learner.rows.settle()
    # Chances differ, because they are learned later. All else is what was drafted and accepted.
    learned = [(*one.tables[:2], one.tables.offers.kept, one.tables.offers.depths) for one in (at_once, one_by_one)]
    assert all(map(torch.equal, *learned))
    counted = [(one.counts.blocks, one.counts.rows, one.counts.accepted) for one in (at_once, one_by_one)]
    assert counted[0] == counted[1] and counted[0][0] == 18 * 3 + 2 + 11
    assert [one.accepted for one in at_once.counts.by_depth] == [one.accepted for one in one_by_one.counts.by_depth]


def test_a_plan_whose_step_never_ended_is_forgotten():
    """Fails where a step that was broken off is learned with the next one's path."""
    learner, half = Learner(depths=2, rows=3), torch.full((1, 2, 1), 0.5).log()
    learner.plan(half, ["broken off"], [0], 1)
    learner.plan(half, ["a"], [0], 1)
    learner.learn(torch.tensor([[0, 1, 0]]))
    assert (learner.counts.blocks, learner.counts.rows, learner.counts.accepted) == (1, 2, 1)
    assert learner.places.get("broken off") is None and learner.places.get("a") is not None


def test_rows_of_each_request() -> None:
    """Fails where rows that wait are left out, or where a name that comes again begins with what was there before."""
    learner = Learner(rows=4)
    log_probs = torch.tensor([[0.5, 0.25, 0.5, 0.5], [0.9, 0.8, 0.5, 0.5]]).log()[..., None]

    def steps(count: int) -> None:
        for _ in range(count):
            rows = learner.plan(log_probs, ("a", "b"), [1, 2], 4)
            learner.rows.end(rows.row_starts[:-1, None].repeat(1, rows.length))

    def rows_of(name: str) -> list[int]:
        counted = learner.rows.take_out(name)
        assert all(0 < one.promised <= one.rows and one.accepted == 0 for one in counted)
        return [one.rows for one in counted]

    steps(2)
    assert rows_of("unknown") == []
    assert rows_of("a") == [2, 2, 2] and rows_of("a") == []
    steps(1)
    assert rows_of("a") == [1, 1, 1] and rows_of("b") == [3, 3, 3]
