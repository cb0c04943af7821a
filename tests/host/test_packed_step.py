"""Steps that verify some rows of all blocks, packed: what is committed is what plain decoding gives.

And what is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_decoding import Asked
from planned_rig import Rig
from sglang.srt.configs.model_config import AttentionArch
from stand_in_worker import BATCH, BLOCK
from stand_ins import configured
from test_planned_step import GREEDY, PLAIN, SEEDED, SEEDS, _hooked, ask

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.core.row_budget import Budget, BudgetTuning, RowBudget
from sglang_dflash.host import packed_step, widths
from sglang_dflash.host.packed_step import LOOK_STEPS, PackedStep
from sglang_dflash.ops import packed_rows

__all__ = ["_hooked"]  # a fixture


class AnyBudget:
    """Random numbers of rows, in graphs of the same size or larger."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.gains: list[Any] = []

    def choose(self, batch: int) -> Budget:
        if self._rng.random() < 0.2:
            return Budget(batch, batch + self._rng.randrange(3), False)
        rows = min(self._rng.randint(batch, batch * BLOCK + BLOCK), batch * BLOCK)  # often whole blocks
        return Budget(rows, rows + self._rng.choice([0, 0, 3]), True)

    def see_gains(self, batch: int, gains: Any) -> None:
        self.gains.append(gains)

    def see_time(self, batch: int, budget: Budget, seconds: float) -> None:
        assert seconds > 0


class PackedRig(Rig):
    """The rig over a `PackedStep`: chains, whose slots keep their places."""

    def __init__(self, seed: int, asked: Sequence[Asked], **options: Any) -> None:
        super().__init__(seed, asked, page_size=16, candidates=2, **options)
        target, draft = self.worker._target, self.worker._draft
        target.sliding_window_size = None
        draft._head.weigh_drafts()
        stages = target, draft, self.worker.lay_out, self.worker.plan_kv
        self.worker.planned = step = PackedStep(BLOCK, *stages)
        step._budget = AnyBudget(self.rng)
        drafting = SimpleNamespace(width=BLOCK, requests=range(BATCH), copies=())
        self.policy = SimpleNamespace(trees=None, ended=[], drafting=drafting)
        propose, end = step.propose, step.end

        def keep(batch: Any) -> Any:
            plan, kv_plan = propose(batch)
            self.policy.trees = chains(plan.packed.lens.tolist())
            drafting.width = BLOCK if plan.packed is not step._anchors(len(plan.packed.lens), plan.packed.size) else 1
            return plan, kv_plan

        def follow(accepted: Any) -> None:
            starts = self.policy.trees.row_starts[:-1, None]
            rows = torch.arange(BLOCK) * (torch.arange(BLOCK) < accepted.commit_lens[:, None])
            self.policy.ended.append((starts + rows, accepted.commit_lens))
            end(accepted)

        step.propose, step.end = keep, follow

    def _verify(self, forward_batch: Any = None, **_: Any) -> Any:
        """The rows as SGLang's ragged layout has them; padding writes slot 0 and nothing else."""
        verify_input, trees = forward_batch.spec_info, self.policy.trees
        layout, count = verify_input.ragged_verify_layout, sum(trees.lens)
        assert (
            layout.verify_lens.tolist() == trees.lens and layout.qo_indptr_device.tolist() == trees.row_starts.tolist()
        )
        assert verify_input.draft_token_num == BLOCK
        rows = ("input_ids", "positions", "out_cache_loc")
        for name in rows:
            values = getattr(forward_batch, name)
            assert len(values) == layout.graph_num_tokens and not values[count:].any()
        fields = {name: getattr(forward_batch, name)[:count] for name in rows}
        verify_input = SimpleNamespace(trees=trees, draft_token_num=max(trees.lens))
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

    def _check_draft_kv(self) -> None:
        """Committed tokens' KV; behind them anything may stand."""
        pairs = zip(self._draft_buffers(self.worker._draft), self._draft_buffers(self.writer), strict=True)
        slots = [self.table[one.slot, : one.prefix_len].long() for one in self.running]
        for ours, expected in pairs:
            torch.testing.assert_close(ours[torch.cat(slots)], expected[torch.cat(slots)])


