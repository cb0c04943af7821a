"""Plans each decode step: which requests the draft fills a block for, and which of its proposals the target verifies.

A row that is verified may commit one more token, and it costs time: almost none while reading the weights dominates the
step, its full share once all cores are busy. The planner takes the rows that bring the most tokens per second, over all
requests of the step together:

* The tokens of a row are the chance that it is reached: the product of the calibrated chances (`DraftedRows`) along its
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

import torch

from sglang_dflash import ops
from sglang_dflash.core.copying import Copying, best_copies
from sglang_dflash.core.draft_memory import DraftMemory, MemoryTuning
from sglang_dflash.core.drafted_rows import DraftedRows
from sglang_dflash.core.places import Places
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts
from sglang_dflash.core.policy import NOTHING, Copied, Drafting, undrafted
from sglang_dflash.core.step_times import StepTimes
from sglang_dflash.core.turn_gaps import Expected, TurnGaps

REQUESTS = 1024
"""Requests of which is kept what their drafts have shown."""
BLOCKS = 256
"""Drafted requests of steps that wait to be learned; more if one step drafts more."""


@dataclass(frozen=True, slots=True)
class PlanTuning:
    """Tuning values of `Planner`.

    Fields:
        decision_steps: steps after which it is decided anew who is drafted, if the requests stay the same. Each
            decision learns from the drafted steps before it.
        settled_steps: steps after a decision in which it takes in requests that come or leave; then it is made anew.
        sure_ratio: ratio of rates. A decision is sure if it drafts everybody and promises this many times the rate of
            plain steps. It takes in such changes for all `decision_steps`, and plain probes come half as often.
        warm_up_steps: first steps, which take every row, the planned rows, and one row for each request, in turn.
        probe_time_share: share of the time that probes may cost beyond the worth of what they bring. A probe drafts
            whole blocks for requests that are not drafted otherwise, too, or nothing.
        probe_interval_steps: steps from one probe to the next, at least.
        probe_weight: share. Weight of the latest probe in the mean rows of probes.
    """

    decision_steps: int = 16
    settled_steps: int = 6
    sure_ratio: float = 2.0
    warm_up_steps: int = 12
    probe_time_share: float = 0.0125
    probe_interval_steps: int = 4
    probe_weight: float = 0.25


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
        self._draft_times, self._rest_times = StepTimes(), StepTimes()
        self._gaps = TurnGaps()
        self._requests: list[str] = []
        self.counts = PlanCounts()
        places, memory = Places(REQUESTS), MemoryTuning()
        tables = ops.PlanTables.none(REQUESTS, memory.steps, self._max_rows, block_size - 1, BLOCKS)
        self._memory = DraftMemory(tables.offers, places, memory)
        self._drafted_rows = DraftedRows(tables, places, self.counts, memory=memory)
        self.copying, self._drafts = copying, drafts
        self._drafts_worth: dict[int, float] = {}  # request -> tokens that its block brings beyond its rows' price
        self._probing = False
        self._drafting = self._decided = NOTHING
        self._decided_for: list[str] | None = None  # the requests for which it was decided
        self._held_for: list[str] | None = None  # those for which it holds now; see `_holds` and `_adapts`
        self._sure = False  # see `PlanTuning.sure_ratio`
        self._expected = Expected(0.0)  # of a step as decided
        self._least: float | None = 0.0  # tokens that a row's mean time is worth, by its price; None: unknown
        self._probe_rows = 0.0  # mean rows of a drafted request in probes, beside its anchor
        self._everything = False  # this step verifies every row that the draft offers
        self._steps = self._decided_at = self._steps_since_probe = self._probes = 0
        self._probe_budget_s = 0.0
        self._probe_price_s = 0.0  # no probe is looked for before the budget has grown so far
        self._begun_s = self._draft_begun_s = self._drafted_s = 0.0
        self._ended_s: float | None = None
        self._prefilled: int | None = 0  # rows of prompts that ran since the latest step; None: something else ran, too
        self._rows: ops.PlannedRows | None = None

    def begin(self, requests: Sequence[str], turn_s: float = 0.0, goes_on: bool = False) -> Drafting:
        self._begun_s = self._clock()
        self._gaps.turn_s = turn_s
        before, self._requests = self._requests, list(requests)
        if self._ended_s is not None:
            self._observe_gap(before, goes_on)
        self._prefilled = 0
        tuning, since = self._tuning, self._steps - self._decided_at
        settled = since <= (tuning.decision_steps if self._sure else tuning.settled_steps)
        adapted = self._decided.width > 1 and self._held_for is not self._decided_for
        due = since >= tuning.decision_steps or self._steps_since_probe == 1 or (adapted and not settled)
        if due or (self._requests != self._held_for and not self._holds() and not (settled and self._adapts())):
            self._decided_at = self._steps
            self._decide()
        elif self._decided.width == 1 and self._expected.seconds and self._expected.tokens != len(self._requests):
            self._expect(self._plain())  # nobody is drafted, whoever came or left
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
            self._drafting = probe or (self._decided if warming or self.copying is None else self._copy())
        if self._drafting.width > 1:
            self._drafted_rows.make_room(len(self._drafting.requests))
        self._draft_begun_s = self._clock()
        self.counts.planning_s += self._draft_begun_s - self._begun_s
        return self._drafting

    def _observe_gap(self, before: list[str], goes_on: bool) -> None:
        """before: the requests of the step before."""
        assert self._ended_s is not None
        gap_s, stayed = self._begun_s - self._ended_s, len(before)
        if self._requests != before:
            stayed = len(set(before).intersection(self._requests))
        if not (self._everything or self._probing or self._drafting.copies):  # it was as expected
            self._gaps.step(self._expected.tokens, len(before) - stayed)
        if self._prefilled == 0:  # nothing ran in between
            self._gaps.observe(gap_s, goes_on)
        elif self._prefilled and 0 < stayed < len(self._requests):
            # If nobody stayed, the server may have been idle. If nobody came, it was a part of a prompt.
            self._gaps.observe_prefill(self._prefilled, gap_s)

    def _copy(self) -> Drafting:
        """What was decided, except that requests get copies where these promise more."""
        decided, price = self._decided, self._expected.price
        assert self.copying is not None
        if not price:
            return decided
        offers = [self.copying.offer(name) for name in self._requests]
        if not any(offers):
            return decided
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
        if any(map(self._memory.knows, set(self._requests).difference(before))):
            return False
        self._held_for = self._requests
        return True

    def _adapts(self) -> bool:
        """Lets a decision to draft take in changes, if it can: requests that left are dropped, and newcomers are
        drafted if it is sure, or drafts requests that were never drafted before. Returns whether it could.

        Unless it is sure, it cannot where it knew no such request and where a newcomer was drafted before. It never can
        where nobody is left to draft, and where the number of requests has doubled or halved, since it was priced for
        another one. Where text is copied, `_drafts_worth` has the places of the requests that were decided for.
        """
        before, decided = self._held_for, self._decided
        if before is None or decided.width == 1 or self.copying is not None or self._doubled_or_halved():
            return False
        drafted, knows = {before[i] for i in decided.requests}, self._memory.knows
        new = set(self._requests).difference(before)
        if self._sure:
            drafted |= new
        elif new:
            unknown = next((name for name in before if not knows(name)), None)
            if unknown is None or any(map(knows, new)):
                return False
            if unknown in drafted:
                drafted |= new
        requests = [i for i, name in enumerate(self._requests) if name in drafted]
        if not requests:
            return False
        self._decided, self._held_for = Drafting(decided.width, requests), self._requests
        self._probe_price_s = 0.0
        return True

    def _doubled_or_halved(self) -> bool:
        """The number of requests, since the latest decision."""
        batch, before = len(self._requests), len(self._decided_for or [])
        return 2 * batch <= before or batch >= 2 * before

    def _whole_blocks(self) -> Drafting:
        return Drafting(self._block_size, list(range(len(self._requests)))) if self._drafts else NOTHING

    def draft_begins(self) -> None:
        self._draft_begun_s = self._clock()

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        self._drafted_s = self._clock()
        batch, drafted, copies = len(self._requests), self._drafting.requests, self._drafting.copies
        if log_probs is None:
            self._rows = undrafted(batch, copies)
            self.counts.planning_s += self._clock() - self._drafted_s
            return self._rows
        # A row pays if it brings more than its time is worth in a step as decided. By this step's own rate, poor drafts
        # would get rows for which later steps have better use.
        if self._least is None:
            self._least = self._rest_times.line()[1] * self._expected.price
        least = 0.0 if self._everything else self._least
        names = [self._requests[i] for i in drafted]
        self._rows = self._drafted_rows.plan(log_probs, names, drafted, batch, least, copies)
        if self._probing:
            rows = (len(self._rows.parents) - batch) / len(drafted)
            self._probe_rows += self._tuning.probe_weight * (rows - self._probe_rows)
        self.counts.planning_s += self._clock() - self._drafted_s
        return self._rows

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        rows, drafting = self._rows, self._drafting
        assert rows is not None and len(commit_lens) == len(self._requests), (len(commit_lens), self._requests)
        self._ended_s = self._clock()
        if drafting.width > 1:
            self._draft_times.observe(len(drafting.requests) * drafting.width, self._drafted_s - self._draft_begun_s)
        self._rest_times.observe(len(rows.parents), self._ended_s - self._drafted_s)
        if self._probing and self.copying is None:  # else the probe may have cost a copy
            probed = list(set(drafting.requests).difference(self._decided.requests))
            brought = int(commit_lens[probed].sum()) - len(probed)
            self._probe_budget_s += brought / self._expected.price
        if drafting.copies:
            lens = commit_lens.tolist()
            self.counts.copied_accepted += sum(lens[copy.request] - 1 for copy in drafting.copies)
        if drafting.width > 1:
            self._drafted_rows.end(path)
        now_s = self._clock()
        self.counts.steps += 1
        self.counts.seconds += now_s - self._begun_s
        self.counts.planning_s += now_s - self._ended_s

    def interrupt(self, rows: int) -> None:
        self._prefilled = self._prefilled + rows if rows and self._prefilled is not None else None

    def settle(self) -> None:
        begun_s = self._clock()
        self._drafted_rows.settle()
        self._has_planned_since(begun_s)

    def request_ends(self, request: str) -> list[DepthCounts]:
        begun_s = self._clock()
        rows = self._drafted_rows.take_out(request)
        self._has_planned_since(begun_s)
        return rows

    def _has_planned_since(self, begun_s: float) -> None:
        took_s = self._clock() - begun_s
        self.counts.seconds += took_s
        self.counts.planning_s += took_s

    def _decide(self) -> None:
        """Chooses the requests to draft and their width, by what the same choice would have brought in recent steps."""
        self._drafted_rows.learn()
        batch, another_load = len(self._requests), self._doubled_or_halved()
        self._decided_for = self._held_for = self._requests
        self._drafts_worth, self._sure = {}, False
        if not self._rest_times.seen or (self._drafts and not self._draft_times.seen):
            self._decided = self._whole_blocks()
            self._expect(Expected(batch))
            return
        plain, before = self._plain(), self._expected
        # The price is that of the best plan: at first, of the plan before. If the requests have doubled or halved since
        # then, it is chosen twice: first at the price of plain steps.
        if another_load:
            _, before = self._best(self._costs(batch), plain.price)
        costs = self._costs(max(batch, before.tokens))
        best, expected = self._best(costs, max(plain.price, before.price))
        if expected.rate <= plain.rate:
            self._decided = NOTHING
            self._expect(plain)
            return
        self._decided = Drafting(best.width, best.requests)
        self._sure = len(best.requests) == batch and expected.rate >= self._tuning.sure_ratio * plain.rate
        self._expect(expected)
        if self.copying is not None:
            names = [self._requests[i] for i in best.requests]
            worth = self._memory.worth(names, expected.price * costs.rest_row_s)
            block = expected.price * costs.draft_row_s * best.width
            self._drafts_worth = {i: own - block for i, own in zip(best.requests, worth, strict=True)}

    def _costs(self, tokens: float) -> ops.StepCosts:
        """With the gap after the shortest drafted step, as a line over tokens around `tokens`. The line's slope is left
        out: it is part of the price, and the same for all widths."""
        (draft_s, draft_row_s), (rest_s, rest_row_s) = self._draft_times.line(), self._rest_times.line()
        gap = self._gaps.after(draft_s + rest_s + rest_row_s * len(self._requests), tokens)
        return ops.StepCosts(gap.seconds - tokens * gap.token_s, draft_s, draft_row_s, rest_s, rest_row_s)

    def _best(self, costs: ops.StepCosts, price: float) -> tuple[ops.BestWidth, Expected]:
        """The best width, and what it brings with the gap after a step of its own."""
        best = self._memory.best_width(self._requests, costs, price)
        return best, self._gaps.expected(best.seconds - costs.gap_s, best.tokens)

    def _plain(self) -> Expected:
        """Of a step that drafts nobody."""
        fixed_s, row_s = self._rest_times.line()
        batch = len(self._requests)
        return self._gaps.expected(fixed_s + row_s * batch, batch)

    def _expect(self, expected: Expected) -> None:
        self._expected, self._least, self._probe_price_s = expected, None, 0.0

    def _probe(self) -> Drafting | None:
        """A step of another shape than decided, if one is due and affordable."""
        tuning, expected = self._tuning, self._expected
        if not expected.seconds:
            return None
        self._steps_since_probe += 1
        self._probe_budget_s += tuning.probe_time_share * expected.seconds
        if self._steps_since_probe < tuning.probe_interval_steps or self._probe_budget_s < self._probe_price_s:
            return None
        if self._probes % 2 == 1:  # what the probe costs: the tokens that it lacks
            probe, lost_s = NOTHING, self._plain().seconds - len(self._requests) / expected.rate
            lost_s *= 2 if self._sure else 1  # so that such probes come half as often
        else:
            probe, lost_s = self._wide_probe()
        if probe == self._decided:
            self._probes += 1
            return None
        self._probe_price_s = lost_s
        if lost_s > self._probe_budget_s:
            return None
        self._probe_budget_s -= max(lost_s, 0.0)
        self._probes += 1
        self._steps_since_probe = 0
        return probe

    def _wide_probe(self) -> tuple[Drafting, float]:
        """Whole blocks for as many requests as are affordable beside those decided on, and the seconds that it adds.

        Others come in the order of `DraftMemory.least_known`. What they bring is credited at the step's end, except
        where copies are served: there a probe costs the copies of all requests, so it drafts everybody or nobody.
        """
        decided, block, batch = self._decided.requests, self._block_size, len(self._requests)
        (fixed_s, row_s), (rest_s, rest_row_s) = self._draft_times.line(), self._rest_times.line()
        others = batch - len(decided) if self._drafts else 0
        each_s = max(row_s * block + rest_row_s * self._probe_rows, 1e-9)
        expected = self._expected
        step_s = rest_s + rest_row_s * batch + fixed_s + len(decided) * each_s
        added_s = max(0.0, self._gaps.expected(step_s, max(batch, expected.tokens)).seconds - expected.seconds)
        self._probe_budget_s = min(self._probe_budget_s, added_s + others * each_s)
        if self.copying is None:
            others = min(others, max(1, int((self._probe_budget_s - added_s) / each_s)))
        if not others and (not decided or self._decided.width == block):
            return self._decided, 0.0
        lost_s = added_s + others * each_s
        if lost_s > self._probe_budget_s:  # whom it would draft does not matter yet
            return self._whole_blocks(), lost_s
        probed = self._memory.least_known(self._requests, decided)[:others]
        return Drafting(block, sorted((*decided, *probed))), lost_s
