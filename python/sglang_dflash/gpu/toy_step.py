"""Measures the lowest time of a decode step: two graphs with dummy weights, and variants of the work outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.gpu.device import Device
from sglang_dflash.gpu.toy_model import QWEN3_8B, TINY, Shape, Stack, dummy
from sglang_dflash.ops import KVBuffers, reference, triton_acceptance, triton_block, triton_context_kv

Row = dict[str, Any]
REPEATS, CALLS = 9, 5  # for steps that take milliseconds
Accept = Callable[[torch.Tensor, torch.Tensor], reference.GreedyAcceptance]


class Models:
    """A target, a draft, their shared embedding and head, and the draft's projections of the tapped layers."""

    def __init__(self, shape: Shape, device: str, positions: int) -> None:
        self.shape = shape
        self.target = Stack(shape, shape.layers, device, positions)
        self.draft = Stack(shape, shape.draft_layers, device, positions)
        self.embedding = dummy(shape.vocab, shape.hidden, device=device, scale=1.0)
        self.head = dummy(shape.vocab, shape.hidden, device=device)
        self.fc = dummy(shape.hidden, shape.taps * shape.hidden, device=device)
        self.kv_weight = dummy(shape.draft_layers, 2, shape.kv_heads, shape.dim, shape.hidden, device=device)
        self.k_norm = torch.ones(shape.draft_layers, shape.dim, device=device, dtype=torch.bfloat16)


class Step:
    """The buffers and pieces of a step at one batch size. No tensor is reallocated, because graphs hold addresses."""

    def __init__(self, models: Models, batch: int, rows: int, prefix: int) -> None:
        shape, device = models.shape, str(models.embedding.device)
        self.models, self.batch, self.rows, self.prefix = models, batch, rows, prefix
        self.target_cache = models.target.cache(batch, prefix + rows)
        self.draft_cache = models.draft.cache(batch, prefix + rows)
        self.bonus_ids = torch.arange(batch, device=device)
        self.prefix_lens = torch.full((batch,), prefix, device=device)
        self.pool_rows = torch.arange(batch, device=device)
        self.table = torch.arange(batch * (prefix + rows), device=device).view(batch, -1).int()
        self.ids = torch.zeros((batch, rows), dtype=torch.int64, device=device)
        self.logits = torch.zeros((batch, rows, shape.vocab), dtype=torch.bfloat16, device=device)
        self.tapped = torch.zeros((batch * rows, shape.taps * shape.hidden), dtype=torch.bfloat16, device=device)
        slots = (batch * (prefix + rows), shape.kv_heads, shape.dim)
        kept = [[torch.zeros(slots, dtype=torch.bfloat16, device=device) for _ in models.draft.weights] for _ in "kv"]
        self.buffers = KVBuffers(*kept)
        self.layout = reference.block_layout(*self.layout_arguments())

    def layout_arguments(self) -> tuple:
        return self.bonus_ids, self.prefix_lens, self.pool_rows, self.table, self.rows, self.models.shape.vocab - 1

    def draft_forward(self, argmax: Callable[[torch.Tensor], torch.Tensor], block: torch.Tensor) -> None:
        """block: [B, K] ids; they must outlive a captured forward, which reads them at their address."""
        hidden = F.embedding(block.flatten(), self.models.embedding)
        hidden = self.models.draft.forward(hidden, self.draft_cache, self.prefix)
        drafted = hidden.view(self.batch, self.rows, -1)[:, 1:].flatten(0, 1)
        self.ids[:, 0] = self.bonus_ids
        self.ids[:, 1:] = argmax(F.linear(drafted, self.models.head)).view(self.batch, -1)

    def verify_forward(self) -> None:
        hidden = F.embedding(self.ids.flatten(), self.models.embedding)
        hidden = self.models.target.forward(hidden, self.target_cache, self.prefix, self.tapped)
        torch.matmul(hidden, self.models.head.T, out=self.logits.view(-1, self.models.shape.vocab))

    def commit(self, accept: Accept, write: Callable[..., None]) -> None:
        """Acceptance, then the draft's context KV: projection, norm, rotary embedding, write."""
        accepted = accept(self.logits, self.ids)
        self.bonus_ids.copy_(accepted.bonus_ids)
        features = F.rms_norm(
            F.linear(self.tapped, self.models.fc), (self.models.shape.hidden,), self.models.draft.norm
        )
        kv = reference.project_context(features, self.models.kv_weight, None)
        positions, slots = self.layout[1].flatten(), self.layout[2].flatten()
        write(kv, self.models.k_norm, 1e-6, positions, self.models.draft.cos_sin, slots, self.buffers)


