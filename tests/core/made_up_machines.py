"""Made-up machines and drafts, which set the seconds and the chances of every step that a planner plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from sglang_dflash.core.plan import Planner, PlanTuning
from sglang_dflash.core.policy import Drafting, Policy
from sglang_dflash.ops import PlannedRows
from sglang_dflash.ops.planning import ROW_GROUP

K = 8
ANSWER = 64  # tokens of a request that ends
PROMPT = 50  # rows of a prompt
START = 20  # steps that a server may take to learn; the rates below leave them out


@dataclass(frozen=True)
class Machine:
    """What a step takes: fixed times, and for each row; the first `free` rows of the target cost nothing.

    Fields:
        gap_s: from one step to the next, within and between turns.
        prefill_s: of a prefill, whatever it computes. The rows of prompts take no time.
        row_share: share of `row_s` that a row adds to its group of `ROW_GROUP` rows; the group's first row adds the
            rest of the whole group. 1: all rows add the same.
        noise: share by which the time of a step varies. The rates below are those without noise.
    """

    row_s: float = 2e-4
    fixed_s: float = 4e-3
    draft_s: float = 1e-3
    draft_row_s: float = 5e-5
    free: int = 0
    noise: float = 0.0
    row_share: float = 1.0
    gap_s: float = 1e-3
    prefill_s: float = 0.0

    def draft_seconds(self, rows: int) -> float:
        return self.draft_s + self.draft_row_s * rows if rows else 0.0

    def rest_seconds(self, rows: int) -> float:
        dear = max(0, rows - self.free)
        grouped = -(-dear // ROW_GROUP) * ROW_GROUP
        return self.fixed_s + self.row_s * (self.row_share * dear + (1 - self.row_share) * grouped)


@dataclass(frozen=True)
class Step:
    """What a step would bring on average, given the true chances: tokens and seconds, planned and at each width."""

    drafting: Drafting
    planned: PlannedRows
    commit_lens: list[int]
    tokens: float
    seconds: float
    fixed_tokens: list[float]  # with whole chains of width 1..K
    fixed_seconds: list[float]

    @property
    def shape(self) -> tuple:
        return self.drafting, self.planned.parents.tolist(), self.planned.ranks.tolist(), self.planned.lens


class World:
    """A machine, a draft and a target.

    The target's tokens and the draft's chances do not depend on the plan: all plans of a seed meet the same text.
    """

    def __init__(
        self, machine: Machine, heat: float = 1.0, candidates: int = 4, block_size: int = K, seed: int = 0
    ) -> None:
        """heat: factor of the logits of the chances that the draft states; above 1 it is too sure of itself."""
        self.machine, self.heat, self.candidates, self.block_size = machine, heat, candidates, block_size
        self.text, self.noise = np.random.default_rng(seed), np.random.default_rng(seed)
        self.now = 100.0
        self.served = 0
        self.before_draft_s = 0.0  # of other work between the decision and the draft
        self.turn_s = 0.0  # see `TurnGaps`; the rates of a `Step` know no turns
        self.within_s = self.between_s = machine.gap_s
        self.goes_on = False  # whether the next step is of the turn of the one before
        self._turn_begun_s, self._taken = self.now, 0
        self.spoil: Callable[[np.ndarray], np.ndarray] = lambda log_probs: log_probs  # before the planner sees them

    def planner(self, max_rows: int | None = None, tuning: PlanTuning | None = None) -> Planner:
        return Planner(self.block_size, max_rows, clock=lambda: self.now, tuning=tuning)

    def run(self, planner: Policy, skills: Mapping[str, float], steps: int) -> list[Step]:
        return [self.step(planner, skills) for _ in range(steps)]

    def serve(self, planner: Planner, skills: Iterable[float], at_once: int) -> list[Step]:
        """The steps of requests, one for each skill, of `ANSWER` tokens each; whenever one ends, the next begins."""
        waiting, running, steps = iter(skills), {}, list[Step]()
        while True:
            for skill in islice(waiting, at_once - len(running)):
                self.served += 1
                running[f"request-{self.served}"] = (skill, ANSWER)
                planner.interrupt(PROMPT)
            if not running:
                return steps
            steps.append(self.step(planner, {name: skill for name, (skill, _) in running.items()}))
            for (name, (skill, left)), count in zip(list(running.items()), steps[-1].commit_lens, strict=True):
                running[name] = (skill, left - count)
                if left <= count:
                    del running[name]

    def step(self, planner: Policy, skills: Mapping[str, float], disturbed: float = 1.0) -> Step:
        """skills: the draft's skill with each request of the batch, about the mean chance of its first candidates."""
        chances, tokens = self._text(skills)
        machine, batch, width = self.machine, len(skills), self.block_size
        drafting = planner.begin(list(skills), self.turn_s, self.goes_on)
        log_probs = None
        if drafting.width > 1:
            said = chances[drafting.requests, : drafting.width - 1]
            said = said**self.heat / (said**self.heat + (1 - said) ** self.heat)
            log_probs = torch.from_numpy(self.spoil(np.log(said).astype(np.float32)))
        if self.before_draft_s and drafting.width > 1:
            self.now += self.before_draft_s
            planner.draft_begins()
        draft_s = machine.draft_seconds(drafting.width * len(drafting.requests) if drafting.width > 1 else 0)
        self.now += draft_s * self._noise() * disturbed
        planned = planner.choose(log_probs)
        rest_s = machine.rest_seconds(len(planned.parents))
        self.now += rest_s * self._noise() * disturbed
        expected, path, commit_lens = follow(planned, chances, tokens)
        planner.end(path, commit_lens)
        self.leave()
        reaches = chances[:, :, 0].cumprod(1).sum(0)
        return Step(
            drafting,
            planned,
            commit_lens.tolist(),
            expected,
            draft_s + rest_s + machine.gap_s,
            [batch + float(reaches[: rows - 1].sum()) for rows in range(1, width + 1)],
            [
                machine.draft_seconds(batch * rows if rows > 1 else 0)
                + machine.rest_seconds(batch * rows)
                + machine.gap_s
                for rows in range(1, width + 1)
            ],
        )

    def leave(self) -> None:
        """A step has ended. The gap to the next one passes, within a turn or not, as `host.turns` decides."""
        self._taken += 1
        self.goes_on = (self.now - self._turn_begun_s) * (1 + 1 / self._taken) <= self.turn_s
        self.now += self.within_s if self.goes_on else self.between_s
        if not self.goes_on:
            self._turn_begun_s, self._taken = self.now, 0

    def _text(self, of: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """True chances [B, K-1, k] of the candidates, falling in k, and the target's choice [B, K-1] among them."""
        shape, skills = (len(of), self.block_size - 1), np.array(list(of.values()))
        first = self.text.beta(4 * skills[:, None] + 0.2, 4 * (1 - skills[:, None]) + 0.2, size=shape)[..., None]
        first = first.clip(1e-6, 1 - 1e-6)
        others = np.minimum(first, (1 - first) * np.array([0.5, 0.25, 0.125, 0.06])[: self.candidates - 1])
        chances = np.concatenate((first, others), -1)
        return chances, (self.text.random(shape)[..., None] >= chances.cumsum(-1)).sum(-1)

    def _noise(self) -> float:
        return 1 + self.machine.noise * (self.noise.random() - 0.5)


def follow(planned: PlannedRows, chances: np.ndarray, tokens: np.ndarray) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Expected tokens of the plan, and path and commit_lens with the target's `tokens`."""
    parents, depths, ranks = (t.tolist() for t in (planned.parents, planned.depths, planned.ranks))
    starts, of_depth, taken = planned.row_starts.tolist(), chances.tolist(), tokens.tolist()
    path = [[first] * planned.length for first in starts[:-1]]
    lens = [1] * len(path)
    reaches, accepted = [0.0] * len(parents), [False] * len(parents)
    for row, request in enumerate(planned.requests.tolist()):
        if parents[row] < 0:
            reaches[row], accepted[row] = 1.0, True
            continue
        parent, depth, rank = starts[request] + parents[row], depths[row], ranks[row]
        reaches[row] = reaches[parent] * of_depth[request][depth - 1][rank]
        accepted[row] = accepted[parent] and taken[request][depth - 1] == rank
        if accepted[row]:
            path[request][depth], lens[request] = row, depth + 1
    return sum(reaches), torch.tensor(path), torch.tensor(lens, dtype=torch.int32)


def rate(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def fixed_rates(steps: Sequence[Step]) -> list[float]:
    """Tokens per second at each fixed width."""
    tokens, seconds = (np.sum([getattr(s, name) for s in steps], 0) for name in ("fixed_tokens", "fixed_seconds"))
    return (tokens / seconds).tolist()


def mix(easy: int, hard: int = 0, middling: int = 0) -> dict[str, float]:
    skills = ("easy", easy, 0.9), ("hard", hard, 0.15), ("middling", middling, 0.5)
    return {f"{name}-{i}": skill for name, count, skill in skills for i in range(count)}


MIXES = {
    "easy": lambda requests: mix(requests),
    "hard": lambda requests: mix(0, requests),
    "middling": lambda requests: mix(0, 0, requests),
    "half": lambda requests: mix(requests // 2, requests // 2),
}
MACHINES = {
    "cheap rows": Machine(row_s=5e-5),
    "middling rows": Machine(),
    "dear rows": Machine(row_s=1e-3),
    "free rows": Machine(row_s=3e-4, free=12),
    "dear draft": Machine(draft_s=8e-3),
    "noise": Machine(noise=0.4),
}
