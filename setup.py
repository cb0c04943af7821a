"""Packaging of sglang-dflash: sources under python/, two SGLang entry points, the exact pin, the native ops."""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "python/sglang_dflash/__init__.py").read_text()).group(1)

OPS = (
    "attention_op",
    "linear_op",
    "expert_op",
    "recurrent_op",
    "row_ops",
    "tree_ops",
    "plan_ops",
    "learn_ops",
    "offer_ops",
    "dispatch",
)
SOURCES = ["csrc/bindings.cpp", "csrc/module.cpp", *(f"csrc/cpu/{name}.cpp" for name in OPS)]
KERNELS = "csrc/cpu/kernels.cpp"  # compiled once per instruction set
HEADERS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*.h"))]
# Vectors pass only between inline functions, so their calling convention (-Wpsabi) does not matter.
FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
INSTRUCTION_SETS = {"scalar": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
    }


class NativeOps(build_ext):
    """Builds the native ops for the torch of this environment, or prints one sentence that says why not.

    Install with `pip install --no-build-isolation`, as scripts/venv.sh does. An isolated build fetches its own torch,
    and ops built for that one may not fit the torch that serves. `SGLANG_DFLASH_BUILD_NATIVE=0` leaves the ops out;
    `SGLANG_DFLASH_SANITIZE=address,undefined` compiles with sanitizers (scripts/sanitize.sh).
    """

    def run(self):
        missing = reason_not_to_build()
        if missing is None:
            super().run()
        else:
            print(f"sglang-dflash: the native ops are not built, so torch's ops are used. Reason: {missing}.")

    def get_outputs(self):
        return super().get_outputs() if reason_not_to_build() is None else []

    def build_extension(self, ext):
        """Compiles each unit with its own flags, two at a time; needs no ninja and no CUDA headers."""
        sanitize = os.environ.get("SGLANG_DFLASH_SANITIZE")
        flags = [*FLAGS, *([f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"] if sanitize else [])]
        torch = Path(find_spec("torch").origin).parent
        headers = [f"-I{torch}/include", f"-I{sysconfig.get_path('include')}"]
        units = [
            (source, "torch", ["-std=c++20", "-O1", "-fopenmp", *headers]) for source in SOURCES
        ]  # torch's headers need these; without OpenMP, at::parallel_for is a plain loop
        for isa, isa_flags in INSTRUCTION_SETS.items():
            units.append((KERNELS, isa, ["-std=c++17", *isa_flags, f"-DISA={isa}", f"-DTABLE=k{isa.capitalize()}"]))

        def compile_unit(unit):
            source, folder, own_flags = unit
            target = Path(self.build_temp, folder, Path(source).with_suffix(".o").name)
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [compiler(), *flags, *own_flags, "-c", str(ROOT / source), "-o", str(target)]
            subprocess.run(command, check=True)
            return str(target)

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_unit, units))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # torch is loaded first, so its libraries are found without a path. One of them is its OpenMP runtime, the only
        # one whose threads torch.set_num_threads counts.
        libraries = [f"-L{torch}/lib", "-ltorch_python", "-ltorch_cpu", "-lc10"]
        sanitizers = [f"-fsanitize={sanitize}"] if sanitize else []
        fresh = target.with_suffix(".new")
        subprocess.run([compiler(), "-shared", *objects, *libraries, *sanitizers, "-o", str(fresh)], check=True)
        fresh.replace(target)  # a running server keeps the file that it has loaded


def compiler():
    """The C++ compiler, `CXX` first; None if there is none."""
    return next((path for name in (os.environ.get("CXX"), "c++", "g++") if name and (path := shutil.which(name))), None)


def reason_not_to_build():
    """The reason why the native ops cannot be built, as half a sentence; None if they can."""
    if os.environ.get("SGLANG_DFLASH_BUILD_NATIVE", "1") == "0":
        return "SGLANG_DFLASH_BUILD_NATIVE is 0"
    if platform.system() != "Linux":
        return f"they need Linux, and this is {platform.system()}"
    if compiler() is None:
        return "no C++ compiler was found (CXX, c++ or g++)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <atomic>\nint main() { return 0; }\n")
        widest = list(INSTRUCTION_SETS.values())[-1]
        for flags in (["-std=c++20", "-fopenmp", *FLAGS], ["-std=c++17", *FLAGS, *widest]):
            command = [compiler(), *flags, str(source), "-o", f"{folder}/probe"]
            if subprocess.run(command, capture_output=True).returncode:
                return f"{compiler()} does not work with {' '.join(flags)} (GCC 10 or newer does)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers were not found (the package python3-dev has them)"
    if find_spec("torch") is None:
        return "torch is not in the build environment (use pip install --no-build-isolation)"
    return None


# What measuring and training need beyond serving; `serving.errors.EXTRAS` names the extra of a missing package.
BENCH = ["datasets>=4", "matplotlib>=3.9", "pandas>=2"]
TRAIN = ["accelerate>=1.15", "datasets>=4", "matplotlib>=3.9"]

# If the native ops are left out on purpose, the wheel is for every platform.
wanted = os.environ.get("SGLANG_DFLASH_BUILD_NATIVE", "1") != "0"
setup(
    name="sglang-dflash",
    version=VERSION,
    description="DFlash speculative decoding for SGLang: exactly the target's answers, several tokens a step.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    package_dir={"": "python"},
    packages=find_packages("python"),
    include_package_data=True,
    package_data={"sglang_dflash": ["assets/**/*"]},
    ext_modules=[Extension("sglang_dflash.ops._native", [*SOURCES, KERNELS], depends=HEADERS)] if wanted else [],
    cmdclass={"build_ext": NativeOps},
    install_requires=[
        "sglang==0.5.23",
        "httpx",
        "prometheus-client",
        "rich",
        "typer>=0.16",
    ],
    extras_require={
        "bench": BENCH,
        "train": TRAIN,
        "dev": [
            *BENCH,
            *TRAIN,
            "hypothesis==6.170.15",
            "mypy==2.4.1",
            "psutil",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
        ],
    },
    entry_points={
        "console_scripts": ["sglang-dflash = sglang_dflash.cli.main:run"],
        "sglang.srt.plugins": ["sglang_dflash = sglang_dflash.plugin:activate"],
        "sglang.srt.platforms": ["sglang_dflash = sglang_dflash.plugin:activate_platform"],
    },
)
