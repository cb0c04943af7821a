"""Plans each decode step: which requests the draft fills a block for, and which of its proposals the target verifies.

A row that is verified may commit one more token, and it costs time: almost none while reading the weights dominates the
step, its full share once all cores are busy. The planner takes the rows that bring the most tokens per second, over all
requests of the step together:

* The tokens of a row are the chance that it is reached: the product of the calibrated chances (`Calibration`) along its
  path. `tree.best_first` finds each request's most likely rows, as a tree, or as a chain if the draft gives one
  candidate for each row.
* The seconds follow from the times of recent steps (`StepTimes`), apart for the draft and for all the rest.

Whether a request is drafted must be known before the draft has run. It follows from what the same plan would have
brought in the request's recent steps. A request whose own text offers a better continuation (`Copying`) gets a copy
instead, and costs no draft. Rows change no answer, except where the shape of a batch changes rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from sglang_dflash import ops
from sglang_dflash.core.calibration import Calibration
from sglang_dflash.core.copying import Copying, best_copies
from sglang_dflash.core.depth_tally import DepthTally
from sglang_dflash.core.places import Places
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.core.policy import NOTHING, Copied, Drafting, add_copies, anchors
from sglang_dflash.core.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class PlanTuning:
    """Tuning values of `Planner`.

    Fields:
        memory_steps: drafted steps of a request that tell whether to draft it again.
        others: other requests whose latest drafted steps count, too, each as a part of `prior_steps`.
        prior_steps: steps. Weight of all other requests beside a request's own steps.
        learning_steps: drafted steps that are learned from together.
        decision_steps: steps after which it is decided anew who is drafted, if the requests stay the same.
        least_gain: share. Tokens per second that a plan must promise beyond plain steps: the best of several uncertain
            promises is mostly too high, and a plan that is taken now and then costs more than one taken every time.
        warm_up_steps: first steps, which take every row, the planned rows, and one row for each request, in turn.
        gap_weight: share. Weight of the latest gap between two steps in the mean gap.
        deep_weight: share. Weight of the latest chances of a depth in their mean.
        probe_time_share: share of the time that probes may cost. A probe drafts whole blocks for all requests, or
            nothing.
        probe_interval_steps: steps from one probe to the next, at least.
        probe_weight: share. Weight of the latest probe in the mean rows of probes.
        requests: requests whose recent steps are kept.
    """

    memory_steps: int = 4
    others: int = 8
    prior_steps: float = 1.0
    learning_steps: int = 4
    decision_steps: int = 16
    least_gain: float = 0.04
    warm_up_steps: int = 12
    gap_weight: float = 0.1
    deep_weight: float = 0.05
    probe_time_share: float = 0.01
    probe_interval_steps: int = 16
    probe_weight: float = 0.25
    requests: int = 1024


class Drafted(NamedTuple):
    """A drafted step that is not learned from yet.

    Fields:
        names: of the b requests with blocks.
        requests: their indices in the batch.
        log_probs: [b, D, k]; of the draft.
        chosen: what was verified.
        path: of all requests; see `ops.TreeAcceptance`.
        accepted: drafts, of these requests.
        commit_lens: [n] int32; of these requests, and perhaps of others that commit one token.
    """

    names: list[str]
    requests: list[int]
    log_probs: torch.Tensor
    chosen: ops.ChosenRows
    path: torch.Tensor
    accepted: int
    commit_lens: torch.Tensor


class Planner:
    """Rows where they pay. Now and then a step of another shape keeps the estimates up to date."""

    def __init__(
        self,
        block_size: int,
        max_rows: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tuning: PlanTuning | None = None,
        copying: Copying | None = None,
        drafts: bool = True,
    ) -> None:
        """
        Args:
            block_size: K, at least 2.
            max_rows: rows of one request that is drafted, anchor included; None: K.
            clock: monotonic, in seconds.
            copying: what is copied instead; None: nothing.
            drafts: False: the draft never runs, so a request gets a copy or the row of plain decoding.
        """
        assert block_size >= 2, block_size
        self._block_size = block_size
        self._max_rows = max_rows or block_size
        self._clock = clock
        self._tuning = tuning or PlanTuning()
        self._calibration = Calibration(block_size - 1)
        self._draft_times, self._rest_times = StepTimes(), StepTimes()
        self._memory = Memory(block_size, self._max_rows, self._tuning)
        self._gap_s = 0.0  # mean time between two consecutive decode steps
        self._requests: list[str] = []
        self.counts = PlanCounts()
        self.copying, self._drafts = copying, drafts
        self._drafts_worth: dict[int, float] = {}  # request -> tokens that its block brings beyond its rows' price
        self._probing = False
        self._tally = DepthTally(self.counts)
        self._drafting = self._decided = NOTHING
        self._decided_for: list[str] | None = None
        self._expected = (0.0, 0.0)  # tokens and seconds of a step as decided; 0 seconds: nothing is measured yet
        self._kernels = ops.choose_kernels("cpu").plans
        self._probe_rows = 0.0  # mean rows of a drafted request in probes, beside its anchor
        self._everything = False  # this step verifies every row that the draft offers
        self._steps = self._decided_at = self._steps_since_probe = self._probes = 0
        self._probe_budget_s = 0.0
        self._begun_s = self._draft_begun_s = self._drafted_s = 0.0
        self._ended_s: float | None = None
        self._rows: ops.PlannedRows | None = None
        self._offered: tuple[torch.Tensor, ops.ChosenRows] | None = None  # the draft's log-probabilities, and the plan
        self._unlearned: list[Drafted] = []

    def begin(self, requests: Sequence[str]) -> Drafting:
        self._begun_s = self._clock()
        if self._ended_s is not None:
            self._gap_s += self._tuning.gap_weight * (self._begun_s - self._ended_s - self._gap_s)
        self._requests = list(requests)
        tuning, since = self._tuning, self._steps - self._decided_at
        due = since >= tuning.decision_steps or self._steps_since_probe == 1
        if due or (self._requests != self._decided_for and not self._holds()):
            self._decided_at = self._steps
            self._decide()
        self._steps += 1
        warming = self._steps <= tuning.warm_up_steps
        self._everything = warming and self._steps % 3 == 1
        self._probing = False
        if self._everything:
            self._drafting = self._whole_blocks()
        elif warming and self._steps % 3 == 0:
            self._drafting = NOTHING
        else:
            probe = self._probe()
            self._probing = probe is not None
            self._drafting = probe or (self._decided if warming else self._copy())
        self._draft_begun_s = self._clock()
        self.counts.planning_s += self._draft_begun_s - self._begun_s
        return self._drafting

    def _copy(self) -> Drafting:
        """What was decided, except that requests get copies where these promise more."""
        decided, (tokens, seconds) = self._decided, self._expected
        if self.copying is None or not seconds:
            return decided
        offers = [self.copying.offer(name) for name in self._requests]
        if not any(offers):
            return decided
        price = tokens / seconds
        draft_s = self._draft_times.line()[0] if decided.width > 1 else 0.0
        least = price * self._rest_times.line()[1]
        copies, drafted = best_copies(offers, self._drafts_worth, price * draft_s, least)
        if not copies:
            return decided
        counts, copied = self.counts, tuple(Copied(request, offer.ids) for request, offer in copies.items())
        counts.copies += len(copied)
        counts.copied_rows += sum(len(ids) for _, ids in copied)
        counts.copied_promised += sum(sum(offer.reaches) for offer in copies.values())
        return Drafting(decided.width if drafted else 1, drafted, copied)

    def _holds(self) -> bool:
        """Whether the decision drafts nobody and still holds: more than half as many requests are left, and of those
        that came, nothing is known."""
        before = self._decided_for
        if before is None or self._decided.width > 1 or 2 * len(self._requests) <= len(before):
            return False
        return not any(map(self._memory.knows, set(self._requests).difference(before)))

    def _whole_blocks(self) -> Drafting:
        return Drafting(self._block_size, list(range(len(self._requests)))) if self._drafts else NOTHING

    def draft_begins(self) -> None:
        self._draft_begun_s = self._clock()

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        self._drafted_s = self._clock()
        batch, drafted, copies = len(self._requests), self._drafting.requests, self._drafting.copies
        if log_probs is None:
            self._rows = add_copies(self._kernels, None, [], [], copies, batch) if copies else anchors(batch)
            self.counts.planning_s += self._clock() - self._drafted_s
            return self._rows
        # A row pays if it brings more than the same time brings on average. A single step's own tokens per second would
        # be another price: where its drafts are poor, it would take rows for which later steps have better use.
        tokens, seconds = self._expected
        least = self._rest_times.line()[1] * tokens / seconds if seconds and not self._everything else 0.0
        names = [self._requests[i] for i in drafted]
        chosen = self._calibration.plan(log_probs, names, self._max_rows, least, drafted, batch)
        if copies:
            lens = [chosen.rows.lens[i] for i in drafted]
            chosen = chosen._replace(rows=add_copies(self._kernels, chosen.trees, drafted, lens, copies, batch))
        self._rows, self._offered = chosen.rows, (log_probs, chosen)
        if self._probing:
            self._probe_rows += self._tuning.probe_weight * (len(self._rows.parents) / batch - 1 - self._probe_rows)
        self.counts.planning_s += self._clock() - self._drafted_s
        return self._rows

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        rows, drafting = self._rows, self._drafting
        assert rows is not None and len(commit_lens) == len(self._requests), (len(commit_lens), self._requests)
        self._ended_s = self._clock()
        if drafting.width > 1:
            self._draft_times.observe(len(drafting.requests) * drafting.width, self._drafted_s - self._draft_begun_s)
        self._rest_times.observe(len(rows.parents), self._ended_s - self._drafted_s)
        if drafting.copies:
            lens = commit_lens.tolist()
            self.counts.copied_accepted += sum(lens[copy.request] - 1 for copy in drafting.copies)
        if drafting.width > 1 and self._offered is not None:
            names = [self._requests[i] for i in drafting.requests]
            if drafting.copies:
                commit_lens = commit_lens[drafting.requests]
            accepted = int(commit_lens.sum()) - len(commit_lens)
            self._unlearned.append(Drafted(names, drafting.requests, *self._offered, path, accepted, commit_lens))
            self._offered = None
            if len(self._unlearned) == self._tuning.learning_steps:
                self._learn()
        now_s = self._clock()
        self.counts.steps += 1
        self.counts.seconds += now_s - self._begun_s
        self.counts.planning_s += now_s - self._ended_s

    def interrupt(self) -> None:
        self._ended_s = None

    def _learn(self) -> None:
        """Takes in recent drafted steps. Several together cost little more than one: the code of learning has to come
        into the processor's caches, which the model's weights have filled."""
        for names, requests, log_probs, chosen, path, accepted, commit_lens in self._unlearned:
            lens = [chosen.rows.lens[i] for i in requests]
            self.counts.chose(lens, chosen.depth, chosen.promised)
            self._tally.add(chosen.trees, lens, commit_lens)
            self.counts.accepted += accepted
            self._memory.keep(names, chosen.chances, chosen.trees)
            if chosen.rows.width > 1:
                self._calibration.observe(names, requests, chosen.rows, path, log_probs)
        self._unlearned.clear()

    def _decide(self) -> None:
        """Chooses the requests to draft and their width, by what the same choice would have brought in recent steps."""
        self._learn()
        self._decided_for, batch = self._requests, len(self._requests)
        self._drafts_worth = {}
        if not self._rest_times.seen or (self._drafts and not self._draft_times.seen):
            self._decided, self._expected = self._whole_blocks(), (float(batch), 0.0)
            return
        costs = ops.StepCosts(self._gap_s, *self._draft_times.line(), *self._rest_times.line())
        plain_s = costs.gap_s + costs.rest_fixed_s + costs.rest_row_s * batch
        # The price of a second is what the best plan makes of it: at first, what the plan before made.
        tokens_before, seconds_before = self._expected
        price = max(batch / plain_s, tokens_before / seconds_before if seconds_before else 0.0)
        best = self._memory.best_width(self._requests, costs, price)
        if best.tokens / best.seconds > (1 + self._tuning.least_gain) * batch / plain_s:
            self._expected = best.tokens, best.seconds
            self._decided = Drafting(best.width, best.requests)
            if self.copying is not None:
                price = best.tokens / best.seconds
                names = [self._requests[i] for i in best.requests]
                worth = self._memory.worth(names, price * costs.rest_row_s)
                block = price * costs.draft_row_s * best.width
                self._drafts_worth = {i: own - block for i, own in zip(best.requests, worth, strict=True)}
        else:
            self._expected, self._decided = (float(batch), plain_s), NOTHING

    def _probe(self) -> Drafting | None:
        """A step of another shape than decided, if one is due and affordable."""
        tuning, (tokens, seconds) = self._tuning, self._expected
        if not seconds:
            return None
        self._steps_since_probe += 1
        self._probe_budget_s += tuning.probe_time_share * seconds
        if self._steps_since_probe < tuning.probe_interval_steps:
            return None
        batch = len(self._requests)
        (draft_fixed_s, draft_row_s), (rest_fixed_s, rest_row_s) = self._draft_times.line(), self._rest_times.line()
        plain_s = self._gap_s + rest_fixed_s + rest_row_s * batch
        wide_s = plain_s + draft_fixed_s + batch * (draft_row_s * self._block_size + rest_row_s * self._probe_rows)
        self._probe_budget_s = min(self._probe_budget_s, wide_s)
        plain = self._probes % 2 == 1
        probe = NOTHING if plain else self._whole_blocks()
        if probe == self._decided:
            self._probes += 1
            return None
        # What the probe costs: the time it adds, or the tokens it lacks. A wide one commits at least as many tokens.
        lost_s = plain_s - batch * seconds / tokens if plain else wide_s - seconds
        if lost_s > self._probe_budget_s:
            return None
        self._probe_budget_s -= max(lost_s, 0.0)
        self._probes += 1
        self._steps_since_probe = 0
        return probe


class Memory:
    """What recent drafts offered, by request (`ops.Offers`). It says what drafting the request once more may bring."""

    def __init__(self, block_size: int, max_rows: int, tuning: PlanTuning) -> None:
        self._tuning, self._kernels = tuning, ops.choose_kernels("cpu").plans
        self._offers = ops.Offers.none(tuning.requests, tuning.memory_steps, max_rows - 1, block_size - 1)
        self._places = Places(tuning.requests)

    def knows(self, name: str) -> bool:
        """Whether the request was drafted before."""
        return self._places.get(name) is not None

    def keep(self, names: Sequence[str], chances: torch.Tensor, trees: ops.Trees) -> None:
        """Keeps one step of each named request. chances: [b, D, k]."""
        places = []
        for name in names:
            place, new = self._places.use(name)
            if new:
                self._offers.kept[place] = 0
            places.append(place)
        self._kernels.keep_offers(self._offers, places, chances, trees, self._tuning.deep_weight)

    def best_width(self, names: Sequence[str], costs: ops.StepCosts, price: float) -> ops.BestWidth:
        """See `draft_offers.best_width`."""
        places = [self._places.get(name) for name in names]
        known = [-1 if place is None else place for place in places]
        others = list(islice(self._places.newest_first(), self._tuning.others))
        return self._kernels.best_width(self._offers, known, others, self._tuning.prior_steps, costs, price)

    def worth(self, names: Sequence[str], least: float) -> list[float]:
        """Tokens that a block of each request brings beyond the price of its rows. A request that was never drafted is
        taken for the latest others.

        Args:
            least: tokens that the time of a row is worth.
        """
        offers, places = self._offers, [self._places.get(name) for name in names]
        steps = torch.arange(offers.reaches.shape[1])

        def of(rows: list[int]) -> torch.Tensor:
            brought = (offers.reaches[rows] - least).clamp(min=0.0).sum(-1)  # [n, S]
            kept = (steps < offers.kept[rows, None]).float()
            return (brought * kept).sum(1) / kept.sum(1).clamp(min=1.0)

        others = list(islice(self._places.newest_first(), self._tuning.others))
        mean = float(of(others).mean()) if others else 0.0
        known = [place for place in places if place is not None]
        own = iter(of(known).tolist() if known else [])
        return [mean if place is None else next(own) for place in places]
