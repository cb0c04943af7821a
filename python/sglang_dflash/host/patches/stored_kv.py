"""KV in a store (`--hicache-storage-backend`): the keys name the draft, and every rank stores its share of the draft's.

SGLang keeps the draft's KV beside the target's, at the same places. So a hit in host memory is one in both models, and
of a store the pages that hold both.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_memory, get_model, get_spec

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.start.draft_files import weights_folder
from sglang_dflash.host.start.version import serves_dflash

PIECES, PIECE_BYTES = 256, 4096
"""Of each file of weights so many pieces are read, 1 MB in all: training changes every tensor, and a draft of 3 GB
should not be read twice."""


BY_RANK = ("file", "mooncake")
"""Stores that hold every rank's share of the draft's KV, also where the target's is equal on all ranks."""


def check(cfg: Any, latent: bool, draft_layers: int, target: Any) -> None:
    """Refuses what would lose the draft's KV.

    Args:
        cfg: SGLang's view of the server arguments.
        latent: whether the target's attention is latent (MLA): its KV is equal on all ranks.
        target: SGLang's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the flag.
    """
    store = cfg.hicache_storage_backend
    if latent and cfg.tp_size > 1 and store not in (None, *BY_RANK):
        raise ValueError(
            f"--hicache-storage-backend is {store}, which would hold one rank's share of the draft's KV beside a "
            f"target with latent attention (--tp-size {cfg.tp_size}); allowed: {', '.join(BY_RANK)}."
        )
    if cfg.enable_hierarchical_cache and draft_layers > target.num_hidden_layers:
        raise ValueError(
            f"--enable-hierarchical-cache: the draft has {draft_layers} layers and the target "
            f"{target.num_hidden_layers}; KV is loaded layer by layer of the target, so the draft may have no more."
        )


@cache
def draft_digest(path: str, revision: str | None) -> str:
    """Names a draft by its files: 12 hex digits, which differ for another config and for other weights."""
    folder = weights_folder(path, revision)
    if folder is None:
        raise SystemExit(
            f"--speculative-draft-model-path is {path}, whose files are in no folder here; a store, or a pair of "
            "servers, needs them to name the draft: download it first."
        )
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        _add_pieces(digest, file)
    return digest.hexdigest()[:12]


def _add_pieces(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as weights:
        for piece in range(PIECES):
            weights.seek(piece * max(0, size - PIECE_BYTES) // (PIECES - 1))
            digest.update(weights.read(PIECE_BYTES))


def draft_in_use() -> str:
    """Names the draft that this process serves, and how its KV is held."""
    spec, model = get_spec(), get_model()
    draft = draft_digest(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
    held = model.dtype, spec.speculative_draft_kv_cache_dtype or model.kv_cache_dtype, model.json_model_override_args
    return f"{draft}-{hashlib.sha256(repr(held).encode()).hexdigest()[:4]}"


def stored_as() -> str:
    """What keys of a store say beside the model's name: of which draft the KV is, and how both models' KV is held."""
    held = draft_in_use(), get_model().kv_cache_dtype, get_memory().hicache_mem_layout
    return f"dflash-{hashlib.sha256(repr(held).encode()).hexdigest()[:12]}"


@hook(
    "sglang.srt.managers.cache_controller.storage_model_name",
    AROUND,
    why="keys of a store do not name the draft: another one would read its KV, and accept next to nothing (SGLang "
    "issue 31600)",
    until="SGLang's keys name it",
    always=True,
)
def _name_the_draft(original: Any, model_name: str | None, host_pool: Any) -> str | None:
    name = original(model_name, host_pool)
    return f"{name or ''}-{stored_as()}" if serves_dflash() else name


@hook(
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.should_backup",
    AROUND,
    why="with a target whose KV is equal on all ranks (MLA), rank 0 alone stores, but the draft's heads are sharded",
    until="SGLang stores them",
    always=True,
)
def _store_every_share(original: Any, controller: Any, transfer: Any) -> bool:
    if original(controller, transfer):
        return True
    if not serves_dflash():
        return False
    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    sharded = entry is not None and isinstance(entry.host_pool, MHATokenToKVPoolHost)
    return transfer.name == PoolName.DRAFT and sharded and controller.storage_backend_type == "file"


@hook(
    "sglang.srt.mem_cache.hicache_storage.HiCacheFile._get_suffixed_key",
    AROUND,
    why="with such a target, the file of the draft's share has no rank in its name",
    until="SGLang names it",
    always=True,
)
def _name_the_rank(original: Any, store: Any, key: str) -> str:
    if serves_dflash() and key.endswith(f".{PoolName.DRAFT.value}"):
        return key + store.tp_config_suffix
    return original(store, key)
