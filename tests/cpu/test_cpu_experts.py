"""The experts of the host's mixtures on a CPU: ours where the op serves them, the host's loop elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_cpu import ops
from sglang_cpu.experts import MAX_ROWS, run_experts

EXPERTS, CHOSEN, HIDDEN, INNER = 6, 2, 24, 40
needs_native = pytest.mark.skipif(not ops.serves("cpu"), reason=ops.native.described())


def layer_of(dtype: torch.dtype = torch.float32, **others: torch.Tensor) -> Any:
    """What the host's loop reads of its `FusedMoE`."""
    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    return SimpleNamespace(num_experts=EXPERTS, w13_weight=up.to(dtype), w2_weight=down.to(dtype), **others)


def rows_of(
    rows: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, None]]:
    """x, and what the host's router returns."""
    torch.manual_seed(rows)
    ids = torch.rand(rows, EXPERTS).argsort(-1)[:, :CHOSEN].int()
    return torch.randn(rows, HIDDEN).to(dtype), (torch.rand(rows, CHOSEN), ids, None)


def the_hosts(*arguments: Any) -> str:
    return "the host's"


@needs_native
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9])
def test_experts_are_the_hosts(activation: str, dtype: torch.dtype, rows: int) -> None:
    """Fails where our op computes something else than the host's loop, or the loop still runs."""
    config, layer = MoeRunnerConfig(activation=activation), layer_of(dtype)
    x, chosen = rows_of(rows, dtype)
    expected = moe_forward_native(layer, x, chosen, config)
    out = run_experts(the_hosts, layer, x, chosen, config)
    assert out.dtype == dtype
    size = float(expected.abs().max())
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * size * torch.finfo(dtype).eps)


@needs_native
@pytest.mark.parametrize("biased", [False, True], ids=["ours", "the host's loop"])
def test_ranks_add_up_to_all_experts(biased: bool) -> None:
    """Fails where a rank's half of the experts is applied to another id, or an expert of another rank (-1) adds
    something or ends the forward."""
    config, whole = MoeRunnerConfig(activation="silu"), layer_of()
    if biased:  # keeps SGLang's loop
        whole.w13_weight_bias, whole.w2_weight_bias = torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    x, (weights, ids, _) = rows_of(9)
    expected = moe_forward_native(whole, x, (weights, ids, None), config)
    total, each = torch.zeros_like(x), EXPERTS // 2
    for first in (0, each):
        rank = SimpleNamespace(num_experts=EXPERTS)
        for name, value in vars(whole).items():
            if name != "num_experts":
                setattr(rank, name, value[first : first + each])
        own = torch.where((ids >= first) & (ids < first + each), ids - first, -1)
        total += run_experts(moe_forward_native, rank, x, StandardTopKOutput(weights, own, None), config)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "config", "rows", "dtype"),
    [
        (layer_of(w13_weight_bias=torch.ones(1)), {}, 1, torch.float32),
        (layer_of(w2_weight_bias=torch.ones(1)), {}, 1, torch.float32),
        (layer_of(), {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, 1, torch.float32),
        (layer_of(), {"apply_router_weight_on_input": True}, 1, torch.float32),
        (layer_of(), {"activation": "situ"}, 1, torch.float32),
        (layer_of(torch.float16), {}, 1, torch.float16),
        (layer_of(torch.bfloat16), {}, 1, torch.float32),
        (layer_of(), {}, MAX_ROWS * EXPERTS // CHOSEN + 1, torch.float32),
    ],
    ids=["bias up", "bias down", "bounded", "weights first", "another activation", "float16", "two dtypes", "prompt"],
)
def test_others_stay_the_hosts(layer: Any, config: dict[str, Any], rows: int, dtype: torch.dtype) -> None:
    """Fails where an option that our op does not know is ignored."""
    assert run_experts(the_hosts, layer, *rows_of(rows, dtype), MoeRunnerConfig(**config)) == "the host's"
