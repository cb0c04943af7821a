"""Rows that the device chooses, packed: what is committed is what plain decoding gives.

And for which targets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from rows_rig import Rig, Running
from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from stand_in_worker import BATCH, BLOCK, VOCAB, StepBatch
from stand_ins import configured
from test_step_rows import GREEDY, PLAIN, SEEDED, SEEDS, _hooked, ask, check_finding, past_its_rows

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.patches import packed_gdn, ragged
from sglang_dflash.host.worker import acceptance, trimmed_rows
from sglang_dflash.host.worker.device_rows import DeviceRows
from sglang_dflash.host.worker.trimmed_rows import TrimmedRows, can_trim
from sglang_dflash.ops import rows as row_ops

__all__ = ["_hooked"]  # a fixture


@pytest.fixture(autouse=True)
def _layouts_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrimmedRows, "made", False)
    monkeypatch.setattr(BuildQoIndptr, "triton", BuildQoIndptr.torch)


class DeviceRig(Rig):
    """The rig over `DeviceRows`, with steps of any width."""

    kind = DeviceRows
    expected_step: Any = None

    def __init__(self, seed: int, asked: Sequence[Asked], **options: Any) -> None:
        super().__init__(seed, asked, page_size=16, **options)
        kernels = ops.choose_kernels("cpu", torch.float32)
        parts = (self.worker._target, self.worker._draft, VOCAB - 1, kernels)
        self.worker.step_rows = self.kind(BLOCK, self.policy, *parts)
        self.policy.verify = None  # the device chooses

    def _note(self, chosen: Any, lens: list[int]) -> None:
        """The policy learns a step later, and drafts all requests or none."""
        everybody = list(range(len(chosen))) if self.policy.drafting.width > 1 else []
        self.policy.drafting = self.policy.drafting._replace(requests=[], width=self._width() if everybody else 1)
        super()._note(chosen, lens)
        if self.expected_step is not None:
            (step,) = self.policy.learned
            assert (step.names, step.lens.tolist(), step.commit_lens.tolist()) == self.expected_step
        names = [one.req.rid for one in chosen]
        self.expected_step = (names, self.lens, lens) if everybody else self.expected_step

    def _width(self) -> int:
        """Of a drafted block."""
        return self.policy.drafting.width


class TrimmedRig(DeviceRig):
    """The rig over `TrimmedRows`, whose graphs have room for 8, 16 and 24 rows."""

    kind = TrimmedRows

    def __init__(self, seed: int, asked: Sequence[Asked], **options: Any) -> None:
        super().__init__(seed, asked, **options)
        self.worker.step_rows._sizes, self.worker.step_rows._slots = [8, 16, 24], BATCH

    def _width(self) -> int:
        return BLOCK

    def _counted(self) -> list[int]:
        """What fills the graph of a step without drafts is no draft."""
        return self.lens if self.policy.drafting.width > 1 else [1] * len(self.lens)

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


class WrapperRig(TrimmedRig):
    """The rig over a target with sections of positions. Requests in odd slots have images before their text."""

    def _batch(self, chosen: list[Running]) -> StepBatch:
        batch = super()._batch(chosen)
        self.worker._target.model_config.model_is_mrope = True
        self.shifts = [-3 * one.slot * (one.slot % 2) for one in chosen]
        batch.multimodal_inputs = [
            SimpleNamespace(mrope_position_delta=torch.tensor([[shift]])) if shift else None for shift in self.shifts
        ]
        return batch

    def _verify(self, forward_batch: Any = None, **_: Any) -> Any:
        lens = forward_batch.spec_info.ragged_verify_layout.verify_lens.tolist()
        shifts = [shift for shift, count in zip(self.shifts, lens, strict=True) for _ in range(count)]
        shifts += [0] * (len(forward_batch.positions) - len(shifts))
        sections = forward_batch.positions + torch.tensor(shifts)
        assert torch.equal(forward_batch.mrope_positions, sections.repeat(3, 1))
        self.seen["shifted"] = self.seen.get("shifted", 0) + (len(set(lens)) > 1 and any(shifts))
        return super()._verify(forward_batch)


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_any_width_commit_plain_decoding(seed):
    """Fails where a step of fewer rows than K, or behind one, commits another token than plain decoding, accepts less
    than it could, or leaves KV at another slot than that of the token's position."""
    with configured():
        rig = DeviceRig(seed, PLAIN, overlap=seed % 2 == 1)
        rig.run()
        assert rig.seen["deep"] and rig.seen["nobody drafted"] and not rig.seen["ragged"], rig.seen


