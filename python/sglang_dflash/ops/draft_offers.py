"""The specification of the choice whom to draft next, by what recent drafts offered.

An offer is what one drafted step of a request offered: the rows of its tree, with the chances to reach them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Offers(NamedTuple):
    """The latest S offers of each of P requests. The request at a place writes them in turn.

    Fields:
        reaches: [P, S, N] float32; of a tree's rows without the anchor, as in `Trees`.
        depths: [P, S, N] int32; of the same rows.
        drafted: [P, S] int64; depths that the draft filled.
        through: [P, S] float32; chance that the first candidates of all these depths are accepted.
        odds: [P, S] float32; factor of the odds of the mean chances beyond these depths.
        kept: [P] int64; offers so far. The next one is written at `kept % S`.
        deep: [D] float32; mean chance of each depth's first candidate, over all requests.
    """

    reaches: torch.Tensor
    depths: torch.Tensor
    drafted: torch.Tensor
    through: torch.Tensor
    odds: torch.Tensor
    kept: torch.Tensor
    deep: torch.Tensor

    @classmethod
    def none(cls, places: int, steps: int, rows: int, depths: int) -> Offers:
        """rows: N. depths: D."""
        return cls(
            torch.zeros(places, steps, rows),
            torch.zeros(places, steps, rows, dtype=torch.int32),
            torch.zeros(places, steps, dtype=torch.int64),
            torch.zeros(places, steps),
            torch.ones(places, steps),
            torch.zeros(places, dtype=torch.int64),
            torch.ones(depths),
        )


class StepCosts(NamedTuple):
    """Seconds of a step: fixed ones, and those of a row. `rest` is all but the draft; `gap_s` comes after the step."""

    gap_s: float
    draft_fixed_s: float
    draft_row_s: float
    rest_fixed_s: float
    rest_row_s: float


class BestWidth(NamedTuple):
    """What the draft should fill.

    Fields:
        width: rows of a block, anchor included; 1: drafting promises nothing.
        requests: those that get a block, rising.
        tokens, seconds: of such a step, as promised.
    """

    width: int
    requests: list[int]
    tokens: float
    seconds: float


def best_width(
    offers: Offers, places: Sequence[int], others: Sequence[int], prior_steps: float, costs: StepCosts, price: float
) -> BestWidth:
    """Which requests should be drafted, and how wide, if their drafts are worth what recent ones were.

    A row is taken if its chance is worth its mean time: groups of rows (`planning.rows_that_pay`) are left out, because
    they depend on the rows of all requests. A request is drafted if its rows bring more tokens than the draft and they
    cost.

    Args:
        places: of the B requests; -1: nothing is known of the request.
        others: places whose latest offers count for every request.
        prior_steps: weight of all `others` together, beside 1 for each offer of the request's own.
        price: tokens that a second is worth.
    """
    batch, depths, steps = len(places), len(offers.deep), offers.reaches.shape[1]
    least = price * costs.rest_row_s
    tokens = [[0.0] * (depths + 1) for _ in places]  # by depth
    rows = [[0.0] * (depths + 1) for _ in places]
    latest = [(other, (int(offers.kept[other]) - 1) % steps, prior_steps / len(others)) for other in others]
    for request, place in enumerate(places):
        own = [(place, step, 1.0) for step in range(min(int(offers.kept[place]), steps))] if place >= 0 else []
        total = sum(weight for _, _, weight in (*own, *latest))
        for at, step, weight in (*own, *latest):
            for depth, reach in _offered(offers, at, step):
                if reach > least:
                    tokens[request][depth] += reach * weight / total
                    rows[request][depth] += weight / total
    plain_s = costs.gap_s + costs.rest_fixed_s + costs.rest_row_s * batch
    best = BestWidth(1, [], float(batch), plain_s)
    best_rate = 0.0
    for width in range(2, depths + 2):
        requests, promised, seconds = [], float(batch), plain_s + costs.draft_fixed_s
        for request in range(batch):
            brought = sum(tokens[request][:width])
            cost_s = costs.rest_row_s * sum(rows[request][:width]) + costs.draft_row_s * width
            if brought > price * cost_s:
                requests.append(request)
                promised, seconds = promised + brought, seconds + cost_s
        if requests and promised / seconds > best_rate:
            best, best_rate = BestWidth(width, requests, promised, seconds), promised / seconds
    return best


def _offered(offers: Offers, place: int, step: int) -> Iterator[tuple[int, float]]:
    """Depth and reach of each row. Beyond what was drafted, the offer goes on as a chain of mean chances, with its own
    factor of their odds."""
    yield from zip(offers.depths[place, step].tolist(), offers.reaches[place, step].tolist(), strict=True)
    reach, odds = float(offers.through[place, step]), float(offers.odds[place, step])
    for depth in range(int(offers.drafted[place, step]), len(offers.deep)):
        mean = float(offers.deep[depth])
        reach *= odds * mean / (odds * mean + 1 - mean)
        yield depth + 1, reach
