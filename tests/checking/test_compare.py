"""Pure comparisons: what counts as a difference, a tie, acceptance and lost steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_dflash.checking.compare import Difference, Request, first_difference, step_loss
from sglang_dflash.checking.draft_kv import judge
from sglang_dflash.checking.recording import Exchange
from sglang_dflash.serving import AcceptanceStats, Completion, TiePolicy, greedy_body

FINISH = {"type": "stop", "matched": 2}
TIES = TiePolicy.of("float32")


def answer(ids: list[int], **fields: Any) -> Completion:
    return Completion(**{"ids": ids, "text": str(ids), "finish": FINISH, **fields})


def drafted(*histogram: int) -> Completion:
    return Completion(accept_histogram=list(histogram), steps=sum(histogram))


def compare(off: Completion, on: Completion, temperature: float = 0.0, **body: Any) -> Difference | None:
    request = Request("case", "prompt", {**greedy_body([1], temperature=temperature), **body})
    return first_difference(request, off, on, TIES)


OFF = answer([5, 6, 2], best=[[(5, -0.1), (7, -2.0)], [(6, -0.7), (8, -0.7 - 1e-6)], [(2, -0.1), (3, -4.0)]])


def test_equal() -> None:
    """Fails if equal answers give a difference."""
    assert compare(OFF, answer([5, 6, 2])) is None


@pytest.mark.parametrize(
    ("on", "kind", "index"),
    [
        (answer([5, 9, 2]), "token", 1),
        (answer([9, 6, 2]), "token", 0),
        (answer([5, 6]), "length", 2),
        (answer([5, 6, 2, 4]), "length", 3),
        (answer([5, 6, 2], finish={"type": "length"}), "finish", 3),
        (answer([5, 6, 2], text="other"), "text", 3),
        (Completion(failure="HTTP 500: gone"), "failure", 0),
    ],
)
def test_differences(on: Completion, kind: str, index: int) -> None:
    """Fails if a different answer passes, or the difference is reported at the wrong index."""
    found = compare(OFF, on)
    assert found is not None and (found.kind, found.index, found.tie) == (kind, index, False)


@pytest.mark.parametrize(
    ("on_id", "temperature", "gap", "tie"),
    [(8, 0.0, 1e-6, True), (8, 1.0, 1e-6, False), (4, 0.0, 1e-6, False)],
    ids=["second best", "sampled", "not among the best"],
)
def test_ties(on_id: int, temperature: float, gap: float, tie: bool) -> None:
    """Fails if a tie is not excused, or something else is excused as a tie."""
    found = compare(OFF, answer([5, on_id, 2]), temperature)
    assert found is not None and found.gap == pytest.approx(gap, rel=1e-3) and found.tie == tie


def test_a_wide_gap_is_no_tie() -> None:
    """Fails if the gap between two tokens is ignored."""
    found = compare(OFF, answer([7, 6, 2]))
    assert found is not None and found.gap == pytest.approx(1.9) and not found.tie


@pytest.mark.parametrize(
    ("logprobs", "kind"),
    [([-0.1, -0.2, -0.3], None), ([-0.1, -0.2, -0.31], "logprob"), ([-0.1, -0.2], "logprob"), ([], "logprob")],
)
def test_logprobs(logprobs: list[float], kind: str | None) -> None:
    """Fails if wrong or missing logprobs pass, or logprobs are compared that were not requested."""
    off = answer([5, 6, 2], logprobs=[-0.1, -0.2, -0.3])
    found = compare(off, answer([5, 6, 2], logprobs=logprobs), return_logprob=True)
    assert (None if found is None else found.kind) == kind
    assert compare(off, answer([5, 6, 2])) is None, "none were asked for"


def test_logprobs_of_alternatives() -> None:
    """Fails if only the chosen tokens' logprobs are compared."""
    off = answer([5], logprobs=[-0.1], best=[[(5, -0.1), (6, -2.0), (7, -3.0)]])
    assert compare(off, answer([5], logprobs=[-0.1], best=[[(5, -0.1), (6, -2.0)]]), return_logprob=True) is None
    found = compare(off, answer([5], logprobs=[-0.1], best=[[(5, -0.1), (6, -2.5)]]), return_logprob=True)
    assert found is not None and found.kind == "logprob"


