"""A whole check against toy servers: what it reports, and what it must not report."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from toy import Faults, ToyArm, ToyClient

from sglang_dflash.checking.cases import select
from sglang_dflash.checking.recording import Recording
from sglang_dflash.checking.report import Report
from sglang_dflash.checking.run import Plan, check
from sglang_dflash.checking.terminal import show
from sglang_dflash.serving import Progress, ServerError
from sglang_dflash.serving.sessions import Session, Turn

PROMPTS = [Session(f"p{n}", (Turn(()),), text=f"prompt number {n} " + "x" * n) for n in range(4)]
OFF = Faults(gap=0.5)


def plan(on: Faults, without: Faults = OFF, cases: str = "presence_penalty,ignore_eos", **changes: Any) -> Plan:
    whole = Plan(
        off=ToyArm(ToyClient(False, without)),
        on=ToyArm(ToyClient(True, on)),
        prompts=PROMPTS,
        cases=select(cases),
        num_prompts=4,
        limit=24,
        concurrency=3,
        seed=0,
        tie_ulps=None,
        control=False,
        reference=False,
        save_off=None,
        logs=Path("logs"),
    )
    return replace(whole, **changes)


def run(whole: Plan, log: StringIO | None = None) -> Report:
    return check(whole, Progress(Console(file=log or StringIO(), width=200)))


def shown(report: Report) -> str:
    console = Console(file=StringIO(), width=200)
    show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def change_token(index: int, by: int, where: str = "presence_penalty") -> Any:
    """A fault: one token of every answer to requests with one parameter."""

    def change(body: dict[str, Any], ids: list[int]) -> list[int]:
        if where not in body["sampling_params"] or len(ids) <= index:
            return ids
        return [*ids[:index], (ids[index] + by) % 9, *ids[index + 1 :]]

    return change


def test_equal_answers_are_lossless() -> None:
    """Fails if a check reports equal answers, compares too few, or does not report the acceptance."""
    report = run(plan(Faults()))
    assert report.lossless and report.compared == 4 * 3 * 2 and not list(report.found())
    assert {result.acceptance.tau for result in report.results} == {3.0}
    assert report.results[0].acceptance.shares == [1.0, 1.0]
    assert report.draft_kv is not None and not report.draft_kv.lost
    assert "Lossless: 24 requests" in shown(report)


def test_another_token_is_found_and_named() -> None:
    """Fails if a wrong token passes, another case is reported, or case, request, index, tokens or gap are missing."""
    report = run(plan(Faults(change_token(2, 1))))
    assert not report.lossless
    found = list(report.found())
    assert {one.case for one in found} == {"presence_penalty"}
    assert {one.concurrency for one in found} == {1, 3} and {one.prompt_id for one in found} <= {p.id for p in PROMPTS}
    first = found[0].difference
    assert (first.kind, first.index, first.tie) == ("token", 2, False)
    assert first.gap == pytest.approx(0.5) and first.on_id == (first.off_id + 1) % 9
    text = shown(report)
    off, on = (f"'<{token}>' ({token}) with speculation" for token in (first.off_id, first.on_id))
    assert f"token 2 is {off} off and {on} on" in text
    assert "NOT LOSSLESS: " in text


def test_a_check_says_early_what_it_found() -> None:
    """Fails if a check that is ended in the middle leaves nothing of the phases that it has finished."""
    log = StringIO()
    run(plan(Faults(change_token(2, 1), dies_after=15)), log)
    assert "Speculation on, one at a time: 8 identical, 0 ties, 4 different, 0 refused\n" in log.getvalue()


def test_ties_are_listed_and_excused() -> None:
    """Fails if the second best of two close tokens is no tie, or the third best is one."""
    near = Faults(gap=5e-6)
    report = run(plan(Faults(change_token(2, 1)), near, cases="presence_penalty", tie_ulps=None))
    assert sum(result.ties for result in report.results) == len(list(report.found())) > 0
    assert not any(result.different for result in report.results)
    assert not report.lossless, "rounding in float32 does not explain this many ties in so few tokens"
    assert not run(plan(Faults(change_token(2, 3)), near)).lossless
    assert run(plan(Faults(change_token(2, 1)), near, tie_ulps=0.0)).results[1].different > 0


def test_refusals_are_no_divergence() -> None:
    """Fails if a refused request counts as wrong or as right, or its message is not shown."""
    report = run(plan(Faults(refuse=["presence_penalty"])))
    assert report.lossless and report.compared == 4 * 2 * 2
    refused = [result for result in report.results if result.refused]
    assert {result.case for result in refused} == {"presence_penalty"}
    assert "refused 8 times (presence_penalty): presence_penalty is not served here." in shown(report)
    assert "1 of 3 cases were refused" in shown(report)


def test_what_only_the_off_arm_refuses_is_not_compared() -> None:
    """Fails if a request without a baseline answer is compared."""
    report = run(plan(Faults(), Faults(refuse=["presence_penalty"])))
    assert report.lossless
    assert [result.unknown for result in report.results if result.case == "presence_penalty"] == [4, 4]


def test_nothing_to_compare_is_no_verdict() -> None:
    """Fails if a server that refuses everything counts as lossless."""
    with pytest.raises(ServerError, match=r"Nothing could be compared: .*max_new_tokens is not served here"):
        run(plan(Faults(refuse=["max_new_tokens"])))
    with pytest.raises(ValueError, match="The server without speculation answers no prompt: max_new_tokens is not"):
        run(plan(Faults(), Faults(refuse=["max_new_tokens"])))


def test_leaked_slots_are_counted() -> None:
    """Fails if emptying the cache between cases hides a leak."""
    report = run(plan(Faults(leak=1)))
    assert report.leaked > 24 and not report.lossless and "KV slots stay in use" in shown(report)


def test_a_server_that_dies_is_a_verdict() -> None:
    """Fails if earlier results are lost, or the check ends with the on arm."""
    report = run(plan(Faults(dies_after=9)))
    assert not report.lossless and report.results[0].identical == 4
    assert "stopped answering: toy error" in shown(report)
    with pytest.raises(ServerError, match="without speculation stopped answering: toy error"):
        run(plan(Faults(), Faults(dies_after=3)))


def test_inert_drafts_are_lossless_with_a_warning() -> None:
    """Fails if the report does not mention a draft that is never accepted."""
    whole = plan(Faults())
    client = whole.on.client  # type: ignore[attr-defined]
    client._response = lambda body, ids, cached, original=client._response: _inert(original(body, ids, cached))
    report = run(whole)
    assert report.lossless and "does not speed anything up" in shown(report)


def _inert(response: dict[str, Any]) -> dict[str, Any]:
    response["meta_info"]["spec_correct_drafts_histogram"] = [5, 0, 0]
    return response


def test_draft_kv_that_differs_by_its_way() -> None:
    """Fails if more steps after a cache hit than after a prefill are not reported, or change the verdict."""
    report = run(plan(Faults(steps=lambda cached: 3 if cached > 12 else 2), cases="ignore_eos"))
    assert report.lossless and report.draft_kv is not None
    if not report.draft_kv.skipped:
        assert report.draft_kv.lost and "acceptance lost: 50% more" in shown(report)


def with_whole_blocks(default: Faults, whole_blocks: Faults, **changes: Any) -> Report:
    """A check of a server whose widths adapt; the second server has whole blocks."""
    on = ToyArm(ToyClient(True, replace(default, adapts=True)), whole_blocks=ToyArm(ToyClient(True, whole_blocks)))
    return run(replace(plan(Faults(), cases="ignore_eos"), on=on, **changes))


def test_steps_are_compared_in_whole_blocks() -> None:
    """Fails if the default is not what is proven, or the probe of draft KV is left out because widths adapt."""
    report = with_whole_blocks(Faults(), Faults())
    assert report.lossless and report.draft_kv is not None and "SGLANG_DFLASH_WIDTH" not in report.draft_kv.skipped
    assert [r.case for r in report.results if r.concurrency == 1] == ["plain", "ignore_eos", "plain, whole blocks"]
    assert "rows: 16 blocks in 20 steps, on average 2.00 rows" in shown(report)
    assert report.to_json(whole=True)["rows"]["rows"] == 32
    assert not with_whole_blocks(Faults(change_token(1, 1, "ignore_eos")), Faults()).lossless
    assert not with_whole_blocks(Faults(), Faults(change_token(1, 1, "temperature"))).lossless


def test_a_second_server_that_dies_is_a_verdict() -> None:
    """Fails if what the first server answered is lost, or the check ends with the second one."""
    report = with_whole_blocks(Faults(), Faults(dies_after=2))
    assert not report.lossless and report.results[0].identical == 4 and "stopped answering" in shown(report)


def test_an_off_run_is_kept_and_compared_with(tmp_path: Path) -> None:
    """Fails if a saved run differs from the original, or narrowing it has no effect."""
    kept = tmp_path / "deep" / "off.json"
    first = run(plan(Faults(), save_off=kept))
    recording = Recording.load(kept)
    assert recording.cases() == ["plain", "presence_penalty", "ignore_eos"]
    again = run(plan(Faults(), off=recording, cases="presence_penalty", num_prompts=3))
    assert again.lossless and again.compared == 3 * 2 * 2
    assert again.off == first.off
    assert not run(plan(Faults(change_token(1, 1)), off=recording)).lossless


def test_a_recording_without_the_case_is_refused(tmp_path: Path) -> None:
    """Fails if cases that were requested by name are silently left out."""
    kept = tmp_path / "off.json"
    run(plan(Faults(), save_off=kept))
    with pytest.raises(ValueError, match=r"--cases has regex, stop; --off-from holds plain, presence_penalty, ign"):
        run(plan(Faults(), off=Recording.load(kept), cases="regex,stop,plain"))
    with pytest.raises(ValueError, match=r"--cases has seeded sampling; the server needs --enable-determ"):
        run(plan(Faults(), cases="seeded sampling"))


def test_a_failure_is_one_whatever_the_off_arm_said() -> None:
    """Fails if an internal error passes because there is no baseline answer."""
    broken = Faults(change=lambda body, ids: ids if "presence_penalty" not in body["sampling_params"] else None)
    report = run(plan(broken, Faults(refuse=["presence_penalty"])))
    assert not report.lossless and {one.difference.kind for one in report.found()} == {"failure"}


def test_a_reference_that_cannot_run_is_a_note() -> None:
    """Fails if a requested probe is dropped silently, or prevents a verdict."""
    report = run(plan(Faults(), reference=True))
    assert report.lossless and "the reference in transformers cannot run: " in shown(report)


def test_a_server_without_a_tokenizer_is_checked_all_the_same() -> None:
    """Fails if a probe that cannot run prevents a verdict."""
    whole = plan(Faults(), prompts=[Session("ids", (Turn(()),), input_ids=(1, 2, 3))])
    client = whole.on.client  # type: ignore[attr-defined]
    post = client.post
    client.post = lambda path, body: httpx.Response(500) if path == "/tokenize" else post(path, body)
    report = run(whole)
    assert report.lossless and "no markers were asked: " in shown(report)


def test_warnings_about_the_arms() -> None:
    """Fails if there is no warning about an off arm that speculates, or an on arm that does not."""
    whole = plan(Faults())
    swapped = replace(whole, off=ToyArm(ToyClient(True)), on=ToyArm(ToyClient(False)))
    notes = " ".join(run(swapped).notes())
    assert "the off arm runs with speculation (DFLASH)" in notes and "the on arm runs without speculation" in notes


def test_a_cache_that_may_not_be_emptied() -> None:
    """Fails if the cache of a running server is emptied without permission."""
    whole = plan(Faults())
    client = whole.on.client  # type: ignore[attr-defined]
    client.flush_cache = lambda: pytest.fail("the cache was emptied")
    report = run(replace(whole, on=ToyArm(client, may_flush=False)))
    assert report.lossless and "--flush allows it" in shown(report)


def test_the_report_is_json() -> None:
    """Fails if a report cannot be written as JSON, or its short form lacks the verdict."""
    report = run(plan(Faults(change_token(0, 1)), control=True))
    whole, short = (json.loads(json.dumps(report.to_json(whole=w))) for w in (True, False))
    assert not short["lossless"] and short["failures"] == whole["failures"]
    assert whole["differences"][0]["off_text"].startswith("<")
    assert {"case", "prompt", "concurrency", "index", "off_id", "on_id", "gap", "tie"} <= set(whole["differences"][0])
    assert [row["identical"] for row in whole["control"]] == [4, 4, 4]
