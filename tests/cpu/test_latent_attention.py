"""Attention over latent rows (MLA): one KV head, and values that are the first part of the keys' own memory."""

from __future__ import annotations

import pytest
import torch

from sglang_cpu.ops import REFERENCE_KERNELS, Attention, PagedTable, choose_kernels, native, reference

LATENT, ROTARY, HEADS = 512, 64, 128  # of DeepSeek-V3
SLOTS = 90


@pytest.fixture(params=["specification", "native"])
def attention(request: pytest.FixtureRequest) -> Attention:
    if request.param == "specification":
        return REFERENCE_KERNELS.attention
    if native.isa() is None:
        pytest.skip("the native ops are not built")
    return choose_kernels(torch.float32).attention


@pytest.mark.parametrize(
    ("prefix_lens", "row_lens"), [([17, 40], [1, 1]), ([5, 0], [8, 8]), ([0, 3], [40, 7])], ids=str
)
def test_values_within_keys(attention: Attention, prefix_lens: list[int], row_lens: list[int]) -> None:
    """Fails where values are read as if they were memory of their own, or more heads than a tile holds are mixed up."""
    torch.manual_seed(0)
    keys = torch.randn(SLOTS, 1, LATENT + ROTARY)
    values = keys[..., :LATENT]
    q = torch.randn(sum(row_lens), HEADS, LATENT + ROTARY)
    table = torch.randperm(SLOTS).view(2, -1).int()
    requests = torch.tensor([1, 0])
    rows = PagedTable.gather(table, requests, prefix_lens, row_lens)
    out = attention.attend(q, keys, values, rows, 0.05, True, None)
    starts = torch.tensor([0, *row_lens]).cumsum(0)
    expected = reference.paged_attention(
        q.double(), keys.double(), values.double(), table, requests, torch.tensor(prefix_lens), starts, 0.05, True
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
