"""What Nemotron-H needs on a CPU beside its recurrence: a gated norm in groups, and experts that are not gated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated import Mixer2RMSNormGated
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from sglang_cpu import experts as cpu_experts
from sglang_cpu import layers, ops

EXPERTS, CHOSEN, HIDDEN, INNER = 6, 2, 24, 40


def host_norm(groups: int, ranks: int, dtype: torch.dtype) -> Mixer2RMSNormGated:
    """The host's norm of one rank, made without its process groups."""
    norm = Mixer2RMSNormGated.__new__(Mixer2RMSNormGated)
    torch.nn.Module.__init__(norm)
    norm.n_groups, norm.tp_size, norm.group_size = groups, ranks, 20
    norm.use_rms_norm, norm.variance_epsilon = True, 1e-5
    norm.weight = torch.nn.Parameter(torch.randn(groups // ranks * 20).to(dtype), requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (4, 1), (4, 2)])
def test_gated_norms_are_the_hosts(groups: int, ranks: int, dtype: torch.dtype) -> None:
    """Fails where a rank's groups are others than the host's, the gate comes behind the norm, or a dtype that the
    native ops do not take ends the server."""
    torch.manual_seed(0)
    norm = host_norm(groups, ranks, dtype)
    size = groups // ranks * 20
    x, gate = torch.randn(7, size).to(dtype), torch.randn(7, 3 + size).to(dtype)[:, 3:]
    expected = norm.forward_native(x, gate)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(layers.gated_group_norm(norm, x, gate), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not ops.serves("cpu"), reason=ops.native.described())
def test_ranks_that_share_a_group_keep_the_hosts_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a rank norms a part of a group as if it were the whole."""
    monkeypatch.setattr(Mixer2RMSNormGated, "forward_native", lambda norm, x, gate: "the host's")
    norm = host_norm(2, 1, torch.float32)
    norm.n_groups, norm.tp_size = 1, 2
    assert layers.gated_group_norm(norm, torch.ones(1, 40), torch.ones(1, 40)) == "the host's"


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_experts_are_those_of_transformers(rows: int) -> None:
    """Fails where an expert's activation, a row's weights or the scaling factor are others."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    experts = NemotronHExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    x, weights = torch.randn(rows, HIDDEN), torch.rand(rows, CHOSEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(rows)]) if rows else torch.zeros(0, CHOSEN)
    ids = ids.long()
    layer = SimpleNamespace(w13_weight=experts.up_proj.data, w2_weight=experts.down_proj.data)
    settings = SimpleNamespace(is_gated=False, activation="relu2", routed_scaling_factor=2.5)
    out = cpu_experts.run_experts(None, layer, x, (weights, ids.int(), None), settings)
    with torch.no_grad():
        expected = experts(x, ids, 2.5 * weights)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
