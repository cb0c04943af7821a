"""The reference ops, each against a slow, independent computation."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from sglang_dflash.ops.reference import (
    accept_greedy,
    block_layout,
    context_kv,
    extend_positions,
    gather_slots,
    rms_norm,
    rope_neox,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def _table(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A `req_to_token` in which no slot occurs twice."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(rows * columns, generator=generator) + 1).view(rows, columns).int()


def _cos_sin(positions: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).double(), _frequencies(rotary_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def _frequencies(rotary_dim: int) -> torch.Tensor:
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)


def _complex_rope(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """In float64: element i of the first half and element i of the second are one complex number, which is rotated."""
    x = x.double()
    half = rotary_dim // 2
    numbers = torch.complex(x[..., :half], x[..., half:rotary_dim])
    angles = torch.outer(positions.double(), _frequencies(rotary_dim))
    turns = torch.polar(torch.ones_like(angles), angles)
    numbers = numbers * turns.view(len(x), *([1] * (x.dim() - 2)), half)
    return torch.cat((numbers.real, numbers.imag, x[..., rotary_dim:]), dim=-1)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gather_slots_reads_each_requests_own_row(index_dtype):
    """Fails where a slot comes from another row or column."""
    table = _table(5, 11)
    rows = torch.tensor([4, 0, 4], dtype=index_dtype)
    positions = torch.tensor([[0, 10], [3, 2], [9, 9]])
    slots = gather_slots(table, rows, positions)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        [int(table[r, p]) for p in ps] for r, ps in zip(rows.tolist(), positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("prefix_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [2, 7])
def test_block_layout_is_the_bonus_and_masks_after_the_prefix(block_size, prefix_dtype):
    """Fails where the bonus is not at position prefix_len, or a mask is not right after it."""
    table = _table(4, 20)
    bonus_ids = torch.tensor([70, 71, 72])
    prefix_lens = torch.tensor([0, 13, 5], dtype=prefix_dtype)
    rows = torch.tensor([2, 3, 1])
    ids, positions, slots = block_layout(bonus_ids, prefix_lens, rows, table, block_size, mask_token_id=99)
    assert ids.dtype == positions.dtype == slots.dtype == torch.int64
    for b in range(3):
        prefix, row = int(prefix_lens[b]), int(rows[b])
        assert ids[b].tolist() == [int(bonus_ids[b])] + [99] * (block_size - 1)
        assert positions[b].tolist() == list(range(prefix, prefix + block_size))
        assert slots[b].tolist() == table[row, prefix : prefix + block_size].tolist()


def test_block_layout_of_an_empty_batch():
    """Fails where an empty batch raises or returns rows."""
    nothing = torch.empty(0, dtype=torch.int64)
    for part in block_layout(nothing, nothing, nothing, _table(2, 20), 4, mask_token_id=99):
        assert part.shape == (0, 4)
        assert part.dtype == torch.int64


@pytest.mark.parametrize(
    ("prefix_lens", "row_lens", "expected"),
    [
        ([], [], []),
        ([0], [3], [0, 1, 2]),
        ([5, 0, 2], [2, 1, 3], [5, 6, 0, 2, 3, 4]),
        ([5, 7], [0, 2], [7, 8]),
    ],
)
def test_extend_positions(prefix_lens, row_lens, expected):
    """Fails where a row's position is not its request's prefix plus its index."""
    positions = extend_positions(prefix_lens, row_lens)
    assert positions.dtype == torch.int64
    assert positions.tolist() == expected


def test_extend_positions_needs_a_length_per_request():
    """Fails where a missing length drops a request's rows without an error."""
    with pytest.raises(ValueError):
        extend_positions([0, 1], [2])


def _accept_by_hand(logits: list[list[float]], ids: list[int]) -> tuple[list[int], int, int]:
    """Commits token by token, like a target that sees one row at a time."""
    committed = []
    for row, following in zip(logits, [*ids[1:], None], strict=True):
        committed.append(row.index(max(row)))  # `index` gives the lowest id of a tie
        if committed[-1] != following:
            break
    return committed + [0] * (len(ids) - len(committed)), len(committed), committed[-1]


