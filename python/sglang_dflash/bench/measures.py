"""Computes the measures of a cell from its records. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from sglang_dflash.bench.records import Cell, Limits, Record

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks, as in numpy; NaN without values.

    Args:
        share: 0 to 100.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * share / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def measure(cell: Cell, limits: Limits | None = None) -> dict[str, float]:
    """The measures of one cell; NaN if a number does not exist.

    `tok_s`: output tokens of all requests per second of the cell's wall time. `user_tok_s`: tokens per second of a
    request's own time, including the wait for its first token; median over requests. `goodput_rps`: requests per second
    that meet `limits`. `accept_1`, `accept_2`, ...: share of verify steps that accepted that draft.
    """
    answered = [record for record in cell.records if not record.failure]
    tokens = sum(record.tokens for record in answered)
    timed = [record for record in answered if record.end_s > record.start_s and record.tokens]
    measures = {
        "requests": float(len(cell.records)),
        "failed": float(len(cell.records) - len(answered)),
        "tokens": float(tokens),
        "tok_s": tokens / cell.wall_s if cell.wall_s and tokens else math.nan,
        "user_tok_s": median(r.tokens / (r.end_s - r.start_s) for r in timed) if timed else math.nan,
    }
    ttfts = [record.ttft_s * 1e3 for record in answered if record.ttft_s is not None]
    tpots = [record.tpot_s * 1e3 for record in answered if record.tpot_s is not None]
    for share in PERCENTILES:
        measures[f"ttft_ms_p{share}"] = percentile(ttfts, share)
        measures[f"tpot_ms_p{share}"] = percentile(tpots, share)
    if limits is not None:
        good = sum(limits.kept(record) for record in cell.records)
        measures["goodput_rps"] = good / cell.wall_s if cell.wall_s else math.nan
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    measures["cached_tokens"] = float(sum(cached)) if cached else math.nan
    measures["prompt_tokens"] = float(sum(record.prompt_tokens for record in answered))
    return {**measures, **_acceptance(cell)}


def _acceptance(cell: Cell) -> dict[str, float]:
    held = cell.acceptance
    if held is None or not held.steps:
        return {"tau": math.nan, "drafted": math.nan, "accepted": math.nan}
    shares = {f"accept_{i}": count / held.steps for i, count in enumerate(held.by_position, start=1)}
    return {"tau": held.tau, "drafted": float(held.drafted), "accepted": float(held.accepted), **shares}


def by_turn(cell: Cell) -> dict[int, dict[str, float]]:
    """Measures by turn, 0 first. Here `tok_s` is that of the median request, including the wait for its first token."""
    turns: dict[int, list[Record]] = {}
    for record in cell.records:
        if not record.failure:
            turns.setdefault(record.turn, []).append(record)
    return {turn: _of_turn(records) for turn, records in sorted(turns.items())}


def _of_turn(records: Sequence[Record]) -> dict[str, float]:
    steps = sum(record.steps for record in records)
    accepted = sum(n * count for record in records for n, count in enumerate(record.accept_histogram))
    cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return {
        "requests": float(len(records)),
        "prompt_tokens": median(record.prompt_tokens for record in records),
        "cached_tokens": median(cached) if cached else math.nan,
        "ttft_ms_p50": percentile([r.ttft_s * 1e3 for r in records if r.ttft_s is not None], 50),
        "ttft_ms_p90": percentile([r.ttft_s * 1e3 for r in records if r.ttft_s is not None], 90),
        "tok_s": percentile([r.tokens / (r.end_s - r.start_s) for r in records if r.end_s > r.start_s], 50),
        "tau": 1 + accepted / steps if steps else math.nan,
    }
