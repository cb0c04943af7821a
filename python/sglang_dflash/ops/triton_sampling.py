"""Sampling in Triton: one program draws a row's token in one pass over its logits.

A lane reads every `BLOCK`-th logit of the row. It keeps the three best of them, and adds up the weights of all. A row
keeps its `top_k` best tokens and their ties, so a lane seldom has more than two of them. Which tokens are kept, and
which one is drawn, is then found by bisection over what the lanes hold. Only where a lane may have dropped a kept token
the row is read again: once in most such cases to see that none is missing, and twice to draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.reference import Filters
from sglang_dflash.ops.triton_acceptance import _ordered

BLOCK = 4096  # lanes of a program
WARPS = 32  # so that 64 registers a thread hold what the lanes keep
STAGES = 3  # blocks of logits on their way to a program

ABSENT = tl.constexpr(-0x80000000)  # the key of no token, and of one of probability zero
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(cells, column, vocab):
    """Logits, and int32 keys that order as they do."""
    x = tl.load(cells + column, mask=column < vocab, other=float("-inf"))
    return x, tl.where(x == float("-inf"), ABSENT, _ordered(x))


@triton.jit
def _logit(key):
    """The logit of a key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
    return tl.where(key == ABSENT, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _middle(low, high):
    """The lower middle of two int32."""
    return low + ((high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)


@triton.jit
def _read_again(cells, vocab, first, best, scale, top_k, limit, uniform, BLOCK: tl.constexpr):
    """The drawn id, from as many passes over the row as that takes.

    Args:
        first, best: int32; the least key that may be kept, and the greatest.
        limit: the weight that makes all less likely tokens drop.
    """
    lane = tl.arange(0, BLOCK)
    top = _logit(best)
    low = first
    high = best
    probe = first  # right, unless a lane dropped a token
    while low < high:
        likelier = tl.zeros((BLOCK,), tl.int32)
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, vocab, BLOCK):
            x, key = _load(cells, start + lane, vocab)
            likelier += (key > probe).to(tl.int32)
            mass += tl.where(key > probe, tl.exp2((x - top) * scale), 0.0)
        kept = (tl.sum(likelier, 0) < top_k) & (tl.sum(mass, 0) < limit)
        high = tl.where(kept, probe, high)
        low = tl.where(kept, low, probe + 1)
        probe = _middle(low, high)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab, BLOCK):
        x, key = _load(cells, start + lane, vocab)
        mass += tl.where(key >= low, tl.exp2((x - top) * scale), 0.0)
    target = uniform * tl.sum(mass, 0)
    below = tl.to_tensor(0.0)
    drawn = vocab
    last = tl.to_tensor(0)
    for start in tl.range(0, vocab, BLOCK):
        x, key = _load(cells, start + lane, vocab)
        weight = tl.where(key >= low, tl.exp2((x - top) * scale), 0.0)
        hit = (weight > 0.0) & (below + tl.cumsum(weight, 0) > target)
        drawn = tl.minimum(drawn, tl.min(tl.where(hit, start + lane, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + lane, 0), 0))
        below += tl.sum(weight, 0)
    return tl.where(drawn < vocab, drawn, last)  # rounded otherwise, no sum may exceed the target


