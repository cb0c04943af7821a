"""DFlash2's ops against loops: candidates and their ties, scores of pairs, the walk, and the convolution in a block."""

from __future__ import annotations

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
) -> list[int]:
    """The same walk for one request, one row and candidate at a time; keys: [S, r]."""
    path, previous = [], anchor
    for logits, tokens, key in zip(candidates.values.tolist(), candidates.ids.tolist(), keys, strict=True):
        scores = {
            token: logit + float((predecessors[previous] * key * successors[token]).sum())
            for logit, token in zip(logits, tokens, strict=True)
        }
        previous = min(scores, key=lambda token: (-scores[token], token))
        path.append(previous)
    return path


@pytest.mark.parametrize(("batch", "slots", "count", "rank"), [(1, 1, 1, 1), (3, 7, 4, 5), (2, 3, 16, 2)])
def test_walk_against_loops(batch: int, slots: int, count: int, rank: int) -> None:
    """Fails where a row follows another row's choice, the anchor is not the first predecessor, or a tie goes to a
    higher id: the small integers make many scores tie."""
    generator = torch.Generator().manual_seed(slots)
    vocab = 20

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    predecessors, successors, keys = draw(vocab, rank), draw(vocab, rank), draw(batch, slots, rank)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:count].sort().values for _ in range(batch * slots)])
    values, anchors = draw(batch * slots, count), torch.randint(vocab, (batch,), generator=generator)
    candidates = ops.Candidates(values, ids)
    walked = ops.greedy_walk(candidates, keys.flatten(0, 1), anchors, predecessors, successors)
    assert walked.dtype == torch.int64 and walked.shape == (batch, slots)
    for request, anchor in enumerate(anchors.tolist()):
        rows = slice(request * slots, (request + 1) * slots)
        own = ops.Candidates(values[rows], ids[rows])
        expected = _walk_in_loops(own, keys[request], anchor, predecessors, successors)
        assert walked[request].tolist() == expected


def test_a_better_first_choice_can_lose() -> None:
    """Fails where the walk takes each row's best logit: here the pair (4, 7) outweighs it."""
    candidates = ops.Candidates(torch.tensor([[1.0, 2.0], [5.0, 4.0]]), torch.tensor([[3, 4], [6, 7]]))
    predecessors, successors = torch.zeros(8, 1), torch.zeros(8, 1)
    predecessors[4], successors[7] = 1.0, 3.0
    keys = torch.ones(2, 1)
    assert ops.greedy_walk(candidates, keys, torch.tensor([0]), predecessors, successors).tolist() == [[4, 7]]
    assert ops.greedy_walk(candidates, 0 * keys, torch.tensor([0]), predecessors, successors).tolist() == [[4, 6]]


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
