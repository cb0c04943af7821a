"""Estimates what prefills between decode steps cost, so that a plan knows how often it is interrupted."""

from __future__ import annotations

import math

from sglang_dflash.core.step_times import StepTimes, TimeTuning
from sglang_dflash.ops.draft_offers import prefill_after

DECAY_STEPS = 256
"""Steps after which older arrivals and tokens weigh 1/e."""
PRIOR_ROW_SHARE = 1 / 64
"""Share of a prefill's fixed time that one row of a prompt adds. First guess."""
LEAST_WORTH = 0.25
"""A token is worth this share of itself at least, after what it adds to the chance of a prefill. Where prefills take
nearly all time, the rest would be next to nothing."""


class PrefillGaps:
    """The fixed time of a prefill, and how many requests arrive for each committed token.

    A server under load starts a request whenever one ends. Those that arrive during a step share one prefill after it.
    So few long steps are interrupted less often than many short ones that commit as much. The rows of the prompts take
    their time in any case and are left out. So is the gap that any two steps have between them.
    """

    def __init__(self) -> None:
        self._times = StepTimes(TimeTuning(prior_row_share=PRIOR_ROW_SHARE))
        self._arrived = self._tokens = 0.0
        self._fixed_s = self._arrivals = 0.0

    def step(self, tokens: float) -> None:
        """A step was expected to commit so many tokens. Not what it has committed: a plan that promises too much then
        finds as much fewer arrivals for each promised token."""
        kept = 1 - 1 / DECAY_STEPS
        self._arrived *= kept
        self._tokens = self._tokens * kept + tokens

    def observe(self, arrived: int, rows: int, seconds: float) -> None:
        """Requests have arrived between two steps of others. rows: of their prompts, as computed. seconds: above 0;
        beyond the gap between two steps without a prefill."""
        self._arrived += arrived
        self._times.observe(rows, seconds)

    def reckon(self) -> None:
        """Takes in what was observed. Until the next call, all answers are of this moment."""
        if self._times.seen and self._tokens > 0:
            self._fixed_s, self._arrivals = self._times.line()[0], self._arrived / self._tokens

    def costs(self) -> tuple[float, float]:
        """Fixed seconds of a prefill, and requests that arrive for each token: see `ops.StepCosts`."""
        return self._fixed_s, self._arrivals

    def after(self, tokens: float) -> float:
        """Expected seconds of a prefill after a step that commits so many tokens."""
        return prefill_after(self._fixed_s, self._arrivals, tokens)

    def price(self, tokens: float, seconds: float) -> float:
        """Tokens per second that a further row must bring, in its own time, to raise the rate of a step. That is more
        than the step's rate, because its tokens make a prefill likelier.

        Args:
            tokens, seconds: of the step, prefills included.
        """
        rate = tokens / seconds
        further_s = self._fixed_s * self._arrivals * math.exp(-self._arrivals * tokens)  # of prefills, for each token
        return rate / max(1 - rate * further_s, LEAST_WORTH)