def _float32_accept(logits: torch.Tensor, ids: torch.Tensor) -> reference.GreedyAcceptance:
    return reference.accept_greedy(logits.float(), ids)


def _variants(device: Device, step: Step) -> dict[str, Callable[[], None]]:
    """Variants of the step that differ in what runs outside of the graphs."""
    draft = device.capture(lambda: step.draft_forward(triton_acceptance.row_argmax, step.layout[0]))
    verify = device.capture(step.verify_forward)

    def two_graphs() -> None:
        draft()
        verify()

    def eager_torch() -> None:
        reference.block_layout(*step.layout_arguments())
        two_graphs()
        step.commit(_float32_accept, reference.write_context_kv)

    def eager_triton() -> None:
        triton_block.block_layout(*step.layout_arguments())
        two_graphs()
        step.commit(triton_acceptance.accept_greedy, triton_context_kv.write_context_kv)

    def head_of_step() -> None:
        # Do not store it in `step`: the first graph reads `step.layout`.
        block, _, _ = triton_block.block_layout(*step.layout_arguments())
        step.draft_forward(triton_acceptance.row_argmax, block)

    def tail_of_step() -> None:
        step.verify_forward()
        step.commit(triton_acceptance.accept_greedy, triton_context_kv.write_context_kv)

    whole_draft, whole_verify = device.capture(head_of_step), device.capture(tail_of_step)

    def all_in_graphs() -> None:
        whole_draft()
        whole_verify()

    return {
        "draft graph": draft,
        "verify graph": verify,
        "two graphs": two_graphs,
        "+ eager torch ops": eager_torch,
        "+ eager Triton ops": eager_triton,
        "Triton ops in the graphs": all_in_graphs,
    }


def _launches(device: Device, step: Step, between: list[int]) -> Iterator[Row]:
    """Two graphs with n tiny eager launches between them: the slope is the cost of one eager launch."""
    variants = _variants(device, step)
    scratch = torch.zeros(1, device=step.bonus_ids.device)
    base = None
    for count in between:

        def call(count: int = count) -> None:
            variants["draft graph"]()
            for _ in range(count):
                scratch.add_(1)
            variants["verify graph"]()

        time_us = device.median_us(call, REPEATS, CALLS)
        base = time_us if base is None else base
        added = (time_us - base) / count if count else 0.0
        yield {"requests": step.batch, "launches": count, "step_us": time_us, "added_per_launch_us": added}


def _configuration(device: Device) -> tuple[Shape, tuple[int, ...], int, int]:
    """Shape, batch sizes, prefix length, rows per block."""
    return (TINY, (2,), 5, 2) if device.dry else (QWEN3_8B, (1, 8, 32), 1024, 16)


def toy_step(device: Device, bandwidth: float) -> Iterator[Row]:
    """Times each variant; `plain_steps` is its time in plain decode steps of the same target, head and cache."""
    shape, batches, prefix, rows = _configuration(device)
    models = Models(shape, device.name, prefix + rows)
    head_bytes = models.head.numel() * 2
    for batch in batches:
        plain = Step(models, batch, 1, prefix)
        plain_us = device.median_us(device.capture(plain.verify_forward), REPEATS, CALLS)
        yield {"requests": batch, "step": "plain decoding", "us": plain_us, "plain_steps": 1.0}
        del plain
        step = Step(models, batch, rows, prefix)
        cache_bytes = sum(k.numel() * 4 for k, _ in (*step.target_cache, *step.draft_cache))
        moved = models.target.weight_bytes() + models.draft.weight_bytes() + 2 * head_bytes + cache_bytes
        yield {"requests": batch, "step": "weights and cache over bandwidth", "us": moved / bandwidth}
        for name, call in _variants(device, step).items():
            time_us = device.median_us(call, REPEATS, CALLS)
            yield {"requests": batch, "step": name, "us": time_us, "plain_steps": time_us / plain_us}
        del step
        if not device.dry:
            torch.cuda.empty_cache()


def eager_launches(device: Device, bandwidth: float) -> Iterator[Row]:
    shape, batches, prefix, rows = _configuration(device)
    models = Models(shape, device.name, prefix + rows)
    for batch in batches[:2]:
        yield from _launches(device, Step(models, batch, rows, prefix), [0, 1] if device.dry else [0, 8, 16, 27, 54])
