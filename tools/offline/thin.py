"""Takes out of a shared library what a server on one kind of GPU never reads: kernels for other GPUs, and the symbol
table that only debuggers and linkers read.

The bytes become zeros, which compress to nothing, so that every offset in the file stays as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tools.offline.complete import ELF, sections

SYMTAB = 2  # sh_type of the symbol table that the dynamic loader does not read
FATBIN = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries behind it
ENTRY_HEADER = struct.Struct("<HHIQ12xI")  # kind, version, bytes of the header, bytes of the code, ..., architecture


def thin(library: bytes, architecture: int) -> bytes:
    """The library without kernels for other GPUs and without its symbol table; other files as they are.

    Args:
        architecture: of the GPU, 90 for sm_90 and sm_90a. Fat binaries without code for it keep all their entries.
    """
    if not library.startswith(ELF):
        return library
    data = bytearray(library)
    found = sections(data)
    for section in found:
        if section.type == SYMTAB:
            for table in (section, found[section.link]):
                data[table.offset : table.offset + table.size] = bytes(table.size)
    begin = 0
    while (begin := data.find(FATBIN, begin)) >= 0:
        begin = _thin_fatbin(data, begin, architecture)
    return bytes(data)


def _thin_fatbin(data: bytearray, begin: int, architecture: int) -> int:
    """Keeps the entries for one architecture of the fat binary at `begin`; returns where to look for the next.

    The kept entries move to the front, and the header says that there are no others.
    """
    if begin + FATBIN_HEADER.size > len(data):
        return len(data)
    magic, version, header, size = FATBIN_HEADER.unpack_from(data, begin)
    first, end = begin + FATBIN_HEADER.size, begin + FATBIN_HEADER.size + size
    entries = list(_entries(data, first, end)) if header == FATBIN_HEADER.size and end <= len(data) else []
    if not entries or entries[-1][1] != end:  # the same four bytes in code or data
        return begin + len(FATBIN)
    kept = b"".join(data[start:stop] for start, stop, found in entries if found == architecture)
    if kept:
        FATBIN_HEADER.pack_into(data, begin, magic, version, header, len(kept))
        data[first:end] = kept + bytes(size - len(kept))
    return end


def _entries(data: bytearray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and architecture of each entry of a fat binary; no more behind bytes that are no entry."""
    while begin + ENTRY_HEADER.size <= end:
        _, _, header, size, architecture = ENTRY_HEADER.unpack_from(data, begin)
        if header < ENTRY_HEADER.size:
            return
        yield begin, begin + header + size, architecture
        begin += header + size
