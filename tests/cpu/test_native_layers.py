"""The native ops in SGLang on the CPU: its norms, its rotary embeddings, the draft's context KV."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated import Mixer2RMSNormGated
from sglang.srt.layers.layernorm import Gemma4RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, UnquantizedKVCacheMethod
from sglang.srt.platforms import current_platform
from stand_in_worker import HostAttention

from sglang_cpu import layers, ops
from sglang_dflash.host.worker.context_kv import ContextKVWriter

pytestmark = pytest.mark.skipif(not ops.serves("cpu"), reason=ops.native.described())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def make_norm(size: int, dtype: torch.dtype, **options) -> RMSNorm:
    norm = RMSNorm(size, **options).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm.requires_grad_(False)


@DTYPES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"cast_x_before_out_mul": True}, {"var_hidden_size": 32}, {"fp32_residual": True}]
)
def test_norms_are_the_hosts(options, with_residual, dtype):
    """Fails where an option of the host's norm is ignored."""
    norm, x = make_norm(64, dtype, **options), torch.randn(5, 64).to(dtype)
    residual = torch.randn(5, 64).to(dtype) if with_residual else None
    got, expected = layers.rms_norm(norm, x, residual), norm.forward_native(x, residual)
    if residual is None:
        close(got, expected)
        return
    assert got[1].dtype == expected[1].dtype
    close(got[0], expected[0])
    close(got[1], expected[1])


