"""Greedy acceptance in Triton: the argmax of every row straight from the logits, then each block's committed ids.

A row of 151,936 logits is too long for one program, and a few requests have too few rows to fill a GPU. So each row is
split. The first launch packs the best entry of each split into an int64; their maximum is the row's argmax. The second
launch reduces the splits and accepts. No float32 copy of the logits is made.

The number of splits follows the number of rows. It is no constant of the kernels: Triton would compile a variant per
number, while requests wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.reference import GreedyAcceptance

PROGRAMS = 1024  # target number for the first launch: several programs for every SM
MAX_SPLITS = 64
BLOCK = 2048  # columns that a program reads at a time


@triton.jit
def _ordered(x):
    """An int32 that orders float32 `x` as torch's argmax does: -0 equals 0, NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize=("split_blocks",))
def _split_argmax_kernel(logits, partials, vocab, row_stride, split_blocks, BLOCK: tl.constexpr):
    """One program per row and split, `split_blocks` blocks each. partials: [rows, splits] int64; the high half orders
    by value, the low half by falling id."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * split_blocks * BLOCK
    columns = start + tl.arange(0, BLOCK)
    best_ids = columns
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for _ in range(split_blocks):
        x = tl.load(logits + row * row_stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        # Only a strictly better value replaces the best: ids ascend within a lane, so the lowest id of a tie stays.
        better = (x > best) | ((x != x) & (best == best))
        best = tl.where(better, x, best)
        best_ids = tl.where(better, columns, best_ids)
        columns += BLOCK
    # Lanes beyond the vocabulary hold -inf and ids larger than all real ones, so they lose every tie.
    packed = (_ordered(best).to(tl.int64) << 32) | (0x7FFFFFFF - best_ids).to(tl.int64)
    tl.store(partials + row * tl.num_programs(1) + split, tl.max(packed, 0))


@triton.jit
def _best_of_splits(partials, row, valid, splits, MAX_SPLITS: tl.constexpr):
    """The ids of rows whose `splits` partials are dense. row, valid: [N]."""
    split = tl.arange(0, MAX_SPLITS)
    inside = valid[:, None] & (split < splits)[None, :]
    lowest = -0x7FFFFFFFFFFFFFFF
    packed = tl.load(partials + row[:, None] * splits + split[None, :], mask=inside, other=lowest)
    return 0x7FFFFFFF - (tl.max(packed, 1) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=("rows", "splits"))
def _reduce_kernel(partials, target_ids, rows, splits, MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(target_ids + row, _best_of_splits(partials, row, row < rows, splits, MAX_SPLITS), mask=row < rows)


@triton.jit(do_not_specialize=("splits",), do_not_specialize_on_alignment=("choices", "ids"))
def _accept_kernel(
    choices,
    ids,
    out_ids,
    commit_lens,
    bonus_ids,
    splits,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program per block. choices: [B, WIDTH, splits] partials, or [B, WIDTH] ids if MAX_SPLITS is 0."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = block * WIDTH + lane
    valid = lane < WIDTH
    if MAX_SPLITS > 0:
        chosen = _best_of_splits(choices, row, valid, splits, MAX_SPLITS)
    else:
        chosen = tl.load(choices + row, mask=valid, other=0)
    following = tl.load(ids + row + 1, mask=lane < WIDTH - 1, other=0)
    wrong = (lane >= WIDTH - 1) | (following != chosen)
    accept_len = tl.min(tl.where(wrong, lane, WIDTH - 1), 0)
    tl.store(out_ids + row, tl.where(lane <= accept_len, chosen, 0), mask=valid)
    tl.store(commit_lens + block, accept_len + 1)
    tl.store(bonus_ids + block, tl.sum(tl.where(lane == accept_len, chosen, 0), 0))


def _splits_of(rows: int, vocab: int) -> int:
    """Splits of a row, a power of two: enough to fill the GPU, each with at least one block of columns."""
    wanted = min(MAX_SPLITS, max(1, PROGRAMS // max(rows, 1)), triton.cdiv(vocab, BLOCK))
    return 1 << (wanted.bit_length() - 1)


def _split_argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits: [rows, V]. Returns [rows, splits] int64."""
    rows, vocab = logits.shape
    assert 0 < vocab < 2**31 and logits.stride(1) == 1, (logits.shape, logits.stride())
    splits = _splits_of(rows, vocab)
    partials = torch.empty((rows, splits), dtype=torch.int64, device=logits.device)
    if rows:
        blocks = triton.cdiv(vocab, splits * BLOCK)
        _split_argmax_kernel[(rows, splits)](logits, partials, vocab, logits.stride(0), blocks, BLOCK=BLOCK)
    return partials


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """`reference.row_argmax`; two launches. The last dimension must be contiguous; rows may be strided."""
    partials = _split_argmax(logits)
    rows, splits = partials.shape
    target_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _reduce_kernel[(triton.cdiv(rows, 16),)](partials, target_ids, rows, splits, MAX_SPLITS=MAX_SPLITS, ROWS=16)
    return target_ids


def _accept(choices: torch.Tensor, ids: torch.Tensor, splits: int) -> GreedyAcceptance:
    batch, width = ids.shape
    # `ids` may be a view of a wider block, whose rows are not dense.
    ids, choices = ids.contiguous(), choices.contiguous()
    out_ids = torch.empty((batch, width), dtype=torch.int64, device=ids.device)
    commit_lens = torch.empty(batch, dtype=torch.int32, device=ids.device)
    bonus_ids = torch.empty(batch, dtype=torch.int64, device=ids.device)
    if batch:
        lanes = triton.next_power_of_2(width)
        _accept_kernel[(batch,)](
            choices,
            ids,
            out_ids,
            commit_lens,
            bonus_ids,
            splits,
            WIDTH=width,
            LANES=lanes,
            MAX_SPLITS=MAX_SPLITS if splits else 0,
            num_warps=1,
        )
    return GreedyAcceptance(out_ids, commit_lens, bonus_ids)


def accept_chain(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """`reference.accept_chain`; one launch."""
    return _accept(target_ids, ids, splits=0)


def accept_greedy(logits: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """`reference.accept_greedy`; two launches."""
    partials = _split_argmax(logits.flatten(0, 1))
    return _accept(partials, ids, splits=partials.shape[1])
