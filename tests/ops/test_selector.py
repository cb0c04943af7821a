"""DFlash2's ops against loops: candidates and their ties, scores of pairs, the walk, and the convolution in a block."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash import ops


def _best(logits: list[float], count: int) -> list[int]:
    """The ids of the `count` largest logits, the lowest of equals, rising."""
    return sorted(sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "count"), [(5, 40, 16), (3, 16, 16), (1, 7, 1), (0, 9, 4)])
def test_candidates_against_a_sort(rows: int, vocab: int, count: int, dtype: torch.dtype) -> None:
    """Fails where a candidate is missed, or a tie at the cut goes to a higher id: most of these logits tie."""
    logits = torch.randint(-3, 3, (rows, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[:1, vocab // 2 :] = float("-inf")
    values, ids = ops.top_candidates(logits, count)
    assert values.dtype == dtype and ids.dtype == torch.int64 and ids.shape == (rows, count)
    assert ids.tolist() == [_best(row, count) for row in logits.tolist()]
    assert torch.equal(values, logits.gather(1, ids))


def test_candidates_without_ties() -> None:
    """Fails where values do not follow their ids."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    values, ids = ops.top_candidates(logits, 16)
    assert ids.tolist() == [_best(row, 16) for row in logits.tolist()]
    assert torch.equal(values, logits.gather(1, ids))


def test_logits_as_the_selector_adds_them() -> None:
    """Fails where factor and cap come in another order, or the caller's logits change."""
    values = torch.tensor([[1.0, -2.0, 30.0]])
    assert torch.equal(ops.candidate_logits(values, 2.0, None), torch.tensor([[2.0, -4.0, 60.0]]))
    expected = 3.0 * torch.tanh(torch.tensor([[2.0, -4.0, 60.0]]) / 3.0)
    assert torch.equal(ops.candidate_logits(values, 2.0, 3.0), expected)
    assert values.tolist() == [[1.0, -2.0, 30.0]]


def _walk_in_loops(
    candidates: ops.Candidates, keys: torch.Tensor, anchor: int, predecessors: torch.Tensor, successors: torch.Tensor
) -> tuple[list[int], list[float]]:
    """The same walk for one request, one row and candidate at a time; keys: [S, r]. Its ids and their chances."""
    path, chances, previous = [], [], anchor
    for logits, tokens, key in zip(candidates.values.tolist(), candidates.ids.tolist(), keys, strict=True):
        scores = {
            token: logit + float((predecessors[previous] * key * successors[token]).sum())
            for logit, token in zip(logits, tokens, strict=True)
        }
        previous = min(scores, key=lambda token: (-scores[token], token))
        path.append(previous)
        chances.append(1 / sum(math.exp(score - scores[previous]) for score in scores.values()))
    return path, chances


@pytest.mark.parametrize(("batch", "slots", "count", "rank"), [(1, 1, 1, 1), (3, 7, 4, 5), (2, 3, 16, 2)])
def test_walk_against_loops(batch: int, slots: int, count: int, rank: int) -> None:
    """Fails where a row follows another row's choice, the anchor is not the first predecessor, a tie goes to a higher
    id, or a chance is another row's or another candidate's: the small integers make many scores tie."""
    generator = torch.Generator().manual_seed(slots)
    vocab = 20

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    predecessors, successors, keys = draw(vocab, rank), draw(vocab, rank), draw(batch, slots, rank)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:count].sort().values for _ in range(batch * slots)])
    values, anchors = draw(batch * slots, count), torch.randint(vocab, (batch,), generator=generator)
    candidates = ops.Candidates(values, ids)
    walked, log_probs = ops.greedy_walk(candidates, keys.flatten(0, 1), anchors, predecessors, successors)
    assert walked.dtype == torch.int64 and walked.shape == (batch, slots)
    assert log_probs.dtype == torch.float32 and log_probs.shape == (batch, slots)
    for request, anchor in enumerate(anchors.tolist()):
        rows = slice(request * slots, (request + 1) * slots)
        own = ops.Candidates(values[rows], ids[rows])
        expected, chances = _walk_in_loops(own, keys[request], anchor, predecessors, successors)
        assert walked[request].tolist() == expected
        assert log_probs[request].exp().tolist() == pytest.approx(chances, rel=1e-5)


def test_a_better_first_choice_can_lose() -> None:
    """Fails where the walk takes each row's best logit: here the pair (4, 7) outweighs it."""
    candidates = ops.Candidates(torch.tensor([[1.0, 2.0], [5.0, 4.0]]), torch.tensor([[3, 4], [6, 7]]))
    predecessors, successors = torch.zeros(8, 1), torch.zeros(8, 1)
    predecessors[4], successors[7] = 1.0, 3.0
    keys = torch.ones(2, 1)
    ids, log_probs = ops.greedy_walk(candidates, keys, torch.tensor([0]), predecessors, successors)
    assert ids.tolist() == [[4, 7]]
    rows = torch.tensor([[1.0, 2.0], [5.0, 4.0 + 3.0]])
    assert torch.allclose(log_probs[0], rows.softmax(-1).log()[:, 1])
    ids, log_probs = ops.greedy_walk(candidates, 0 * keys, torch.tensor([0]), predecessors, successors)
    assert ids.tolist() == [[4, 6]]
    assert torch.allclose(log_probs[0], candidates.values.softmax(-1).log().amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chances_are_float32_and_never_nan(dtype: torch.dtype) -> None:
    """Fails where a row without a finite maximum gives a NaN, which would spoil the plan of every request, or where
    codebooks of another dtype give chances of that dtype."""
    inf = float("inf")
    candidates = ops.Candidates(torch.tensor([[-inf, -inf], [1.0, inf], [0.0, 0.0]]), torch.tensor([[1, 2]] * 3))
    tables = torch.zeros(3, 1, dtype=dtype), torch.zeros(3, 1, dtype=dtype)
    ids, log_probs = ops.greedy_walk(candidates, torch.zeros(3, 1, dtype=dtype), torch.tensor([0, 0, 0]), *tables)
    assert ids.tolist() == [[1], [2], [1]]
    assert log_probs.dtype == torch.float32
    assert log_probs[:2].isneginf().all()
    assert log_probs[2].exp().tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "size", "taps"), [(2, 4, 2), (3, 3, 3), (1, 2, 4), (4, 1, 2), (0, 4, 2)])
def test_convolution_against_loops(blocks: int, size: int, taps: int, dtype: torch.dtype) -> None:
    """Fails where a row reads the block before its own, a tap reads another row, or a group another group's kernel."""
    generator = torch.Generator().manual_seed(taps)
    rows, groups, width = blocks * size, 3, 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)  # small integers: exact in any order

    x, delta, base = draw(rows, groups * width), draw(rows, taps, groups), draw(taps, groups * width)
    expected = torch.zeros(rows, groups * width)
    for row in range(rows):
        for channel in range(groups * width):
            for tap in range(min(taps, row % size + 1)):
                kernel = base[tap, channel] + delta[row, tap, channel // width]
                expected[row, channel] += (kernel * x[row - tap, channel]).float()
    out = ops.grouped_conv(x, delta, base, size)
    assert out.dtype == dtype and torch.equal(out.float(), expected)
