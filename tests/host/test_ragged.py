"""Positions of images in a verification, with equally many rows of each request and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash.host.patches.ragged import RaggedVerifyInput, positions_of_sections

DELTA = torch.tensor([[-5]])


@pytest.mark.parametrize("lens", [None, [3, 1]])
@pytest.mark.parametrize("images", [(None, None), (DELTA, None), (None, DELTA)])
def test_positions_of_sections(lens: list[int] | None, images: tuple[torch.Tensor | None, ...]) -> None:
    """Fails where a request's rows get another request's shift, or equal rows another one than SGLang gives them."""
    counts = lens or [3, 3]
    positions = torch.cat(
        [torch.arange(20 + 10 * place, 20 + 10 * place + count) for place, count in enumerate(counts)]
    )
    rows = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    inputs = [None if delta is None else SimpleNamespace(mrope_position_delta=delta) for delta in images]
    spec_info = RaggedVerifyInput(draft_token=positions, positions=positions, draft_token_num=3, lens=rows)
    batch = SimpleNamespace(spec_info=spec_info, multimodal_inputs=inputs)
    forward_batch = SimpleNamespace(seq_lens=torch.zeros(2))
    positions_of_sections(pytest.fail, forward_batch, None, batch)
    shifts = torch.cat([torch.full((count,), 0 if d is None else -5) for count, d in zip(counts, images, strict=True)])
    assert torch.equal(forward_batch.mrope_positions, (positions + shifts).repeat(3, 1))
    if lens is None:
        theirs = SimpleNamespace(seq_lens=torch.zeros(2))
        ForwardBatch.compute_spec_mrope_positions(theirs, SimpleNamespace(device="cpu"), batch)
        assert torch.equal(forward_batch.mrope_positions, theirs.mrope_positions)
