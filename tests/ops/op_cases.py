"""The ops that run in Triton, and the packing of rows: how each is compared on one shape, and what one call moves.

`test_cuda_ops.py` runs the shapes of a server on a GPU, `test_triton_cases.py` tiny ones under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.ops import (
    BlockRows,
    EmittedTokens,
    Filters,
    KVBuffers,
    PenaltyParams,
    likeliest_rows,
    reference,
    triton_acceptance,
    triton_block,
    triton_context_kv,
    triton_sampling,
)
from sglang_dflash.ops.triton_penalties import TritonEmittedTokens

SENTINEL = 77.0
ACCEPTED = 0.85  # of the drafts


@dataclass(frozen=True, slots=True)
class Case:
    """An op on one shape.

    Fields:
        compare: compares the op with its reference; returns its largest error, 0 where all must be equal.
        run: one call of the op.
        torch_body: one call of its torch body; None where the op has no other.
        moved_bytes: the least that one call reads and writes.
    """

    shape: str
    compare: Callable[[], float]
    run: Callable[[], Any]
    torch_body: Callable[[], Any] | None
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A case that was right, and its speed.

    Fields:
        share: of the device's bandwidth.
    """

    op: str
    shape: str
    error: float
    us: float
    torch_us: float | None
    gb_s: float
    share: float

    def line(self) -> str:
        beside = "" if self.torch_us is None else f" (torch {self.torch_us:.1f})"
        return (
            f"{self.op}, {self.shape}: error {self.error:.2g}, {self.us:.1f} us{beside}, {self.gb_s:.1f} GB/s, "
            f"{self.share:.1%} of the device's bandwidth"
        )


def measure(op: str, case: Case, clock_us: Callable[[Callable[[], Any]], float], bandwidth_gb_s: float) -> Measured:
    """Compares the case, then times it.

    Args:
        clock_us: calls a function, and returns the microseconds of a call.
    """
    error = case.compare()
    us = clock_us(case.run)
    torch_us = None if case.torch_body is None else clock_us(case.torch_body)
    gb_s = case.moved_bytes / us / 1e3
    return Measured(op, case.shape, error, us, torch_us, gb_s, gb_s / bandwidth_gb_s)


def _equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (number, a.dtype, a.shape, b.dtype, b.shape)
        assert torch.equal(a, b), f"result {number} differs at {(a != b).nonzero()[:4].tolist()}"
    return 0.0


def _compared(shape: str, ours: Callable, torch_body: Callable, arguments: tuple, moved_bytes: int) -> Case:
    """The case of an op whose results are whole numbers."""
    return Case(
        shape,
        lambda: _equal(ours(*arguments), torch_body(*arguments)),
        lambda: ours(*arguments),
        lambda: torch_body(*arguments),
        moved_bytes,
    )


def block_layout(device: str, batch: int, width: int, columns: int) -> Case:
    generator = torch.Generator(device).manual_seed(batch)
    table = torch.arange(2 * batch * columns, device=device).view(-1, columns).int()
    bonus_ids = torch.randint(0, 2**31, (batch,), generator=generator, device=device)
    prefix_lens = torch.randint(0, columns - width + 1, (batch,), generator=generator, device=device)
    rows = torch.randperm(2 * batch, generator=generator, device=device)[:batch]
    arguments = (bonus_ids, prefix_lens, rows, table, width, 151_669)
    shape = f"{batch} blocks of {width}"
    return _compared(shape, triton_block.block_layout, reference.block_layout, arguments, batch * (24 + 28 * width))


def accept_greedy(device: str, batch: int, width: int, vocab: int) -> Case:
    """Acceptance from bfloat16 logits, whose argmax often ties."""
    generator = torch.Generator(device).manual_seed(batch)
    logits = torch.randn(batch, width, vocab, generator=generator, device=device).bfloat16()
    ids = torch.randint(0, vocab, (batch, width), generator=generator, device=device)
    right = torch.rand(batch, width - 1, generator=generator, device=device) < ACCEPTED
    ids[:, 1:] = torch.where(right, logits.argmax(-1)[:, :-1], ids[:, 1:])
    shape = f"{batch} blocks of {width}, {vocab} ids"
    ours, torch_body = triton_acceptance.accept_greedy, reference.accept_greedy
    return _compared(shape, ours, torch_body, (logits, ids), logits.numel() * 2)


