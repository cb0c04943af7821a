"""SGLang's hash of a seed, a position and a token id: the noise of seeded sampling (`kernels/ops/sampling`)."""

from __future__ import annotations

import torch

LOW = 0xFFFFFFFF
BYTES = 16  # length of a key: 8 for the seed, 4 for the position, 4 for the column


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, hash seed 0) of (seed, position, column), bit for bit as SGLang's Triton kernel.

    Args:
        seeds: [N] int64 or uint64; all 64 bits are hashed, the low half first.
        positions: [N] integers; columns: [M] integers. Only the low 32 bits are hashed.

    Returns:
        [N, M] uint32.
    """
    # Torch has no uint32 arithmetic. An int64 product wraps at 64 bits, so its low 32 bits are right.
    seed = seeds.to(torch.int64)
    rows = torch.zeros_like(seed)
    for block in (seed & LOW, (seed >> 32) & LOW, positions.to(torch.int64) & LOW):
        rows = _mix(rows, _scramble(block))
    hashed = _mix(rows[:, None], _scramble(columns.to(torch.int64) & LOW))  # [N, M] int64
    hashed ^= BYTES
    hashed ^= hashed >> 16
    hashed.mul_(0x85EBCA6B).bitwise_and_(LOW)
    hashed ^= hashed >> 13
    hashed.mul_(0xC2B2AE35).bitwise_and_(LOW)
    hashed ^= hashed >> 16
    return hashed.to(torch.uint32)


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & LOW


def _scramble(block: torch.Tensor) -> torch.Tensor:
    return _rotated((block * 0xCC9E2D51) & LOW, 15).mul_(0x1B873593).bitwise_and_(LOW)


def _mix(state: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    return _rotated(state ^ scrambled, 13).mul_(5).add_(0xE6546B64).bitwise_and_(LOW)
