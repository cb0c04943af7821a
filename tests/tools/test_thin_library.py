"""Tests what the offline bundle takes out of libraries: a small library with made-up fat binaries, compiled here."""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import subprocess
import zipfile

import pytest

from tiny_bundle import make_wheel
from tools.offline import wheels
from tools.offline.thin import ENTRY_HEADER, FATBIN, FATBIN_HEADER, thin

HEADER_BYTES = {75: 64, 90: 64, 100: 112}
"""Headers of entries have more than one length."""


def entry(architecture: int, code: bytes) -> bytes:
    header = ENTRY_HEADER.pack(2, 0x101, HEADER_BYTES[architecture], len(code), architecture)
    return header.ljust(HEADER_BYTES[architecture], b"\x07") + code


def fatbin(*entries: bytes) -> bytes:
    return FATBIN_HEADER.pack(int.from_bytes(FATBIN, "little"), 1, 16, sum(map(len, entries))) + b"".join(entries)


HOPPER, OTHERS = entry(90, b"H" * 96), (entry(75, b"T" * 80), entry(100, b"B" * 64))
BOTH = fatbin(OTHERS[0], HOPPER, OTHERS[1])
STRAY = FATBIN + b"no header of a fat binary" + fatbin(bytes(64)) + fatbin(HOPPER[:70])
"""The magic number, and not what must follow it: the fat binaries behind would be swallowed."""


@pytest.fixture
def library(tmp_path):
    """Compiles a library whose `binaries` are the given bytes; returns its path and a function that reads them."""

    def build(content: bytes):
        source, place = tmp_path / "binaries.c", tmp_path / "libbinaries.so"
        source.write_text(
            f"const unsigned char binaries[] = {{{','.join(map(str, content))}}};\n"
            "static int hidden_from_the_loader(void) { return 7; }\n"
            "int seven(void) { return hidden_from_the_loader(); }\n"
        )
        subprocess.run(["cc", "-shared", "-fPIC", "-O0", "-o", str(place), str(source)], check=True)

        def read(data: bytes) -> bytes:
            thinned = tmp_path / "libthinned.so"
            thinned.write_bytes(data)
            loaded = ctypes.CDLL(str(thinned))
            assert loaded.seven() == 7
            return bytes((ctypes.c_ubyte * len(content)).in_dll(loaded, "binaries"))

        return place.read_bytes(), read

    return build


def test_only_the_kernels_of_one_gpu_stay(library):
    """Fails where a thinned library does not load, loses the asked kernel or keeps another, or a fat binary without
    the asked architecture changes."""
    foreign = fatbin(OTHERS[1])
    whole, read = library(STRAY + BOTH + foreign)
    thinned = thin(whole, 90)
    assert len(thinned) == len(whole)
    found = read(thinned)
    alone = fatbin(HOPPER)
    assert found == STRAY + alone + bytes(len(BOTH) - len(alone)) + foreign


def test_the_symbol_table_goes(library):
    """Fails where names that only debuggers read stay, or those that the loader reads go."""
    whole, _ = library(b"x")
    assert b"hidden_from_the_loader" in whole
    thinned = thin(whole, 90)
    assert b"hidden_from_the_loader" not in thinned and b"seven" in thinned


def test_what_is_no_library_stays():
    """Fails where a file of another kind changes."""
    assert thin(BOTH, 90) == BOTH


def test_a_packed_wheel_has_thin_libraries(library, tmp_path):
    """Fails where the packer leaves a library as it is, or RECORD names another content."""
    whole, _ = library(BOTH + FATBIN)
    wheel = make_wheel(tmp_path / "wheels", "big", {"big/lib.so.1": whole, "big/dropped": b""})
    packed = wheels.pack(wheel, tmp_path / "packed", lambda path: path != "big/dropped")
    with zipfile.ZipFile(packed) as archive:
        thinned = archive.read("big/lib.so.1")
        rows = dict(row[:2] for row in csv.reader(archive.read("big-1.0.dist-info/RECORD").decode().splitlines()))
    assert thinned == thin(whole, 90) != whole
    digest = base64.urlsafe_b64encode(hashlib.sha256(thinned).digest()).rstrip(b"=").decode()
    assert rows["big/lib.so.1"] == f"sha256={digest}"
