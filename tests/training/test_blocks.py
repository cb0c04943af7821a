"""Training blocks against an example worked out by hand: rows, labels, masks, and the positions of anchors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.reference import LayerAttention
from sglang_dflash.training.blocks import (
    IGNORED,
    Blocks,
    dense_mask,
    flex_mask,
    make_blocks,
    sample_anchors,
    split_attention,
)

M, NO = 999, IGNORED
CONTEXT = 12
_QKV = ((6, 8), (2, 20), (2, 20))  # heads and rows of q, k and v: two blocks of 4 rows behind 12 tokens

# Two conversations: 12 tokens, prompt 0 to 4 and answer 5 to 11; and 7 tokens, answer 3 to 6, then padding.
IDS = [[100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111], [200, 201, 202, 203, 204, 205, 206, 0, 0, 0, 0, 0]]
LEARNED = [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
ANCHORS = [[6, 9], [-1, 4]]

FULL, CAUSAL = LayerAttention(causal=False, window=None), LayerAttention(causal=True, window=None)
SLIDING, SLIDING_BOTH_WAYS = LayerAttention(causal=True, window=3), LayerAttention(causal=False, window=3)

# Each line is a row's view of the 12 context tokens, then of the 4 rows of each block.
TABLES = {
    FULL: (
        """
        111111000000 1111 0000
        111111000000 1111 0000
        111111000000 1111 0000
        111111000000 1111 0000
        111111111000 0000 1111
        111111111000 0000 1111
        111111111000 0000 1111
        111111111000 0000 1111
        """,
        """
        000000000000 1111 0000
        000000000000 1111 0000
        000000000000 1111 0000
        000000000000 1111 0000
        111100000000 0000 1111
        111100000000 0000 1111
        111100000000 0000 1111
        111100000000 0000 1111
        """,
    ),
    CAUSAL: (
        """
        111111000000 1000 0000
        111111000000 1100 0000
        111111000000 1110 0000
        111111000000 1111 0000
        111111111000 0000 1000
        111111111000 0000 1100
        111111111000 0000 1110
        111111111000 0000 1111
        """,
        """
        000000000000 1000 0000
        000000000000 1100 0000
        000000000000 1110 0000
        000000000000 1111 0000
        111100000000 0000 1000
        111100000000 0000 1100
        111100000000 0000 1110
        111100000000 0000 1111
        """,
    ),
    SLIDING: (
        """
        000011000000 1000 0000
        000001000000 1100 0000
        000000000000 1110 0000
        000000000000 0111 0000
        000000011000 0000 1000
        000000001000 0000 1100
        000000000000 0000 1110
        000000000000 0000 0111
        """,
        """
        000000000000 1000 0000
        000000000000 1100 0000
        000000000000 1110 0000
        000000000000 0111 0000
        001100000000 0000 1000
        000100000000 0000 1100
        000000000000 0000 1110
        000000000000 0000 0111
        """,
    ),
    SLIDING_BOTH_WAYS: (
        """
        000011000000 1111 0000
        000001000000 1111 0000
        000000000000 1111 0000
        000000000000 0111 0000
        000000011000 0000 1111
        000000001000 0000 1111
        000000000000 0000 1111
        000000000000 0000 0111
        """,
        """
        000000000000 1111 0000
        000000000000 1111 0000
        000000000000 1111 0000
        000000000000 0111 0000
        001100000000 0000 1111
        000100000000 0000 1111
        000000000000 0000 1111
        000000000000 0000 0111
        """,
    ),
}
NAMES = ["full", "causal", "sliding", "sliding-both-ways"]


def _example() -> Blocks:
    return make_blocks(torch.tensor(IDS), torch.tensor(LEARNED).bool(), torch.tensor(ANCHORS), 4, M)


def test_the_example_by_hand():
    """Fails if a row's id, position or label differs from the example: the blocks at 9 and 4 run over their answer's
    end, the one at -1 is empty."""
    blocks = _example()
    assert blocks.ids.tolist() == [[106, M, M, M, 109, M, M, M], [200, M, M, M, 204, M, M, M]]
    assert blocks.positions.tolist() == [[6, 7, 8, 9, 9, 10, 11, 12], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert blocks.labels.tolist() == [[NO, 107, 108, 109, NO, 110, 111, NO], [NO, NO, NO, NO, NO, 205, 206, NO]]
    assert blocks.block_size == 4


def _table(text: str) -> list[list[int]]:
    return [[int(sign) for sign in line.replace(" ", "")] for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("kind", TABLES, ids=NAMES)
def test_masks_by_hand(kind):
    """Fails if a row sees one key too many or too few."""
    seen = dense_mask(_example(), CONTEXT, kind)
    assert seen.shape == (2, 1, 8, CONTEXT + 8)
    assert seen[:, 0].int().tolist() == [_table(text) for text in TABLES[kind]]


def test_a_label_never_stands_behind_its_spans_end():
    """Fails if a block learns a user turn, or the next answer of the same conversation."""
    learned = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]).bool()
    ids = torch.arange(12)[None]
    anchors = sample_anchors(learned, 100, None)
    assert anchors.tolist() == [[2, 3, 7, 8, 9]]
    labels = make_blocks(ids, learned, anchors, 4, M).labels.view(-1, 4)
    assert labels.tolist() == [[NO, 3, 4, NO], [NO, 4, NO, NO], [NO, 8, 9, 10], [NO, 9, 10, NO], [NO, 10, NO, NO]]


def _drawn(learned: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    return sample_anchors(learned, count, torch.Generator().manual_seed(seed))


def test_anchors_stand_where_something_is_learned():
    """Fails if an anchor repeats, is out of order, or is outside an answer or on its last token."""
    learned = torch.rand(6, 200, generator=torch.Generator().manual_seed(0)) < 0.7
    anchors = _drawn(learned, 16, seed=1)
    assert anchors.shape == (6, 16) and (anchors >= 0).all()
    assert (anchors.diff(dim=1) > 0).all()
    assert learned.gather(1, anchors).all() and learned.gather(1, anchors + 1).all()


def test_fewer_places_than_asked():
    """Fails if a conversation with few learned tokens gets other anchors, or reduces those of other conversations."""
    learned = torch.zeros(3, 10, dtype=torch.bool)
    learned[0, 4:7] = learned[1, 2:9] = True
    assert _drawn(learned, 4, seed=0)[0].tolist() == [-1, -1, 4, 5]
    assert (_drawn(learned, 4, seed=0)[1] >= 2).all()
    assert _drawn(learned, 4, seed=0)[2].tolist() == [-1] * 4
    assert _drawn(learned, 100, seed=0).tolist() == [[-1] * 4 + [4, 5], [2, 3, 4, 5, 6, 7], [-1] * 6]
    assert _drawn(learned[2:], 4, seed=0).tolist() == [[-1]]


def test_anchors_follow_the_seed_alone():
    """Fails if the same seed gives different anchors, or different seeds give the same anchors."""
    learned = torch.ones(2, 500, dtype=torch.bool)
    assert torch.equal(_drawn(learned, 32, seed=3), _drawn(learned, 32, seed=3))
    assert not torch.equal(_drawn(learned, 32, seed=3), _drawn(learned, 32, seed=4))


def test_anchors_are_uniform():
    """Fails if some positions are drawn more often than others: chi-square of 3 out of 10, beyond p = 0.001."""
    draws, places, count = 4000, 10, 3
    learned = torch.zeros(draws, 20, dtype=torch.bool)
    learned[:, 5 : 5 + places + 1] = True
    hits = torch.bincount(_drawn(learned, count, seed=0).flatten() - 5, minlength=places).double()
    expected = draws * count / places
    # Without replacement, the variance of the counts is smaller than that of independent draws by (n - c) / (n - 1).
    chi_square = ((hits - expected) ** 2 / expected).sum() * (places - 1) / (places - count)
    assert len(hits) == places and chi_square < 27.9


def _random_blocks(context_len: int, count: int, size: int) -> Blocks:
    generator = torch.Generator().manual_seed(context_len)
    ids = torch.randint(50, (2, context_len), generator=generator)
    learned = torch.rand(2, context_len, generator=generator) < 0.9
    return make_blocks(ids, learned, sample_anchors(learned, count, generator), size, M)


@pytest.mark.parametrize("kind", TABLES, ids=NAMES)
@pytest.mark.parametrize(("context_len", "count", "size"), [(12, 2, 4), (150, 37, 4), (256, 16, 16)])
def test_flex_attention_equals_dense(kind, context_len, count, size):
    """Fails if a row sees other keys in flex attention than in the dense mask, with full and with partial tiles.

    On a CPU, flex attention has no backward pass; that kernel follows the tile lists of the next test.
    """
    blocks = _random_blocks(context_len, count, size)
    generator = torch.Generator().manual_seed(5)
    rows = blocks.ids.shape[1]
    q = torch.randn(2, 2, rows, 16, generator=generator)
    k, v = (torch.randn(2, 1, context_len + rows, 16, generator=generator) for _ in range(2))
    mask = flex_mask(blocks, context_len, kind)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(blocks, context_len, kind), enable_gqa=True)
    assert expected.isfinite().all()
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), expected, rtol=0, atol=1e-5)


# Tile lists of the forward pass (kv) and of the backward pass (q).
TILE_LISTS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


@pytest.mark.parametrize("kind", TABLES, ids=NAMES)
@pytest.mark.parametrize(("context_len", "count", "size"), [(12, 2, 4), (700, 90, 8), (512, 64, 16)])
def test_flex_tiles_are_torchs_own(kind, context_len, count, size):
    """Fails if a tile is missing, is marked full though it is not, or is visited for nothing. Only the compiled kernel
    uses the tiles; eager flex attention does not."""
    blocks = _random_blocks(context_len, count, size)
    made = flex_mask(blocks, context_len, kind)
    rows = blocks.ids.shape[1]
    expected = create_block_mask(made.mask_mod, 2, None, rows, context_len + rows, device="cpu")
    assert made.shape == expected.shape and made.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in TILE_LISTS:
        one, other = getattr(made, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor created."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, list | tuple) else [out]:
            self.numel = max(self.numel, one.numel() if isinstance(one, torch.Tensor) else 0)
        return out


def test_flex_masks_are_never_held_as_a_whole():
    """Fails if making a BlockMask evaluates all rows x keys at once, more than a gigabyte at the paper's sizes."""
    blocks = _random_blocks(2048, 256, 16)
    rows = blocks.ids.shape[1]
    with _Largest() as largest:
        flex_mask(blocks, 2048, SLIDING)
    assert 0 < largest.numel < rows * (2048 + rows) * len(IDS) / 4


@pytest.mark.parametrize("kind", [FULL, CAUSAL, SLIDING, SLIDING_BOTH_WAYS], ids=str)
def test_split_attention_is_that_of_the_dense_mask(kind):
    """Fails if a row sees other keys than in the dense mask, or a gradient differs."""
    blocks = _example()
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, length, 8, generator=generator, requires_grad=True) for heads, length in _QKV)
    factors = torch.randn(2, 6, 8, 8, generator=generator)
    found = []
    for out in (
        F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(blocks, CONTEXT, kind), enable_gqa=True),
        split_attention(blocks, CONTEXT, kind)(q, k, v),
    ):
        found.append((out, *torch.autograd.grad((out * factors).sum(), (q, k, v))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
