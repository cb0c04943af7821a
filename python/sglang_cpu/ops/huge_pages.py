"""Moves a model's weights to huge pages.

Each decode step reads all weights. With pages of 4 KiB, each page costs a walk through the page tables, and the
processor's prefetchers stop at its end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

VARIABLE = "SGLANG_DFLASH_HUGE_PAGES"
KERNEL = Path("/sys/kernel/mm/transparent_hugepage")
MAPPINGS = Path("/proc/self/smaps")
ALIGNMENT = 64  # bytes: a cache line
LARGEST_PAGE = 32 << 20  # bytes; a region takes whole pages, so larger ones would waste much memory on a small draft


def page_bytes(kernel: Path = KERNEL) -> int | None:
    """Bytes of a huge page that the kernel gives on request (`madvise`).

    None if it gives none, if they are larger than LARGEST_PAGE, or if `VARIABLE` is 0.
    """
    if os.environ.get(VARIABLE, "1") == "0" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        size = int((kernel / "hpage_pmd_size").read_text())
        never = "[never]" in (kernel / "enabled").read_text()
    except (OSError, ValueError):
        return None
    return None if never or size > LARGEST_PAGE else size


def move(tensors: Iterable[torch.Tensor], page: int) -> tuple[int, int]:
    """Moves CPU tensors into one region of huge pages. Tensors that share memory still share it afterwards.

    Args:
        tensors: of any dtypes and strides; each keeps its identity, its `data` is replaced.
        page: bytes of a huge page.

    Returns:
        The bytes moved, and how many of them are on huge pages.

    Raises:
        OSError: the memory cannot be mapped; then no tensor has moved.
    """
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes()]
    sizes: dict[int, int] = {}  # address of a storage -> its bytes
    for storage in (tensor.untyped_storage() for tensor in tensors):
        sizes[storage.data_ptr()] = max(storage.nbytes(), sizes.get(storage.data_ptr(), 0))
    places: dict[int, int] = {}  # address of a storage -> its offset in the region
    total = 0
    for address, size in sizes.items():
        places[address] = total
        total += -(-size // ALIGNMENT) * ALIGNMENT
    if not total:
        return 0, 0
    region = _region(total, page)
    for tensor in tensors:
        _move_one(tensor, region, places[tensor.untyped_storage().data_ptr()])
    _give_back_heap()
    return total, min(total, _on_huge_pages(region.data_ptr()))


def _move_one(tensor: torch.Tensor, region: torch.Tensor, place: int) -> None:
    storage = tensor.untyped_storage()
    old = torch.empty(0, dtype=torch.uint8).set_(storage)
    region[place : place + storage.nbytes()].copy_(old)
    offset = (region.storage_offset() + place) // tensor.element_size() + tensor.storage_offset()
    moved = torch.empty(0, dtype=tensor.dtype)
    tensor.data = moved.set_(region.untyped_storage(), offset, tensor.size(), tensor.stride())


def _region(size: int, page: int) -> torch.Tensor:
    """[size] uint8 from the start of a huge page. The memory is freed with the last tensor in it."""
    pages = -(-size // page) + 1  # one more, because the mapping may begin inside a page
    region = mmap.mmap(-1, pages * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(region, dtype=torch.uint8)
    begin = -mapped.data_ptr() % page
    return mapped[begin : begin + size]


def _give_back_heap() -> None:
    """Returns freed memory to the kernel. The C library would keep it, and SGLang sizes its KV pool by free memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _on_huge_pages(address: int, mappings: Path = MAPPINGS) -> int:
    """Bytes on huge pages in the mapping that holds `address`; 0 if the kernel does not tell."""
    inside = False
    try:
        for line in mappings.read_text().splitlines():
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(bound, 16) for bound in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "AnonHugePages:":
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        return 0
    return 0
