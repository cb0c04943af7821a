"""The block's layout in Triton: ids, positions and KV slots of all requests in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("plane",), do_not_specialize_on_alignment=("bonus_ids", "prefix_lens", "req_pool_indices")
)
def _block_layout_kernel(
    bonus_ids,
    prefix_lens,
    req_pool_indices,
    req_to_token,
    table_stride,
    out,
    plane,
    mask_token_id,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """out: [3, B, WIDTH] int64 (ids, positions, slots), `plane` = B * WIDTH elements apart."""
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    valid = lane < WIDTH
    positions = tl.load(prefix_lens + request).to(tl.int64) + lane
    table_row = tl.load(req_pool_indices + request).to(tl.int64)
    slots = tl.load(req_to_token + table_row * table_stride + positions, mask=valid, other=0)
    ids = tl.where(lane == 0, tl.load(bonus_ids + request), mask_token_id)
    cell = out + request * WIDTH + lane
    tl.store(cell, ids, mask=valid)
    tl.store(cell + plane, positions, mask=valid)
    tl.store(cell + 2 * plane, slots.to(tl.int64), mask=valid)


def block_layout(
    bonus_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.block_layout`; one launch, one allocation. Rows of `req_to_token` must be contiguous."""
    batch = len(bonus_ids)
    out = torch.empty((3, batch, block_size), dtype=torch.int64, device=bonus_ids.device)
    assert req_to_token.stride(1) == 1, req_to_token.stride()
    if batch:
        _block_layout_kernel[(batch,)](
            bonus_ids.contiguous(),
            prefix_lens.contiguous(),
            req_pool_indices.contiguous(),
            req_to_token,
            req_to_token.stride(0),
            out,
            batch * block_size,
            mask_token_id,
            WIDTH=block_size,
            LANES=triton.next_power_of_2(block_size),
            num_warps=1,
        )
    ids, positions, slots = out.unbind(0)
    return ids, positions, slots