@triton.jit(do_not_specialize_on_alignment=("requests", "temperatures", "top_ks", "top_ps", "uniform"))
def _sample_kernel(
    logits,
    row_stride,
    vocab,
    requests,
    temperatures,
    top_ks,
    top_ps,
    uniform,
    ids,
    ANY_ID: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row. logits: float32; ids: [N] int64."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row)
    temperature = tl.load(temperatures + request)
    scale = LOG2_E / temperature
    top_k = tl.load(top_ks + request)
    top_p = tl.load(top_ps + request)
    u = tl.load(uniform + row)
    cells = logits + row * row_stride
    lane = tl.arange(0, BLOCK)

    # Of each lane: the best keys in falling order and their columns; of equal keys the lower column comes first.
    key1 = tl.full((BLOCK,), ABSENT, tl.int32)
    key2 = key1
    key3 = key1
    column1 = lane
    column2 = lane
    column3 = lane
    # Of each lane: its largest logit so far, and the weights relative to it. It begins with a finite number, so that
    # no difference of two is NaN.
    most = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        column = start + lane
        x, key = _load(cells, column, vocab)
        better1 = key > key1
        better2 = key > key2
        better3 = key > key3
        key3 = tl.where(better2, key2, tl.where(better3, key, key3))
        column3 = tl.where(better2, column2, tl.where(better3, column, column3))
        key2 = tl.where(better1, key1, tl.where(better2, key, key2))
        column2 = tl.where(better1, column1, tl.where(better2, column, column2))
        key1 = tl.where(better1, key, key1)
        column1 = tl.where(better1, column, column1)
        smaller = tl.exp2(-tl.abs(x - most) * scale)
        total = tl.where(x > most, total * smaller + 1.0, total + smaller)
        most = tl.where(x > most, x, most)

    best = tl.max(key1, 0)
    top = _logit(best)
    weight1 = tl.exp2((_logit(key1) - top) * scale)
    weight2 = tl.exp2((_logit(key2) - top) * scale)
    weight3 = tl.exp2((_logit(key3) - top) * scale)
    whole = tl.sum(total * tl.exp2((most - top) * scale), 0)
    limit = tl.where(top_p < 1.0, top_p * whole, float("inf"))

    # The least key that fewer than `top_k` tokens with less than `top_p` of the weight exceed.
    low = tl.to_tensor(ABSENT + 1)
    high = tl.maximum(best, low)
    while low < high:
        probe = _middle(low, high)
        above1 = key1 > probe
        above2 = key2 > probe
        above3 = key3 > probe
        likelier = tl.sum(above1.to(tl.int32) + above2.to(tl.int32) + above3.to(tl.int32), 0)
        mass = tl.where(above1, weight1, 0.0) + tl.where(above2, weight2, 0.0) + tl.where(above3, weight3, 0.0)
        kept = (likelier < top_k) & (tl.sum(mass, 0) < limit)
        high = tl.where(kept, probe, high)
        low = tl.where(kept, low, probe + 1)

    if top_k <= 1:
        drawn = tl.min(tl.where(key1 == best, column1, vocab), 0)
    elif not (tl.abs(top / temperature) < float("inf")):  # NaN, too
        drawn = tl.minimum((u * vocab).to(tl.int32), vocab - 1) if ANY_ID else tl.to_tensor(0)
    elif tl.max(key3, 0) >= low:  # that lane may have dropped a kept token
        drawn = _read_again(cells, vocab, low, best, scale, top_k, limit, u, BLOCK)
    else:
        weight1 = tl.where(key1 >= low, weight1, 0.0)
        weight2 = tl.where(key2 >= low, weight2, 0.0)
        weight3 = tl.where(key3 >= low, weight3, 0.0)
        whole = tl.sum(weight1 + weight2 + weight3, 0)
        target = u * whole  # less than `whole`, even rounded: the numbers end half a step below 1
        # The least id up to which the weights exceed the target.
        drawn = tl.to_tensor(0)
        end = vocab - 1
        while drawn < end:
            probe = (drawn + end) // 2
            mass = tl.where(column1 <= probe, weight1, 0.0)
            mass += tl.where(column2 <= probe, weight2, 0.0)
            mass += tl.where(column3 <= probe, weight3, 0.0)
            reached = tl.sum(mass, 0) > target
            end = tl.where(reached, probe, end)
            drawn = tl.where(reached, drawn, probe + 1)
    tl.store(ids + row, drawn.to(tl.int64))


def sample_rows(
    logits: torch.Tensor, requests: torch.Tensor, filters: Filters, uniform: torch.Tensor, any_id: bool
) -> torch.Tensor:
    """`reference.sample_rows`; one launch. The last dimension must be contiguous; rows may be strided."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    assert 0 < vocab < 2**31 - BLOCK and logits.stride(1) == 1, (logits.shape, logits.stride())
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _sample_kernel[(rows,)](
            logits,
            logits.stride(0),
            vocab,
            requests.contiguous(),
            *(values.contiguous() for values in filters),
            uniform.contiguous(),
            ids,
            ANY_ID=any_id,
            BLOCK=BLOCK,
            STAGES=STAGES,
            num_warps=WARPS,
        )
    return ids
