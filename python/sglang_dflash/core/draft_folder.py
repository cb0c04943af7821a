"""A draft's folder in the plain layout, whatever layout it was published in, and the head that it may bring."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open

from sglang_dflash.core.draft_formats import read_published

CONFIG = "config.json"
FILES = ["*.safetensors", "*.json", "mask_embedding.pt", "README.md"]
"""Of a draft on the hub; others, such as the state of a training, are left there."""
OWN_HEAD, HEAD_IDS = "lm_head.weight", "d2t"


def drafts_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "drafts"


def plain_folder(folder: Path) -> Path:
    """The draft's own folder if its config is plain; else one in the cache, with a plain config and links to the rest.

    Raises:
        ValueError: the config cannot be read; one sentence.
    """
    published = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config = read_published(published).config
    return folder if config == published else _with_config(folder, config)


def _with_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder in the cache with another config, and links to all else; made once."""
    text = json.dumps(config, indent=2, sort_keys=True)
    files = {file.name: file.resolve() for file in sorted(folder.iterdir()) if file.name != CONFIG}
    listed = f"{text}\n{files}"
    plain = drafts_cache() / f"{folder.resolve().name}-{hashlib.sha256(listed.encode()).hexdigest()[:16]}"
    if plain.exists():
        return plain
    plain.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=plain.parent))
    made.chmod(0o755)
    (made / CONFIG).write_text(text, encoding="utf-8")
    for name, file in files.items():
        (made / name).symlink_to(file)
    try:
        made.rename(plain)
    except OSError:  # another process has made it meanwhile
        shutil.rmtree(made)
    return plain


def plain_name(name: str, revision: str | None = None) -> str:
    """A folder as `plain_folder` makes it, for a folder or a hub's name; the name itself if the config is plain, or
    cannot be read, which the draft's loader says.

    Raises:
        ValueError: the config says what we do not serve; one sentence.
    """
    folder = Path(name)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG]))
        published = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, HFValidationError):
        return name
    config = read_published(published).config if isinstance(published, dict) else published
    if config == published:
        return name
    if not Path(name).is_dir():
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    return str(_with_config(folder, config))


class OwnHead(NamedTuple):
    """A head over fewer ids than the target's.

    Fields:
        ids: [N] int64, rising; of the target's vocabulary.
        weight: [N, H].
    """

    ids: torch.Tensor
    weight: torch.Tensor


def read_own_head(folder: Path, head_vocab_size: int) -> OwnHead:
    """Reads `lm_head` and `d2t`: row i stands for the target's id i + d2t[i] (speculators, train/vocab_mapping.py).

    Raises:
        ValueError: one of them is missing or has another size; one sentence.
    """
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = {OWN_HEAD, HEAD_IDS}.intersection(opened.keys())
            found |= {name: opened.get_tensor(name) for name in names}
    for name in (OWN_HEAD, HEAD_IDS):
        if name not in found or len(found[name]) != head_vocab_size:
            size = f"{len(found[name]) if name in found else 0} rows"
            raise ValueError(
                f"The draft's draft_vocab_size is {head_vocab_size}, and its weights have a {name} of {size}: there "
                "must be as many rows."
            )
    ids = torch.arange(head_vocab_size) + found[HEAD_IDS].long()
    if (ids.diff() <= 0).any():
        raise ValueError(f"The draft's {HEAD_IDS} gives an id twice, or not in rising order.")
    return OwnHead(ids, found[OWN_HEAD])
