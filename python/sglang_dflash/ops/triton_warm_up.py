"""Compiles every variant of the Triton kernels that a decode step can meet, before requests wait for them.

A variant depends on dtypes, on the block's width, and on what Triton reads off an argument: a stride of 1, divisibility
by 16. The kernels keep whatever varies with the batch out of it, so one small call each covers all batches.
"""

from __future__ import annotations

import torch

from sglang_dflash.ops import triton_acceptance, triton_block, triton_sampling
from sglang_dflash.ops.penalties import BlockRows, PenaltyParams
from sglang_dflash.ops.reference import Filters
from sglang_dflash.ops.triton_penalties import TritonEmittedTokens


def warm_up(
    width: int,
    compared: set[tuple[int, torch.dtype]],
    vocab_size: int,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    draws: bool,
) -> None:
    """Runs each kernel on a request of its own; writes nothing that anybody reads.

    Args:
        width: rows of a request in a step.
        compared: columns and dtype of the logits whose argmax is taken: the target's and the draft's.
        vocab_size: columns of the logits that penalties change and tokens are drawn from.
        req_to_token: [R, C] int32; the slot table, whose first row and columns are read.
        draws: whether `sample_rows` may be called.
    """
    device = req_to_token.device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    ids, _, _ = triton_block.block_layout(first, first, first, req_to_token, width, mask_token_id)
    for columns, dtype in compared:
        for rows in _layouts(width, columns, dtype, device):
            triton_acceptance.accept_greedy(rows, ids)
            triton_acceptance.accept_chain(triton_acceptance.row_argmax(rows[0]).view(1, width), ids)
    emitted = TritonEmittedTokens(vocab_size, device)
    emitted.start(0, first, 0.0)
    zero = torch.zeros(1, device=device)
    params = PenaltyParams(zero, zero, zero + 1, first, first[:, None])
    emitted.penalize(torch.zeros((width, vocab_size), device=device), BlockRows.whole(first, ids), first, 1, params)
    for logits in _layouts(1, vocab_size, torch.float32, device) if draws else ():
        for any_id in (False, True):
            filters = Filters(zero + 1, first.int() + 2, zero + 1)
            triton_sampling.sample_rows(logits[0], first, filters, zero, any_id)
    for ids_of_a_step in (ids, ids[:, :1]):  # of a decode step, and of a prefill
        emitted.append(first, first, ids_of_a_step, first.int() + 1, 1, params)


def _layouts(width: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Logits of one request, [1, width, columns]: dense, and the first columns of wider rows. Triton distinguishes row
    strides that are multiples of 16."""
    padded = -(-columns // 16) * 16
    strides = {columns, padded, padded + 8}
    return [torch.zeros((1, width, stride), dtype=dtype, device=device)[..., :columns] for stride in sorted(strides)]
