"""Which servers plan their steps, in which shape, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dflash.core.plan import Planner
from sglang_dflash.core.policy import Fixed
from sglang_dflash.host import planned_step, widths


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (widths.WIDTH, widths.TREE, "SGLANG_SIMULATE_ACC_LEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "device", "tp_size", "policy"),
    [
        (None, "cpu", 1, Planner),
        ("adaptive", "cpu", 1, Planner),
        ("1", "cpu", 1, Fixed),
        ("8", "cpu", 1, Fixed),
        ("full", "cpu", 1, type(None)),
        (None, "cpu", 2, type(None)),
        (None, "cuda", 1, type(None)),
    ],
)
def test_who_plans(monkeypatch, value, device, tp_size, policy):
    """Fails where steps are planned with graphs of one size or on several ranks, or are not planned where they can."""
    if value is not None:
        monkeypatch.setenv(widths.WIDTH, value)
    widths.check(device, tp_size, 8)
    assert type(widths.choose_planner(8, device, tp_size)) is policy


def test_simulated_acceptance_has_whole_blocks(monkeypatch):
    """Fails where a mean commit_len of 4 would be drawn in blocks of 2."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    assert widths.choose_planner(8, "cpu", 1) is None


@pytest.mark.parametrize(
    ("name", "value", "device", "tp_size", "words"),
    [
        (widths.WIDTH, "9", "cpu", 1, "'9'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "0", "cpu", 1, "'0'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "wide", "cpu", 1, "'wide'; allowed: adaptive, full, or a number from 1 to 8"),
        (widths.WIDTH, "4", "cuda", 1, "SGLANG_DFLASH_WIDTH=4 needs --device cpu, not cuda"),
        (
            *(widths.WIDTH, "adaptive", "cpu", 2),
            "needs --tp-size 1, not 2, because ranks could choose different widths. Use full",
        ),
        (widths.WIDTH, "adaptive", "cuda", 1, "needs --device cpu, not cuda, because an accelerator"),
        (widths.TREE, "-2", "cpu", 1, "'-2'; allowed: 0 .chains., 1 .*, or a number of rows from 2"),
        (widths.TREE, "many", "cpu", 1, "'many'; allowed: 0 .chains., 1 .*, or a number of rows from 2"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, name, value, device, tp_size, words):
    """Fails where an unknown or impossible value is silently replaced by another."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        widths.check(device, tp_size, 8)


@pytest.mark.parametrize(
    ("tree", "recurrent", "deterministic", "most", "words"),
    [
        (None, False, False, None, None),
        ("1", False, False, None, None),
        ("", False, False, None, None),
        ("0", False, False, None, "SGLANG_DFLASH_TREE=0"),
        (None, True, False, None, "recurrent state"),
        (None, False, True, None, "--enable-deterministic-inference"),
        (None, False, False, 1, "one candidate for each row"),
    ],
)
def test_who_gets_trees(monkeypatch, tree, recurrent, deterministic, most, words):
    """Fails where rows form trees over a recurrent state, in another order of keys than plain decoding's, or against
    the user's wish; or where they form chains for no reason."""
    if tree is not None:
        monkeypatch.setenv(widths.TREE, tree)
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic))
    monkeypatch.setattr(planned_step, "get_exec", lambda: exec_)
    monkeypatch.setattr(planned_step, "mambaish_config", lambda config: object() if recurrent else None)
    target, draft = SimpleNamespace(model_config=None), SimpleNamespace(most_candidates=most)
    reason = planned_step.why_chains(target, draft)
    assert reason is None if words is None else words in reason
    step = planned_step.PlannedStep(None, target, draft, None)
    assert step._candidates == (planned_step.CANDIDATES if words is None else 1)
