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
from sglang_dflash.core.policy import Drafting, Step
from sglang_dflash.core.step_times import StepTimes, eighths

MEAN_SHARE = 0.05
"""Least weight of a block in its request's mean: of the last 20 blocks or so."""
JUDGED, FEWEST_JUDGED = 64, 8
"""Requests, the latest, by which newcomers are judged; with fewer, all newcomers are drafted."""
REMEMBERED = 1024
"""Requests of which is kept what their blocks were worth; one that was retracted comes back."""


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
        memory: weight of a request's latest block in what is expected of its next one. Text comes in runs of hard and
            easy; by the same share a step, what is expected returns to the request's mean while it is not drafted.
        hope: share. A width that was not timed yet is tried if lines between known times promise so much of the best
            speed. Forwards take rows in groups, so a width may be much faster than a line says.
        surest: most that a row's chance is taken for. A draft that is always sure would be verified whole.
    """

    dead_band: float = 0.04
    newcomer_blocks: int = 2
    newcomer_share: float = 0.1
    probe_share: float = 0.02
    memory: float = 0.25
    hope: float = 0.85
    surest: float = 0.99


@dataclass(slots=True)
class _Request:
    """What is known of a request: `mean` and `recent`, [K - 1], of the survival of its blocks."""

    mean: np.ndarray
    recent: np.ndarray
    learned_at: int
    blocks: int = 0
    drafted_at: int = 0
    offset: float = 0.0
    weight: float = field(default=PRIOR)


def best_count(tokens: np.ndarray, seconds: np.ndarray) -> tuple[int, float]:
    """The number of further rows with the most tokens per second, and these. [N + 1] each, for 0..N rows; ties: the
    fewer."""
    rates = tokens / seconds
    best = int(rates.argmax())
    return best, float(rates[best])


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
        self._probed: set[str] = set()
        self._batch, self._drafting, self._rate = 0, Drafting(1, [], 0), 0.0

    # Before the draft runs.

    def draft(self, names: Sequence[str]) -> Drafting:
        self._step += 1
        self._batch, self._names = len(names), list(names)
        requests = [self._request(name) for name in names]
        while len(self._requests) > max(REMEMBERED, len(names)):
            del self._requests[next(iter(self._requests))]
        self._probed = set()
        if not self._are_times_known():
            self._whole = self._step % 2 == 1
            self._drafting = self._of(self._block_size, list(range(len(names)))) if self._whole else self._of(1, [])
            return self._drafting
        decided = self._decide(requests)
        self._drafting = self._probe_all(decided) if self._together else self._with_others(decided, requests)
        for place in self._drafting.requests:
            requests[place].drafted_at = self._step
        return self._drafting

    def _are_times_known(self) -> bool:
        """Whether a draft was timed, and as many sizes of the rest as tell a plain step from whole blocks."""
        sizes = {self._rest_times.size_of(rows) for rows in (self._batch, self._batch * self._block_size)}
        return len(self._draft_times) > 0 and len(self._rest_times) >= len(sizes)

    def _request(self, name: str) -> _Request:
        known = self._requests.pop(name, None) or _Request(
            self._newcomer.copy(), self._newcomer.copy(), self._step, drafted_at=self._step
        )
        self._requests[name] = known  # the latest last
        return known

    def _of(self, width: int, requests: list[int]) -> Drafting:
        return Drafting(width, requests, self._batch + len(requests) * (width - 1))

    def _decide(self, requests: list[_Request]) -> Drafting:
        """Whom to draft, by what their recent blocks had."""
        batch, band = self._batch, 1 + self._settings.dead_band
        survival = self._expected(requests)
        whole, plain = self._of(self._block_size, list(range(batch))), self._of(1, [])
        whole_rate = (batch + float(survival.sum())) / self._seconds(whole)
        plain_rate = batch / self._seconds(plain)
        best, rate = (whole, whole_rate) if whole_rate > plain_rate else (plain, plain_rate)
        for width in self.widths:
            before: list[int] = []
            for _ in range(2):  # the second time at the price of the best so far
                chosen = list(range(batch))
                if not self._together:
                    chosen = self._worth_drafting(survival[:, : width - 1], width, rate)
                if not chosen or chosen == before:
                    break
                found, its_rate = self._best_rows(survival, self._of(width, chosen))
                if its_rate > rate:
                    best, rate = found, its_rate
                before = chosen
        if self._drafts is not False and whole_rate * band >= rate:
            best = whole
        elif self._drafts is False and rate < band * plain_rate:
            best = plain
        self._rate = rate
        untimed = self._untimed(survival, rate)
        self._whole, self._drafts = untimed is not None or best is whole, best.width > 1
        return best if untimed is None else untimed

    def _expected(self, requests: list[_Request]) -> np.ndarray:
        """The survival of the requests' next blocks, [B, K - 1]."""
        ages = np.array([self._step - one.learned_at - 1 for one in requests]).clip(0)
        kept = ((1 - self._settings.memory) ** ages)[:, None]
        means, recent = np.stack([one.mean for one in requests]), np.stack([one.recent for one in requests])
        expected: np.ndarray = means + kept * (recent - means)
        return expected

    def _untimed(self, survival: np.ndarray, best_rate: float) -> Drafting | None:
        """The narrowest width that was not timed with so many requests, and might be the fastest."""
        for width in reversed(self.widths):
            if not self._rest_times.knows(self._batch * width):
                drafting = self._of(width, list(range(self._batch)))
                tokens = self._batch + float(survival[:, : width - 1].sum())
                if tokens / self._seconds(drafting) > self._settings.hope * best_rate:
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

    def _best_rows(self, survival: np.ndarray, drafting: Drafting) -> tuple[Drafting, float]:
        """The best number of rows of a drafting, and its tokens per second."""
        if not self._trims:
            rate = (self._batch + float(survival[:, : drafting.width - 1].sum())) / self._seconds(drafting)
            return drafting, rate
        chances = survival[drafting.requests, : drafting.width - 1]
        best, rate = self._best_count(chances, self._batch, drafting)
        return drafting._replace(rows=self._batch + best), rate

    def _best_count(self, chances: np.ndarray, rows: int, drafting: Drafting) -> tuple[int, float]:
        """How many rows of these chances pay beside `rows` others, and the step's tokens per second."""
        tokens = falling(chances).cumsum() + self._batch
        rest = self._rest_times.table(rows + len(tokens))[rows : rows + len(tokens) + 1]
        seconds = rest + self._draft_seconds(drafting)
        return best_count(np.concatenate(([self._batch], tokens)), seconds)

    def _draft_seconds(self, drafting: Drafting) -> float:
        rows = drafting.width * len(drafting.requests)
        return float(self._draft_times.table(rows)[rows]) if rows else 0.0

    def _seconds(self, drafting: Drafting) -> float:
        """Of a step."""
        return float(self._rest_times.table(drafting.rows)[drafting.rows]) + self._draft_seconds(drafting)

    def _with_others(self, decided: Drafting, requests: list[_Request]) -> Drafting:
        """With newcomers, and with those that a probe can afford."""
        settings, width = self._settings, decided.width if decided.width > 1 else self._block_size
        left = [place for place in range(self._batch) if place not in decided.requests]
        new = [place for place in left if requests[place].blocks < settings.newcomer_blocks]
        if new and not self._are_newcomers_worth_it():
            new = []
        drafting = decided
        if new:
            drafting = Drafting(width, sorted([*decided.requests, *new]), decided.rows + len(new))
        self._probe_s += settings.probe_share * self._seconds(decided)
        others = [place for place in left if place not in new]
        if not others:
            self._probe_s = 0.0
            return drafting
        probed = min(others, key=lambda place: requests[place].drafted_at)
        with_one = Drafting(width, sorted([*drafting.requests, probed]), drafting.rows + width - 1)
        cost_s = self._seconds(with_one) - self._seconds(drafting)
        if cost_s > self._probe_s:
            return drafting
        self._probe_s -= cost_s
        self._probed = {self._names[probed]}
        return with_one

    def _are_newcomers_worth_it(self) -> bool:
        """Whether drafting now would pay for enough of the requests that were drafted before."""
        known = [one.mean for one in self._requests.values() if one.blocks >= self._settings.newcomer_blocks][-JUDGED:]
        if len(known) < FEWEST_JUDGED:
            return True
        means = np.stack(known)
        worth = {
            place for width in self.widths for place in self._worth_drafting(means[:, : width - 1], width, self._rate)
        }
        return len(worth) >= self._settings.newcomer_share * len(known)

    def _probe_all(self, decided: Drafting) -> Drafting:
        """The widest block for everybody, now and then, where nothing else would show what it brings."""
        if decided.width == self.widths[0]:
            return decided
        wide = self._of(self.widths[0], list(range(self._batch)))
        if self._trims:
            wide = wide._replace(rows=decided.rows)
        step_s = self._seconds(decided)
        self._probe_s += self._settings.probe_share * step_s
        cost_s = self._seconds(wide) - step_s
        if cost_s > self._probe_s:
            return decided
        self._probe_s = 0.0
        return wide

    # Behind it.

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return self._calibration.offsets(np.array([self._requests[name].offset for name in names]), depths)

    def verify(self, survival: np.ndarray) -> np.ndarray:
        names = [self._names[place] for place in self._drafting.requests]
        width = self._drafting.width
        if self._whole or not self._trims:
            return np.full(len(names), width)
        chances = np.minimum(survival, self._settings.surest ** np.arange(1, width))
        probed = np.array([name in self._probed for name in names], dtype=bool)
        others = chances[~probed]
        rows = self._batch + int(probed.sum()) * (width - 1)
        count, _ = self._best_count(others, rows, self._drafting)
        flat = falling(others)
        least = flat[count - 1] if count else 2.0
        lens: np.ndarray = 1 + (chances >= least).sum(1)
        return np.where(probed, width, lens)

    def _remember(self, names: Sequence[str], survival: np.ndarray) -> None:
        depths = survival.shape[1]
        for name, own in zip(names, survival, strict=True):
            one = self._requests.get(name)
            if one is None:
                continue
            share = 1 / (one.blocks + 2)
            one.recent = self._expected([one])[0]
            one.recent[:depths] += max(self._settings.memory, share) * (own - one.recent[:depths])
            one.mean[:depths] += max(MEAN_SHARE, share) * (own - one.mean[:depths])
            one.blocks, one.learned_at = one.blocks + 1, self._step
        self._blocks = self._blocks * 0.99 + len(names)
        mean = survival.mean(0)
        self._newcomer[:depths] += len(names) / self._blocks * (mean - self._newcomer[:depths])

    def learn(self, step: Step) -> None:
        self._remember(step.names, step.survival)
        before = np.concatenate((np.ones((len(step.lens), 1)), step.survival[:, :-1]), 1)
        chances = np.divide(step.survival, before, out=np.zeros_like(step.survival), where=before > 0)
        depth = np.arange(1, chances.shape[1] + 1)
        seen = (depth < step.lens[:, None]) & (depth <= step.commit_lens[:, None])
        right = depth < step.commit_lens[:, None]
        errors, weights = self._calibration.learn(chances, seen, right)
        for name, error, weight in zip(step.names, errors, weights, strict=True):
            one = self._requests.get(name)
            if one is not None:
                one.weight = max(one.weight * KEPT_OF_REQUEST + float(weight), PRIOR)
                one.offset += float(error) / one.weight

    def see_draft(self, rows: int, seconds: float) -> None:
        self._draft_times.see(rows, seconds)

    def see_rest(self, rows: int, seconds: float) -> None:
        self._rest_times.see(rows, seconds)
