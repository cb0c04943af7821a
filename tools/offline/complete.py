"""Completes a venv that uses a machine's own packages: paths, missing NCCL functions, torch's cuDNN check.

Standard library only, because it is copied into the bundle.

Usage: VENV/bin/python complete.py paths FOLDER...   make the machine's packages and CUDA libraries visible (first)
       VENV/bin/python complete.py nccl              stub the NCCL functions that torch links and the machine lacks
       VENV/bin/python complete.py torch             check that torch loads; skip its cuDNN version check if needed

`paths` is needed for two reasons: a venv created from another venv sees only the system's packages, and torch looks for
CUDA libraries in its own site-packages folder, while the machine has them in another.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

SITE = Path(sysconfig.get_paths()["purelib"])
ELF = b"\x7fELF\x02"  # how a 64-bit one begins


def link_paths(folders: list[Path]) -> None:
    """Adds the machine's packages after the venv's; links its CUDA libraries where the venv's torch looks for them."""
    others = [folder for folder in folders if folder.is_dir() and folder.resolve() != SITE.resolve()]
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in others]
    (SITE / "_machine_packages.pth").write_text("".join(lines))
    for folder in others:
        for library in sorted((folder / "nvidia").glob("*")):
            link = SITE / "nvidia" / library.name
            if library.is_dir() and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(library.resolve(), target_is_directory=True)


class Section(NamedTuple):
    """A section header of a 64-bit ELF file; offset and size in bytes. link: the section with its names."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def sections(data: mmap.mmap | bytearray) -> list[Section]:
    """The section headers of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return [Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + number * size)) for number in range(count)]


def undefined_symbols(library: Path) -> list[str]:
    """Names in the dynamic symbol table of a 64-bit ELF library that it does not define."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data[:5] == ELF, f"{library} is not a 64-bit ELF file"
        headers = sections(data)
        symbols = next(section for section in headers if section.type == 11)  # SHT_DYNSYM
        names = headers[symbols.link]
        found = []
        for offset in range(symbols.offset, symbols.offset + symbols.size, 24):
            name, section = struct.unpack_from("<I2xH", data, offset)
            if section == 0 and name:
                begin = names.offset + name
                found.append(data[begin : data.find(b"\0", begin)].decode())
        return found


def lacking(nccl: Path) -> list[str]:
    """NCCL functions that the venv's torch links and this library does not define.

    A newer torch is built for a newer NCCL; on one GPU none of these functions is called.
    """
    library = ctypes.CDLL(str(nccl))
    asked = {
        name
        for path in sorted((SITE / "torch" / "lib").glob("lib*.so"))
        for name in undefined_symbols(path)
        if name.startswith("nccl")
    }
    return sorted(name for name in asked if not hasattr(library, name))


def stub_nccl() -> None:
    """Builds a library of stubs for the functions that the machine's NCCL lacks; each prints its name and aborts.

    A .pth file makes every Python of the venv load the library before torch.
    """
    found = sorted((SITE / "nvidia" / "nccl" / "lib").glob("libnccl.so*"))
    if not found:
        print("the machine has no NCCL library: nothing to stub")
        return
    names = lacking(found[0])
    if not names:
        return
    print(f"the machine's {found[0].name} lacks {', '.join(names)}: each aborts when called", flush=True)
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise SystemExit(f"error: {found[0]} lacks {', '.join(names)}, and no C compiler was found to build stubs.")
    place = SITE / "libnccl_lacks.so"
    bodies = [
        f'void {n}(void) {{ fputs("{n}: this machine\'s NCCL has no such function\\n", stderr); abort(); }}'
        for n in names
    ]
    source = "\n".join(["#include <stdio.h>", "#include <stdlib.h>", *bodies, ""])
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(place), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    line = f"import ctypes; ctypes.CDLL({str(place)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    (SITE / "_nccl_lacks.pth").write_text(line)


def check_torch() -> None:
    """Loads torch, so that an incompatible library fails here.

    If the machine's cuDNN is older than the one that torch was built with, torch refuses it. Our attention needs no
    cuDNN, so the venv then tells torch to skip that check.
    """
    script = "import torch; torch.backends.cudnn.version(); print(torch.__version__)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if run.returncode and "cuDNN version incompatibility" in run.stderr:
        line = "import os; os.environ.setdefault('PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK', '1')\n"
        (SITE / "_older_cudnn.pth").write_text(line)
        print("the machine's cuDNN is older than torch's: avoid cuDNN attention and convolutions")
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"error: torch does not load in {SITE}:\n{run.stderr[-2000:]}")
    print(f"torch {run.stdout.strip()} loads")


if __name__ == "__main__":
    if sys.argv[1:2] == ["paths"]:
        link_paths([Path(folder) for folder in sys.argv[2:]])
    elif sys.argv[1:] == ["nccl"]:
        stub_nccl()
    elif sys.argv[1:] == ["torch"]:
        check_torch()
    else:
        raise SystemExit(__doc__)
