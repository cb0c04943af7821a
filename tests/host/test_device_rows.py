"""Rows that the device chooses, packed: what is committed is what plain decoding gives.

And what is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from rows_rig import Rig
from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr
from sglang.srt.configs.model_config import AttentionArch
from stand_in_worker import BATCH, BLOCK, VOCAB
from stand_ins import configured
from test_step_rows import GREEDY, PLAIN, SEEDED, SEEDS, _hooked, ask, past_its_rows

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host import acceptance, device_rows, widths
from sglang_dflash.host.device_rows import DeviceRows
from sglang_dflash.ops import rows as row_ops

__all__ = ["_hooked"]  # a fixture


@pytest.fixture(autouse=True)
def _layouts_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BuildQoIndptr, "triton", BuildQoIndptr.torch)


def rows_of(rig: Rig) -> DeviceRows:
    kernels = ops.choose_kernels("cpu", torch.float32)
    return DeviceRows(BLOCK, rig.policy, rig.worker._target, rig.worker._draft, VOCAB - 1, kernels)


class DeviceRig(Rig):
    """The rig over `DeviceRows`, whose graphs have room for 8, 16 and 24 rows."""

    def __init__(self, seed: int, asked: Sequence[Asked], **options: Any) -> None:
        super().__init__(seed, asked, page_size=16, **options)
        self.worker._target.sliding_window_size = None
        self.worker.rows = rows_of(self)
        self.worker.rows._sizes, self.worker.rows._slots = [8, 16, 24], BATCH
        self.policy.verify = None  # the device chooses

    def _verify(self, forward_batch: Any = None, **_: Any) -> Any:
        """The rows as SGLang's ragged layout has them; padding writes slot 0 and nothing else."""
        verify_input = forward_batch.spec_info
        layout = verify_input.ragged_verify_layout
        lens = layout.verify_lens
        count = int(lens.sum())
        assert layout.qo_indptr_device.tolist() == [0, *lens.cumsum(0).tolist()]
        assert verify_input.draft_token_num == BLOCK
        rows = ("input_ids", "positions", "out_cache_loc")
        for name in rows:
            values = getattr(forward_batch, name)
            assert len(values) == layout.graph_num_tokens and not values[count:].any()
        fields = {name: getattr(forward_batch, name)[:count] for name in rows}
        verify_input = SimpleNamespace(lens=lens, draft_token_num=BLOCK)
        result = super()._verify(
            SimpleNamespace(
                **fields,
                spec_info=verify_input,
                seq_lens=forward_batch.seq_lens,
                req_pool_indices=forward_batch.req_pool_indices,
            )
        )
        out, more = result.logits_output, layout.graph_num_tokens - count
        for name in ("next_token_logits", "hidden_states", "last_hidden_states"):
            states = getattr(out, name)
            setattr(out, name, torch.cat((states, torch.full((more, states.shape[1]), torch.nan))))
        return result

    def _note(self, chosen: Any, lens: list[int]) -> None:
        """The policy learns a step later, and drafts all requests or none."""
        everybody = list(range(len(chosen))) if self.policy.drafting.width > 1 else []
        self.policy.drafting = self.policy.drafting._replace(requests=[], width=BLOCK if everybody else 1)
        super()._note(chosen, lens)
        if self.expected_step is not None:
            (step,) = self.policy.learned
            assert (step.names, step.lens.tolist(), step.commit_lens.tolist()) == self.expected_step
        names = [one.req.rid for one in chosen]
        self.expected_step = (names, self.lens, lens) if everybody else self.expected_step

    expected_step: Any = None


@pytest.mark.parametrize("seed", range(6))
def test_greedy_rows_commit_plain_decoding(seed):
    """Fails where a step commits another token than plain decoding, accepts less than it could, publishes too early,
    leaves KV of either model at another slot than that of the token's position, or tells the policy other steps."""
    with configured():
        rig = DeviceRig(seed, PLAIN)
        rig.run()
        assert rig.seen["deep"] and rig.seen["nobody drafted"] and rig.seen["ragged"], rig.seen