@pytest.mark.parametrize(("vocab", "width"), [(2, 2), (2, 3), (3, 2)])
def test_acceptance_on_every_small_vocabulary(vocab, width):
    """Fails where any drafts and logits, ties included, commit other ids than a token-by-token target does."""
    levels = (-1.0, 2.0)
    all_logits = list(itertools.product(itertools.product(levels, repeat=vocab), repeat=width))
    all_ids = list(itertools.product(range(vocab), repeat=width))
    cases = list(itertools.product(all_logits, all_ids))
    accepted = accept_greedy(torch.tensor([c[0] for c in cases]), torch.tensor([c[1] for c in cases]))
    assert accepted.out_ids.dtype == torch.int64
    assert accepted.commit_lens.dtype == torch.int32
    assert accepted.bonus_ids.dtype == torch.int64
    assert set(accepted.commit_lens.tolist()) == set(range(1, width + 1))
    for case, out, length, bonus in zip(
        cases, accepted.out_ids.tolist(), accepted.commit_lens.tolist(), accepted.bonus_ids.tolist(), strict=True
    ):
        logits, ids = [list(row) for row in case[0]], list(case[1])
        assert (out, length, bonus) == _accept_by_hand(logits, ids), case


@DTYPES
@pytest.mark.parametrize("width", [2, 5, 8])
def test_acceptance_of_every_length(width, dtype):
    """Fails where a block with its first wrong draft at a known place commits other ids."""
    generator = torch.Generator().manual_seed(width)
    vocab = 50
    target_ids = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(width)])
    logits = F.one_hot(target_ids, vocab).to(dtype)
    ids = torch.cat((torch.full((width, 1), 7), target_ids[:, :-1]), dim=1)
    for accept_len in range(width - 1):
        ids[accept_len, accept_len + 1] = (ids[accept_len, accept_len + 1] + 1) % vocab  # later drafts stay right
    accepted = accept_greedy(logits, ids)
    assert accepted.commit_lens.tolist() == list(range(1, width + 1))
    assert accepted.bonus_ids.tolist() == target_ids.diagonal().tolist()
    for accept_len, out in enumerate(accepted.out_ids.tolist()):
        assert out == target_ids[accept_len, : accept_len + 1].tolist() + [0] * (width - 1 - accept_len)


def test_acceptance_of_an_empty_batch():
    """Fails where an empty batch raises or loses its width."""
    accepted = accept_greedy(torch.empty(0, 4, 9), torch.empty(0, 4, dtype=torch.int64))
    assert accepted.out_ids.shape == (0, 4)
    assert accepted.commit_lens.shape == accepted.bonus_ids.shape == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_speculation_commits_the_targets_own_text(seed):
    """Fails where decoding with random drafts gives another text than greedy decoding of the target."""
    generator = torch.Generator().manual_seed(seed)
    vocab, width, length = 4, 4, 60
    table = torch.randint(0, 3, (vocab, vocab, vocab), generator=generator).float()  # by the last two tokens; ties
    alone = [1, 2]
    while len(alone) < length:
        alone.append(table[alone[-2], alone[-1]].tolist().index(table[alone[-2], alone[-1]].max()))
    text, seen = [1, 2], set()
    while len(text) < length:
        drafts = torch.randint(0, vocab, (width - 1,), generator=generator)
        right = torch.rand(width - 1, generator=generator) < 0.7
        drafts = torch.where(right, torch.tensor((alone + [0] * width)[len(text) : len(text) + width - 1]), drafts)
        ids = [text[-1], *drafts.tolist()]
        logits = torch.stack([table[before, last] for before, last in itertools.pairwise([text[-2], *ids])])
        accepted = accept_greedy(logits[None], torch.tensor([ids]))
        commit_len = int(accepted.commit_lens[0])
        seen.add(commit_len)
        text += accepted.out_ids[0, :commit_len].tolist()
        assert text[-1] == int(accepted.bonus_ids[0])
    assert text[:length] == alone
    assert len(seen) >= 3, "the drafts are too good or too bad to test anything"


@DTYPES
def test_rms_norm_is_computed_in_float32(dtype):
    """Fails where the mean or the product is rounded to the input's dtype in between."""
    torch.manual_seed(0)
    x, weight = (10 * torch.randn(7, 3, 33)).to(dtype), torch.randn(33).to(dtype)
    wide = F.rms_norm(x.double(), (33,), weight.double(), eps=1e-5)
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    # One rounding of the result, plus float32 rounding errors.
    tolerance = (torch.finfo(dtype).eps / 2 + 1e-6) * wide.abs() + 1e-7
    assert bool(((normed.double() - wide).abs() <= tolerance).all())


