"""Requests that arrive from a prefill server or come back from a backup, and prefill servers that do not fit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.common import RetractionBackup

from sglang_dflash.host.patches import disaggregation
from sglang_dflash.host.patches.disaggregation import BESIDE


class Pool:
    """A draft's KV pool with one number in each slot."""

    def __init__(self) -> None:
        self.rows = torch.arange(10.0)

    def get_cpu_copy(self, slots: torch.Tensor) -> torch.Tensor:
        return self.rows[slots].clone()

    def load_cpu_copy(self, held: torch.Tensor, slots: torch.Tensor) -> None:
        self.rows[slots] = held


def test_a_backup_holds_the_drafts_kv() -> None:
    """Fails where the draft's KV of a retracted request does not come back in its new slots, or the target's backup
    does not reach SGLang as it was."""
    pool = Pool()
    allocator = SimpleNamespace(dflash_draft_kv=pool)
    table = SimpleNamespace(req_to_token=torch.tensor([[0, 0, 0, 0], [7, 2, 5, 0], [1, 9, 3, 0]]))
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1, retraction_backup=None), seqlen=4)
    restored: list[Any] = []

    def back_up(req: Any, *_: Any) -> None:
        req.kv.retraction_backup = RetractionBackup(cpu_tensors="target", mamba_cpu="state")

    disaggregation._back_up_draft(back_up, req, table, allocator)
    pool.rows.fill_(-1)
    req.kv.req_pool_idx = 2
    disaggregation._restore_draft(lambda req, *_: restored.append(req.kv.retraction_backup), req, table, allocator)
    assert pool.rows[[1, 9, 3]].tolist() == [7, 2, 5] and pool.rows[7] == -1
    assert restored == [RetractionBackup(cpu_tensors="target", mamba_cpu="state")]


def manager_of(ours: str, info: Any, **fields: Any) -> SimpleNamespace:
    held = {"kv_cache_dtype_str": ours, "prefill_info_table": {"p": info}, "attn_tp_size": 2, "is_mla_backend": False}
    return SimpleNamespace(**held | {"kv_args": SimpleNamespace(kv_item_lens=[64, 64])} | fields)


@pytest.mark.parametrize(("theirs", "words"), [("auto", "it has no draft"), (f"auto{BESIDE}ab", "it has ab")])
def test_another_draft_is_refused(theirs: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails where KV of another draft, or of none, is taken, or ends the decode server; or the log does not say why."""
    ours = f"auto{BESIDE}cd"

    def original(manager: Any, addr: str) -> bool:
        raise RuntimeError(
            f"KV cache dtype mismatch: prefill server has kv_cache_dtype={theirs}, but decode server has "
            f"kv_cache_dtype={ours}. Both servers must use the same --kv-cache-dtype value."
        )

    with caplog.at_level(logging.ERROR):
        assert not disaggregation._refuse_misfits(original, manager_of(ours, None), "p")
    assert words in caplog.text and "this server has cd;" in caplog.text and "--speculative-draft" in caplog.text


def test_other_misfits_stay_errors() -> None:
    """Fails where an error that has nothing to do with a draft is swallowed."""

    def original(manager: Any, addr: str) -> bool:
        raise RuntimeError("Page size mismatch")

    with pytest.raises(RuntimeError):
        disaggregation._refuse_misfits(original, manager_of("auto", None), "p")


@pytest.mark.parametrize(
    ("prefill_ranks", "rows", "latent", "taken"),
    [(2, [64, 32], True, True), (1, [64, 64], False, True), (1, [64, 32], False, False), (4, [64, 64], True, False)],
)
def test_ranks_must_fit(prefill_ranks: int, rows: list[int], latent: bool, taken: bool) -> None:
    """Fails where KV of unequal rows, or KV that only the target has on all ranks, is taken from another number of
    ranks."""
    info = SimpleNamespace(attn_tp_size=prefill_ranks)
    manager = manager_of(f"auto{BESIDE}ab", info, is_mla_backend=latent, kv_args=SimpleNamespace(kv_item_lens=rows))
    assert disaggregation._refuse_misfits(lambda manager, addr: True, manager, "p") == taken
    assert ("p" in manager.prefill_info_table) == taken


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"disable_overlap_schedule": True}, False),
        ({"disaggregation_decode_retraction_backup": "none"}, False),
        ({"disaggregation_mode": "prefill"}, False),
    ],
)
def test_states_need_no_overlap(changed: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a retracted request could come back with the recurrent state of a later token."""
    monkeypatch.setattr(disaggregation, "mambaish_config", lambda target: object())
    flags = {"disaggregation_mode": "decode", "disable_overlap_schedule": False}
    cfg = SimpleNamespace(**flags | {"disaggregation_decode_retraction_backup": None} | changed)
    target = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Recurrent"]))
    if not refused:
        disaggregation.check(cfg, target)
        return
    with pytest.raises(ValueError, match=r"Recurrent .* --disable-overlap-schedule"):
        disaggregation.check(cfg, target)