@pytest.mark.parametrize("seed", range(10))
def test_rows_honour_parameters(seed):
    """Fails where a row is penalised, masked, biased, seeded or processed as if other tokens than those before it were
    emitted, or where logprobs or states are those of other rows."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        rig = DeviceRig(seed, [ask(rng, seed % 2 == 1) for _ in range(BATCH)], overlap=rng.random() < 0.5)
        rig.run()


# Planted bugs.


def _of_the_next(original: Any, *arguments: Any) -> ops.Rows:
    rows = original(*arguments)
    return rows._replace(row_of=(rows.row_of + 1).clamp(max=len(rows.kept) - 1))


def _one_row_less(original: Any, *arguments: Any) -> ops.Rows:
    rows = original(*arguments)
    return rows._replace(lens=(rows.lens - 1).clamp(min=1))


PLANTED: dict[str, tuple[Any, str, Any, list[Asked]]] = {
    "a row's logits are the next row's": (row_ops, "keep_rows", _of_the_next, PLAIN),
    "a layout with fewer rows": (row_ops, "keep_rows", _one_row_less, PLAIN),
    "a commit past the verified rows": (acceptance.Acceptor, "accept", past_its_rows, PLAIN),
    "logprobs in the order of the forward": (
        *(acceptance, "in_blocks", lambda *_: None),
        [Asked(GREEDY, (5,), top_logprobs=2), *PLAIN[:2]],
    ),
    "seeds by packed row": (
        *(VerifyPlan, "requests"),
        lambda original, plan: torch.arange(len(plan.ids)) % plan.batch,
        SEEDS,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    owner, name, wrong, asked = PLANTED[bug]
    with configured(**(SEEDED if asked is SEEDS else {})):
        DeviceRig(1, asked).run()
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *rest, **named: wrong(original, *rest, **named))
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            DeviceRig(1, asked).run()


# What is refused.


def config_of(**changed: Any) -> SimpleNamespace:
    fields = {"tp_size": 1, "enable_deterministic_inference": False, "enable_lora": False, "lora_paths": None}
    fields |= {"device": "cuda", "disable_cuda_graph_padding": False, "disable_cuda_graph": False}
    fields |= {"disable_decode_cuda_graph": False, "cuda_graph_backend_decode": None}
    fields |= {"attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**(fields | changed))


TARGET = {"is_hybrid_swa": False, "attention_arch": AttentionArch.MHA, "is_multimodal": False}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"tp_size": 2}, "SGLANG_DFLASH_WIDTH=auto needs --tp-size 1, not 2"),
        ({"enable_deterministic_inference": True}, "without --enable-deterministic-inference"),
        ({"enable_lora": True}, "without --enable-lora"),
        ({"disable_cuda_graph_padding": True}, "without --disable-cuda-graph-padding"),
        ({"disable_cuda_graph": True}, "needs CUDA graphs of decode steps"),
        ({"disable_decode_cuda_graph": True}, "needs CUDA graphs of decode steps"),
        ({"cuda_graph_backend_decode": "disabled"}, "needs CUDA graphs of decode steps"),
        ({"is_hybrid_swa": True}, "without sliding windows"),
        ({"attention_arch": AttentionArch.MLA}, "without latent attention"),
        ({"is_multimodal": True}, "reads text alone"),
        ({"recurrent": True}, "without recurrent state"),
        ({"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN unset"),
        ({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0"),
        ({"device": "cpu", "tp_size": 2}, None),
    ],
)
def test_what_packed_rows_cannot_have_is_refused(monkeypatch, changed, words):
    """Fails where a server would start with packed rows that it cannot honour, or refuses one that did not ask."""
    for name in [name for name in changed if name.isupper()]:
        monkeypatch.setenv(name, changed[name])
    monkeypatch.setattr(device_rows, "mambaish_config", lambda config: changed.get("recurrent"))
    target = SimpleNamespace(**{name: changed.get(name, value) for name, value in TARGET.items()})
    asked = config_of(**{name: value for name, value in changed.items() if name in vars(config_of())})
    device_rows.check(asked, target)
    monkeypatch.setenv(widths.WIDTH, "auto")
    if words is None:
        device_rows.check(asked, target)
    else:
        with pytest.raises(ValueError, match=words):
            device_rows.check(asked, target)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "trtllm_mha"])
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_attention_without_packed_rows_is_refused(monkeypatch, flag, backend):
    """Fails where a backend would verify packed rows as whole blocks."""
    device_rows.check_backends(config_of(**{flag: backend}))
    monkeypatch.setenv(widths.WIDTH, "auto")
    device_rows.check_backends(config_of())
    device_rows.check_backends(config_of(device="cpu", **{flag: backend}))
    with pytest.raises(ValueError, match=f"{backend}.*SGLANG_DFLASH_WIDTH=auto.*allowed: fa3. "):
        device_rows.check_backends(config_of(**{flag: backend}))


@pytest.mark.parametrize(("width", "packs"), [("auto", True), ("adaptive", True), ("full", False), ("", False)])
def test_the_host_captures_packed_rows(monkeypatch, width, packs):
    """Fails where graphs are captured by requests although rows are packed, or by rows although they are not."""
    monkeypatch.setattr(device_rows, "get_device", lambda: SimpleNamespace(device="cuda"))
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    monkeypatch.setenv(widths.WIDTH, width)
    assert device_rows.captures_packed_rows(lambda algorithm: False, algorithm) is packs
    monkeypatch.setattr(device_rows, "get_device", lambda: SimpleNamespace(device="cpu"))
    assert not device_rows.captures_packed_rows(lambda algorithm: False, algorithm)
    other = SimpleNamespace(is_dflash=lambda: False)
    assert not device_rows.captures_packed_rows(lambda algorithm: False, other)


def test_a_window_found_late_is_refused():
    """Fails where a target whose windows are known only when it is loaded is served."""
    with configured():
        rig = Rig(0, PLAIN)
        rig.worker._target.sliding_window_size = 512
        with pytest.raises(SystemExit, match="sliding windows"):
            rows_of(rig)


def test_a_server_without_graphs_is_refused():
    """Fails where a start that captured no graphs, for whatever reason, would end at its first step."""
    with configured():
        rig = Rig(0, PLAIN)
        rig.worker._target.sliding_window_size = None
        with pytest.raises(SystemExit, match="CUDA graphs"):
            rows_of(rig).use_graphs()
