"""Made-up machines on which policies of rows are compared, over made-up or recorded drafts, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sglang_dflash.core.policy import Drafting, Policy, Step

T = TypeVar("T")
K = 8
ANSWER = 100  # tokens of a request


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: of a draft over so many rows, and of all else over so many verified rows.

    Fields:
        free_rows: rows that a forward takes for nothing, because reading the weights takes as long.
        step_rows: a forward takes rows in groups of so many.
        noise: each time is up to half of this share above or below.
    """

    row_s: float
    fixed_s: float
    draft_s: float
    draft_row_s: float
    free_rows: int = 0
    step_rows: int = 1
    noise: float = 0.15

    def rest_seconds(self, rows: int) -> float:
        grouped = -(-rows // self.step_rows) * self.step_rows
        return self.fixed_s + self.row_s * max(0, grouped - self.free_rows)

    def draft_seconds(self, rows: int) -> float:
        return self.draft_s + self.draft_row_s * rows if rows else 0.0


CPU = Machine(row_s=4e-3, fixed_s=22e-3, draft_s=6e-3, draft_row_s=0.5e-3, free_rows=4)
"""SmolLM2-135M in float32 on two cores, about."""
H200 = Machine(row_s=23e-6, fixed_s=5.1e-3, draft_s=0.8e-3, draft_row_s=3.6e-6, free_rows=40)
"""Qwen3-8B's shape with fa3 (docs/gpu.md), about."""


class Text(NamedTuple):
    """A recorded answer of L tokens: of the block behind each, what the draft says and whether its rows are right.

    Fields:
        log_probs: [L, K - 1] float; of the draft's best candidates.
        right: [L, K - 1] bool; the candidate is the target's token there.
    """

    log_probs: np.ndarray
    right: np.ndarray


def read_texts(path: Path) -> list[Text]:
    """The answers of a file of `record`."""
    with np.load(path) as file:
        ends = file["lens"].cumsum()[:-1]
        log_probs = np.split(np.log(np.maximum(file["chances"][:, :, 0], 1e-9)), ends)
        right = np.split(file["taken"] == 0, ends)
    return [Text(*one) for one in zip(log_probs, right, strict=True)]


def right_as_often(texts: Iterable[Text], tau: float, seed: int = 0) -> list[Text]:
    """The same answers with drafts that commit `tau` tokens in the mean, and say how likely each is."""
    from tools.measure.replay import share_right

    made, random = [], np.random.default_rng(seed)
    share = share_right(tau, K)
    for text in texts:
        chances = random.beta(6 * share + 0.3, 6 * (1 - share) + 0.3, size=text.right.shape).clip(1e-6, 1 - 1e-6)
        made.append(Text(np.log(chances), random.random(chances.shape) < chances))
    return made


@dataclass(frozen=True)
class Taken:
    """A step that was taken: what was drafted and verified, and what came of it, for all requests."""

    drafting: Drafting
    lens: np.ndarray
    commit_lens: np.ndarray
    seconds: float


class World:
    """Serves requests; the next block of each is given by `block`."""

    def __init__(self, machine: Machine, heat: float = 1.0, seed: int = 0) -> None:
        """heat: factor of the log-odds that the draft states; above 1 it is too sure of itself."""
        self.machine, self.heat = machine, heat
        self._text, self._noise = np.random.default_rng(seed), np.random.default_rng(seed)
        self.served = 0

    def blocks(self, skills: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities that the draft states, and whether each row is right, given those before: [B, K-1] each.

        skills: about the mean chance of a row, of each request.
        """
        shape, skill = (len(skills), K - 1), np.array(skills)[:, None]
        chances = self._text.beta(4 * skill + 0.2, 4 * (1 - skill) + 0.2, size=shape).clip(1e-6, 1 - 1e-6)
        said = chances**self.heat / (chances**self.heat + (1 - chances) ** self.heat)
        return np.log(said), self._text.random(shape) < chances

    def step(self, policy: Policy, names: Sequence[str], log_probs: np.ndarray, right: np.ndarray) -> Taken:
        """One step over blocks as `blocks` gives them. The policy learns from it at once."""
        drafting = policy.draft(names)
        lens = np.ones(len(names), dtype=int)
        draft_s = self.machine.draft_seconds(drafting.width * len(drafting.requests) if drafting.width > 1 else 0)
        draft_s *= self._jitter()
        drafted = [names[place] for place in drafting.requests]
        survival = np.empty((0, 0))
        if drafted:
            own = log_probs[drafting.requests, : drafting.width - 1]
            odds = own - np.log1p(-np.exp(np.minimum(own, -1e-6))) + policy.offsets(drafted, drafting.width - 1)
            survival = (1 / (1 + np.exp(-odds))).cumprod(1)
            lens[drafting.requests] = policy.verify(survival)
        accepted = np.minimum(right.cumprod(1).sum(1), lens - 1)
        rest_s = self.machine.rest_seconds(int(lens.sum())) * self._jitter()
        if drafted:
            policy.see_draft(drafting.width * len(drafted), draft_s)
            of_drafted = lens[drafting.requests], 1 + accepted[drafting.requests]
            policy.learn(Step(drafted, survival, *of_drafted))
        policy.see_rest(int(lens.sum()), rest_s)
        return Taken(drafting, lens, 1 + accepted, draft_s + rest_s)

    def _jitter(self) -> float:
        return 1 + self.machine.noise * (self._noise.random() - 0.5)

    def run(self, policy: Policy, skills: Mapping[str, float], steps: int) -> list[Taken]:
        return [self.step(policy, list(skills), *self.blocks(list(skills.values()))) for _ in range(steps)]

    def serve(self, policy: Policy, skills: Iterable[float], at_once: int) -> list[Taken]:
        """The steps of requests of `ANSWER` tokens, one for each skill; whenever one ends, the next begins."""
        return list(self._serve(policy, skills, at_once, lambda skill: ANSWER, lambda skills, _: self.blocks(skills)))

    def replay(self, policy: Policy, texts: Iterable[Text], at_once: int) -> list[Taken]:
        """The same of recorded answers."""

        def blocks(running: list[Text], at: list[int]) -> tuple[np.ndarray, np.ndarray]:
            places = [(text, min(place, len(text.right) - 1)) for text, place in zip(running, at, strict=True)]
            return np.stack([text.log_probs[at] for text, at in places]), np.stack(
                [text.right[at] for text, at in places]
            )

        return list(self._serve(policy, texts, at_once, lambda text: len(text.right), blocks))

    def _serve(
        self,
        policy: Policy,
        requests: Iterable[T],
        at_once: int,
        length: Callable[[T], int],
        blocks: Callable[[list[T], list[int]], tuple[np.ndarray, np.ndarray]],
    ) -> Iterator[Taken]:
        waiting, running = iter(requests), dict[str, tuple[T, int]]()
        while True:
            for one in islice(waiting, at_once - len(running)):
                self.served += 1
                running[f"request {self.served}"] = one, 0
            if not running:
                return
            of_step = blocks([one for one, _ in running.values()], [at for _, at in running.values()])
            taken = self.step(policy, list(running), *of_step)
            yield taken
            for (name, (one, at)), count in zip(list(running.items()), taken.commit_lens, strict=True):
                running[name] = one, at + int(count)
                if at + count >= length(one):
                    del running[name]


def rate(steps: Iterable[Taken]) -> float:
    """Tokens per second."""
    taken = list(steps)
    return float(sum(step.commit_lens.sum() for step in taken) / sum(step.seconds for step in taken))
