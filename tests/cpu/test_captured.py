"""A captured model's forward, beside the uncompiled one."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_cpu.captured import CapturedLayers

WIDTH = 8


class Layers(torch.nn.Module):
    """Two layers without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, rows, positions, batch):
        middle = self.first(rows) * positions[:, None].float()
        return (middle + self.second(middle)).sin(), middle


@pytest.mark.parametrize("count", [1, 9])
def test_hidden_and_tapped_states_of_any_number_of_rows(count):
    """Fails where the trace holds for its example's number of rows alone, or a tapped state is another layer's."""
    torch.manual_seed(5)
    layers, rows, positions = Layers(), torch.randn(count, WIDTH), torch.arange(1, count + 1)

    def call(rows, positions, batch):
        hidden, middle = layers(rows, positions, batch)
        return hidden, [middle]

    captured = CapturedLayers(layers, call, torch.zeros(1, WIDTH), ForwardMode.DECODE)
    with torch.no_grad():
        expected = layers(rows, positions, None)
    assert captured.taps == 1
    for one, other in zip(captured.run(rows, positions, None), expected, strict=True):
        torch.testing.assert_close(one, other)
