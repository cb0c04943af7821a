"""Steps with trees of N rows: what is committed is what plain decoding gives; and what is refused.

The ops are those of CUDA, and the target reads what the mask lets a row see.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from planned_rig import Rig
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from stand_in_worker import BATCH, BLOCK, VOCAB
from stand_ins import configured
from test_planned_step import (
    GREEDY,
    PLAIN,
    SEEDED,
    SEEDS,
    _hooked,
    _in_kernel,
    _in_order_of_rows,
    _position_of_the_row,
    _reversed,
)

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host import acceptance, fixed_trees, requests, sampling, widths
from sglang_dflash.host.hidden_states import ReturnedHiddenStates
from sglang_dflash.ops import fixed_trees as bodies

__all__ = ["_hooked"]  # a fixture
ROWS = [2, 5, 8, 13]


@pytest.fixture(autouse=True)
def _bodies_of_cuda(monkeypatch):
    monkeypatch.setattr(fixed_trees, "block_size", lambda: BLOCK)
    kernels = ops.choose_kernels("cpu", torch.float32)

    def accept_tree_greedy(logits: Any, ids: Any, *rows: Any) -> Any:
        return bodies.accept_tree(kernels.row_argmax(logits[: len(ids)]), ids, *rows)

    chosen = replace(
        kernels,
        top_log_probs=bodies.top_log_probs,
        accept_tree=bodies.accept_tree,
        accept_tree_greedy=accept_tree_greedy,
    )
    monkeypatch.setattr(ops, "choose_kernels", lambda *_: chosen)


class FixedRig(Rig):
    """The rig over a `FixedTreeStep`: KV moves, so slots keep their places at every page size."""

    def __init__(self, seed: int, asked: Sequence[Asked], rows: int, **options: Any) -> None:
        self.policy: Any = SimpleNamespace(trees=None, ended=[], drafting=None)
        super().__init__(seed, asked, page_size=16, **options)
        target, self.rows = self.worker._target, rows
        target.sliding_window_size, target.model_config.context_len = None, self.table.shape[1]
        self.worker.planned = step = fixed_trees.FixedTreeStep(rows, target, self.worker._draft, self.worker.lay_out)
        drafting = SimpleNamespace(width=BLOCK, requests=range(BATCH), copies=())
        self.policy = SimpleNamespace(trees=None, ended=[], drafting=drafting)
        step.end = lambda accepted: self.policy.ended.append((accepted.path, accepted.commit_lens))
        propose = step.propose

        def keep(batch: Any) -> Any:
            plan, kv_plan = propose(batch)
            self.policy.trees = plan.trees
            return plan, kv_plan

        step.propose = keep

    def _verify(self, forward_batch: Any = None, **_: Any) -> Any:
        """Reads the mask as SGLang's kernels do."""
        verify_input, prefix_lens = forward_batch.spec_info, forward_batch.seq_lens.tolist()
        assert verify_input.trees is None and verify_input.draft_token_num == self.rows
        mask, start, seen = verify_input.custom_mask, 0, []
        for prefix in prefix_lens:
            keys = prefix + self.rows
            view = mask[start : start + self.rows * keys].view(self.rows, keys)
            assert view[:, :prefix].all()
            seen.append(view[:, prefix:])
            start += self.rows * keys
        verify_input.trees = self.policy.trees._replace(row_mask=torch.stack(seen))
        return super()._verify(forward_batch)

    def _check_draft_kv(self) -> None:
        """Committed tokens' KV; behind them anything may stand."""
        pairs = zip(self._draft_buffers(self.worker._draft), self._draft_buffers(self.writer), strict=True)
        slots = [self.table[one.slot, : one.prefix_len].long() for one in self.running]
        for ours, expected in pairs:
            torch.testing.assert_close(ours[torch.cat(slots)], expected[torch.cat(slots)])

    def run(self) -> None:
        """As long as there is room for a tree."""
        while max(len(one.emitted) for one in self.running) + max(BLOCK, self.rows) < self.table.shape[1] - 8:
            places = list(range(len(self.running)))
            self.step(self.rng.sample(places, self.rng.randint(1, len(places))))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_trees_commit_plain_decoding(seed, rows):
    """Fails where a step commits another token than plain decoding, accepts less than it could, publishes too early, or
    leaves KV of either model at another slot than that of the token's position."""
    with configured():
        rig = FixedRig(seed, PLAIN, rows)
        rig.run()
        assert rig.seen["tree"] and (rows == 2 or rig.seen["reordered"]), rig.seen


