"""`invariant_attention` is right and gives a token the same bits in a decode step, a verified block and any prefill."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops import PagedRows, invariant_attention
from sglang_dflash.ops.reference import attention_rows

LENGTH = 1100  # three key blocks
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
HEADS = pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1), (16, 1)], ids=str)  # of queries, of keys
WINDOWS = pytest.mark.parametrize("window_left", [None, 0, 100, 600])
DIM, SCALING = 32, 0.17


class Token:
    """Requests in which the token at position p has the same query, key and value everywhere."""

    def __init__(self, heads: tuple[int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(LENGTH, heads[0], DIM).to(dtype)
        self.k, self.v = (torch.randn(LENGTH, heads[1], DIM).to(dtype) for _ in range(2))

    def attend(self, layout: list[tuple[int, int]], causal: bool = True, window_left: int | None = None):
        """One forward over requests of (prefix, rows). Returns the results of each request's rows."""
        req_to_token = torch.zeros(len(layout), LENGTH, dtype=torch.int32)
        k, v = (
            torch.full((1 + sum(p + n for p, n in layout), *x.shape[1:]), torch.nan).to(x) for x in (self.k, self.v)
        )
        k[0], v[0] = 0, 0
        first = 1
        for index, (prefix, count) in enumerate(layout):
            slots = first + torch.randperm(prefix + count)
            req_to_token[index, : prefix + count] = slots.int()
            k[slots], v[slots] = self.k[: prefix + count], self.v[: prefix + count]
            first += prefix + count
        prefixes, counts = [p for p, _ in layout], [n for _, n in layout]
        rows = PagedRows.gather(req_to_token, torch.arange(len(layout)), prefixes, counts)
        q = torch.cat([self.q[prefix : prefix + count] for prefix, count in layout])
        out = invariant_attention(q, k, v, rows, SCALING, causal, window_left)
        again = invariant_attention(q, k, v, rows, SCALING, causal, window_left)  # the next layer, with kept masks
        assert torch.equal(out, again)
        return out.split(counts)


@DTYPES
@HEADS
@WINDOWS
def test_a_token_is_the_same_in_every_forward(heads, dtype, window_left):
    """Fails where a result depends on rows or keys that the token does not see, as with SDPA over keys of another
    length, or with tiles of another size."""
    token = Token(heads, dtype)
    whole = token.attend([(0, LENGTH)], window_left=window_left)[0]
    for position in (0, 7, 511, 512, 1023, LENGTH - 10):
        alone = token.attend([(position, 1)], window_left=window_left)[0]
        others = [(300, 1), (position, 1), (0, 1), (LENGTH - 1, 1)]
        batch = token.attend(others, window_left=window_left)[1]
        block = token.attend([(17, 8), (position, 8)], window_left=window_left)[1]
        inside = token.attend([(max(0, position - 3), 13)], window_left=window_left)[0]
        chunk = token.attend([(max(0, position - 40), 49)], window_left=window_left)[0]
        here = whole[position]
        assert torch.equal(alone[0], here), position
        assert torch.equal(batch[0], here), position
        assert torch.equal(block[0], here), position
        assert torch.equal(inside[min(3, position)], here), position
        assert torch.equal(chunk[min(40, position)], here), position


def test_a_long_extend_in_parts_is_the_same(monkeypatch):
    """Fails where rows after the first part of an extend see other keys, or are returned at another place."""
    token = Token((4, 2), torch.float32)
    whole = token.attend([(5, 600)])[0]
    monkeypatch.setattr("sglang_dflash.ops.tiled_attention.MASK_ELEMENTS", 40_000)
    assert torch.equal(token.attend([(5, 600)])[0], whole)


@DTYPES
@HEADS
@WINDOWS
@pytest.mark.parametrize("causal", [True, False])
def test_values_are_right(heads, dtype, window_left, causal):
    """Fails where a row sees a key that it must not see, or misses one."""
    token = Token(heads, dtype)
    layout = [(0, 5), (509, 8), (700, 1), (3, 530)]
    for (prefix, count), ours in zip(layout, token.attend(layout, causal, window_left), strict=True):
        end = prefix + count
        arguments = (token.q[prefix:end], token.k[:end], token.v[:end])
        exact = attention_rows(*(x.float() for x in arguments), prefix, SCALING, causal, window_left)
        assert ours.dtype == dtype
        assert (ours.float() - exact).abs().max() <= 4e-6 + torch.finfo(dtype).eps * exact.abs().max()


def test_no_requests():
    """Fails where an idle batch raises."""
    empty = torch.empty(0, 4, DIM)
    rows = PagedRows.gather(torch.zeros(1, 4, dtype=torch.int32), torch.empty(0, dtype=torch.int64), [], [])
    assert invariant_attention(empty, torch.zeros(1, 2, DIM), torch.zeros(1, 2, DIM), rows, SCALING, True).shape == (
        0,
        4,
        DIM,
    )


def test_row_masks_are_refused():
    """Fails where rows of a tree are computed as rows of a chain."""
    mask, tables = torch.ones(1, 2, 2).bool(), (torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0]))
    rows = PagedRows.gather(*tables, [1], [2], row_mask=mask)
    with pytest.raises(AssertionError):
        invariant_attention(torch.zeros(2, 4, DIM), torch.zeros(1, 2, DIM), torch.zeros(1, 2, DIM), rows, SCALING, True)
