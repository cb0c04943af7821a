"""No Triton kernel of ours is compiled while requests wait: the warm-up meets every variant that a batch can.

Triton's own code computes a launch's key; nothing is compiled or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from sglang_dflash.ops import triton_acceptance, triton_block, triton_context_kv, triton_sampling, triton_warm_up
from sglang_dflash.ops.kv_buffers import KVBuffers
from sglang_dflash.ops.penalties import BlockRows, PenaltyParams
from sglang_dflash.ops.reference import Filters
from sglang_dflash.ops.triton_penalties import TritonEmittedTokens

VOCAB, MASK = 151_936, 151_669
Variants = set[tuple[str, str]]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """Collects the variants of all launches within the block, instead of launching."""
    found: Variants = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders = {}

    def run(self: jit.JITFunction, *args, grid, warmup, **kwargs) -> None:
        assert all(size > 0 for size in grid), (self.__name__, grid)
        if self not in binders:
            binders[self] = jit.create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **kwargs)
        found.add((self.__name__, f"{specialization} {options}"))

    with monkeypatch.context() as patch:
        patch.setattr(jit.JITFunction, "run", run)
        yield found


def unaligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count]; a view that does not start at a multiple of 16 bytes, as a row of a table may."""
    return torch.zeros(count + 1, dtype=dtype)[1:]


def step(batch: int, width: int, logits: torch.Tensor, table: torch.Tensor, place) -> None:
    """The launches of a step, greedy, penalised and sampled; place(count, dtype) makes a vector."""
    vectors = [place(batch, torch.int64) for _ in range(3)]
    ids, _, _ = triton_block.block_layout(*vectors, table, width, MASK)
    for rows in (ids, place(batch * width, torch.int64).view(batch, width)):
        triton_acceptance.accept_greedy(logits, rows)
        triton_acceptance.accept_chain(triton_acceptance.row_argmax(logits.flatten(0, 1)).view(batch, width), rows)
    if logits.dtype == torch.float32:
        real = place(batch, torch.float32)
        requests, uniform = place(batch * width, torch.int64), place(batch * width, torch.float32)
        for any_id in (False, True):
            filters = Filters(real, place(batch, torch.int32), real)
            triton_sampling.sample_rows(logits.flatten(0, 1), requests, filters, uniform, any_id)
    for asking in {1, batch}:
        emitted = TritonEmittedTokens(VOCAB, "cpu")
        row, real = place(asking, torch.int64), torch.zeros(asking)
        stop_ids = torch.zeros((asking, batch % 7 + 1), dtype=torch.int64)
        params = PenaltyParams(real, real, real, torch.zeros(asking, dtype=torch.int64), stop_ids)
        if logits.dtype == torch.float32:
            block_rows = place(asking * width, torch.int64).view(asking, width)
            block = BlockRows(block_rows, place(asking * width, torch.int64).view(asking, width), row)
            emitted.penalize(logits.flatten(0, 1), block, row, 9, params)
        for committed in (ids, place(batch, torch.int64)[:, None]):
            emitted.append(row, row, committed, place(batch, torch.int32), 9, params)


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_a_step_meets_only_what_was_warmed_up(width, monkeypatch):
    """Fails where the kernel of a batch of 1 to 256 requests has another variant than the warm-up's."""
    table = torch.zeros((300, 4096), dtype=torch.int32)
    kinds = {(VOCAB, torch.float32), (VOCAB, torch.bfloat16)}
    with recorded(monkeypatch) as warm:
        triton_warm_up.warm_up(width, kinds, VOCAB, table, MASK, draws=True)
    assert {name for name, _ in warm} == {
        *("_block_layout_kernel", "_split_argmax_kernel", "_reduce_kernel", "_accept_kernel"),
        *("_penalize_kernel", "_append_kernel", "_sample_kernel"),
    }
    for _, dtype in kinds:
        with recorded(monkeypatch) as met:
            for stride in (VOCAB, VOCAB + 16, VOCAB + 2):  # also slices of a padded vocabulary
                most = torch.empty((256, width, stride), dtype=dtype)[..., :VOCAB]  # never touched
                for batch in range(1, 257):
                    for place in (torch.zeros, unaligned):
                        step(batch, width, most[:batch], table, lambda n, dtype, place=place: place(n, dtype=dtype))
        assert met and met <= warm, sorted(met - warm)[:3]


def test_context_kv_has_one_variant(monkeypatch):
    """Fails where the number of rows, or where their slots lie, gives another variant."""
    layers, heads, dim = 5, 8, 128
    buffers = [[torch.zeros(64, heads, dim, dtype=torch.bfloat16) for _ in range(layers)] for _ in "kv"]
    cos_sin, norm = torch.zeros(4096, dim), torch.zeros(layers, dim, dtype=torch.bfloat16)
    with recorded(monkeypatch) as met:
        for rows in range(1, 300):
            for place in (torch.zeros, unaligned):
                slots = place(rows, dtype=torch.int64)
                kv = torch.zeros(rows, layers, 2, heads, dim, dtype=torch.bfloat16)
                triton_context_kv.write_context_kv(kv, norm, 1e-6, slots, cos_sin, slots, KVBuffers(*buffers))
    assert len(met) == 1, met


def test_a_variant_that_was_not_warmed_up_is_found(monkeypatch):
    """Fails where this file's comparison could not fail: a constant that follows the batch must show."""
    with recorded(monkeypatch) as warm:
        triton_acceptance.row_argmax(torch.zeros(1, 64))
    with recorded(monkeypatch) as met:
        triton_acceptance.row_argmax(torch.zeros(1, 63))
    assert met - warm
