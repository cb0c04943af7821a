"""What trees over one block would bring at few requests, by replay of recorded blocks (`tools.measure.record`).

A tree of N rows takes the likeliest paths of the draft's candidates, best first. A step of N rows costs
1 + 0.05 log2(N / K) steps of a chain of K: rows are nearly free where one or two requests run on a GPU. The last line
is JSON: tokens per time over the chain's, of each file and each N.
"""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

COST = 0.05


def paths(log_chances: np.ndarray, nodes: int) -> set[tuple[int, ...]]:
    """The `nodes` likeliest paths of a block, each a candidate's place for each depth.

    Depths are independent given the prefix, so a path's chance is the product of its candidates' chances.
    log_chances: [K - 1, C], falling.
    """
    found: set[tuple[int, ...]] = set()
    heap = [(-log_chances[0, 0], (0,))]
    while heap and len(found) < nodes:
        cost, path = heapq.heappop(heap)
        found.add(path)
        depth, last = len(path), path[-1]
        if last + 1 < log_chances.shape[1]:
            step = log_chances[depth - 1, last] - log_chances[depth - 1, last + 1]
            heapq.heappush(heap, (cost + step, (*path[:-1], last + 1)))
        if depth < len(log_chances):
            heapq.heappush(heap, (cost - log_chances[depth, 0], (*path, 0)))
    return found


def tau(chances: np.ndarray, taken: np.ndarray, nodes: int) -> float:
    """Mean commit_len over one answer. chances: [L, K - 1, C]; taken: [L, K - 1], C for no candidate; nodes: 0: a
    chain."""
    place = steps = 0
    while place < len(taken):
        own = taken[place]
        if nodes:
            tree = paths(np.log(np.maximum(chances[place], 1e-9)), nodes)
            right = [tuple(own[: depth + 1].tolist()) in tree for depth in range(len(own))]
        else:
            right = (own == 0).tolist()
        place += 1 + (right.index(False) if False in right else len(right))
        steps += 1
    return len(taken) / steps


def main(
    recorded: Annotated[list[Path], typer.Argument(help="Files of tools.measure.record.")],
    rows: Annotated[list[int], typer.Option(help="Rows of a tree, the anchor included.")] = [16, 32, 64],  # noqa: B006
) -> None:
    result = {}
    for path in recorded:
        with np.load(path) as file:
            ends = file["lens"].cumsum()[:-1]
            texts = list(zip(np.split(file["chances"], ends), np.split(file["taken"], ends), strict=True))
        block_size = texts[0][1].shape[1] + 1
        chain = np.mean([tau(*text, 0) for text in texts])
        gains = {}
        for count in rows:
            price = 1 + COST * math.log2(count / block_size)
            gains[count] = float(np.mean([tau(*text, count - 1) for text in texts]) / chain / price)
        result[path.stem] = {"tau of the chain": float(chain), **gains}
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
