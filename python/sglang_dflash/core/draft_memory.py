"""Remembers what recent drafts offered, and says whom to draft next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from sglang_dflash import ops
from sglang_dflash.core.places import Places


@dataclass(frozen=True, slots=True)
class MemoryTuning:
    """Tuning values of `DraftMemory`.

    Fields:
        steps: drafted steps of a request that tell whether to draft it again.
        others: other requests whose latest drafted steps count, too, each as a part of `prior_steps`.
        prior_steps: steps. Weight of all other requests beside a request's own steps.
        deep_weight: share. Weight of the latest chances of a depth in their mean.
        own_share: share of a request's advantage over the mean, at the depths that were drafted, that is expected of
            deeper ones. Measured: within a block, log-odds at different depths have a correlation of 0.7 to 0.8.
    """

    steps: int = 8
    others: int = 8
    prior_steps: float = 2.0
    deep_weight: float = 0.05
    own_share: float = 0.5


class DraftMemory:
    """What recent drafts offered, by request (`ops.Offers`). It says what drafting the request once more may bring."""

    def __init__(self, offers: ops.Offers, places: Places, tuning: MemoryTuning | None = None) -> None:
        """places: of the requests in the offers."""
        self._tuning = tuning or MemoryTuning()
        self._kernels = ops.choose_kernels("cpu").plans
        self._offers, self._places = offers, places

    def knows(self, name: str) -> bool:
        """Whether the request was drafted before."""
        return self._places.get(name) is not None

    def least_known(self, names: Sequence[str], drafted: Sequence[int]) -> list[int]:
        """Indices of all requests but `drafted`: those that were never drafted, the last in the batch first, then the
        others, those whose latest draft is the oldest first."""
        last_used = self._places.last_used
        others = set(range(len(names))).difference(drafted)
        return sorted(others, key=lambda i: (last_used(names[i]), -i))

    def best_width(self, names: Sequence[str], costs: ops.StepCosts, price: float) -> ops.BestWidth:
        """See `draft_offers.best_width`."""
        others = list(islice(self._places.newest_first(), self._tuning.others))
        return self._kernels.best_width(
            self._offers, self._places.of(names), others, self._tuning.prior_steps, costs, price
        )

    def worth(self, names: Sequence[str], least: float) -> list[float]:
        """Tokens that a block of each request brings beyond the price of its rows. A request that was never drafted is
        taken for the latest others.

        Args:
            least: tokens that the time of a row is worth.
        """
        offers, places = self._offers, self._places.of(names)
        steps = torch.arange(offers.reaches.shape[1])

        def of(rows: list[int]) -> torch.Tensor:
            brought = (offers.reaches[rows] - least).clamp(min=0.0).sum(-1)  # [n, S]
            kept = (steps < offers.kept[rows, None]).float()
            return (brought * kept).sum(1) / kept.sum(1).clamp(min=1.0)

        others = list(islice(self._places.newest_first(), self._tuning.others))
        mean = float(of(others).mean()) if others else 0.0
        known = [place for place in places if place >= 0]
        own = iter(of(known).tolist() if known else [])
        return [mean if place < 0 else next(own) for place in places]
