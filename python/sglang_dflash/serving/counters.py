"""Reads what a server did for a cell from its own counters, which cover the whole server, not single requests."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.core.row_counts import PREFILLED
from sglang_dflash.serving.completion import AcceptanceStats

_STEPS = "vllm:spec_decode_num_drafts"
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def prefilled_between(before: str, after: str) -> int | None:
    """Prompt tokens whose draft KV our worker computed between two readings of SGLang's /server_info.

    The others' was in the prefix cache. None if another worker serves, or a reading cannot be read.
    """
    old, new = _prefilled(before), _prefilled(after)
    return None if old is None or new is None else new - old


def _prefilled(text: str) -> int | None:
    """Over all replicas, since their start."""
    try:
        states = json.loads(text).get("internal_states") or []
    except ValueError:
        return None
    counts = [state[PREFILLED] for state in states if PREFILLED in state]
    return sum(counts) if counts else None


def acceptance_between(before: str, after: str) -> AcceptanceStats | None:
    """Drafts and accepted drafts between two readings of vLLM's /metrics; None without verify steps.

    vLLM's `num_drafts` counts one per request and step: these are our verify steps.
    """
    old, new = _read(before), _read(after)
    difference = {name: new[name] - old.get(name, 0.0) for name in new}
    steps = round(difference.get((_STEPS, -1), 0.0))
    if not steps:
        return None
    positions = sorted(position for name, position in difference if name == _BY_POSITION)
    return AcceptanceStats(
        steps=steps,
        drafted=round(difference.get((_DRAFTED, -1), 0.0)),
        accepted=round(difference.get((_ACCEPTED, -1), 0.0)),
        by_position=[round(difference[_BY_POSITION, position]) for position in positions],
    )


def _read(text: str) -> dict[tuple[str, int], float]:
    """Counters by name and position (-1 without one), summed over engines."""
    values: dict[tuple[str, int], float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (_STEPS, _DRAFTED, _ACCEPTED, _BY_POSITION):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    key = (family.name, int(sample.labels.get("position", -1)))
                    values[key] = values.get(key, 0.0) + sample.value
    return values