def ask(rng: random.Random, sampled: bool) -> Asked:
    """A request that may ask for anything but penalties."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    if sampled:
        sampling = {"temperature": rng.choice([0.5, 1.0, 1.4]), "sampling_seed": rng.randrange(1000)}
        filters = {"top_k": rng.randint(2, 20), "top_p": rng.uniform(0.5, 0.95), "min_p": 0.05}
        sampling |= {name: value for name, value in filters.items() if rng.random() < 0.3}
    if rng.random() < 0.3:
        sampling["logit_bias"] = {str(token): rng.uniform(-5, 5) for token in rng.sample(range(VOCAB), 9)}
    return Asked(
        sampling,
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))),
        grammar=rng.random() < 0.3,
        shift=rng.randrange(4) if rng.random() < 0.3 else None,
        top_logprobs=rng.choice([0, 0, 2, 3]),
        listed_ids=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(8))
def test_trees_honour_parameters(seed):
    """Fails where a row is masked, biased, seeded or processed as if other tokens than those of its path were emitted,
    or where logprobs or states do not follow the accepted path."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        asked = [ask(rng, seed % 2 == 1) for _ in range(BATCH)]
        rig = FixedRig(seed, asked, ROWS[seed % 4], overlap=rng.random() < 0.5)
        rig.run()


# Planted bugs.


def _unmoved(original: Any, *arguments: Any) -> ops.FinalSlots:
    final = original(*arguments)
    return final._replace(sources=final.slots)


def _at_the_rows_slots(original: Any, step: Any, batch: Any, plan: VerifyPlan, accepted: Any, *rest: Any) -> Any:
    hidden, positions, _ = original(step, batch, plan, accepted, *rest)
    return hidden, positions, plan.slots[accepted.path.flatten()]


PLANTED: dict[str, tuple[Any, str, Any, list[Asked]]] = {
    "path in the wrong order": (ops, "choose_kernels", _in_kernel("accept_tree_greedy", _reversed), PLAIN),
    "KV not moved": (ops, "final_slots", _unmoved, PLAIN),
    "KV moved from the wrong end": (
        *(MHATokenToKVPool, "move_kv_cache", lambda original, pool, to, origin: original(pool, origin, to)),
        PLAIN,
    ),
    "context KV at the rows' slots": (fixed_trees.FixedTreeStep, "commit", _at_the_rows_slots, PLAIN),
    "siblings are seen": (
        *(ops, "attention_mask", lambda original, seen, *rest: original(torch.ones_like(seen).tril(), *rest)),
        PLAIN,
    ),
    "positions by row": (
        *(ops, "lay_out_fixed_trees"),
        lambda original, depths, *rest: original(torch.ones_like(depths).cumsum(1) - 1, *rest),
        PLAIN,
    ),
    "states in the order of rows": (
        *(ReturnedHiddenStates, "put", lambda original, own, batch, out, path: original(own, batch, out)),
        PLAIN,
    ),
    "logprobs in the order of rows": (acceptance, "follow", _in_order_of_rows, [Asked(GREEDY, (5,), top_logprobs=2)]),
    "grammar without siblings": (
        *(ops, "links", lambda original, parents: (original(parents)[0], torch.full_like(original(parents)[1], -1))),
        [Asked(GREEDY, (5,), grammar=True)],
    ),
    "seeds by row": (sampling.RowSampler, "_sample", _position_of_the_row, SEEDS),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    owner, name, wrong, asked = PLANTED[bug]
    with configured(**(SEEDED if asked is SEEDS else {})):
        FixedRig(1, asked, 13).run()
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *rest, **named: wrong(original, *rest, **named))
        with pytest.raises((AssertionError, RuntimeError)):
            FixedRig(1, asked, 13).run()


# What is refused, and what the host is told.


def config_of(**changed: Any) -> SimpleNamespace:
    fields = {"tp_size": 1, "enable_deterministic_inference": False, "enable_lora": False, "lora_paths": None}
    fields |= {"attention_backend": "triton", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**(fields | changed))


TARGET = {"is_hybrid_swa": False, "attention_arch": AttentionArch.MHA}
HEADS = {"selector": None, "domino": None}


