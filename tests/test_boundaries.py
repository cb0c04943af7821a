"""Who may import whom, read from the source: imports go one way, and only `host` and `sglang_cpu` reach sglang."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "sglang_dflash"
SOURCE = ROOT / "python" / PACKAGE

# Folder or module of the package -> what it may import of the package, besides itself and the version.
ALLOWED = {
    "plugin": {"host"},
    "host": {"core", "ops"},
    "core": {"ops"},
    "ops": set(),
    "serving": {"core"},
    "reference": {"core", "ops"},
    "training": {"serving", "reference"},
    "bench": {"serving"},
    "checking": {"serving", "core", "reference"},
    "doctor": {"serving", "core"},
    "cli": {"serving", "core", "reference", "training", "bench", "checking", "doctor"},
}
MAY_IMPORT_SGLANG = {"host"}
CPU_PACKAGE = "sglang_cpu"
SEAM = ("detect", "hooking", "hooks")  # all that `host` may import of the CPU platform's package
WITHOUT_TORCH = {"plugin", "serving"}
OF_EXTRAS = ("accelerate", "datasets", "matplotlib", "pandas")


def imported_names(source: str, module: str) -> Iterator[str]:
    """Every dotted name that a file imports, at any depth: `from a import b` yields `a.b`.

    Args:
        module: the file's own dotted name, `a.b.__init__` for a package, against which relative imports resolve.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rsplit(".", 1)[-1]
            if function in ("import_module", "__import__", "resolve_name") and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value.replace(":", ".")


def violations(root: Path) -> list[str]:
    """One line per import in the package at `root` that the house forbids."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).with_suffix("")
        part = inside.parts[0]
        for name in imported_names(path.read_text(), ".".join((root.name, *inside.parts))):
            top, *rest = name.split(".")
            where = f"{inside}.py imports {name}"
            if top == "sglang" and part not in MAY_IMPORT_SGLANG:
                found.append(f"{where}: only host may")
            if top == CPU_PACKAGE and (part != "host" or not rest or rest[0] not in SEAM):
                found.append(f"{where}: only host may, and of it {', '.join(SEAM)}")
            if top in ("tools", "tests"):
                found.append(f"{where}: the package is installed without it")
            if top == "torch" and part in WITHOUT_TORCH | {"__init__"}:
                found.append(f"{where}: {part} stays without torch")
            if top == root.name and rest and rest[0] != "__version__":
                if part not in ALLOWED and part != "__init__":
                    found.append(f"{where}: {part} is not in the list of this test")
                elif rest[0] != part and rest[0] not in ALLOWED.get(part, set()):
                    found.append(f"{where}: {part} may import {sorted(ALLOWED.get(part, set()))}")
    return found


def test_package_keeps_its_boundaries():
    """Fails where a file imports against the arrows, imports within functions included."""
    assert violations(SOURCE) == []


def test_the_cpu_platform_stands_alone():
    """Fails where SGLang on a plain CPU needs the worker's package, or one of its ops needs SGLang."""
    package = ROOT / "python" / CPU_PACKAGE
    assert _forbidden(package, (PACKAGE, "tools", "tests")) == []
    assert _forbidden(package / "ops", ("sglang",)) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("core/a.py", "def f():\n    import sglang.srt.utils", "only host may"),
        ("plugin.py", "from sglang.srt import plugins", "only host may"),
        ("host/a.py", "from sglang_cpu import shims", "of it detect, hooking, hooks"),
        ("ops/a.py", "from sglang_cpu.detect import ATTENTION_BACKEND", "only host may"),
        ("core/a.py", "from sglang_dflash.host.start import hooks", "core may import ['ops']"),
        ("core/a.py", "from ..host import hooks", "core may import ['ops']"),
        ("core/a.py", "from sglang_dflash import host", "core may import ['ops']"),
        ("ops/__init__.py", "from ..core import block", "ops may import []"),
        ("ops/a.py", "import sglang_dflash.core.block", "ops may import []"),
        ("serving/a.py", "import torch.nn", "stays without torch"),
        ("bench/a.py", "def f():\n    from sglang_dflash.checking import compare", "bench may import"),
        ("checking/a.py", "from ..bench.records import Run", "checking may import"),
        ("serving/a.py", "from importlib import import_module\nimport_module('sglang.srt')", "only host may"),
        ("cli/a.py", "from sglang_dflash.host.start.version import SUPPORTED_SGLANG", "cli may import"),
        ("novel/a.py", "from sglang_dflash import ops", "novel is not in the list"),
        ("bench/a.py", "from sglang_dflash.cli.main import run", "bench may import"),
        ("bench/a.py", "from tools.measure import profile_step", "installed without it"),
        ("__init__.py", "import torch", "stays without torch"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, line, expected):
    """Fails where the check above would overlook one."""
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line)
    (found,) = violations(tmp_path / PACKAGE)
    assert expected in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "host/a.py",
            "import sglang.srt, sglang_cpu.hooks, sglang_cpu.hooking\nfrom sglang_dflash import __version__, ops",
        ),
        ("plugin.py", "def f():\n    from sglang_dflash.host.start import hooks"),
        ("core/__init__.py", "from . import block\nfrom sglang_dflash.core.block import Block\nimport torch"),
    ],
)
def test_an_allowed_import_passes(tmp_path, path, line):
    """Fails where the check would complain of what the house allows."""
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line)
    assert violations(tmp_path / PACKAGE) == []


