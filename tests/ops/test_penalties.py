"""Penalties of a block's rows against plain Python, token by token. `tests/host` compares with SGLang's penalizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.ops import BlockRows, Emitted, EmittedTokens, PenaltyParams, penalties_of
from sglang_dflash.ops import penalize as penalize_rows

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def make_params(
    frequency: list[float],
    presence: list[float],
    repetition: list[float],
    min_new_tokens: list[int] | None = None,
    stop_ids: list[list[int]] | None = None,
) -> PenaltyParams:
    count = len(frequency)
    return PenaltyParams(
        torch.tensor(frequency),
        torch.tensor(presence),
        torch.tensor(repetition),
        torch.tensor(min_new_tokens or [0] * count),
        torch.tensor(stop_ids or [[0]] * count),
    )


def make_emitted(emitted: list[list[int]], frequency: list[float], vocab_size: int, padding: int = 0) -> Emitted:
    """`Emitted` from the definition of its fields; shorter lists are padded with `padding`."""
    most = max(map(len, emitted))
    seen = torch.zeros(len(emitted), vocab_size, dtype=torch.bool)
    sums = torch.zeros(len(emitted), vocab_size)
    for row, tokens in enumerate(emitted):
        for token in tokens:
            seen[row, token] = True
            sums[row, token] += torch.tensor(frequency[row])
    ids = torch.tensor([tokens + [padding] * (most - len(tokens)) for tokens in emitted], dtype=torch.int64)
    return Emitted(ids.view(len(emitted), most), seen, sums, torch.tensor([len(tokens) for tokens in emitted]))


def row_by_hand(logits: torch.Tensor, emitted: list[int], params: PenaltyParams, request: int) -> np.ndarray:
    """Penalizes one row in float32, token by token."""
    row = logits.numpy().copy()
    frequency, presence, repetition = (np.float32(x[request]) for x in params[:3])
    for token in set(emitted):
        times = np.float32(0)
        for _ in range(emitted.count(token)):
            times = times + frequency
        x = np.float32(np.float32(row[token] - times) - presence)
        row[token] = x * repetition if x < 0 else x / repetition
    if len(emitted) < params.min_new_tokens[request]:
        row[params.stop_ids[request].numpy()] = -np.inf
    return row


def draw_params(data, emitting: int, vocab_size: int, generator: torch.Generator) -> PenaltyParams:
    values = st.lists(st.floats(-2, 2, width=32), min_size=emitting, max_size=emitting)
    return make_params(
        data.draw(values),
        data.draw(values),
        [abs(value) + 0.01 for value in data.draw(values)],
        data.draw(st.lists(st.integers(0, 14), min_size=emitting, max_size=emitting)),
        torch.randint(vocab_size, (emitting, 3), generator=generator).tolist(),
    )


@EXAMPLES
@given(data=st.data())
def test_rows_equal_a_token_by_token_count(data):
    """Fails where a row counts a draft that comes after it, counts one twice, ignores an emitted token, or changes any
    bit of another request."""
    width, vocab_size = data.draw(st.integers(2, 16)), data.draw(st.integers(17, 500))
    batch = data.draw(st.integers(1, 5))
    requests = data.draw(st.permutations(range(batch)).map(lambda order: order[: 1 + order[0]]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    few = data.draw(st.integers(1, vocab_size))  # with few ids, many occur twice in a block
    logits = torch.randn(batch, width, vocab_size, generator=generator) * 5
    block_ids = torch.randint(few, (len(requests), width), generator=generator)
    emitted = [
        torch.randint(few, (data.draw(st.integers(0, 9)),), generator=generator).tolist()
        + data.draw(
            st.sampled_from([[anchor], [anchor], []])  # []: nothing emitted, the anchor is the prompt's last token
        )
        for anchor in block_ids[:, 0].tolist()
    ]
    params = draw_params(data, len(requests), vocab_size, generator)
    counted = make_emitted(emitted, params.frequency.tolist(), vocab_size, data.draw(st.integers(0, vocab_size - 1)))
    before = logits.clone()
    penalize(logits, torch.tensor(requests), block_ids, counted, params)
    for request in set(range(batch)) - set(requests):
        assert torch.equal(logits[request], before[request])
    for place, request in enumerate(requests):
        for row in range(width):
            so_far = emitted[place] + block_ids[place, 1 : row + 1].tolist()
            expected = row_by_hand(before[request, row], so_far, params, place)
            assert logits[request, row].numpy().tolist() == expected.tolist(), (request, row)


@EXAMPLES
@given(data=st.data())
def test_some_rows_of_blocks(data):
    """Fails where a row of a request with fewer rows is penalised as another one, or where a place that is not verified
    changes a row."""
    lens = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    requests = data.draw(st.permutations(range(len(lens))).map(lambda order: order[: 1 + order[0]]))
    width, vocab_size = 8, data.draw(st.integers(17, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    few = data.draw(st.integers(1, vocab_size))
    starts = [sum(lens[:request]) for request in range(len(lens) + 1)]
    logits = torch.randn(starts[-1], vocab_size, generator=generator) * 5
    ids = torch.randint(few, (len(requests), width), generator=generator)
    emitted = [
        [*torch.randint(few, (data.draw(st.integers(0, 9)),), generator=generator).tolist(), int(anchor)]
        for anchor in ids[:, 0]
    ]
    params = draw_params(data, len(requests), vocab_size, generator)
    any_row = torch.randint(starts[-1], (len(requests), width), generator=generator)
    counts = torch.tensor([lens[request] for request in requests])
    own = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(width)
    rows = torch.where(torch.arange(width) < counts[:, None], own, any_row)
    before = logits.clone()
    counted = make_emitted(emitted, params.frequency.tolist(), vocab_size, 5)
    penalize_rows(logits, BlockRows(rows, ids, counts), counted, params)
    for place, request in enumerate(requests):
        for row in range(lens[request]):
            so_far = emitted[place] + ids[place, 1 : row + 1].tolist()
            expected = row_by_hand(before[starts[request] + row], so_far, params, place)
            assert logits[starts[request] + row].numpy().tolist() == expected.tolist(), (request, row)
    for request in set(range(len(lens))) - set(requests):
        assert torch.equal(logits[starts[request] : starts[request + 1]], before[starts[request] : starts[request + 1]])


def penalize(
    logits: torch.Tensor, requests: torch.Tensor, ids: torch.Tensor, emitted: Emitted, params: PenaltyParams
) -> None:
    """Of whole blocks. logits: [B, W, V]; ids: [P, W]."""
    penalize_rows(logits.flatten(0, 1), BlockRows.whole(requests, ids), emitted, params)


def test_a_block_by_hand():
    """Fails where a value differs from the one worked out by hand: token 3 emitted once and drafted twice, token 1
    drafted once."""
    logits = torch.full((1, 4, 5), 6.0)
    params = make_params([1.0], [0.5], [2.0])
    penalize(logits, torch.tensor([0]), torch.tensor([[3, 3, 1, 3]]), make_emitted([[3]], [1.0], 5), params)
    assert logits[0, :, 3].tolist() == [2.25, 1.75, 1.75, 1.25]
    assert logits[0, :, 1].tolist() == [6.0, 6.0, 2.25, 2.25]
    assert logits[0][:, [0, 2, 4]].unique().tolist() == [6.0]


def test_a_negative_logit_is_multiplied():
    """Fails where a repetition penalty raises a negative logit."""
    logits = torch.tensor([[[-2.0, 2.0, 0.0]] * 2])
    penalize(
        logits, torch.tensor([0]), torch.tensor([[0, 1]]), make_emitted([[0]], [0.0], 3), make_params([0.0], [0.0], [2])
    )
    assert logits.tolist() == [[[-4.0, 2.0, 0.0], [-4.0, 1.0, 0.0]]]


def test_the_minimum_ends_inside_a_block():
    """Fails where stop ids are masked one row too few or too many: of the minimum of 4 tokens 2 are emitted, so the row
    after the second draft may stop."""
    logits = torch.zeros(2, 4, 6)
    params = make_params([0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [4, 2], [[5, 2], [5, 5]])
    penalize(
        logits,
        torch.tensor([1, 0]),
        torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]),
        make_emitted([[4, 1], [0, 0]], [0.0, 0.0], 6),
        params,
    )
    masked = logits.isneginf()
    assert masked[1].nonzero().tolist() == [[0, 2], [0, 5], [1, 2], [1, 5]]
    assert not masked[0].any()


def test_neutral_parameters_change_no_bit():
    """Fails where another request's penalties change a request with neutral ones, or where an infinity or a NaN
    changes."""
    logits = torch.randn(3, 3, 40)
    logits[0, :, 3], logits[1, :, :9], logits[1, :, 9:12] = torch.inf, torch.nan, -torch.inf
    logits[2, 1] = 1e38
    before = logits.clone()
    params = make_params([0.0, 2.0], [0.0, -2.0], [1.0, 0.3], [0, 99])
    block_ids = torch.tensor([[3, 4, 3], [5, 5, 5]])
    penalize(logits, torch.tensor([0, 2]), block_ids, make_emitted([[3], [5]], [0.0, 2.0], 40), params)
    assert torch.equal(logits[:2].view(torch.int32), before[:2].view(torch.int32))
    assert not torch.equal(logits[2], before[2])


@pytest.mark.parametrize("layout", ["a slice of a padded vocabulary", "columns first"])
def test_logits_need_not_be_contiguous(layout):
    """Fails where strided float32 logits raise or are copied: the host passes slices and gathered columns."""
    width, vocab_size = 3, 10
    own = torch.randn(2 * width, 64) if layout.startswith("a slice") else torch.randn(vocab_size, 2 * width).T
    logits = own[:, :vocab_size].view(2, width, vocab_size)  # `flatten` keeps it a view
    assert not logits.is_contiguous()
    expected, rest = logits.contiguous(), own[:, vocab_size:].clone()
    block_ids, params = torch.tensor([[3, 4, 3]]), make_params([0.7], [0.2], [1.3], [9], [[1]])
    for target in (logits, expected):
        penalize(target, torch.tensor([1]), block_ids, make_emitted([[3]], [0.7], vocab_size), params)
    assert torch.equal(own[:, :vocab_size].reshape(2, width, vocab_size), expected)
    assert torch.equal(own[:, vocab_size:], rest)


@EXAMPLES
@given(data=st.data())
def test_penalties_of_one_row(data):
    """Fails where the two parts, added and then scaled, give other logits than the first row of a block."""
    count, vocab_size = data.draw(st.integers(1, 4)), data.draw(st.integers(17, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    emitted = data.draw(st.lists(tokens, min_size=count, max_size=count))
    # With quarters, sums and differences are exact, so the order of additions does not matter.
    values = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=count, max_size=count)
    frequency, presence = data.draw(values), data.draw(values)
    params = make_params(
        frequency,
        presence,
        [abs(value) + 0.25 for value in data.draw(values)],
        data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)),
        torch.randint(vocab_size, (count, 2), generator=generator).tolist(),
    )
    logits = torch.randint(-40, 40, (count, vocab_size), generator=generator) / 4
    additive, scaling = penalties_of(make_emitted(emitted, frequency, vocab_size), params)
    assert additive.dtype == scaling.dtype == torch.float32
    x = logits + additive
    x = torch.where(x < 0, x * scaling, x / scaling)
    for request in range(count):
        expected = row_by_hand(logits[request], emitted[request], params, request)
        assert x[request].numpy().tolist() == expected.tolist()


class Model:
    """A model of `EmittedTokens` with Python lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.frequency: dict[int, float] = {}

    def check(self, ours: EmittedTokens, rows: list[int], most: int, vocab_size: int) -> None:
        got = ours.of(torch.tensor(rows), most)
        expected = make_emitted([self.tokens[row] for row in rows], [self.frequency[row] for row in rows], vocab_size)
        assert got.ids.dtype == got.lens.dtype == torch.int64
        assert torch.equal(got.lens, expected.lens)
        assert torch.equal(got.seen, expected.seen)
        assert torch.equal(got.sums, expected.sums)
        for row, ids in zip(rows, got.ids.tolist(), strict=True):
            assert set(self.tokens[row]) <= set(ids)
            assert all(0 <= token < vocab_size for token in ids)


