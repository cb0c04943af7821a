"""A captured model's forward, where only some rows' hidden states are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_cpu.captured import CapturedLayers, rows_of
from sglang_cpu.compiled import last_rows

ROWS, WIDTH = 9, 8
POSITIONS = torch.arange(ROWS)


class Layers(torch.nn.Module):
    """Two layers without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, rows, positions, batch):
        middle = self.first(rows) * positions[:, None].float()
        return (middle + self.second(middle)).sin(), middle


def captured(tap: bool) -> tuple[Layers, CapturedLayers]:
    torch.manual_seed(5)
    layers = Layers()

    def call(rows, positions, batch):
        hidden, middle = layers(rows, positions, batch)
        return hidden, [middle] if tap else []

    return layers, CapturedLayers(layers, call, torch.zeros(1, WIDTH), ForwardMode.DECODE)


def test_rows_that_nobody_reads_are_left_out():
    """Fails where a row that is read gets another's state, or the other rows are computed all the same."""
    layers, short = captured(tap=False)
    rows, used = torch.randn(ROWS, WIDTH), torch.tensor([2, 7, 8])
    with torch.no_grad():
        expected = layers(rows, POSITIONS, None)[0]
    (all_rows,) = short.run(rows, POSITIONS, None)
    (hidden,) = short.run(rows, POSITIONS, None, used)
    torch.testing.assert_close(all_rows, expected)
    torch.testing.assert_close(hidden[used], expected[used])
    others = [row for row in range(ROWS) if row not in used.tolist()]
    assert hidden.shape == expected.shape and not hidden[others].any()


def test_rows_of_a_view_keep_its_strides():
    """Fails where a piece gets rows that lie closer together than those it was compiled for."""
    view = torch.randn(ROWS, 4, 2 * WIDTH)[..., WIDTH:]
    some = rows_of(view, torch.tensor([1, 8]))
    assert some.stride() == view.stride() and torch.equal(some, view[[1, 8]])


def test_taps_are_of_all_rows():
    """Fails where a tapped state that the last piece gives is left out, too: the draft reads every row of it."""
    layers, tapped = captured(tap=True)
    rows = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        expected = layers(rows, POSITIONS, None)
    assert tapped.taps == 1
    for one, other in zip(tapped.run(rows, POSITIONS, None, torch.tensor([8])), expected, strict=True):
        torch.testing.assert_close(one, other)


def prefill(**changes):
    fields = {
        "forward_mode": ForwardMode.EXTEND,
        "extend_seq_lens": torch.tensor([3, 1, 5]),
        "return_logprob": False,
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "multi_item_delimiter_indices": None,
        "token_indices_to_pool": None,
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "tapped", "expected"),
    [
        ({}, False, [2, 3, 8]),
        ({"forward_mode": ForwardMode.MIXED}, True, [2, 3, 8]),
        ({"capture_hidden_mode": CaptureHiddenMode.FULL}, True, [2, 3, 8]),
        ({"capture_hidden_mode": CaptureHiddenMode.FULL}, False, None),
        ({"return_logprob": True}, True, None),
        ({"multi_item_delimiter_indices": []}, True, None),
        ({"token_indices_to_pool": []}, True, None),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, True, None),
        ({"forward_mode": ForwardMode.DECODE, "extend_seq_lens": None}, False, None),
    ],
)
def test_which_rows_are_read(changes, tapped, expected):
    """Fails where a prompt's logprobs, returned hidden states or verified rows are taken from rows left out."""
    used = last_rows(prefill(**changes), tapped)
    assert (None if used is None else used.tolist()) == expected
