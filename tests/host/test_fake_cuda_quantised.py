"""Quantised heads and drafts on the made-up CUDA device of `test_fake_cuda.py`: nothing waits, devices do not mix."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from stand_in_worker import (
    BATCH,
    BLOCK,
    COLUMNS,
    DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    TAPS,
    VOCAB,
    HostAttention,
    decode_batch,
    pool_of,
    prefill_batch,
    worker_of,
)
from stand_ins import PackedHead, make_sampler
from test_fake_cuda import Watch, run, table_of, watch

from sglang_dflash import ops
from sglang_dflash.host.worker.context_kv import ContextKVWriter
from sglang_dflash.host.worker.draft_heads import DraftHead

__all__ = ["watch"]  # a fixture


class PackedProjection(torch.nn.Module):
    """A quantised projection to queries, keys and values: only its own forward can multiply by it."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.zeros(3 * HEADS * DIM, HIDDEN, dtype=torch.int8)
        self.qweight = torch.nn.Parameter(packed, requires_grad=False)
        self.quant_method, self.rows = None, list[int]()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.rows.append(len(x))
        return F.linear(x, self.qweight.to(x.dtype)), None


def packed_draft() -> SimpleNamespace:
    """What context KV reads of a quantised draft of SGLang's."""

    def attention() -> HostAttention:
        return HostAttention(
            qkv_proj=PackedProjection(),
            k_norm=RMSNorm(DIM),
            rotary_emb=RotaryEmbedding(DIM, DIM, COLUMNS, 10000, True, torch.float32),
            attn=SimpleNamespace(k_scale=None, v_scale=None),
            num_kv_heads=HEADS,
            head_dim=DIM,
            q_size=HEADS * DIM,
            kv_size=HEADS * DIM,
            v_scale=0.5,
        )

    fc = torch.zeros(HIDDEN, TAPS * HIDDEN)
    layers = [SimpleNamespace(self_attn=attention()) for _ in range(LAYERS)]
    return SimpleNamespace(layers=layers, project_target_hidden=lambda hidden: F.linear(hidden, fc))


def test_a_step_and_a_prefill_with_a_quantised_draft(watch: Watch) -> None:
    """Fails where the context KV of packed projections, layer by layer, reads a weight that is not there, waits for the
    device, mixes devices, or leaves out a layer or a row."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), make_sampler())
    with torch.device("cuda"):
        model = packed_draft()
    pool = one._draft.runner.token_to_kv_pool = pool_of(model, BATCH * COLUMNS, "cuda")
    one._draft._context_kv = ContextKVWriter(model)
    one._draft._context_kv.bind(pool)
    run(watch, one, decode_batch("cuda"))
    run(watch, one, prefill_batch("cuda"))
    assert not watch.waits
    assert [layer.self_attn.qkv_proj.rows for layer in model.layers] == [[BATCH * BLOCK, 5 + 9]] * LAYERS


def test_a_greedy_step_with_a_quantised_head(watch: Watch) -> None:
    """Fails where the method of a packed head gets operands of the CPU, its logits wait for the device, or the step is
    not that of a dense head."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32))
    with torch.device("cuda"):
        lm_head = PackedHead(torch.zeros(VOCAB, HIDDEN), padding=64)
    one._draft._head = head = DraftHead(lm_head, BLOCK)
    result = run(watch, one, decode_batch("cuda"))
    assert result.next_token_ids.device.type == "cuda" and result.next_token_ids.shape == (BATCH * BLOCK,)
    assert not watch.waits and watch.launches["triton.row_argmax"] == lm_head.calls == 1
    head.reserve(BATCH)
    with watch:
        head(
            torch.zeros(BATCH * BLOCK, HIDDEN, device="cuda"),
            torch.zeros(BATCH, BLOCK, dtype=torch.int64, device="cuda"),
        )
    assert head.captured_ids.device.type == "cuda" and lm_head.calls == 2 and not watch.waits