def chains(lens: list[int]) -> ops.PlannedRows:
    """Chains of as many rows."""
    depths = torch.cat([torch.arange(count) for count in lens]).int()
    counts = torch.tensor(lens, dtype=torch.int32)
    return ops.PlannedRows(
        depths - 1,
        depths,
        torch.where(depths > 0, 0, -1),
        torch.arange(len(lens)).repeat_interleave(counts),
        torch.tensor([0, *counts.cumsum(0).tolist()]),
        counts,
        lens,
        None,
        max(lens),
        max(lens),
    )


@pytest.mark.parametrize("seed", range(6))
def test_greedy_rows_commit_plain_decoding(seed):
    """Fails where a step commits another token than plain decoding, accepts less than it could, publishes too early, or
    leaves KV of either model at another slot than that of the token's position."""
    with configured():
        rig = PackedRig(seed, PLAIN)
        rig.run()
        assert rig.seen["deep"] and rig.seen["nobody drafted"], rig.seen
        given = rig.worker.planned._promised_and_accepted.tolist()
        accepted = sum(int((lens - 1).sum()) for _, lens in rig.policy.ended)
        assert given[0] > 0 and abs(given[1] - accepted) <= LOOK_STEPS * BATCH * (BLOCK - 1), (given, accepted)


@pytest.mark.parametrize("seed", range(10))
def test_rows_honour_parameters(seed):
    """Fails where a row is penalised, masked, biased, seeded or processed as if other tokens than those of its chain
    were emitted, or where logprobs or states are those of other rows."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        rig = PackedRig(seed, [ask(rng, seed % 2 == 1) for _ in range(BATCH)], overlap=rng.random() < 0.5)
        rig.run()


@pytest.mark.parametrize("start", range(4))
def test_a_draft_that_pays_again_is_asked_again(start):
    """Fails where steps of whole blocks, as probes are with one request, tell the budget nothing of their drafts."""
    with configured():
        rig = PackedRig(start, PLAIN[:1])
        budget = RowBudget(BLOCK, [BLOCK, 2 * BLOCK], BudgetTuning(undrafted_steps=4))
        budget.see_gains(1, np.zeros(BLOCK - 1))
        for option in budget._options(1):
            budget.see_time(1, option, 1.0)
            budget.see_time(1, option, 1.0 + option.drafts)
        budget.see_time = lambda *_: None
        budget._step = budget._probed = rig.worker.planned.counts.steps = start
        rig.worker.planned._due = False
        rig.worker.planned._budget = budget
        drafted = []
        while len(rig.running[0].emitted) + BLOCK < 48:
            rig.step([0])
            drafted.append(rig.policy.drafting.width > 1)
        assert not any(drafted[:2]) and all(drafted[6:10]) and len(drafted) >= 10, drafted


# Planted bugs.


def _of_the_next(original: Any, *arguments: Any) -> ops.PackedRows:
    packed = original(*arguments)
    return packed._replace(rows=(packed.rows + 1).clamp(max=len(packed.places) - 1))


def _one_row_less(original: Any, *arguments: Any) -> ops.PackedRows:
    packed = original(*arguments)
    return packed._replace(lens=(packed.lens - 1).clamp(min=1))


def _all_slots(original: Any, plan: VerifyPlan, values: torch.Tensor) -> torch.Tensor:
    return values[: len(plan.packed.places)]


def _kept_ids(original: Any, plan: VerifyPlan) -> torch.Tensor:
    return plan.chains()


PLANTED: dict[str, tuple[Any, str, Any, list[Asked]]] = {
    "a row's logits are the next row's": (packed_rows, "pack_rows", _of_the_next, PLAIN),
    "a layout with fewer rows": (packed_rows, "pack_rows", _one_row_less, PLAIN),
    "context KV at the first slots": (VerifyPlan, "seen", _all_slots, PLAIN),
    "rows that were not verified are accepted": (VerifyPlan, "compared", _kept_ids, PLAIN),
    "states in the order of the forward": (VerifyPlan, "row_in_forward", property(lambda plan: None), PLAIN),
    "logits in the order of the forward": (
        *(VerifyPlan, "spread"),
        lambda original, plan, values: torch.cat((values, values))[: len(plan.ids)].clone(),
        [Asked(GREEDY, (5,), top_logprobs=2), *PLAIN[:2]],
    ),
    "seeds by packed row": (
        *(VerifyPlan, "forward_rows"),
        lambda original, plan: tuple(values[: plan.packed.size] for values in (plan.ids, plan.positions, plan.slots)),
        SEEDS,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    owner, name, wrong, asked = PLANTED[bug]
    with configured(**(SEEDED if asked is SEEDS else {})):
        PackedRig(1, asked).run()
        original = getattr(owner, name)
        planted = wrong if isinstance(wrong, property) else lambda *rest, **named: wrong(original, *rest, **named)
        monkeypatch.setattr(owner, name, planted)
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            PackedRig(1, asked).run()


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
        ({"tp_size": 2}, "SGLANG_DFLASH_WIDTH=adaptive needs --tp-size 1, not 2"),
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
        ({"SGLANG_DFLASH_TREE": "8"}, "SGLANG_DFLASH_TREE unset or 0"),
        ({"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN unset"),
        ({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0"),
        ({"device": "cpu", "tp_size": 2}, None),
    ],
)
def test_what_packed_rows_cannot_have_is_refused(monkeypatch, changed, words):
    """Fails where a server would start with packed rows that it cannot honour, or refuses one that did not ask."""
    for name in [name for name in changed if name.isupper()]:
        monkeypatch.setenv(name, changed[name])
    monkeypatch.setattr(packed_step, "mambaish_config", lambda config: changed.get("recurrent"))
    target = SimpleNamespace(**{name: changed.get(name, value) for name, value in TARGET.items()})
    asked = config_of(**{name: value for name, value in changed.items() if name in vars(config_of())})
    packed_step.check(asked, target)
    monkeypatch.setenv(widths.WIDTH, "adaptive")
    if words is None:
        packed_step.check(asked, target)
    else:
        with pytest.raises(ValueError, match=words):
            packed_step.check(asked, target)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "trtllm_mha"])
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_attention_without_packed_rows_is_refused(monkeypatch, flag, backend):
    """Fails where a backend would verify packed rows as whole blocks."""
    packed_step.check_backends(config_of(**{flag: backend}))
    monkeypatch.setenv(widths.WIDTH, "adaptive")
    packed_step.check_backends(config_of())
    packed_step.check_backends(config_of(device="cpu", **{flag: backend}))
    with pytest.raises(ValueError, match=f"{backend}.*SGLANG_DFLASH_WIDTH=adaptive.*allowed: fa3. "):
        packed_step.check_backends(config_of(**{flag: backend}))


@pytest.mark.parametrize(("width", "packs"), [("adaptive", True), ("full", False), ("", False)])
def test_the_host_captures_packed_rows(monkeypatch, width, packs):
    """Fails where graphs are captured by requests although rows are packed, or by rows although they are not."""
    monkeypatch.setattr(packed_step, "get_device", lambda: SimpleNamespace(device="cuda"))
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    monkeypatch.setenv(widths.WIDTH, width)
    assert packed_step.captures_packed_rows(lambda algorithm: False, algorithm) is packs
    monkeypatch.setattr(packed_step, "get_device", lambda: SimpleNamespace(device="cpu"))
    assert not packed_step.captures_packed_rows(lambda algorithm: False, algorithm)
    other = SimpleNamespace(is_dflash=lambda: False)
    assert not packed_step.captures_packed_rows(lambda algorithm: False, other)


def test_a_window_found_late_is_refused():
    """Fails where a target whose windows are known only when it is loaded is served."""
    with pytest.raises(SystemExit, match="sliding windows"):
        PackedStep(BLOCK, SimpleNamespace(sliding_window_size=512), None, None, None)


def test_a_server_without_graphs_is_refused():
    """Fails where a start that captured no graphs, for whatever reason, would end at its first step."""
    step = PackedStep.__new__(PackedStep)
    step._target = SimpleNamespace(decode_cuda_graph_runner=None)
    with pytest.raises(SystemExit, match="CUDA graphs"):
        step.use_graphs()