@pytest.mark.parametrize("seed", range(6))
def test_greedy_rows_commit_plain_decoding(seed):
    """Fails where a step commits another token than plain decoding, accepts less than it could, publishes too early,
    leaves KV of either model at another slot than that of the token's position, or tells the policy other steps."""
    with configured():
        rig = TrimmedRig(seed, PLAIN)
        rig.run()
        assert rig.seen["deep"] and rig.seen["nobody drafted"] and rig.seen["ragged"], rig.seen


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_wrappers(seed, monkeypatch):
    """Fails where a row of a request with an image stands at another position than in plain decoding."""
    name = "compute_spec_mrope_positions"  # hooked, as on a server
    original = getattr(ForwardBatch, name)
    monkeypatch.setattr(ForwardBatch, name, lambda *given: ragged.positions_of_sections(original, *given))
    with configured():
        rig = WrapperRig(seed, PLAIN)
        rig.run()
        assert rig.seen["deep"] and rig.seen["shifted"], rig.seen


@pytest.mark.parametrize("seed", range(10))
def test_rows_honour_parameters(seed):
    """Fails where a row is penalised, masked, biased, seeded or processed as if other tokens than those before it were
    emitted, or where logprobs or states are those of other rows."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        rig = TrimmedRig(seed, [ask(rng, seed % 2 == 1) for _ in range(BATCH)], overlap=rng.random() < 0.5)
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
        *(VerifyRows, "requests"),
        lambda original, rows: torch.arange(len(rows.ids)) % rows.batch,
        SEEDS,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    check_finding(TrimmedRig, *PLANTED[bug], monkeypatch)


# Which targets.


def config_of(**changed: Any) -> SimpleNamespace:
    fields = {"tp_size": 1, "disable_cuda_graph_padding": False, "attention_backend": "fa3"}
    fields["enable_linear_replayssm_spec"] = False
    fields |= {"prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**(fields | changed))


MODEL = {"is_hybrid_swa": False, "attention_arch": AttentionArch.MHA}
MODEL |= {"is_encoder_decoder": False, "is_local_attention_model": False}


@pytest.mark.parametrize(
    "changed",
    [
        {"disable_cuda_graph_padding": True},
        {"enable_linear_replayssm_spec": True},
        {"attention_backend": "triton"},
        {"prefill_attention_backend": "flashinfer"},
        {"decode_attention_backend": "triton"},
        {"is_hybrid_swa": True, "attention_backend": "trtllm_mha"},
        {"sliding_window_size": 512, "attention_backend": "trtllm_mha"},
        {"attention_arch": AttentionArch.MLA},
        {"is_encoder_decoder": True},
        {"is_local_attention_model": True},
        {"recurrent": "NemotronHForCausalLM"},
        {"recurrent": "Qwen3_5MoeForCausalLM"},
    ],
)
def test_what_cannot_be_trimmed_is_not(monkeypatch, changed):
    """Fails where a target's graphs would take rows of requests that its attention lays out as whole blocks."""
    assert not trims(monkeypatch, changed)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tp_size": 2},
        {"attention_backend": "trtllm_mha"},
        {"is_hybrid_swa": True},
        {"sliding_window_size": 512},
        {"recurrent": "Qwen3_5ForCausalLM"},
    ],
)
def test_what_can_be_trimmed_is(monkeypatch, changed):
    """Fails where a target whose packed rows are right gets blocks of one width."""
    assert trims(monkeypatch, changed)


def trims(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> bool:
    monkeypatch.setattr(trimmed_rows, "BACKENDS", {"fa3", "trtllm_mha"})  # as on SM100
    monkeypatch.setattr(trimmed_rows, "mambaish_config", lambda model: changed.get("recurrent"))
    model = SimpleNamespace(**{name: changed.get(name, value) for name, value in MODEL.items()})
    model.hf_config = SimpleNamespace(architectures=[changed.get("recurrent")])
    target = SimpleNamespace(model_config=model, sliding_window_size=changed.get("sliding_window_size"))
    asked = {name: value for name, value in changed.items() if name in vars(config_of())}
    return can_trim(config_of(**asked), target)


def test_graphs_of_gated_delta_nets_are_replayed():
    """Fails where SGLang would run their packed rows without graphs, which nobody would be told."""
    parts = [SimpleNamespace(supports_ragged_verify_graph=able) for able in (True, False)]
    hybrid = SimpleNamespace(full_attn_backend=parts[0], linear_attn_backend=parts[1])
    packed_gdn.allow_graphs(hybrid)
    packed_gdn.allow_graphs(parts[0])
    assert HybridLinearAttnBackend.supports_ragged_verify_graph.fget(hybrid)


@pytest.mark.parametrize("made", [False, True])
def test_the_host_captures_packed_rows(monkeypatch, made):
    """Fails where graphs are captured by requests although rows are packed, or by rows although they are not."""
    monkeypatch.setattr(TrimmedRows, "made", made)
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    assert trimmed_rows.captures_packed_rows(lambda algorithm: False, algorithm) is made
    other = SimpleNamespace(is_dflash=lambda: False)
    assert not trimmed_rows.captures_packed_rows(lambda algorithm: False, other)
