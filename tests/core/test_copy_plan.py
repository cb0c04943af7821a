"""The planner with copies, over made-up texts, a made-up draft and a made-up machine."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from sglang_dflash.core.copying import Copying, Text
from sglang_dflash.core.plan import Planner
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.core.policy import Drafting

K, VOCAB = 8, 5000
STEP_S, ROW_S, DRAFT_S, DRAFT_ROW_S, GAP_S = 4e-3, 2e-4, 1e-3, 5e-5, 1e-3
WARM_UP = 12  # steps without copies


@dataclass
class Story:
    """A request: its prompt, the target's answer to it, and the draft's chance for each token of that."""

    prompt: list[int]
    answer: list[int]
    skill: float = 0.5
    shown: array = field(default_factory=lambda: array("q"))

    def ahead(self, depth: int) -> int:
        return self.answer[len(self.shown) + depth - 1]


class World:
    """Runs steps of a planner. What it commits is the target's own text, whatever is proposed."""

    def __init__(self, stories: dict[str, Story], copying: Copying | None, seed: int = 0) -> None:
        self.stories, self.chance, self.now = stories, random.Random(seed), 100.0
        self.planner = Planner(K, clock=lambda: self.now, copying=copying)
        self.draftings: list[Drafting] = []
        self.tokens: list[int] = []  # of each step

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        names, planner = list(self.stories), self.planner
        if planner.copying is not None:
            planner.copying.see({name: Text(story.prompt, story.shown) for name, story in self.stories.items()})
        drafting = planner.begin(names)
        self.draftings.append(drafting)
        said = ids = None
        if drafting.width > 1:
            self.now += DRAFT_S + DRAFT_ROW_S * drafting.width * len(drafting.requests)
            ids = torch.tensor([self._draft(names[i], drafting.width) for i in drafting.requests])[..., None]
            skills = torch.tensor([self.stories[names[i]].skill for i in drafting.requests])
            said = skills.log()[:, None, None].expand(ids.shape).contiguous()
        rows = planner.choose(said)
        self.now += STEP_S + ROW_S * len(rows.parents)
        everyone, candidates = drafting.candidates(ids)
        path, lens = [], []
        for request, (first, end) in enumerate(pairwise(rows.row_starts.tolist())):
            assert request in everyone or end == first + 1
            own = [first]
            for row in range(first + 1, end):  # all are chains
                depth = int(rows.depths[row])
                assert (depth, int(rows.parents[row]), int(rows.ranks[row])) == (row - first, row - first - 1, 0)
                right = self.stories[names[request]].ahead(depth)
                if candidates[everyone.index(request), depth - 1, 0] != right:
                    break
                own.append(row)
            path.append(own + [first] * (rows.length - len(own)))
            lens.append(len(own))
        planner.end(torch.tensor(path), torch.tensor(lens, dtype=torch.int32))
        for name, count in zip(names, lens, strict=True):
            story = self.stories[name]
            story.shown.extend(story.answer[len(story.shown) : len(story.shown) + count])
        self.tokens.append(sum(lens))
        self.now += GAP_S

    def _draft(self, name: str, width: int) -> list[int]:
        story = self.stories[name]
        return [story.ahead(d) if self.chance.random() < story.skill else 0 for d in range(1, width)]

    def since(self, before: PlanCounts) -> PlanCounts:
        return self.planner.counts.since(before)


def tokens_of(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1, VOCAB) for _ in range(count)]


def edit(seed: int, length: int = 3000, kept: int = 120) -> Story:
    """The answer is the prompt, except for a few new tokens after each `kept` ones."""
    chance = random.Random(seed)
    prompt = tokens_of(chance, length)
    answer: list[int] = []
    for first in range(0, length, kept):
        answer += [*prompt[first : first + kept], *tokens_of(chance, 3)]
    return Story([*prompt, *prompt[:4]], answer[4:])


def essay(seed: int, skill: float = 0.5) -> Story:
    """Nothing comes twice."""
    chance = random.Random(seed)
    return Story(tokens_of(chance, 500), tokens_of(chance, 4000), skill)


def tau(world: World, requests: int = 1, first: int = WARM_UP) -> float:
    return sum(world.tokens[first:]) / requests / len(world.tokens[first:])


def test_edits_take_fewer_steps():
    """Fails where a text that repeats its prompt is hardly faster than its draft alone."""
    taus = []
    for copying in (Copying(K - 1, VOCAB), None):
        world = World({"a": edit(1)}, copying)
        world.run(250)
        taus.append(tau(world))
    assert taus[0] > 2 * taus[1] and taus[0] > 0.75 * K, taus


def test_the_promise_is_kept():
    """Fails where the chances of copies have nothing to do with what is accepted."""
    world = World({"a": edit(1), "b": edit(2, kept=25)}, Copying(K - 1, VOCAB))
    world.run(60)
    before = world.planner.counts.copy()
    world.run(140)
    since = world.since(before)
    assert since.copies > 150 and since.copied_rows > since.copied_accepted > 700
    assert 0.85 < since.copied_promised / since.copied_accepted < 1.15, since


def test_a_copied_request_is_not_drafted():
    """Fails where the draft runs for requests that copy, or where it runs for nobody else's sake."""
    world = World({"edit": edit(1), "essay": essay(2, 0.8)}, Copying(K - 1, VOCAB))
    world.run(250)
    kinds = {"mixed": 0, "edit alone": 0}
    for drafting in world.draftings[WARM_UP:]:
        copied = [request for request, _ in drafting.copies]
        assert not set(copied) & set(drafting.requests)
        kinds["mixed"] += copied == [0] and drafting.requests == [1]
    assert kinds["mixed"] > 120, kinds
    alone = World({"edit": edit(1)}, Copying(K - 1, VOCAB))
    alone.run(250)
    idle = [drafting for drafting in alone.draftings[WARM_UP:] if drafting.copies]
    assert len(idle) > 150 and all(drafting.width == 1 and not drafting.requests for drafting in idle)


def test_drafted_copied_and_plain_in_one_step():
    """Fails where one step cannot have a block, a copy and a lone anchor."""
    stories = {"essay": essay(1, 0.9), "edit": edit(2), "verse": essay(3, 0.02)}
    world = World(stories, Copying(K - 1, VOCAB))
    world.run(250)
    shapes = [(drafting.requests, [request for request, _ in drafting.copies]) for drafting in world.draftings]
    assert shapes.count(([0], [1])) > 60, shapes
    counts = world.planner.counts
    assert counts.accepted + counts.copied_accepted <= sum(world.tokens) - 3 * len(world.tokens)


def test_text_without_repeats_is_planned_as_ever():
    """Fails where copies cost anything in a text that has none."""
    draftings = []
    for copying in (Copying(K - 1, VOCAB), None):
        world = World({"a": essay(1), "b": essay(2, 0.8)}, copying)
        world.run(200)
        draftings.append(world.draftings)
        assert world.planner.counts.copies == 0
    assert draftings[0] == draftings[1]
