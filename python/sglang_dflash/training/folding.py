"""Folds what begins another sample into that sample, so that training computes a shared beginning once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 1000


def holders(keys: Sequence[Any]) -> list[int]:
    """For each key the index of the key that holds it: a longest one that begins with it, itself if there is none.

    Of equal keys the first is the holder.

    Args:
        keys: all bytes, or all tuples.
    """
    # In this order, all keys that begin with a key follow it without a gap: its neighbour tells whether there are any.
    order = sorted(range(len(keys)), key=lambda index: (keys[index], -index))
    found = list(range(len(keys)))
    for place in range(len(order) - 2, -1, -1):
        this, after = order[place], order[place + 1]
        if keys[after][: len(keys[this])] == keys[this]:
            found[this] = found[after]
    return found


def fold(data: Dataset) -> Dataset:
    """The samples that begin no other, in their order, each with the spans of all that it holds.

    Attention is causal and a block sees only what comes before it: the blocks of a sample are the same in one that
    begins with it. What follows a sample's last span teaches nothing, so it need not be the same.

    Args:
        data: `input_ids`, within int32, and `spans`.

    Returns:
        `data` itself if nothing was folded.
    """
    keys: list[bytes] = []
    spans: list[list[list[int]]] = []
    for table in data.with_format("arrow").iter(_ROWS_AT_ONCE):
        spans += table["spans"].to_pylist()
        for ids in table["input_ids"]:
            end = max(end for _, end in spans[len(keys)])
            keys.append(ids.values.to_numpy()[:end].astype(np.int32).tobytes())
    held: dict[int, list[list[int]]] = defaultdict(list)
    for index, holder in enumerate(holders(keys)):
        held[holder] += spans[index]
    if len(held) == len(data):
        return data
    kept = sorted(held)
    united = [_united(held[index]) for index in kept]
    column = data.features["spans"]
    return data.select(kept).remove_columns("spans").add_column("spans", united, feature=column)


def _united(spans: Iterable[Sequence[int]]) -> list[list[int]]:
    """Spans in ascending order; those that overlap become one. Adjacent ones are two answers and stay apart."""
    found: list[list[int]] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([start, end])
    return found