def row_argmax(device: str, rows: int, vocab: int) -> Case:
    """The argmax of bfloat16 logits."""
    generator = torch.Generator(device).manual_seed(rows)
    arguments = (torch.randn(rows, vocab, generator=generator, device=device).bfloat16(),)
    return _compared(
        f"{rows} rows, {vocab} ids",
        lambda logits: [triton_acceptance.row_argmax(logits)],
        lambda logits: [reference.row_argmax(logits)],
        arguments,
        rows * vocab * 2,
    )


def accept_chain(device: str, batch: int, width: int) -> Case:
    """Acceptance from given target ids."""
    generator = torch.Generator(device).manual_seed(batch)
    target_ids, ids = torch.randint(0, 2**31, (2, batch, width), generator=generator, device=device)
    right = torch.rand(batch, width - 1, generator=generator, device=device) < ACCEPTED
    ids[:, 1:] = torch.where(right, target_ids[:, :-1], ids[:, 1:])
    shape = f"{batch} blocks of {width}"
    ours, torch_body = triton_acceptance.accept_chain, reference.accept_chain
    return _compared(shape, ours, torch_body, (target_ids, ids), batch * (16 + 24 * width))


def sample_rows(device: str, rows: int, vocab: int, top_k: int) -> Case:
    """Sampled rows with logits of bfloat16's steps, which often tie. Where a sum ends at a row's number, rounding may
    draw the next token: in at most one row of a hundred."""
    generator = torch.Generator(device).manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator, device=device) * 3).bfloat16().float()
    requests = torch.arange(rows, device=device) // 16
    asking = int(requests[-1]) + 1
    filters = Filters(
        torch.rand(asking, generator=generator, device=device) + 0.5,
        torch.full((asking,), top_k, dtype=torch.int32, device=device),
        torch.where(torch.arange(asking, device=device) % 2 == 0, 0.95, 1.0),
    )
    arguments = logits, requests, filters, torch.rand(rows, generator=generator, device=device), False

    def compare() -> float:
        got, expected = triton_sampling.sample_rows(*arguments), reference.sample_rows(*arguments)
        assert got.dtype == expected.dtype and got.shape == expected.shape, (got.dtype, got.shape)
        share = float((got != expected).float().mean())
        assert share <= 0.01, f"{share:.1%} of the tokens differ"
        return share

    return Case(
        f"top_k {top_k} of {rows} rows, {vocab} ids",
        compare,
        lambda: triton_sampling.sample_rows(*arguments),
        lambda: reference.sample_rows(*arguments),
        rows * vocab * 4,
    )


def _buffers(slots: int, layers: int, heads: int, dim: int, device: str, dtype: torch.dtype) -> KVBuffers:
    def each() -> list[torch.Tensor]:
        return [torch.full((slots, heads, dim), SENTINEL, device=device, dtype=dtype) for _ in range(layers)]

    return KVBuffers(each(), each())


