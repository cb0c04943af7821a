"""What a venv over a machine's own packages needs besides wheels. Standard library only: it travels with the parts.

Usage: VENV/bin/python complete.py paths FOLDER...   the machine's packages and CUDA libraries, before any wheel
       VENV/bin/python complete.py nccl              functions that torch asks of NCCL and the machine's lacks
       VENV/bin/python complete.py torch             that torch loads; and its question after cuDNN's version

A venv made from a venv sees the packages of neither but the system's; and torch in one folder looks for CUDA libraries
beside itself, while the machine has them in another.
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

SITE = Path(sysconfig.get_paths()["purelib"])


def link_paths(folders: list[Path]) -> None:
    """Puts the machine's packages behind the venv's, and links its CUDA libraries where the venv's torch looks."""
    others = [folder for folder in folders if folder.is_dir() and folder.resolve() != SITE.resolve()]
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in others]
    (SITE / "_machine_packages.pth").write_text("".join(lines))
    for folder in others:
        for library in sorted((folder / "nvidia").glob("*")):
            link = SITE / "nvidia" / library.name
            if library.is_dir() and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(library.resolve(), target_is_directory=True)


def undefined_symbols(library: Path) -> list[str]:
    """What a 64-bit ELF library asks of others, from its dynamic symbol table."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data[:5] == b"\x7fELF\x02", f"{library} is no 64-bit ELF file"
        (table,) = struct.unpack_from("<Q", data, 40)
        entry, count = struct.unpack_from("<HH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
        # Of a section: [1] type, [4] offset, [5] size, [6] the section of its names.
        symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
        names = sections[symbols[6]]
        found = []
        for offset in range(symbols[4], symbols[4] + symbols[5], 24):
            name, section = struct.unpack_from("<I2xH", data, offset)
            if section == 0 and name:
                begin = names[4] + name
                found.append(data[begin : data.find(b"\0", begin)].decode())
        return found


def lacking(nccl: Path) -> list[str]:
    """Functions of NCCL that the venv's torch links and this library does not have.

    A newer torch knows a newer NCCL; one GPU calls none of them.
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
    """Builds a library that defines what the machine's NCCL lacks, each function an abort with its name, and has every
    Python of the venv load it before torch."""
    found = sorted((SITE / "nvidia" / "nccl" / "lib").glob("libnccl.so*"))
    if not found:
        print("no NCCL of the machine beside torch: nothing to complete")
        return
    names = lacking(found[0])
    if not names:
        return
    print(f"{found[0].name} of the machine lacks {', '.join(names)}: each aborts when called", flush=True)
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise SystemExit(f"error: {found[0]} lacks {', '.join(names)}, and no C compiler was found to stub them.")
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
    """Loads torch, so that a library that does not fit shows here.

    Where the machine's cuDNN is older than the one torch was built with, torch refuses it altogether; attention without
    cuDNN needs none, so the venv asks torch to go on.
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