@pytest.mark.parametrize(
    ("rows", "changed", "words"),
    [
        ("8", {}, None),
        ("64", {}, None),
        ("65", {}, "SGLANG_DFLASH_TREE is 65; allowed: 0 .chains., 1 .*, or 2 to 64"),
        ("8", {"tp_size": 2}, "SGLANG_DFLASH_TREE=8 needs --tp-size 1, not 2"),
        ("8", {"enable_deterministic_inference": True}, "without --enable-deterministic-inference"),
        ("8", {"enable_lora": True}, "without --enable-lora"),
        ("8", {"is_hybrid_swa": True}, "without sliding windows"),
        ("8", {"attention_arch": AttentionArch.MLA}, "without latent attention"),
        ("8", {"selector": object()}, "several candidates"),
        ("8", {"domino": object()}, "several candidates"),
        ("8", {"recurrent": True}, "without recurrent state"),
        ("8", {"SGLANG_SIMULATE_ACC_LEN": "3"}, "SGLANG_SIMULATE_ACC_LEN unset"),
        ("8", {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0"),
        ("1", {"tp_size": 2}, None),
        ("0", {"is_hybrid_swa": True}, None),
    ],
)
def test_what_trees_cannot_have_is_refused(monkeypatch, rows, changed, words):
    """Fails where a server would start with trees that it cannot honour, or refuses one that did not ask for them."""
    monkeypatch.setenv(widths.TREE, rows)
    for name in [name for name in changed if name.isupper()]:
        monkeypatch.setenv(name, changed[name])
    monkeypatch.setattr(fixed_trees, "mambaish_config", lambda config: changed.get("recurrent"))
    target, draft = (
        SimpleNamespace(**{name: changed.get(name, value) for name, value in fields.items()})
        for fields in (TARGET, HEADS)
    )
    asked = config_of(**{name: value for name, value in changed.items() if name in vars(config_of())})
    if words is None:
        fixed_trees.check(asked, target, draft, BLOCK)
    else:
        with pytest.raises(ValueError, match=words):
            fixed_trees.check(asked, target, draft, BLOCK)


@pytest.mark.parametrize(("block", "most"), [(2, 9), (3, 64)])
def test_how_many_rows_are_allowed(monkeypatch, block, most):
    monkeypatch.setenv(widths.TREE, str(most + 1))
    with pytest.raises(ValueError, match=f"2 to {most}, "):
        fixed_trees.check(config_of(), SimpleNamespace(**TARGET), SimpleNamespace(**HEADS), block)


@pytest.mark.parametrize("backend", ["fa3", "trtllm_mha", "flashinfer", "dflash_cpu"])
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_attention_without_masks_is_refused(monkeypatch, flag, backend):
    """Fails where a backend would verify trees as chains, or wait for the device at each step."""
    fixed_trees.check_backends(config_of(**{flag: backend}))
    monkeypatch.setenv(widths.TREE, "8")
    fixed_trees.check_backends(config_of())
    with pytest.raises(ValueError, match=f"{backend}.*SGLANG_DFLASH_TREE=8.*allowed: triton"):
        fixed_trees.check_backends(config_of(**{flag: backend}))


def test_a_window_found_late_is_refused():
    runner = SimpleNamespace(sliding_window_size=512)
    with pytest.raises(SystemExit, match="sliding windows"):
        fixed_trees.FixedTreeStep(8, runner, None, None)


def test_a_request_with_penalties_is_refused(monkeypatch):
    req = PLAIN[0].req("r", 0, VOCAB, 1)
    penalised = Asked({**GREEDY, "min_new_tokens": 3}, (5,)).req("r", 0, VOCAB, 1)
    assert requests._complaint(penalised) is None
    monkeypatch.setenv(widths.TREE, "8")
    assert requests._complaint(req) is None
    assert "SGLANG_DFLASH_TREE=8" in requests._complaint(penalised)


@pytest.mark.parametrize(("rows", "largest"), [(4, BLOCK), (13, 13)])
def test_the_host_sizes_draft_and_target(monkeypatch, rows, largest):
    """Fails where the host reserves slots for fewer rows than a step writes, or captures a graph of another width."""
    algorithm, original = SpeculativeAlgorithm.DFLASH, lambda algorithm, count, is_draft: count
    assert fixed_trees.resolved(BLOCK) == {}
    assert fixed_trees.rows_of_runner(original, algorithm, 7, False) == 7
    monkeypatch.setenv(widths.TREE, str(rows))
    assert fixed_trees.resolved(BLOCK) == {
        "speculative_num_draft_tokens": largest,
        "speculative_dflash_block_size": BLOCK,
    }
    assert fixed_trees.rows_of_runner(original, algorithm, largest, False) == rows
    assert fixed_trees.rows_of_runner(original, algorithm, largest, True) == BLOCK
    assert fixed_trees.rows_of_runner(original, SpeculativeAlgorithm.EAGLE, 7, False) == 7


@pytest.mark.parametrize("draft", [False, True])
def test_the_target_is_captured_with_a_mask(monkeypatch, draft):
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.DFLASH, is_draft_worker=draft),
        buffers=SimpleNamespace(custom_mask="mask"),
    )
    original = lambda runner, tokens: SimpleNamespace(custom_mask=None)  # noqa: E731
    assert fixed_trees.captured_input(original, runner, 8).custom_mask is None
    monkeypatch.setenv(widths.TREE, "8")
    assert fixed_trees.captured_input(original, runner, 8).custom_mask == (None if draft else "mask")