def context_kv(device: str, rows: int, layers: int, heads: int, dim: int, slots: int) -> Case:
    """The draft's context KV in bfloat16: values are copied, keys may err twice as much as torch's in bfloat16."""
    generator = torch.Generator(device).manual_seed(rows)
    kv = (torch.randn(rows, layers, 2, heads, dim, generator=generator, device=device) * 3).bfloat16()
    norm = (torch.rand(layers, dim, generator=generator, device=device) + 0.5).bfloat16()
    frequencies = 1e6 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.outer(torch.arange(4096.0, device=device), frequencies)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 4096, (rows,), generator=generator, device=device)
    places = torch.randperm(slots, generator=generator, device=device)[:rows]
    arguments = (kv, norm, 1e-6, positions, cos_sin, places)
    ours, torch_body = (_buffers(slots, layers, heads, dim, device, torch.bfloat16) for _ in range(2))

    def compare() -> float:
        exact = _buffers(slots, layers, heads, dim, device, torch.float32)
        triton_context_kv.write_context_kv(*arguments, ours)
        reference.write_context_kv(*arguments, torch_body)
        wide = (x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments)
        reference.write_context_kv(*wide, exact)
        errors = [0.0]
        for layer in range(layers):
            assert torch.equal(ours.v[layer], torch_body.v[layer]), f"values of layer {layer} differ"
            error, allowed = (float((b.k[layer].float() - exact.k[layer]).abs().max()) for b in (ours, torch_body))
            assert error <= 2 * allowed + 1e-6, f"keys of layer {layer} err by {error}, torch's by {allowed}"
            errors.append(error)
        others = torch.ones(slots, dtype=torch.bool, device=device).index_fill_(0, places, False)
        assert all((b[others] == SENTINEL).all() for b in (*ours.k, *ours.v)), "a slot without a row changed"
        return max(errors)

    return Case(
        f"{rows} rows, {layers} layers, {heads} heads of {dim}",
        compare,
        lambda: triton_context_kv.write_context_kv(*arguments, ours),
        lambda: reference.write_context_kv(*arguments, torch_body),
        kv.numel() * 2 * 2,
    )


def penalties(device: str, batch: int, width: int, vocab: int, emitted: int) -> Case:
    """Penalties on float32 logits, bit by bit as torch's; then the count of what was committed."""
    generator = torch.Generator(device).manual_seed(batch)
    logits = torch.randn(batch, width, vocab, generator=generator, device=device) * 5
    block_ids = torch.randint(0, min(vocab, 3 * width), (batch, width), generator=generator, device=device)
    lens = torch.randint(0, width + 1, (batch,), generator=generator, device=device)
    requests = torch.randperm(batch, generator=generator, device=device)
    rows = torch.randperm(batch, generator=generator, device=device)
    frequency, presence = torch.rand(2, batch, generator=generator, device=device) * 4 - 2
    repetition = torch.rand(batch, generator=generator, device=device) + 0.5
    missing = torch.randint(0, emitted + width, (batch,), generator=generator, device=device)
    stop_ids = torch.randint(0, vocab, (batch, 2), generator=generator, device=device)
    params = PenaltyParams(frequency, presence, repetition, missing, stop_ids)
    most = emitted + width
    torch_body, ours = EmittedTokens(vocab, device), TritonEmittedTokens(vocab, device)
    for row in range(batch):
        ids = torch.randint(0, vocab, (emitted,), generator=generator, device=device)
        for body in (torch_body, ours):
            body.start(row, ids, float(frequency[row]))

    def penalized(body: EmittedTokens, changed: torch.Tensor) -> torch.Tensor:
        block = BlockRows.whole(requests, block_ids[requests])
        body.penalize(changed.flatten(0, 1), block, rows, most, params)
        return changed

    def compare() -> float:
        _equal([penalized(ours, logits.clone())], [penalized(torch_body, logits.clone())])
        for body in (torch_body, ours):
            body.append(requests, rows, block_ids, lens, most, params)
        return _equal(ours.of(rows, 0)[1:], torch_body.of(rows, 0)[1:])  # seen, sums, lens

    return Case(
        f"{batch} blocks of {width}, {vocab} ids, {emitted} emitted",
        compare,
        lambda: penalized(ours, logits),
        lambda: penalized(torch_body, logits),
        batch * (vocab + emitted * (4 + 8 * width)),
    )


def likeliest(device: str, batch: int, width: int, count: int) -> Case:
    """The likeliest rows of all blocks: torch's ops on the device, compared with those on a CPU."""
    generator = torch.Generator(device).manual_seed(batch)
    chances = torch.rand(batch, width - 1, generator=generator, device=device).cumprod(1)

    def compare() -> float:
        *got, size = likeliest_rows(chances, count, count)
        *expected, wanted = likeliest_rows(chances.cpu(), count, count)
        assert size == wanted, (size, wanted)
        return _equal([tensor.cpu() for tensor in got], expected)

    shape = f"{count} of {batch} x {width} rows"
    moved_bytes = 4 * batch * width + 8 * (count + batch * width)
    return Case(shape, compare, lambda: likeliest_rows(chances, count, count), None, moved_bytes)