@EXAMPLES
@given(data=st.data())
def test_emitted_tokens_are_lists(data):
    """Fails where a token is lost when rows or columns are added, a restarted row keeps a token, or an id beyond the
    accepted ones counts."""
    vocab_size = data.draw(st.integers(3, 30))
    ours, model = EmittedTokens(vocab_size, "cpu"), Model()
    token = st.integers(0, vocab_size - 1)
    for _ in range(data.draw(st.integers(1, 25))):
        if not model.tokens or data.draw(st.integers(0, 3)) == 0:
            row = data.draw(st.integers(0, 9))
            model.tokens[row] = data.draw(st.lists(token, max_size=20))
            model.frequency[row] = data.draw(st.floats(-2, 2, width=32))
            ours.start(row, torch.tensor(model.tokens[row], dtype=torch.int64), model.frequency[row])
        else:
            rows = data.draw(st.lists(st.sampled_from(sorted(model.tokens)), min_size=1, unique=True))
            width = data.draw(st.sampled_from([1, 2, 5, 16]))
            ids = [data.draw(st.lists(token, min_size=width, max_size=width)) for _ in rows]
            lens = [data.draw(st.integers(0, width)) for _ in rows]
            most = max(len(model.tokens[row]) for row in rows) + data.draw(st.integers(0, width))
            neutral = [0.0] * len(rows)
            params = make_params([model.frequency[row] for row in rows], neutral, neutral)
            requests = torch.arange(len(rows))
            counts = torch.tensor(lens, dtype=torch.int32)
            ours.append(requests, torch.tensor(rows), torch.tensor(ids), counts, most, params)
            for row, new, length in zip(rows, ids, lens, strict=True):
                model.tokens[row] += new[:length]
        known = sorted(model.tokens)
        most = max(len(tokens) for tokens in model.tokens.values())
        model.check(ours, known[::-1], most + data.draw(st.integers(0, 3)), vocab_size)


def test_no_requests():
    """Fails where an empty batch raises."""
    nothing = torch.empty(0, dtype=torch.int64)
    params = PenaltyParams(*(torch.empty(0),) * 3, nothing, torch.empty(0, 1, dtype=torch.int64))
    ours = EmittedTokens(5, "cpu")
    ours.append(nothing, nothing, torch.empty(0, 4, dtype=torch.int64), nothing, 3, params)
    logits = torch.zeros(2, 4, 5)
    no_ids = torch.empty(0, 4, dtype=torch.int64)
    penalize(logits, nothing, no_ids, ours.of(nothing, 3), params)
    ours.penalize(logits.view(8, 5), BlockRows.whole(nothing, no_ids), nothing, 3, params)
    assert not logits.any()
