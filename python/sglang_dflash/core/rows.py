"""Chooses the rows of each decode step: as many as bring the most tokens per second, over all its requests together.

One rule, asked twice. Sort the chances of all rows, sum them up, divide by the time of so many rows: the best count
wins (SGLang's `compute_verify_token_budget`). Before the draft runs, the chances are those that the requests' recent
blocks had: they say whom to draft, and how wide. After it, they are the block's own: they say which rows to verify.

A decision depends on the prefix alone: on earlier tokens, on times, and on what the draft computed from them. It never
depends on a token that the step itself draws, so every row keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_dflash.core.calibration import KEPT_OF_REQUEST, PRIOR, Calibration
from sglang_dflash.core.policy import Drafting, Step, StepSeconds
from sglang_dflash.core.step_times import StepTimes, eighths

MEAN_SHARE = 0.125
"""Least weight of a block in its request's mean: of the last eight blocks or so. A second mean of fewer gained nothing
on recorded texts; one of the last ten finds too late that a text gets easy."""
JUDGED, FEWEST_JUDGED = 64, 8
"""Requests, the latest, by which newcomers are judged; with fewer, all newcomers are drafted."""
REMEMBERED = 1024
"""Requests of which is kept what their blocks were worth; one that was retracted comes back."""
STANDS = 8
"""Steps for which a decision to draft nobody stands, while requests and blocks are the same: nothing but times changes.
To decide takes 0.4 ms with 16 requests, 1 % of a plain step of SmolLM2-135M on two cores."""
NOBODY = -1
"""Instead of a request's place."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of `RowPolicy`.

    Fields:
        dead_band: share. Fewer rows than whole blocks, and drafting after a step that drafted nobody, must be so much
            faster: every published prototype without such a band loses 4 to 8 % at few requests.
        newcomer_blocks: steps in which a new request is drafted, because what it brings must be known while it matters.
            Two of some hundred steps.
        newcomer_share: share of the requests known so far. If drafting paid for fewer of them, no newcomer is drafted:
            at 8 requests on two cores, where it paid for none, newcomers took 4 % of the time.
        probe_share: share of the time that goes into blocks of requests that are not drafted otherwise. Two servers of
            one command differ by 3 %.
        hope: share. A width that was not timed yet is tried if lines between known times promise so much of the best
            speed. Forwards take rows in groups, so a width may be much faster than a line says.
    """

    dead_band: float = 0.04
    newcomer_blocks: int = 2
    newcomer_share: float = 0.1
    probe_share: float = 0.02
    hope: float = 0.85


@dataclass(slots=True)
class _Request:
    """What is known of a request; `mean`, [K - 1], is that of the survival of its blocks."""

    mean: np.ndarray
    blocks: int = 0
    drafted_at: int = 0
    offset: float = 0.0
    weight: float = field(default=PRIOR)


def falling(values: np.ndarray) -> np.ndarray:
    """All values in one row, the largest first."""
    return np.sort(values, axis=None)[::-1]


class RowPolicy:
    """Rows where they pay."""

    weighs = True

    def __init__(
        self,
        block_size: int,
        widths: Sequence[int] | None = None,
        together: bool = False,
        trims: bool = True,
        size_of: Callable[[int], int] = eighths,
        settings: RowSettings | None = None,
    ) -> None:
        """
        Args:
            block_size: K, at least 2.
            widths: of a drafted step, falling, each at least 2; None: K, K / 2 and K / 4.
            together: all requests of a step are drafted, or none, as by a graph of fixed size.
            trims: whether the target's forward can take different numbers of rows; if not, all rows are verified.
            size_of: see `StepTimes`.
        """
        halves = [max(2, block_size // part) for part in (1, 2, 4)]
        self._block_size, self.widths = block_size, list(widths or dict.fromkeys(halves))
        self._together, self._trims, self._settings = together, trims, settings or RowSettings()
        self._draft_times, self._rest_times = StepTimes(), StepTimes(size_of)
        self._calibration = Calibration(block_size - 1)
        self._requests: dict[str, _Request] = {}
        self._newcomer, self._blocks = np.full(block_size - 1, 0.5), 0.0  # what is expected of a new request
        self._step, self._probe_s = 0, 0.0
        self._drafts: bool | None = None  # whether the latest decision drafted anybody; None: there was none
        self._whole = False  # whether this step verifies all rows of its blocks
        self._batch, self._probed, self._drafting, self._rate = 0, NOBODY, Drafting(1, [], 0), 0.0
        self._copies = np.empty((0, block_size - 1))
        self._decided, self._decided_at = Drafting(1, [], 0), 0
        self._decided_for: list[str] = []  # empty: the decision stands for nobody
        self._free: list[int] = []  # places of the requests whose copies do not promise more than their blocks

    # Before the draft runs.

    def draft(self, names: Sequence[str], copies: np.ndarray | None = None) -> Drafting:
        """copies: see `CopyingPolicy`. A request whose copy promises more than its recent blocks did is not drafted."""
        self._step += 1
        self._batch, self._probed = len(names), NOBODY
        self._copies = np.zeros((len(names), self._block_size - 1)) if copies is None else copies
        requests = [self._request(name) for name in names]
        while len(self._requests) > max(REMEMBERED, len(names)):
            del self._requests[next(iter(self._requests))]
        promised = self._copies.sum(1).tolist()
        self._free = [place for place, gain in enumerate(promised) if not gain or gain <= requests[place].mean.sum()]
        sizes = {self._rest_times.size_of(rows) for rows in (self._batch, self._batch * self._block_size)}
        if not len(self._draft_times) or len(self._rest_times) < len(sizes):  # times tell nothing yet
            self._whole, self._copies = True, np.zeros_like(self._copies)
            everybody = self._of(self._block_size, list(range(len(names))))
            self._drafting = everybody if self._step % 2 == 1 else self._of(1, [])
            return self._drafting
        if not self._free:
            self._whole, self._drafting = False, self._of(1, [])
            return self._drafting
        if not self._stands(names):
            self._decided = self._with_newcomers(self._decide(requests), requests)
            self._decided_for, self._decided_at = list(names), self._step
        self._drafting = self._with_probe(self._decided, requests)
        for place in self._drafting.requests:
            requests[place].drafted_at = self._step
        return self._drafting

    def _stands(self, names: Sequence[str]) -> bool:
        """Whether the latest decision, to draft nobody, is still good."""
        recent = self._step - self._decided_at < STANDS and self._decided.width == 1
        return recent and self._decided_for == names and not self._copies.any()

    def _request(self, name: str) -> _Request:
        known = self._requests.pop(name, None) or _Request(self._newcomer.copy(), drafted_at=self._step)
        self._requests[name] = known  # the latest last
        return known

    def _of(self, width: int, requests: list[int]) -> Drafting:
        return Drafting(width, requests, self._batch + len(requests) * (width - 1))

    def _decide(self, requests: list[_Request]) -> Drafting:
        """Whom to draft, by what their recent blocks had."""
        batch, band = self._batch, 1 + self._settings.dead_band
        survival = np.stack([one.mean for one in requests])
        whole, plain = self._of(self._block_size, self._free), self._of(1, [])
        whole_rate = float(self._rates(survival[self._free], batch, whole)[-1])
        plain_rate = float(self._rates(survival[:0], batch, plain).max())
        best, rate = (whole, whole_rate) if whole_rate > plain_rate else (plain, plain_rate)
        for width in self.widths * 2:  # the second time at the price of the best so far
            chosen = self._free
            if not self._together:
                worth = self._worth_drafting(survival[self._free, : width - 1], width, rate)
                chosen = [self._free[place] for place in worth]
            drafting = self._of(width, chosen)
            rates = self._rates(survival[chosen, : width - 1], batch, drafting)
            rows = int(rates.argmax()) if self._trims else len(rates) - 1
            if chosen and rates[rows] > rate:
                best, rate = drafting._replace(rows=batch + rows), float(rates[rows])
        if self._drafts is not False and whole_rate * band >= rate:
            best = whole
        elif self._drafts is False and rate < band * plain_rate:
            best = plain
        self._rate = rate
        untimed = self._untimed(survival, rate)
        self._whole, self._drafts = untimed is not None or best is whole, best.width > 1
        return best if untimed is None else untimed

    def _untimed(self, survival: np.ndarray, best_rate: float) -> Drafting | None:
        """The narrowest width that was not timed with so many requests, and might be the fastest."""
        for width in reversed(self.widths):
            drafting = self._of(width, self._free)
            if len(self._free) == self._batch and not self._rest_times.knows(drafting.rows):  # else copies add rows
                rates = self._rates(survival[self._free, : width - 1], self._batch, drafting)
                if rates[-1] > self._settings.hope * best_rate:
                    return drafting
        return None

    def _worth_drafting(self, survival: np.ndarray, width: int, rate: float) -> list[int]:
        """Which blocks bring more tokens than their time is worth at this rate. survival: [n, width - 1]."""
        batch, most = self._batch, self._batch * width
        rest, draft = self._rest_times.table(most), self._draft_times.table(most)
        row_s = float(rest[most] - rest[batch]) / (most - batch)
        block_s = float(draft[most] - draft[width]) / (batch - 1) if batch > 1 else 0.0
        gains = (survival - rate * row_s).clip(0.0).sum(1).tolist()
        return [place for place, gain in enumerate(gains) if gain > rate * block_s]

    def _rates(self, chances: np.ndarray, rows: int, drafting: Drafting) -> np.ndarray:
        """The step's tokens per second with the likeliest 0..N of N rows beside `rows` others, which are not among the
        chances. [N + 1]; N counts copied rows, too."""
        tokens = self._batch + np.concatenate(([0.0], self._with_copies(chances, drafting).cumsum()))
        rest = self._rest_times.table(rows + len(tokens))[rows : rows + len(tokens)]
        rates: np.ndarray = tokens / (rest + self._draft_seconds(drafting))
        return rates

    def _with_copies(self, chances: np.ndarray, drafting: Drafting) -> np.ndarray:
        """These and those of the copies of the requests that are not drafted, the largest first."""
        if not self._copies.any():
            return falling(chances)
        copied = np.delete(self._copies, drafting.requests, axis=0)
        return falling(np.concatenate((chances.ravel(), copied[copied > 0])))

    def _draft_seconds(self, drafting: Drafting) -> float:
        rows = drafting.width * len(drafting.requests)
        return float(self._draft_times.table(rows)[rows]) if rows else 0.0

    def _seconds(self, drafting: Drafting) -> float:
        """Of a step."""
        return float(self._rest_times.table(drafting.rows)[drafting.rows]) + self._draft_seconds(drafting)

    def _with_newcomers(self, decided: Drafting, requests: list[_Request]) -> Drafting:
        few = self._settings.newcomer_blocks
        new = [place for place in self._free if requests[place].blocks < few and place not in decided.requests]
        width = decided.width if decided.width > 1 else self._block_size
        if not new or self._together or not self._are_newcomers_worth_it(width):
            return decided
        return Drafting(width, sorted([*decided.requests, *new]), decided.rows + len(new))

    def _with_probe(self, drafting: Drafting, requests: list[_Request]) -> Drafting:
        """Now and then with one more block, where nothing else would show what it brings; or with whole blocks for
        everybody, if all are drafted together."""
        step_s, probed = self._seconds(drafting), NOBODY
        self._probe_s += self._settings.probe_share * step_s
        if self._together:
            others = list(range(self._batch)) if drafting.width < self.widths[0] else []
            probing = self._of(self.widths[0], others)
            if self._trims:
                probing = probing._replace(rows=drafting.rows)
        else:
            others = [place for place in self._free if place not in drafting.requests]
            probed = min(others, key=lambda place: requests[place].drafted_at, default=NOBODY)
            width = drafting.width if drafting.width > 1 else self._block_size
            probing = Drafting(width, sorted([*drafting.requests, probed]), drafting.rows + width - 1)
        if not others:
            self._probe_s = 0.0
            return drafting
        cost_s = self._seconds(probing) - step_s
        if cost_s > self._probe_s:
            return drafting
        self._probe_s -= cost_s
        self._probed = probed
        return probing

    def _are_newcomers_worth_it(self, width: int) -> bool:
        """Whether drafting now would pay for enough of the requests that were drafted before."""
        known = [one.mean for one in self._requests.values() if one.blocks >= self._settings.newcomer_blocks][-JUDGED:]
        if len(known) < FEWEST_JUDGED:
            return True
        worth = self._worth_drafting(np.stack(known)[:, : width - 1], width, self._rate)
        return len(worth) >= self._settings.newcomer_share * len(known)

    # Behind it.

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return self._calibration.offsets(np.array([self._requests[name].offset for name in names]), depths)

    def verify(self, survival: np.ndarray) -> np.ndarray:
        return self.verify_all(survival)[self._drafting.requests]

    def verify_all(self, survival: np.ndarray) -> np.ndarray:
        drafted, width = self._drafting.requests, self._drafting.width
        if self._whole or not self._trims:
            lens: np.ndarray = 1 + (self._copies > 0).sum(1)
            lens[drafted] = width
            return lens
        probed = np.array(drafted) == self._probed
        others = survival[~probed]
        count = int(self._rates(others, self._batch + int(probed.sum()) * (width - 1), self._drafting).argmax())
        least = self._with_copies(others, self._drafting)[count - 1] if count else 2.0
        lens = 1 + (self._copies >= least).sum(1)
        lens[drafted] = np.where(probed, width, 1 + (survival >= least).sum(1))
        return lens

    def learn(self, step: Step) -> None:
        self._decided_for = []
        before = np.concatenate((np.ones((len(step.lens), 1)), step.survival[:, :-1]), 1)
        chances = np.divide(step.survival, before, out=np.zeros_like(step.survival), where=before > 0)
        depth = np.arange(1, chances.shape[1] + 1)
        seen = (depth < step.lens[:, None]) & (depth <= step.commit_lens[:, None])
        right = depth < step.commit_lens[:, None]
        learned = zip(step.names, step.survival, *self._calibration.learn(chances, seen, right), strict=True)
        for name, survival, error, weight in learned:
            one = self._requests.get(name)
            if one is None:
                continue
            mean, share = one.mean[: len(depth)], max(MEAN_SHARE, 1 / (one.blocks + 2))
            mean += share * (survival - mean)
            one.blocks += 1
            one.weight = max(one.weight * KEPT_OF_REQUEST + float(weight), PRIOR)
            one.offset += float(error) / one.weight
        self._blocks = self._blocks * 0.99 + len(step.names)
        newcomer = self._newcomer[: len(depth)]
        newcomer += len(step.names) / self._blocks * (step.survival.mean(0) - newcomer)

    def see_draft(self, rows: int, seconds: float) -> None:
        self._draft_times.see(rows, seconds)

    def see_rest(self, rows: int, seconds: float) -> None:
        self._rest_times.see(rows, seconds)

    def step_seconds(self) -> StepSeconds | None:
        rest, block = self._rest_times, self._block_size
        if not (len(self._draft_times) and rest.has(1) and rest.has(block)):
            return None
        seconds = rest.table(block)
        return StepSeconds(float(seconds[1]), float(seconds[block] + self._draft_times.table(block)[block]))
