"""The hash of SGLang's seeded sampling, bit for bit against published values, Python integers and SGLang's kernel."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import torch

from sglang_cpu.ops import murmur_hash32
from sglang_source import SGLANG

LOW = 0xFFFFFFFF
SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**40 + 12, 2**63 - 1, -1, -(2**63)]
POSITIONS = [0, 1, 7, 511, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 3, 2**16]
COLUMNS = [0, 1, 2, 255, 1791, 151_935, 2**31 - 1]


def murmur3(key: bytes) -> int:
    """MurmurHash3_x86_32 with hash seed 0 for whole 4-byte blocks, after Austin Appleby's C source."""
    h = 0
    for (k,) in struct.iter_unpack("<I", key):
        k = k * 0xCC9E2D51 & LOW
        k = (k << 15 | k >> 17) & LOW
        h ^= k * 0x1B873593 & LOW
        h = (h << 13 | h >> 19) & LOW
        h = h * 5 + 0xE6546B64 & LOW
    h ^= len(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor & LOW
    return h


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"", 0), (b"\0\0\0\0", 0x2362F9DE), (b"\xff\xff\xff\xff", 0x76293B50), (b"\x21\x43\x65\x87", 0xF55B516B)],
)
def test_the_reference_is_murmur3(key, value):
    """Fails where `murmur3` here differs from published values."""
    assert murmur3(key) == value


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_hash_equals_the_integers(dtype):
    """Fails where any bit differs, also for negative and 64-bit seeds and for positions above 31 bits."""
    seeds = torch.tensor(SEEDS).to(dtype)
    hashed = murmur_hash32(seeds, torch.tensor(POSITIONS), torch.tensor(COLUMNS))
    assert hashed.dtype == torch.uint32
    expected = [
        [murmur3(struct.pack("<QII", seed % 2**64, position, column)) for column in COLUMNS]
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    assert hashed.tolist() == expected


def test_no_rows_and_no_columns():
    """Fails where an empty batch or vocabulary gives another shape."""
    none = torch.empty(0, dtype=torch.int64)
    assert murmur_hash32(none, none, torch.arange(5)).shape == (0, 5)
    assert murmur_hash32(torch.arange(3), torch.arange(3), none).shape == (3, 0)


KERNEL = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("murmur_hash", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
seeds, positions, columns = (torch.tensor(values) for values in json.loads(sys.argv[2]))
out = torch.empty(len(seeds), len(columns), dtype=torch.uint32)
module.murmur_hash32_kernel[(len(seeds), 2)](
    seeds.to(torch.uint64), positions, columns, out, len(seeds), len(columns), BLOCK_SIZE=4
)
print(out.tolist())
"""


def test_hash_equals_the_hosts_kernel():
    """Fails where the hash differs from SGLang's Triton kernel, run by Triton's interpreter."""
    run = subprocess.run(
        [
            *[sys.executable, "-c", KERNEL, SGLANG / "kernels/ops/sampling/murmur_hash.py"],
            str([SEEDS, POSITIONS, COLUMNS]),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    hashed = murmur_hash32(torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(COLUMNS))
    assert run.stdout.splitlines()[-1] == str(hashed.tolist())
