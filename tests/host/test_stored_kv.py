"""What a store's keys say of the draft whose KV they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from sglang_dflash.host.patches import stored_kv
from sglang_dflash.serving import TINY_DRAFT

SPEC = {"speculative_draft_model_revision": None, "speculative_draft_kv_cache_dtype": None}
MODEL = {"dtype": "float32", "kv_cache_dtype": "auto", "json_model_override_args": "{}"}
MEMORY = {"hicache_mem_layout": "page_first_direct"}


@pytest.fixture
def name_of(monkeypatch: pytest.MonkeyPatch):
    def name(draft: Path, **changed: str) -> str:
        stored_kv.draft_digest.cache_clear()
        bags = {"get_spec": SPEC | {"speculative_draft_model_path": str(draft)}, "get_model": MODEL}
        for getter, fields in (bags | {"get_memory": MEMORY}).items():
            held = SimpleNamespace(**{key: changed.get(key, value) for key, value in fields.items()})
            monkeypatch.setattr(stored_kv, getter, lambda held=held: held)
        return stored_kv.stored_as()

    return name


def test_another_draft_has_another_name(name_of, tmp_path: Path) -> None:
    """Fails where a copy of a draft is another one, or where other weights or another config are the same."""
    same, retrained, retapped = (tmp_path / name for name in ("same", "retrained", "retapped"))
    for folder in (same, retrained, retapped):
        shutil.copytree(TINY_DRAFT, folder)
    tensors = load_file(retrained / "model.safetensors")
    last = list(tensors)[-1]
    tensors[last] = tensors[last] * 1.01
    save_file(tensors, retrained / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((retapped / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"][0] = 0
    (retapped / "config.json").write_text(json.dumps(config))
    assert name_of(same) == name_of(TINY_DRAFT)
    assert len({name_of(folder) for folder in (same, retrained, retapped)}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16"},
        {"hicache_mem_layout": "layer_first"},
        {"json_model_override_args": '{"is_causal": true}'},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_kv_held_otherwise_has_another_name(name_of, changed: dict[str, str]) -> None:
    """Fails where KV of another dtype or layout would be read as if it were this one."""
    assert name_of(TINY_DRAFT, **changed) != name_of(TINY_DRAFT)


@pytest.mark.parametrize("ours", [True, False], ids=["DFLASH", "EAGLE"])
def test_every_rank_has_a_file_of_the_drafts_share(ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where two ranks of a target with latent attention write the draft's KV to one file, or the target's to
    two; or where files of another algorithm's draft get other names than SGLang's, which rank 0 alone writes."""
    monkeypatch.setattr(stored_kv, "serves_dflash", lambda: ours)

    def files(rank: int) -> list[str]:
        shape = {"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = HiCacheStorageConfig(
            **shape, is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=False, model_name="m"
        )
        store = HiCacheFile(config, str(tmp_path))
        return [stored_kv._name_the_rank(HiCacheFile._get_suffixed_key, store, key) for key in ("ab", "ab.draft")]

    (target, draft), (other_target, other_draft) = files(0), files(1)
    assert target == other_target and (draft != other_draft) == ours
