"""A draft that sees only the latest tokens: the slots in its table, and the number of tokens that it sees."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.core.block import Block
from sglang_dflash.host.worker.draft_window import DraftWindow

BLOCK_SIZE = 4
SENTINEL = -7


def block_at(prefix_lens: list[int], rows: list[int]) -> Block:
    nothing = torch.empty((len(prefix_lens), BLOCK_SIZE), dtype=torch.int64)
    return Block(nothing, nothing, nothing, torch.tensor(prefix_lens), torch.tensor(rows))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [4, 7, 16, 100])
def test_latest_tokens_and_the_block_lead_the_row(size: int, page_size: int) -> None:
    """Fails where a slot is not its token's, the window starts inside a page, or another row changes."""
    columns = 96
    target = torch.arange(8 * columns, dtype=torch.int32).view(8, columns)
    draft = torch.full((8, columns), SENTINEL, dtype=torch.int32)
    window = DraftWindow(size, page_size, target, draft)
    prefix_lens, rows = [0, 1, size, size + 1, 3 * page_size, 50, columns - BLOCK_SIZE], [6, 1, 2, 0, 7, 4, 3]
    prefix_lens = [min(length, columns - BLOCK_SIZE) for length in prefix_lens]
    kept = window.lay_out(block_at(prefix_lens, rows))
    for length, row, seen in zip(prefix_lens, rows, kept.tolist(), strict=True):
        first = max(length - size, 0) // page_size * page_size
        assert seen == length - first
        assert min(length, size) <= seen <= window.max_len
        assert draft[row, : seen + BLOCK_SIZE].tolist() == target[row, first : length + BLOCK_SIZE].tolist()
    assert (draft[5] == SENTINEL).all()


def test_no_requests() -> None:
    """Fails where an empty batch raises."""
    table = torch.zeros((2, 32), dtype=torch.int32)
    assert DraftWindow(8, 1, table, table.clone()).lay_out(block_at([], [])).shape == (0,)
