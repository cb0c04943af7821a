"""Packed rows of gated delta nets: their values (`gdn_cases.py`, in a process whose Triton is interpreted), and that a
graph holds them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tape import Tape

from interpreted import run_interpreted
from sglang_dflash.host.patches import packed_gdn

BLOCK, ROWS, HEADS, DIM = 4, 12, 2, 3


@pytest.mark.slow
def test_gated_delta_nets_over_packed_rows():
    """Fails where a case of the rehearsal fails, or none runs."""
    run_interpreted([Path(__file__).parent / "gdn_cases.py"])


def running_sums(blocks: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In the place of the convolution: of each row, itself and the rows before it. blocks: [B, C, W]."""
    return blocks.cumsum(-1)


def outputs_of(starts: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The layer's values over [ROWS, 3 * HEADS * DIM] rows. starts: [B + 1] int32."""
    size = HEADS * DIM
    layer = SimpleNamespace(layer_id=0, q_dim=size, k_dim=size, v_dim=size, head_q_dim=DIM, head_k_dim=DIM)
    for name in ("conv_weights", "bias", "activation", "A_log", "dt_bias"):
        setattr(layer, name, None)
    layer.head_v_dim = DIM
    state = SimpleNamespace(conv=[None], intermediate_conv_window=[None], temporal=None, intermediate_ssm=None)
    slots = torch.zeros(len(starts) - 1, dtype=torch.int32)
    backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(query_start_loc=starts, mamba_cache_indices=slots),
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer: state, size=8),
        verify_intermediate_state_indices=slots,
        kernel_dispatcher=SimpleNamespace(target_verify=lambda v, **_: v * 1.0),
    )
    spec_info = SimpleNamespace(ragged_verify_layout=object(), draft_token_num=BLOCK)
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, spec_info=spec_info, req_pool_indices=slots)
    return packed_gdn.verify_packed(None, backend, layer, batch, inputs, None, None)


def test_a_graph_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a capture would wait for the device, or where a replay keeps the rows of the capture."""
    monkeypatch.setattr(packed_gdn, "causal_conv1d_update", running_sums)
    inputs = torch.randn(ROWS, 3 * HEADS * DIM, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 4, 8, 12, 12], dtype=torch.int32)
    tape = Tape()
    with torch.inference_mode():
        captured = tape.record(lambda: outputs_of(starts, inputs))
        for lens in ([1, 4, 2, 3], [4, 4, 4, 0], [2, 1, 1, 4]):
            starts[1:] = torch.tensor(lens).cumsum(0)
            tape.replay()
            rows = inputs[: sum(lens), -HEADS * DIM :].split(lens)
            expected = torch.cat([row.cumsum(0) for row in rows])
            torch.testing.assert_close(captured[0, : sum(lens)].flatten(1), expected)
