"""Logits, trees and slot tables for the tests of the ops over trees of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from sglang_dflash import ops
from sglang_dflash.ops import native, tree

NATIVE = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
KERNELS = ops.choose_kernels("cpu", torch.float32)
CHOSEN = SimpleNamespace(
    **{field.name: getattr(kernels, field.name) for kernels in (KERNELS, KERNELS.plans) for field in fields(kernels)}
)
"""The chosen bodies, a plan's among them, by the names that `tree` gives them."""
BODIES = pytest.mark.parametrize("body", [tree, CHOSEN], ids=["specification", "chosen"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
THREADS = st.sampled_from([1, 4])
ROW_LENS = st.lists(st.integers(1, 12), max_size=5)
KINDS = ["normal", "ties", "zeros", "nan", "infinite", "few", "minus-infinite"]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def assert_equal(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def padded(logits: torch.Tensor, columns: int) -> torch.Tensor:
    """The same values as a slice of rows that are longer by `columns`, whose values are large."""
    wide = torch.full((len(logits), logits.shape[1] + columns), 1e9, dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]]


def make_logits(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """[rows, vocabulary] float32; kind: one of KINDS."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random) * 4
    rare = torch.rand(logits.shape, generator=random) < 3 / vocabulary
    if kind == "ties":
        logits = logits.round()
    elif kind == "zeros":
        logits = logits.sign() * 0.0  # zeros of both signs are equal
    elif kind in ("nan", "infinite"):
        logits[rare] = torch.nan if kind == "nan" else torch.inf
    elif kind == "few":  # fewer finite logits than candidates
        logits = torch.where(rare, logits, torch.where(logits > 0, -torch.inf, torch.nan))
    elif kind == "minus-infinite":
        logits.fill_(-torch.inf)
    return logits


def make_chances(batch: int, depths: int, ranks: int, kind: str, seed: int) -> torch.Tensor:
    """[batch, depths, ranks] float32, falling in the last dimension."""
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(batch, depths, ranks, generator=random)
    if kind == "ties":
        chances = (chances * 3).round() / 4
    elif kind == "certain":
        chances = chances.round()
    elif kind == "tiny":  # products of some depths are zero
        chances = chances * 1e-15
    return chances.sort(-1, descending=True).values


def random_parents(rows: int, random: torch.Generator) -> list[int]:
    """A tree: each row's parent comes before it."""
    return [-1, *(int(torch.randint(row, (), generator=random)) for row in range(1, rows))]


def make_rows(row_lens: list[int], tokens: int, seed: int) -> Rows:
    """Ids below `tokens`, parents and row_starts of random trees."""
    random = torch.Generator().manual_seed(seed)
    parents = [parent for rows in row_lens for parent in random_parents(rows, random)]
    ids = torch.randint(tokens, (len(parents),), generator=random)
    return ids, torch.tensor(parents, dtype=torch.int32), torch.tensor([0, *row_lens]).cumsum(0)


def chain_rows(ids: torch.Tensor) -> Rows:
    """ids: [B, W]; the same rows as trees."""
    batch, width = ids.shape
    parents = torch.arange(-1, width - 1, dtype=torch.int32).repeat(batch)
    return ids.flatten(), parents, torch.arange(batch + 1) * width


def make_tables(row_lens: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table in which every slot stands once, the requests' rows in it, and their prefixes. Some lie at the ends."""
    random = torch.Generator().manual_seed(seed)
    batch, columns = len(row_lens), max(row_lens, default=0) + 4
    wide = torch.randperm((batch + 2) * (columns + 3), generator=random).int().view(batch + 2, columns + 3)
    prefixes = [int(torch.randint(columns - rows + 1, (), generator=random)) for rows in row_lens]
    return (
        wide[:, :columns],
        torch.randperm(batch + 2, generator=random)[:batch],
        torch.tensor(prefixes, dtype=torch.int64),
    )
