"""Learns how right the draft's own chances are."""

from __future__ import annotations

import numpy as np

KEPT = 0.995
"""Share of what a depth has learned that stays after a step: it forgets within some 200 steps."""
KEPT_OF_REQUEST = 0.9
"""The same of a request, whose text changes faster."""
PRIOR = 6.0
"""The guess that the draft is right weighs as much as the evidence of some 30 rows: a row's weight is p (1 - p)."""


class Calibration:
    """Offsets of the draft's log-odds: one for each depth, and one for each request.

    A row's chance is sigmoid(logit(p) + depth + request), p the draft's own chance of its token, given that all rows
    before it are right. Each step takes a damped Newton step of logistic regression.
    """

    def __init__(self, depths: int) -> None:
        """depths: K - 1."""
        self._offsets = np.zeros(depths)
        self._weights = np.full(depths, PRIOR)

    def offsets(self, of_requests: np.ndarray, depths: int) -> np.ndarray:
        """[b, depths] float32, for `ops.survival`. of_requests: [b]; each request's own offset."""
        offsets: np.ndarray = self._offsets[:depths] + of_requests[:, None]
        return offsets.astype(np.float32)

    def learn(self, chances: np.ndarray, seen: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Learns the depths' offsets.

        Args:
            chances: [b, D]; of each row, given the rows before it, as they were said.
            seen: [b, D] bool; the row was verified, and all rows before it were accepted.
            right: [b, D] bool; it was accepted.

        Returns:
            Of each request [b]: the sum of errors, and the sum of weights, for its own offset.
        """
        errors, weights = (right - chances) * seen, chances * (1 - chances) * seen
        depths = chances.shape[1]
        self._weights[:depths] = np.maximum(self._weights[:depths] * KEPT + weights.sum(0), PRIOR)
        self._offsets[:depths] += errors.sum(0) / self._weights[:depths]
        return errors.sum(1), weights.sum(1)
