"""Makes weights dense that a checkpoint holds in few bits: AWQ, GPTQ, compressed-tensors, MXFP4 and FP8.

Products are computed in float32 and rounded once, to the dtype that is asked for.
"""

from __future__ import annotations

import torch

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its word where AWQ puts each of eight columns
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1
SCALE_BIAS = 127  # of an e8m0 scale: a byte b stands for 2 ** (b - 127)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned numbers in 32-bit words, lowest bits first.

    Args:
        words: [..., n] int32.
        bits: of a number; divides 32 and is at most 8.

    Returns:
        [..., n * 32 / bits] uint8.
    """
    assert 32 % bits == 0 and bits <= 8, bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(-2)


def dense_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """AWQ's "gemm" layout of 4 bits: (q - zero) * scale, with eight columns in a word (AutoAWQ; SGLang's
    `awq_dequantize`).

    Args:
        qweight: [in, out / 8] int32.
        qzeros: [groups, out / 8] int32.
        scales: [groups, out].

    Returns:
        [out, in].
    """
    q, zeros = (
        unpack_words(words, 4).view(len(words), -1, 8)[..., AWQ_COLUMNS].flatten(1) for words in (qweight, qzeros)
    )
    return _scaled(q.t(), zeros.t(), scales.t(), dtype)


def dense_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bits: int,
    zero_offset: int = 1,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """GPTQ: (q - zero) * scale.

    Args:
        qweight: [in * bits / 32, out] int32.
        qzeros: [groups, out * bits / 32] int32.
        scales: [groups, out].
        zero_offset: what the checkpoint took from its zeros: 1, or 0 in "gptq_v2".
        groups: [in] the group of each input (`g_idx`); None: groups of equal size, in order.

    Returns:
        [out, in].
    """
    q = unpack_words(qweight.t().contiguous(), bits)  # [out, in]
    zeros = ((unpack_words(qzeros, bits).int() + zero_offset) & (2**bits - 1)).to(torch.uint8).t()
    return _scaled(q, zeros, scales.t(), dtype, groups)


def dense_grouped(
    packed: torch.Tensor,
    scales: torch.Tensor,
    shape: torch.Tensor,
    dtype: torch.dtype,
    bits: int,
    zeros: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """The "pack-quantized" layout of compressed-tensors: numbers are stored plus 2 ** (bits - 1), zeros, too.

    Args:
        packed: [out, in * bits / 32] int32, rounded up.
        scales: [out, groups].
        shape: [2] out and in.
        zeros: [out * bits / 32, groups] int32, rounded up; None: the numbers are symmetric.
        groups: as in `dense_gptq`.

    Returns:
        [out, in].
    """
    rows, columns = shape.tolist()
    q = unpack_words(packed, bits)[:, :columns]
    if zeros is None:
        middle = torch.full((rows, scales.shape[1]), 2 ** (bits - 1), dtype=torch.uint8)
    else:
        middle = unpack_words(zeros.t().contiguous(), bits).t()[:rows]
    return _scaled(q, middle, scales, dtype, groups)


def dense_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """gpt-oss's experts: blocks of 32 e2m1 numbers, two in a byte, the lower half first, and an e8m0 scale each.

    Args:
        blocks: [experts, out, groups, 16] uint8.
        scales: [experts, out, groups] uint8.

    Returns:
        [experts, in, out], as checkpoints in bfloat16 hold them.
    """
    values = torch.tensor(FP4_VALUES, dtype=dtype)
    dense = torch.empty(blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1], dtype=dtype)
    for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):  # indices take 8 bytes for each number
        numbers = torch.stack((block & 15, block >> 4), -1).flatten(-2)
        exponents = scale.int().unsqueeze(-1) - SCALE_BIAS
        dense[expert] = torch.ldexp(values[numbers.int()], exponents).flatten(-2).t()
    return dense


def dense_fp8(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] | None
) -> torch.Tensor:
    """FP8 weights, times the scale of their block, of their row or of the whole.

    Args:
        weight: [..., out, in] float8.
        scales: [..., out / block[0], in / block[1]], rounded up; without a block [out, 1] or one number.

    Returns:
        [..., out, in].

    Raises:
        ValueError: there are not as many scales as blocks, or they are not those of rows.
    """
    wide = scales.float()
    if block is not None:
        rows, columns = weight.shape[-2:]
        if scales.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
            raise ValueError(
                f"FP8 weights of {rows} x {columns} in blocks of {block} have {list(scales.shape)} scales."
            )
        wide = wide.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    elif scales.numel() > 1 and (scales.dim() != weight.dim() or scales.shape[-1] != 1):
        raise ValueError(f"FP8 weights of shape {list(weight.shape)} have scales of shape {list(scales.shape)}.")
    return (weight.float() * wide).to(dtype)


def _scaled(
    q: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [out, in]; zeros, scales: [out, groups] -> (q - zero) * scale, [out, in]."""
    if groups is not None:
        index = groups.long()
        dense: torch.Tensor = (q.float() - zeros[:, index]) * scales.float()[:, index]
    else:
        grouped = q.float().reshape(*scales.shape, -1)
        dense = ((grouped - zeros.unsqueeze(2)) * scales.float().unsqueeze(2)).flatten(1)
    return dense.to(dtype)
