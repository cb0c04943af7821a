"""The cases of `test_cuda_ops.py` on tiny shapes, interpreted, so that they still fit the ops when a GPU is at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_cases
import pytest

TINY: list[tuple[Callable[..., op_cases.Case], tuple[int, ...]]] = [
    (op_cases.block_layout, (3, 7, 40)),
    (op_cases.accept_greedy, (2, 4, 2501)),
    (op_cases.row_argmax, (3, 1025)),
    (op_cases.accept_chain, (5, 4)),
    (op_cases.sample_rows, (3, 50, 9)),
    (op_cases.context_kv, (3, 2, 2, 16, 20)),
    (op_cases.penalties, (3, 4, 50, 9)),
    (op_cases.likeliest, (4, 5, 9)),
]


@pytest.mark.parametrize(("op", "sizes"), TINY, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_case(op: Callable[..., op_cases.Case], sizes: tuple[int, ...]) -> None:
    """Fails where an op differs from its reference, a case no longer fits its op, or a line lacks a number."""
    calls = []

    def clock_us(call: Callable[[], Any]) -> float:
        call()
        calls.append(call)
        return 2.0 * len(calls)

    case = op("cpu", *sizes)
    measured = op_cases.measure("an_op", case, clock_us, bandwidth_gb_s=100.0)
    gb_s = case.moved_bytes / 2000
    assert measured.gb_s == pytest.approx(gb_s) and measured.share == pytest.approx(gb_s / 100)
    beside = " (torch 4.0)" if len(calls) == 2 else ""
    assert measured.line().startswith(f"an_op, {case.shape}: error {measured.error:.2g}, 2.0 us{beside}, ")


@pytest.mark.parametrize("op", ["accept_chain", "sample_rows", "context_kv", "penalties"])
def test_a_wrong_op_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a case passes although the op does nothing, or gives the result of other arguments."""
    if op == "accept_chain":
        right = op_cases.triton_acceptance.accept_chain
        monkeypatch.setattr(op_cases.triton_acceptance, op, lambda target_ids, ids: right(target_ids + 1, ids))
        case = op_cases.accept_chain("cpu", 5, 4)
    elif op == "sample_rows":
        right = op_cases.triton_sampling.sample_rows
        monkeypatch.setattr(op_cases.triton_sampling, op, lambda logits, *rest: right(-logits, *rest))
        case = op_cases.sample_rows("cpu", 3, 50, 9)
    elif op == "context_kv":
        monkeypatch.setattr(op_cases.triton_context_kv, "write_context_kv", lambda *_: None)
        case = op_cases.context_kv("cpu", 3, 2, 2, 16, 20)
    else:
        monkeypatch.setattr(op_cases.TritonEmittedTokens, "penalize", lambda *_: None)
        case = op_cases.penalties("cpu", 3, 4, 50, 9)
    with pytest.raises(AssertionError, match="differ"):
        case.compare()