def _forbidden(folder: Path, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in imported_names(path.read_text(), path.stem)
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in forbidden)
    ]


def test_modules_of_tests_have_names_of_their_own():
    """Fails where pytest, which imports them by their names alone, would take one module for another."""
    shared = {"conftest.py", "__init__.py"}
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in shared)
    assert [name for name, count in names.items() if count > 1] == []


def test_tools_do_not_import_the_host():
    """Fails where a tool reaches for `sglang_dflash.host`, and with it for sglang."""
    assert _forbidden(ROOT / "tools", (f"{PACKAGE}.host",)) == []


@pytest.mark.parametrize("folder", ["core", "ops", "reference", "training"])
def test_tests_of_core_ops_and_reference_run_without_sglang(folder):
    """Fails where one of them imports sglang or the host."""
    assert _forbidden(ROOT / "tests" / folder, ("sglang", f"{PACKAGE}.host")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (PACKAGE, ("torch", "sglang")),
        (f"{PACKAGE}.plugin", ("torch", "sglang")),
        (f"{PACKAGE}.serving", ("torch", "sglang", *OF_EXTRAS)),
        (f"{PACKAGE}.core.draft_config", ("sglang",)),
        (f"{PACKAGE}.ops", ("sglang",)),
        (f"{CPU_PACKAGE}.detect", ("torch", "sglang")),
        (f"{CPU_PACKAGE}.ops", ("sglang",)),
        (f"{PACKAGE}.reference", ("sglang",)),
        (f"{PACKAGE}.training", ("torch", "sglang")),
        (f"{PACKAGE}.training.trainer", ("sglang",)),
        (f"{PACKAGE}.checking.run", ("torch", "sglang", *OF_EXTRAS)),
        (f"{PACKAGE}.doctor.server", ("torch", "sglang", "transformers", *OF_EXTRAS)),
        (f"{PACKAGE}.doctor.flags", ("torch", "sglang", "transformers", *OF_EXTRAS)),
        (f"{PACKAGE}.cli.benchmark", ("torch", "sglang", *OF_EXTRAS)),
        (f"{PACKAGE}.cli.main", ("torch", "sglang", "openai", *OF_EXTRAS)),
        (f"{PACKAGE}.cli.benchmark_run", ("torch", "sglang")),
    ],
)
def test_import_stays_light(module, absent):
    """Fails where importing the module loads what it must not, however indirectly."""
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd="/")
    modules = json.loads(loaded.stdout)
    assert module in modules
    assert [name for name in modules if name.split(".")[0] in absent] == []
