"""The list of modules at the end of docs/architecture.md: one line each, made from the docstrings.

`SGLANG_DFLASH_UPDATE_TABLE=1 python -m pytest tests/docs/test_modules.py` writes it anew.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
HEADING = "## Every module\n"


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s", paragraph, maxsplit=1)[0].removesuffix(".").replace("|", "\\|")


def modules() -> Iterator[str]:
    for package in ("sglang_dflash", "sglang_cpu"):
        root = ROOT / "python" / package
        folders = [root, *sorted(path for path in root.rglob("*") if (path / "__init__.py").exists())]
        for folder in folders:
            files = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]
            if files:
                yield f"\n| {folder.relative_to(ROOT / 'python')} | |\n|---|---|\n"
                yield from (f"| `{path.stem}` | {first_sentence(path)} |\n" for path in files)


def test_the_list_of_modules() -> None:
    """Fails where a module is not listed, or its line is not the first sentence of its docstring."""
    kept, _, listed = PAGE.read_text().partition(HEADING)
    text = "\nMade from the docstrings.\n" + "".join(modules())
    if os.environ.get("SGLANG_DFLASH_UPDATE_TABLE") == "1":
        PAGE.write_text(kept + HEADING + text)
        return
    assert listed == text, "docs/architecture.md: SGLANG_DFLASH_UPDATE_TABLE=1 writes the list anew"
