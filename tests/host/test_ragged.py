"""Positions of images in a verification: of whole blocks, and of their first rows, which a graph may pad."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash import ops
from sglang_dflash.host.patches.ragged import RaggedVerifyInput, positions_of_sections

DELTA, WIDTH = torch.tensor([[-5]]), 3
IMAGES = pytest.mark.parametrize("images", [(None, None), (DELTA, None), (None, DELTA)])


def batch_of(positions: torch.Tensor, images: tuple[torch.Tensor | None, ...], cols: Any = None) -> SimpleNamespace:
    inputs = [None if delta is None else SimpleNamespace(mrope_position_delta=delta) for delta in images]
    rows = {"draft_token": positions, "positions": positions, "draft_token_num": WIDTH, "kv_loc_cols": cols}
    return SimpleNamespace(spec_info=RaggedVerifyInput(**rows), multimodal_inputs=inputs)


def made_by_ours(batch: SimpleNamespace) -> torch.Tensor:
    forward_batch = SimpleNamespace(seq_lens=torch.zeros(2))
    positions_of_sections(pytest.fail, forward_batch, None, batch)
    return forward_batch.mrope_positions


@IMAGES
def test_positions_of_whole_blocks(images: tuple[torch.Tensor | None, ...]) -> None:
    """Fails where rows get another shift than SGLang gives them."""
    batch = batch_of(torch.tensor([20, 21, 22, 30, 31, 32]), images)
    theirs = SimpleNamespace(seq_lens=torch.zeros(2))
    ForwardBatch.compute_spec_mrope_positions(theirs, SimpleNamespace(device="cpu"), batch)
    assert torch.equal(made_by_ours(batch), theirs.mrope_positions)


@IMAGES
@pytest.mark.parametrize("lens", [[3, 1], [1, 2], [1, 1]])
@pytest.mark.parametrize("size", [None, 6])
def test_positions_of_some_rows(images: tuple[torch.Tensor | None, ...], lens: list[int], size: int | None) -> None:
    """Fails where a request's rows get another request's shift, or rows that only fill a graph get any."""
    rows = ops.keep_rows(torch.tensor(lens), WIDTH, sum(lens), size)
    whole = torch.tensor([20, 21, 22, 30, 31, 32])
    more = torch.zeros(rows.size - sum(lens), dtype=torch.int64)
    positions = torch.cat((whole[rows.kept], more))
    shifts = [0 if delta is None else -5 for delta, count in zip(images, lens, strict=True) for _ in range(count)]
    expected = positions + torch.tensor(shifts + more.tolist())
    assert torch.equal(made_by_ours(batch_of(positions, images, rows.padded())), expected.repeat(3, 1))
