"""Estimates what prefills between decode steps cost, so that a plan knows how often it is interrupted."""

from __future__ import annotations

import math

from sglang_dflash.core.step_times import StepTimes, TimeTuning

DECAY_STEPS = 256
"""Steps after which older arrivals and tokens weigh 1/e."""
PRIOR_ROW_SHARE = 1 / 64
"""Share of a prefill's fixed time that one row of a prompt adds. First guess."""


class PrefillGaps:
    """The fixed time of a prefill, and how many requests arrive for each committed token.

    A server under load starts a request whenever one ends. Those that arrive during a step share one prefill after it.
    So few long steps are interrupted less often than many short ones that commit as much. The rows of the prompts take
    their time in any case and are left out.
    """

    def __init__(self) -> None:
        self._times = StepTimes(TimeTuning(prior_row_share=PRIOR_ROW_SHARE))
        self._arrived = self._tokens = 0.0
        self._costs: tuple[float, float] | None = None  # None: not reckoned since the latest prefill

    def step(self, tokens: float) -> None:
        """A step has committed so many tokens."""
        kept = 1 - 1 / DECAY_STEPS
        self._arrived *= kept
        self._tokens = self._tokens * kept + tokens

    def observe(self, arrived: int, rows: int, seconds: float) -> None:
        """Requests have arrived between two steps of others. rows: of their prompts, as computed. seconds: between the
        steps."""
        self._arrived += arrived
        self._costs = None
        self._times.observe(rows, seconds)

    def costs(self) -> tuple[float, float]:
        """Fixed seconds of a prefill, and requests that arrive for each token, as of the latest prefill: see
        `ops.StepCosts`."""
        if self._costs is None:
            known = self._times.seen and self._tokens > 0
            self._costs = (self._times.line()[0], self._arrived / self._tokens) if known else (0.0, 0.0)
        return self._costs

    def after(self, tokens: float) -> float:
        """Expected seconds of a prefill after a step that commits so many tokens."""
        fixed_s, arrivals = self.costs()
        return fixed_s * -math.expm1(-arrivals * tokens)

    def price(self, tokens: float, seconds: float) -> float:
        """Tokens that a second must bring beside those of a step, so that the step's rate rises.

        Args:
            tokens, seconds: of the step, prefills included. A further token makes a prefill likelier.
        """
        fixed_s, arrivals = self.costs()
        rate = tokens / seconds
        return rate / max(1 - rate * fixed_s * arrivals * math.exp(-arrivals * tokens), 0.25)
