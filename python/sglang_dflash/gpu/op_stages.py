"""Compares each op's Triton body with its torch body: results, then times, then the limit of the memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_dflash.gpu.device import Device
from sglang_dflash.ops import KVBuffers, reference, triton_acceptance, triton_block, triton_context_kv

Body = Callable[..., Any]
Row = dict[str, Any]
COLD_BYTES = 200_000_000  # inputs rotate over this much memory, so that none stays in a cache of 50 or 60 MB
MAX_SETS = 32


def _timed(device: Device, bodies: dict[str, Body], sets: list[tuple], moved_bytes: int, bandwidth: float) -> list[Row]:
    """One row per body: eager and captured time per call, and the bytes' time as a share of the captured time.

    Args:
        sets: the arguments of one call each: the same shapes, separate memory.
        moved_bytes: the least that a call reads and writes.
    """
    rows = []
    for name, body in bodies.items():

        def every(body: Body = body) -> None:
            for arguments in sets:
                body(*arguments)

        eager = device.median_us(every, calls=1) / len(sets)
        captured = device.median_us(device.capture(every), calls=1) / len(sets)
        floor = moved_bytes / bandwidth
        rows.append(
            {"body": name, "eager_us": eager, "graph_us": captured, "bytes_us": floor, "share": floor / captured}
        )
    return rows


def _sets(device: Device, one_bytes: int, make: Callable[[int], tuple]) -> list[tuple]:
    count = 1 if device.dry else min(MAX_SETS, max(2, COLD_BYTES // max(one_bytes, 1)))
    return [make(seed) for seed in range(count)]


def _generator(device: Device, seed: int) -> torch.Generator:
    return torch.Generator(device.name).manual_seed(seed)


def block_layout(device: Device, bandwidth: float) -> Iterator[Row]:
    block_size = 16
    for batch in (1, 3) if device.dry else (1, 8, 32, 64):
        columns = 64 if device.dry else 40_960
        table = torch.arange(2 * batch * columns, device=device.name).view(-1, columns).int()

        def make(seed: int, batch: int = batch, columns: int = columns, table: torch.Tensor = table) -> tuple:
            generator = _generator(device, seed)
            lens = torch.randint(0, columns - block_size, (batch,), generator=generator, device=device.name)
            rows = torch.randperm(2 * batch, generator=generator, device=device.name)[:batch]
            return torch.arange(batch, device=device.name) + 7, lens, rows, table, block_size, 151_669

        sets = _sets(device, 1 << 20, make)
        for arguments in sets[:3]:
            expected = reference.block_layout(*arguments)
            for got, wanted in zip(triton_block.block_layout(*arguments), expected, strict=True):
                assert torch.equal(got, wanted), f"block layout of {batch} requests differs"
        bodies = {"torch": reference.block_layout, "triton": triton_block.block_layout}
        for row in _timed(device, bodies, sets, batch * block_size * 28, bandwidth):
            yield {"requests": batch} | row


def _acceptance_inputs(device: Device, batch: int, width: int, vocab: int, seed: int) -> tuple:
    """bf16 logits, and drafts of which each matches the target with probability 0.85."""
    generator = _generator(device, seed)
    logits = torch.randn(batch, width, vocab, generator=generator, device=device.name, dtype=torch.float32).bfloat16()
    ids = torch.randint(0, vocab, (batch, width), generator=generator, device=device.name)
    right = torch.rand(batch, width - 1, generator=generator, device=device.name) < 0.85
    ids[:, 1:] = torch.where(right, logits.argmax(-1)[:, :-1], ids[:, 1:])
    return logits, ids


def _accept_by_float32(logits: torch.Tensor, ids: torch.Tensor) -> reference.GreedyAcceptance:
    """Acceptance as in a host that first copies the logits to float32."""
    return reference.accept_greedy(logits.float(), ids)


def acceptance(device: Device, bandwidth: float) -> Iterator[Row]:
    width, vocab = (4, 2501) if device.dry else (16, 151_936)
    bodies = {
        "torch float32": _accept_by_float32,
        "torch": reference.accept_greedy,
        "triton": triton_acceptance.accept_greedy,
    }
    for batch in (2,) if device.dry else (1, 8, 32, 64):
        moved = batch * width * vocab * 2

        def make(seed: int, batch: int = batch) -> tuple:
            return _acceptance_inputs(device, batch, width, vocab, seed)

        sets = _sets(device, moved, make)
        for logits, ids in sets[:3]:
            expected = reference.accept_greedy(logits, ids)
            for field, got in zip(expected._fields, triton_acceptance.accept_greedy(logits, ids), strict=True):
                assert torch.equal(got, getattr(expected, field)), f"{field} of {batch} blocks differs"
            rows = logits.flatten(0, 1)
            assert torch.equal(triton_acceptance.row_argmax(rows), reference.row_argmax(rows)), "argmax differs"
        for row in _timed(device, bodies, sets, moved, bandwidth):
            yield {"requests": batch} | row


def acceptance_sweep(device: Device, bandwidth: float) -> Iterator[Row]:
    """Tries settings of the split argmax: columns per block and the target number of programs."""
    width, vocab = (4, 2501) if device.dry else (16, 151_936)
    before = triton_acceptance.BLOCK, triton_acceptance.PROGRAMS
    try:
        for batch in (1,) if device.dry else (1, 8, 32):
            moved = batch * width * vocab * 2

            def make(seed: int, batch: int = batch) -> tuple:
                return _acceptance_inputs(device, batch, width, vocab, seed)

            sets = _sets(device, moved, make)
            for block in (1024,) if device.dry else (1024, 2048, 4096, 8192):
                for programs in (512,) if device.dry else (512, 1024, 2048, 4096):
                    triton_acceptance.BLOCK, triton_acceptance.PROGRAMS = block, programs
                    bodies = {"triton": triton_acceptance.accept_greedy}
                    (row,) = _timed(device, bodies, sets, moved, bandwidth)
                    yield {"requests": batch, "block": block, "programs": programs} | row
    finally:
        triton_acceptance.BLOCK, triton_acceptance.PROGRAMS = before


def accept_chain(device: Device, bandwidth: float) -> Iterator[Row]:
    """Acceptance from given target ids: its cost is launches, not bytes."""
    width = 16
    for batch in (1, 2) if device.dry else (1, 8, 32):

        def make(seed: int, batch: int = batch) -> tuple:
            ids = torch.randint(0, 2, (2, batch, width), generator=_generator(device, seed), device=device.name)
            return ids[0].contiguous(), ids[1].contiguous()

        sets = _sets(device, 1 << 20, make)
        for arguments in sets[:3]:
            expected = reference.accept_chain(*arguments)
            for got, wanted in zip(triton_acceptance.accept_chain(*arguments), expected, strict=True):
                assert torch.equal(got, wanted), "the chain differs"
        bodies = {"torch": reference.accept_chain, "triton": triton_acceptance.accept_chain}
        for row in _timed(device, bodies, sets, batch * width * 24, bandwidth):
            yield {"requests": batch} | row


def _context_inputs(device: Device, rows: int, layers: int, heads: int, dim: int, slots: int, seed: int) -> tuple:
    generator = _generator(device, seed)
    kv = torch.randn(rows, layers, 2, heads, dim, generator=generator, device=device.name).bfloat16()
    norm = (torch.rand(layers, dim, generator=generator, device=device.name) + 0.5).bfloat16()
    frequencies = 1e6 ** (-torch.arange(0, dim, 2, device=device.name) / dim)
    angles = torch.outer(torch.arange(4096.0, device=device.name), frequencies)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 4096, (rows,), generator=generator, device=device.name)
    places = torch.randperm(slots, generator=generator, device=device.name)[:rows]
    shape = (slots, heads, dim)
    buffers = KVBuffers(*([torch.zeros(shape, device=device.name).bfloat16() for _ in range(layers)] for _ in "kv"))
    return kv, norm, 1e-6, positions, cos_sin, places, buffers


def _check_context(arguments: tuple) -> float:
    """Ratio of Triton's largest key error to torch's, both against float32.

    Asserts that the ratio is at most 2 and that values are copied exactly.
    """
    *numbers, buffers = arguments

    def written(body: Body, wide: bool) -> list[torch.Tensor]:
        def each(buffer: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(buffer, dtype=torch.float32 if wide else buffer.dtype)

        own = KVBuffers([each(b) for b in buffers.k], [each(b) for b in buffers.v])
        inputs = [x.float() if wide and isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in numbers]
        body(*inputs, own)
        return [torch.stack(own.k).float(), torch.stack(own.v).float()]

    exact = written(reference.write_context_kv, wide=True)
    plain = written(reference.write_context_kv, wide=False)
    ours = written(triton_context_kv.write_context_kv, wide=False)
    assert torch.equal(ours[1], plain[1]), "values differ"
    errors = [float((keys - exact[0]).abs().max()) for keys in (ours[0], plain[0])]
    assert errors[0] <= 2 * errors[1] + 1e-6, f"key error {errors[0]}, torch's {errors[1]}"
    return errors[0] / max(errors[1], 1e-30)


def context_kv(device: Device, bandwidth: float) -> Iterator[Row]:
    layers, heads, dim = (2, 2, 16) if device.dry else (5, 8, 128)
    for rows in (3,) if device.dry else (16, 128, 512, 2048):
        moved = rows * layers * 2 * heads * dim * 2 * 2

        def make(seed: int, rows: int = rows) -> tuple:
            slots = 16 if device.dry else 8192
            return _context_inputs(device, rows, layers, heads, dim, slots, seed)

        sets = _sets(device, layers * 2 * 8192 * heads * dim * 2, make)
        error = _check_context(sets[0])
        bodies = {"torch": reference.write_context_kv, "triton": triton_context_kv.write_context_kv}
        for row in _timed(device, bodies, sets, moved, bandwidth):
            yield {"rows": rows, "error_ratio": error} | row
