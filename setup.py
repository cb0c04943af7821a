"""Packaging of sglang-dflash: sources under python/, two SGLang entry points, the exact pin.

The wheel is pure Python: it has the sources of the native CPU ops, which are built where they are used
(sglang_cpu/ops/build_native.py).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "python/sglang_dflash/__init__.py").read_text()).group(1)

# What measuring and training need beyond serving; `serving.errors.EXTRAS` names the extra of a missing package.
BENCH = ["datasets>=4", "matplotlib>=3.9", "pandas>=2"]
TRAIN = ["accelerate>=1.15", "datasets>=4", "matplotlib>=3.9"]
# The MLX engine of `sglang-dflash generate`, which names the extra itself; on Linux it computes on the CPU.
MLX = ["mlx[cpu]>=0.32.2", "mlx-lm>=0.32.2,<0.33"]
# Prefill and decode on two servers without CUDA.
PD = ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]

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
    package_data={"sglang_dflash": ["assets/**/*"], "sglang_cpu": ["README.md", "csrc/*"]},
    install_requires=[
        "sglang==0.5.23",
        "filelock",
        "httpx",
        "prometheus-client",
        "rich",
        "typer>=0.16",
    ],
    extras_require={
        "bench": BENCH,
        "train": TRAIN,
        "mlx": MLX,
        "pd": PD,
        "dev": [
            *BENCH,
            *TRAIN,
            *MLX,
            *PD,
            "hypothesis==6.170.15",
            "mypy==2.4.1",
            "psutil",
            "pytest==9.1.1",  # pytest-xdist 3.8.0 reads no groups of tests under 9.2.0
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
            "smg==1.13.0",  # the gateway of deploy/
        ],
    },
    entry_points={
        "console_scripts": ["sglang-dflash = sglang_dflash.cli.main:run"],
        "sglang.srt.plugins": ["sglang_dflash = sglang_dflash.plugin:activate"],
        "sglang.srt.platforms": ["sglang_dflash = sglang_cpu.detect:activate_platform"],
    },
)
