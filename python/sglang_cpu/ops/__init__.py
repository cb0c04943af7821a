"""The ops of layers on a CPU. `reference.py`, `recurrent_reference.py` and `mixture.py` specify them; `csrc/` has the
native bodies. `choose_kernels` chooses; a caller asks it once, when it is constructed, and holds the `Kernels`."""

from __future__ import annotations

from sglang_cpu.ops.attention import Attention, PagedTable, rows_as_requests
from sglang_cpu.ops.batch_invariant import install_batch_invariant_kernels
from sglang_cpu.ops.kernels import REFERENCE_KERNELS, Kernels, choose_kernels
from sglang_cpu.ops.murmur import murmur_hash32
from sglang_cpu.ops.native import DTYPES as NATIVE_DTYPES
from sglang_cpu.ops.native import install_linear, serves
from sglang_cpu.ops.recurrent_reference import StateRows

__all__ = [
    "NATIVE_DTYPES",
    "REFERENCE_KERNELS",
    "Attention",
    "Kernels",
    "PagedTable",
    "StateRows",
    "choose_kernels",
    "install_batch_invariant_kernels",
    "install_linear",
    "murmur_hash32",
    "rows_as_requests",
    "serves",
]
