"""Computes the measures of a cell from its records. Pure functions."""

from __future__ import annotations

import math

import pandas as pd

from sglang_dflash.bench.records import Cell, Limits

PERCENTILES = (50, 90, 99)


def answers(cell: Cell) -> pd.DataFrame:
    """One row per answered request; a number that does not exist is NaN.

    `own_s`: a request's own time, including the wait for its first token. `user_tok_s`: its tokens per second of that.
    `accepted`: drafts.
    """
    names = ["turn", "start_s", "end_s", "tokens", "prompt_tokens", "cached_tokens", "steps", "ttft_s", "tpot_s"]
    held = [record for record in cell.records if not record.failure]
    table = pd.DataFrame([[getattr(record, name) for name in names] for record in held], columns=names, dtype=float)
    accepted = [sum(n * count for n, count in enumerate(record.accept_histogram)) for record in held]
    own_s = (table["end_s"] - table["start_s"]).where(lambda seconds: seconds > 0)
    speed = table["tokens"].where(table["tokens"] > 0) / own_s
    times = {"ttft_ms": 1e3 * table["ttft_s"], "tpot_ms": 1e3 * table["tpot_s"]}
    return table.assign(accepted=accepted, own_s=own_s, user_tok_s=speed, **times)


def measure(cell: Cell, limits: Limits | None = None) -> dict[str, float]:
    """The measures of one cell; NaN if a number does not exist.

    `tok_s`: output tokens of all requests per second of the cell's wall time. `user_tok_s`: tokens per second of a
    request's own time, including the wait for its first token; median over requests. `goodput_rps`: requests per second
    that meet `limits`. `cached_share`, `draft_cached_share`: share of the prompts' tokens whose KV of target and draft
    was in the prefix cache. The draft's exists only if all requests were answered; what is computed again after a
    retraction lowers it. `tool_calls`: calls that the server parsed. `accept_1`, `accept_2`, ...: share of
    verify steps that accepted that draft.
    """
    table, wall_s = answers(cell), cell.wall_s or math.nan
    measures = {
        "requests": float(len(cell.records)),
        "failed": float(len(cell.records) - len(table)),
        "tokens": table["tokens"].sum(),
        "tok_s": (table["tokens"].sum() or math.nan) / wall_s,
        "user_tok_s": table["user_tok_s"].median(),
        "tool_calls": float(sum(len(record.calls) for record in cell.records)),
    }
    quantiles = table[["ttft_ms", "tpot_ms"]].quantile([share / 100 for share in PERCENTILES])
    for share, row in zip(PERCENTILES, quantiles.to_dict("records"), strict=True):
        measures |= {f"{name}_p{share}": value for name, value in row.items()}
    if limits is not None:
        measures["goodput_rps"] = sum(map(limits.kept, cell.records)) / wall_s
    measures |= _prompts(cell, table)
    held = cell.acceptance
    if held is None or not held.steps:
        return {**measures, "tau": math.nan}
    shares = {f"accept_{i}": share for i, share in enumerate(held.shares, start=1)}
    return {**measures, "tau": held.tau, **shares}


def _prompts(cell: Cell, table: pd.DataFrame) -> dict[str, float]:
    """What was not computed, because it was in the prefix cache."""
    cached, prompts = table["cached_tokens"].sum(min_count=1), table["prompt_tokens"].sum()
    known = cell.prefilled is not None and len(table) == len(cell.records)
    return {
        "cached_tokens": cached,
        "prompt_tokens": prompts,
        "cached_share": cached / (prompts or math.nan),
        "draft_cached_share": 1 - cell.prefilled / (prompts or math.nan) if known else math.nan,
    }


def by_turn(cell: Cell) -> pd.DataFrame:
    """Measures by turn, 0 first. Here `tok_s` is that of the median request, including the wait for its first token."""
    turns = answers(cell).groupby("turn")
    found = turns[["prompt_tokens"]].median()
    found["cached_share"] = turns["cached_tokens"].sum(min_count=1) / turns["prompt_tokens"].sum()
    for share in PERCENTILES[:2]:
        found[f"ttft_ms_p{share}"] = turns["ttft_ms"].quantile(share / 100)
    found["tok_s"] = turns["user_tok_s"].median()
    sums = turns[["steps", "accepted"]].sum()
    found["tau"] = 1 + sums["accepted"] / sums["steps"].where(sums["steps"] > 0)
    return found.set_index(found.index.astype(int))
