"""What a server does between two readings of its `/metrics`: load, tokens per second, and what its drafts bring."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.core.step_counts import (
    ACCEPTED,
    BY_POSITION,
    DRAFT_TOKENS,
    DRAFTS,
    LABELS,
    PREFIX,
    REQUEST_STEPS,
    STEPS,
)

RUNNING, QUEUED, TOKENS = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:realtime_tokens"
_MODE = "mode"  # of TOKENS
_LABELS = {TOKENS: _MODE} | {f"{PREFIX}{name}": label for name, label in LABELS.items()}
_GAUGES = (RUNNING, QUEUED)
_COUNTERS = (
    TOKENS,
    *(f"{PREFIX}{name}" for name in (ACCEPTED, BY_POSITION, DRAFT_TOKENS, DRAFTS, REQUEST_STEPS, STEPS)),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of `/metrics`, summed over replicas.

    Fields:
        at_s: when, on a clock that only rises.
        values: by name and by the value of the series' own label, "" without one.
    """

    at_s: float
    model: str
    values: dict[tuple[str, str], float]

    @classmethod
    def of(cls, text: str) -> Reading:
        """
        Raises:
            ValueError: this is no such text.
        """
        values: dict[tuple[str, str], float] = {}
        model = ""
        for family in text_string_to_metric_families(text):
            if family.name not in _COUNTERS + _GAUGES:
                continue
            for sample in family.samples:
                model = sample.labels.get("model_name", model)
                # With priorities, SGLang repeats the total by priority.
                if sample.name.endswith("_created") or sample.labels.get("priority"):
                    continue
                key = family.name, sample.labels.get(_LABELS.get(family.name, ""), "")
                values[key] = values.get(key, 0.0) + sample.value
        return cls(time.monotonic(), model, values)

    def count(self, name: str, label: str = "") -> float:
        return self.values.get((name, label), 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a server did since an earlier reading.

    Fields:
        tok_s: tokens that decode steps emitted, per second; None on a first reading.
        tau, rows: mean tokens and rows of a request in a step; None where nothing was decoded, or not by our worker.
        plain_share: share of decode steps without a draft.
        by_position: share of drafted blocks whose draft at this position was accepted, from position 0.
    """

    model: str
    running: int
    queued: int
    tok_s: float | None = None
    tau: float | None = None
    rows: float | None = None
    plain_share: float | None = None
    by_position: list[float] = field(default_factory=list)


def load_between(before: Reading | None, now: Reading) -> Load:
    """before: None, or a server that was started anew since: then only what runs is known."""
    running, queued = round(now.count(RUNNING)), round(now.count(QUEUED))
    counters = [key for key in now.values if key[0] in _COUNTERS]
    if before is None or any(now.values[key] < before.values.get(key, 0.0) for key in counters):
        return Load(now.model, running, queued)
    since = {key: now.values[key] - before.values.get(key, 0.0) for key in counters}

    def count(name: str, label: str = "") -> float:
        return since.get((f"{PREFIX}{name}", label), 0.0)

    tok_s = since.get((TOKENS, "decode"), 0.0) / max(now.at_s - before.at_s, 1e-3)
    steps, request_steps, drafts = _all(since, STEPS), count(REQUEST_STEPS), count(DRAFTS)
    if not request_steps:
        return Load(now.model, running, queued, tok_s)
    positions = sorted((int(label), some) for (name, label), some in since.items() if name == f"{PREFIX}{BY_POSITION}")
    return Load(
        now.model,
        running,
        queued,
        tok_s,
        tau=1 + count(ACCEPTED) / request_steps,
        rows=1 + count(DRAFT_TOKENS) / request_steps,
        plain_share=count(STEPS, "1") / steps if steps else None,
        by_position=[some / drafts for _, some in positions] if drafts else [],
    )


def _all(since: dict[tuple[str, str], float], name: str) -> float:
    return sum(some for (series, _), some in since.items() if series == f"{PREFIX}{name}")