def test_rms_norm_of_zeros():
    """Fails where a zero row gives NaN or infinity."""
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


@DTYPES
@pytest.mark.parametrize("rotary_dim", [32, 24, 2])
@pytest.mark.parametrize("shape", [(9, 32), (9, 3, 32), (9, 2, 3, 32), (0, 3, 32)])
def test_rope_rotates_complex_numbers(shape, rotary_dim, dtype):
    """Fails where elements are paired wrongly, an angle is wrong, or a dimension beyond the rotary ones changes."""
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    positions = torch.randperm(40)[: shape[0]]
    turned = rope_neox(x, positions, _cos_sin(40, rotary_dim))
    assert turned.dtype == dtype and turned.shape == x.shape
    exact = _complex_rope(x, positions, rotary_dim)
    # Cosine, product and sum are each rounded to the dtype; the pair's length bounds all three roundings.
    tolerance = 4 * torch.finfo(dtype).eps * x.double().abs().amax() if x.numel() else 0.0
    assert bool(((turned.double() - exact).abs() <= tolerance).all())
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_at_position_zero_changes_nothing():
    """Fails where sines and cosines are swapped in the table."""
    x = torch.randn(4, 2, 16)
    assert torch.equal(rope_neox(x, torch.zeros(4, dtype=torch.int64), _cos_sin(3, 16)), x)


def _context_kv_by_layer(
    features: torch.Tensor,
    weights: list[tuple[torch.Tensor, torch.Tensor]],
    biases: list[tuple[torch.Tensor, torch.Tensor]] | None,
    k_norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    rotary_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer by layer, as a transformer computes its own keys and values."""
    heads, dim = k_norm_weight.shape[1:]
    keys, values = [], []
    for layer, (k_weight, v_weight) in enumerate(weights):
        k_bias, v_bias = biases[layer] if biases else (None, None)
        k = F.linear(features, k_weight, k_bias).unflatten(-1, (heads, dim))
        k = F.rms_norm(k, (dim,), k_norm_weight[layer, 0], eps)
        keys.append(_complex_rope(k, positions, rotary_dim).to(features.dtype))
        values.append(F.linear(features, v_weight, v_bias).unflatten(-1, (heads, dim)))
    return torch.stack(keys), torch.stack(values)


@DTYPES
@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("with_bias", [False, True])
def test_context_kv_is_each_layers_own_projection(with_bias, rows, dtype):
    """Fails where the stacked product mixes up layers, heads, keys or values, or norm or rope is wrong."""
    torch.manual_seed(2)
    layers, heads, dim, hidden, eps, rotary_dim = 3, 2, 16, 24, 1e-6, 16
    features = torch.randn(rows, hidden).to(dtype)
    weights = [
        (torch.randn(heads * dim, hidden).to(dtype), torch.randn(heads * dim, hidden).to(dtype)) for _ in range(3)
    ]
    biases = [(torch.randn(heads * dim).to(dtype), torch.randn(heads * dim).to(dtype)) for _ in range(3)]
    norms = torch.randn(layers, dim).to(dtype)
    positions = torch.randperm(50)[:rows]
    k, v = context_kv(
        features,
        torch.stack([torch.stack(pair) for pair in weights]).view(layers, 2, heads, dim, hidden),
        torch.stack([torch.stack(pair) for pair in biases]).view(layers, 2, heads, dim) if with_bias else None,
        norms,
        eps,
        positions,
        _cos_sin(50, rotary_dim),
    )
    assert k.shape == v.shape == (layers, rows, heads, dim)
    assert k.dtype == v.dtype == dtype

    def by_layer(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return _context_kv_by_layer(
            features.to(kind),
            [(a.to(kind), b.to(kind)) for a, b in weights],
            [(a.to(kind), b.to(kind)) for a, b in biases] if with_bias else None,
            norms.to(kind)[:, None].expand(layers, heads, dim),
            eps,
            positions,
            rotary_dim,
        )

    for ours, same_dtype, exact in zip((k, v), by_layer(dtype), by_layer(torch.float64), strict=True):
        if rows == 0:
            continue
        error = (ours.double() - exact).abs().max()
        allowed = 2 * (same_dtype.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert error <= allowed, (error, allowed)