@pytest.mark.parametrize(
    ("dtype", "ulps", "gap"),
    [("float32", None, 8 * 2**-19), ("bfloat16", None, 0.5), ("float16", 2, 2 * 2**-6), ("fp8", 1, 0.125)],
)
def test_tie_gap(dtype: str, ulps: float | None, gap: float) -> None:
    """Fails if a unit in the last place is not that of logits from 16 to 32."""
    assert TiePolicy.of(dtype, ulps).tie_gap == gap


def test_acceptance() -> None:
    """Fails if positions are counted from the wrong end, or requests with shorter histograms are dropped."""
    acceptance = AcceptanceStats.of([drafted(1, 0, 3), drafted(2, 2), Completion()])
    assert (acceptance.steps, acceptance.shares) == (8, [5 / 8, 3 / 8])
    assert acceptance.tau == 1 + (2 * 1 + 3 * 2) / 8
    assert AcceptanceStats.of([]).tau == 0.0


@pytest.mark.parametrize(
    ("steps", "fewest", "exact", "lost"),
    [
        ([10] * 8, [10] * 8, True, False),
        ([10] * 7 + [13], [10] * 8, True, True),
        ([10] * 7 + [13], [10] * 8, False, False),
        ([12, 8, 12, 8, 11, 9, 13, 7], [10] * 8, False, False),
        ([12] * 8, [10] * 8, False, True),
    ],
    ids=["equal", "float32", "one flip", "both ways", "throughout"],
)
def test_step_loss(steps: list[int], fewest: list[int], exact: bool, lost: bool) -> None:
    """Fails if random flips in half precision count as a loss, or a loss in all requests does not."""
    assert step_loss(steps, fewest, exact).lost == lost


@pytest.mark.parametrize(
    ("status", "content", "refusal", "failure"),
    [
        (400, {"error": {"message": "no  such\nthing"}}, "no such thing", ""),
        (422, {"object": "error", "message": "not so"}, "not so", ""),
        (404, "nowhere", "nowhere", ""),
        (500, {"error": {"message": "oh"}}, "", "HTTP 500: oh"),
        (200, {"detail": "odd"}, "", "HTTP 200: {'detail': 'odd'}"),
    ],
)
def test_what_a_server_says(status: int, content: Any, refusal: str, failure: str) -> None:
    """Fails if a refusal counts as a failure, or its message is lost."""
    outcome = Completion.from_generate(status, content)
    assert (outcome.refusal, outcome.failure) == (refusal, failure) and not outcome.answered


def test_aborted_answers_are_failures() -> None:
    """Fails if an answer that the server aborted counts as an answer."""
    meta = {"finish_reason": {"type": "abort", "message": "Aborted"}}
    outcome = Completion.from_generate(200, {"text": "be", "output_ids": [4], "meta_info": meta})
    assert (outcome.failure, outcome.ids, outcome.answered) == ("Aborted", [4], False)
    meta["finish_reason"]["status_code"] = 400
    assert Completion.from_generate(200, {"text": "", "meta_info": meta}).refusal == "Aborted"


def test_outcomes_are_kept_as_json() -> None:
    """Fails if a saved answer differs after loading."""
    outcome = answer([5], logprobs=[-0.1], best=[[(5, -0.1)]], accept_histogram=[1], steps=1)
    exchange = Exchange(Request("case", "prompt", greedy_body([1])), outcome)
    assert Exchange.from_json(json.loads(json.dumps(exchange.to_json()))) == exchange


def test_steps_of_any_width_are_not_compared() -> None:
    """Fails if a server whose number of rows adapts is reported to draft worse from one KV than from another."""
    way = [Completion(ids=[1, 2], accept_histogram=[2], steps=2, cached_tokens=9, adapts=True)]
    probed = judge({"cached": way, "pieces": way, "fresh": way}, [10], exact=True)
    assert not probed.lost and "SGLANG_DFLASH_WIDTH=full" in probed.skipped