@DTYPES
@pytest.mark.parametrize(("rotary_dim", "neox"), [(32, True), (16, True), (32, False)])
def test_rotary_embeddings_are_the_hosts(rotary_dim, neox, dtype):
    """Fails where queries and keys that are slices of one product are rotated differently from the host."""
    rotary = RotaryEmbedding(32, rotary_dim, 100, 10000, neox, dtype)
    qkv, positions = torch.randn(6, 8 * 32).to(dtype), torch.tensor([0, 3, 99, 4, 4, 50])
    q, k, v = qkv.split([4 * 32, 2 * 32, 2 * 32], dim=-1)
    expected, before = rotary.forward_native(positions, q.clone(), k.clone()), v.clone()
    for got, wanted in zip(layers.rotate(rotary, positions, q, k), expected, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(v, before)


def test_half_precision_keeps_the_hosts_bodies():
    """Fails where a dtype that the native ops do not support ends the server."""
    norm, x = make_norm(64, torch.float16), torch.randn(5, 64).half()
    assert torch.equal(layers.rms_norm(norm, x), norm.forward_native(x))
    rotary = RotaryEmbedding(32, 32, 100, 10000, True, torch.float16)
    q, k, positions = torch.randn(6, 128).half(), torch.randn(6, 64).half(), torch.arange(6)
    expected = rotary.forward_native(positions, q.clone(), k.clone())
    for got, wanted in zip(layers.rotate(rotary, positions, q, k), expected, strict=True):
        assert torch.equal(got, wanted)


def test_installed_for_these_classes(monkeypatch):
    """Fails where the host would not find our forwards under its platform's key."""
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    layers.register_forwards()
    registered = BaseFusedOp._oot_forward_registry[current_platform.get_dispatch_key_name()]
    norms = {
        RMSNorm: layers.rms_norm,
        GemmaRMSNorm: layers.gemma_rms_norm,
        Gemma4RMSNorm: layers.gemma4_rms_norm,
        Mixer2RMSNormGated: layers.gated_group_norm,
    }
    rotary = dict.fromkeys(layers.ROTARY, layers.rotate) | {MRotaryEmbedding: layers.rotate_sections}
    assert registered == norms | rotary


def test_gemma_norms() -> None:
    """Fails where our norm with the weight 1 + w differs from the host's, with a residual and without."""
    torch.manual_seed(0)
    norm = GemmaRMSNorm(48)
    norm.weight.data.normal_()
    x, residual = torch.randn(5, 48), torch.randn(5, 48)
    torch.testing.assert_close(layers.gemma_rms_norm(norm, x), norm.forward_native(x))
    for ours, theirs in zip(layers.gemma_rms_norm(norm, x, residual), norm.forward_native(x, residual), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("shift", "scaled"), [(0.0, True), (1.0, True), (0.0, False)])
def test_gemma_4_norms(shift: float, scaled: bool) -> None:
    """Fails where our norm differs from the host's: with the weight, with 1 + weight, and without a weight."""
    torch.manual_seed(0)
    norm = Gemma4RMSNorm(48, scale_shift=shift, with_scale=scaled)
    if scaled:
        norm.weight.data.normal_()
    for x in (torch.randn(5, 48), torch.randn(5, 3, 48), torch.randn(5, 100)[:, :48]):
        torch.testing.assert_close(layers.gemma4_rms_norm(norm, x), norm.forward_native(x))


@pytest.mark.parametrize("text", [True, False], ids=["text", "an image"])
def test_rotary_embedding_by_sections(text: bool) -> None:
    """Fails where positions in time, height and width are mixed up, or text takes another rotation than the host's."""
    torch.manual_seed(0)
    rotary = MRotaryEmbedding(32, 16, 100, 10000, True, torch.float32, [3, 3, 2], mrope_interleaved=True)
    positions = torch.randint(0, 100, (3, 7))
    if text:
        positions[1:] = positions[0]
    q, k = torch.randn(7, 128), torch.randn(7, 64)
    expected = rotary.forward_native(positions, q.clone(), k.clone())
    for ours, theirs in zip(layers.rotate_sections(rotary, positions, q, k), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Pool(SimpleNamespace):
    """A pool that only `set_kv_buffer` writes, as it is without native ops."""

    def set_kv_buffer(self, layer, location, k, v, k_scale, v_scale) -> None:
        slots = location.loc if hasattr(location, "loc") else location[0]
        self.k_buffer[layer.layer_id][slots], self.v_buffer[layer.layer_id][slots] = k, v


class Projection(torch.nn.Module):
    """The host's `qkv_proj` of one rank."""

    def __init__(self, dtype: torch.dtype, bias: bool, quantised: bool) -> None:
        super().__init__()
        self.weight, self.bias = torch.randn(128, 40).to(dtype), torch.randn(128).to(dtype) if bias else None
        self.quant_method = None if quantised else UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


def make_draft(
    dtype: torch.dtype,
    bias: bool = False,
    gemma: bool = False,
    v_scale: float | None = None,
    quantised: bool = False,
    neox: bool = True,
) -> SimpleNamespace:
    """The same weights for all `quantised`, which says only what the projection's method claims."""
    torch.manual_seed(0)

    def attention(layer_id: int) -> SimpleNamespace:
        norm = GemmaRMSNorm(16).to(dtype).requires_grad_(False) if gemma else make_norm(16, dtype)
        torch.nn.init.normal_(norm.weight)
        return HostAttention(
            rotary_emb=RotaryEmbedding(16, 16, 100, 10000, neox, dtype),
            k_norm=norm,
            use_gemma_norm=gemma,
            v_scale=v_scale,
            qkv_proj=Projection(dtype, bias, quantised),
            q_size=64,
            kv_size=32,
            num_kv_heads=2,
            head_dim=16,
            attn=SimpleNamespace(layer_id=layer_id, k_scale=None, v_scale=None),
        )

    draft_layers = [SimpleNamespace(self_attn=attention(i)) for i in range(3)]
    return SimpleNamespace(layers=draft_layers, project_target_hidden=lambda hidden: hidden)


def direct_pool(dtype: torch.dtype) -> MHATokenToKVPool:
    """A pool of the host's class, which one call can write."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.__dict__ |= {"dtype": dtype, "store_dtype": dtype, "device": "cpu", "start_layer": 0}
    pool.__dict__ |= {
        "layer_transfer_counter": None,
        "kv_cache_layout": "nhd",
        "quant_method": UnquantizedKVCacheMethod(),
    }
    pool.k_buffer, pool.v_buffer = ([torch.zeros(50, 2, 16, dtype=dtype) for _ in range(3)] for _ in range(2))
    return pool


def rows_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, positions and slots of seven rows."""
    return torch.randn(7, 40).to(dtype), torch.arange(20, 27), torch.randperm(50)[:7]


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_context_kv_is_what_the_pool_would_hold(bias, dtype):
    """Fails where the direct write of all layers differs from a write through the pool, layer by layer."""
    writer, shape = ContextKVWriter(make_draft(dtype, bias)), (3, 50, 2, 16)
    through = Pool(k_buffer=torch.zeros(shape, dtype=dtype), v_buffer=torch.zeros(shape, dtype=dtype))
    direct, rows = direct_pool(dtype), rows_of(dtype)
    writer.write(through, *rows)
    writer.bind(direct)
    assert writer._buffers is not None
    writer.write(direct, *rows)
    for got, expected in ((direct.k_buffer, through.k_buffer), (direct.v_buffer, through.v_buffer)):
        torch.testing.assert_close(
            torch.stack(got), expected, rtol=2e-2, atol=3e-2 if dtype == torch.bfloat16 else 1e-5
        )


@DTYPES
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"gemma": True}, {"v_scale": 0.612}, {"bias": True, "gemma": True, "v_scale": -2.0}],
    ids=str,
)
def test_context_kv_is_the_hosts(options, dtype):
    """Fails where the stacked way, into a direct pool or through `set_kv_buffer`, loses a norm's kind or the values'
    scale, and where a quantised draft is not computed by the host's own methods, layer by layer."""
    shape, rows = (3, 50, 2, 16), rows_of(dtype)
    by_layer, through = (
        Pool(k_buffer=torch.zeros(shape, dtype=dtype), v_buffer=torch.zeros(shape, dtype=dtype)) for _ in range(2)
    )
    host = ContextKVWriter(make_draft(dtype, quantised=True, **options))
    host.bind(by_layer)
    host.refresh()
    host.write(by_layer, *rows)
    stacked, direct = ContextKVWriter(make_draft(dtype, **options)), direct_pool(dtype)
    stacked.write(through, *rows)
    stacked.bind(direct)
    stacked.write(direct, *rows)
    assert by_layer.k_buffer[:, rows[2]].all() and stacked._buffers is not None
    tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for name in ("k_buffer", "v_buffer"):
        expected = getattr(by_layer, name)
        torch.testing.assert_close(getattr(through, name), expected, **tolerance)
        torch.testing.assert_close(torch.stack(getattr(direct, name)), expected, **tolerance)


