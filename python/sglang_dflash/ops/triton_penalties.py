"""Penalties in Triton: one launch penalizes the rows of all blocks, one counts what they committed.

The torch body looks only at the logits of emitted ids, so its cost grows with the answers. Here every program looks at
one span of the vocabulary for all rows of a request, and touches a logit only if its id is penalised or masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.penalties import BlockRows, EmittedTokens, PenaltyParams

SPAN = 1024  # ids of the vocabulary per program


@triton.jit(
    do_not_specialize=("num_stops", "row_stride"),
    do_not_specialize_on_alignment=("block_rows", "block_ids", "block_lens", "rows"),
)
def _penalize_kernel(
    logits,
    row_stride,
    column_stride,
    block_rows,
    block_ids,
    block_lens,
    rows,
    seen,
    sums,
    lens,
    frequency,
    presence,
    repetition,
    min_new_tokens,
    stop_ids,
    num_stops,
    vocab,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One program per request with penalties and span of the vocabulary; arguments as in `EmittedTokens.penalize`."""
    place = tl.program_id(0)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < vocab
    table = tl.load(rows + place) * vocab + column
    counted = tl.load(seen + table, mask=inside, other=0) != 0
    total = tl.load(sums + table, mask=counted, other=0.0)
    per_occurrence = tl.load(frequency + place)
    once = tl.load(presence + place)
    factor = tl.load(repetition + place)
    missing = tl.load(min_new_tokens + place) - tl.load(lens + tl.load(rows + place))
    stops = column < 0
    for stop in range(num_stops):
        stops |= column == tl.load(stop_ids + place * num_stops + stop)

    cells = logits + column.to(tl.int64) * column_stride
    verified = tl.load(block_lens + place)
    for row in range(WIDTH):
        if row > 0:
            drafted = column == tl.load(block_ids + place * WIDTH + row)
            counted |= drafted
            # One addition per occurrence: the sum is rounded as SGLang's is.
            total = tl.where(drafted, total + per_occurrence, total)
        masked = stops & (row < missing)
        touched = (counted | masked) & inside & (row < verified)
        cell = cells + tl.load(block_rows + place * WIDTH + row) * row_stride
        x = tl.load(cell, mask=touched, other=0.0)
        x = tl.where(counted, x - total - once, x)
        x = tl.where(counted, tl.where(x < 0, x * factor, tl.div_rn(x, factor)), x)
        tl.store(cell, tl.where(masked, float("-inf"), x), mask=touched)


@triton.jit(do_not_specialize_on_alignment=("requests", "rows", "ids", "counts"))
def _append_kernel(
    requests,
    rows,
    ids,
    counts,
    seen,
    sums,
    lens,
    frequency,
    vocab,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per request with penalties; arguments as in `EmittedTokens.append`, `counts` being its `lens`."""
    place = tl.program_id(0)
    request = tl.load(requests + place)
    row = tl.load(rows + place)
    count = tl.load(counts + request).to(tl.int64)
    lane = tl.arange(0, LANES)
    source = ids + request * WIDTH
    mine = tl.load(source + lane, mask=lane < WIDTH, other=-1)[:, None]
    other = tl.load(source + lane, mask=lane < WIDTH, other=-1)[None, :]
    equal = (mine == other) & (lane < count)[None, :]
    times = tl.sum(equal.to(tl.int32), 1)
    earlier = tl.sum((equal & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    first = (lane < count) & (earlier == 0)  # the first of equal ids writes for all of them
    cell = row * vocab + tl.load(source + lane, mask=lane < WIDTH, other=0)
    per_occurrence = tl.load(frequency + place)
    total = tl.load(sums + cell, mask=first, other=0.0)
    for time in range(WIDTH):
        total = tl.where(times > time, total + per_occurrence, total)
    tl.store(sums + cell, total, mask=first)
    tl.store(seen + cell, 1, mask=first)
    tl.store(lens + row, tl.load(lens + row) + count)


class TritonEmittedTokens(EmittedTokens):
    """`EmittedTokens` in one launch per call. It keeps no ids, so `most` may be anything."""

    def _keep_ids(self, row: int, ids: torch.Tensor) -> None:
        self._reserve(row + 1, 0)

    def append(
        self,
        requests: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lens: torch.Tensor,
        most: int,
        params: PenaltyParams,
    ) -> None:
        width = ids.shape[1]
        ids, lens = ids.contiguous(), lens.contiguous()
        _append_kernel[(len(rows),)](
            requests,
            rows,
            ids,
            lens,
            self._seen.view(torch.uint8),
            self._sums,
            self._lens,
            params.frequency,
            self._vocab_size,
            WIDTH=width,
            LANES=triton.next_power_of_2(width),
            num_warps=1,
        )

    def penalize(
        self, logits: torch.Tensor, block: BlockRows, rows: torch.Tensor, most: int, params: PenaltyParams
    ) -> None:
        vocab = logits.shape[1]
        assert vocab == self._vocab_size and logits.dtype == torch.float32, (logits.shape, logits.dtype)
        _penalize_kernel[(len(rows), triton.cdiv(vocab, SPAN))](
            logits,
            *logits.stride(),
            block.rows.contiguous(),
            block.ids.contiguous(),
            block.lens.contiguous(),
            rows,
            self._seen.view(torch.uint8),
            self._sums,
            self._lens,
            *params,
            params.stop_ids.shape[1],
            vocab,
            WIDTH=block.ids.shape[1],
            SPAN=SPAN,
        )