def test_a_rotation_in_another_style_is_the_hosts():
    """Fails where keys whose neighbours are paired are rotated by halves."""
    draft, shape, rows = make_draft(torch.float32, neox=False), (3, 50, 2, 16), rows_of(torch.float32)
    pool = Pool(k_buffer=torch.zeros(shape), v_buffer=torch.zeros(shape))
    ContextKVWriter(draft).write(pool, *rows)
    attention = draft.layers[1].self_attn
    k = attention.k_norm(F.linear(rows[0], attention.qkv_proj.weight)[:, 64:96].unflatten(-1, (2, 16)))
    _, expected = attention.rotary_emb.forward_native(rows[1], torch.zeros(7, 32), k.flatten(1))
    close(pool.k_buffer[1, rows[2]].flatten(1), expected)


def test_another_pool_is_written_through(monkeypatch):
    """Fails where a pool that converts or quantises is written without `set_kv_buffer`."""
    writer = ContextKVWriter(make_draft(torch.float32))
    shape = (3, 50, 2, 16)
    pool = Pool(k_buffer=torch.zeros(shape), v_buffer=torch.zeros(shape), dtype=torch.float32, device="cpu")
    writer.bind(pool)
    writer.write(pool, torch.randn(2, 40), torch.arange(2), torch.tensor([4, 9]))
    assert pool.k_buffer[:, [4, 9]].abs().sum() > 0
