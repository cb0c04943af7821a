"""`sglang-dflash doctor URL` against a server without a model: what it asks, what it concludes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Diagnosed, doctor
from doctored_server import OF_THINKING, Orders, Request, serve

from sglang_dflash.doctor.interview import longest_prompt
from sglang_dflash.doctor.questions import TEXTS

HIGH, LOW = 5.0, 0.6
ASK = ["--expect-tau", 6, "--seed", 1]


def diagnosed(orders: Orders, *words: object) -> Diagnosed:
    with serve(orders) as url:
        return doctor(url, *words)


def test_a_sound_server() -> None:
    """Fails where a healthy server gets a WARN or FAIL, some of twenty questions is not asked, or numbers are lost."""
    orders = Orders()
    found = diagnosed(orders, *ASK)
    assert found.code == 0 and set(found.levels().values()) <= {"PASS", "SKIP"}, found.shown
    assert len(orders.held) == 24
    assert list(found.report["measured"]["kinds"]) == list(TEXTS)
    assert all(one["tau"] == pytest.approx(6, abs=0.1) for one in found.report["measured"]["kinds"].values())
    assert found.finding("files")["level"] == "SKIP"  # no such folder here
    assert "PASS  acceptance: tau is 6.0" in found.shown


def of(slow: Callable[[Request], bool]) -> Callable[[Request], float]:
    return lambda request: LOW if slow(request) else HIGH


def test_a_draft_that_is_rejected_everywhere() -> None:
    """Fails where low acceptance passes, or no cause is named."""
    found = diagnosed(Orders(lambda request: 0.05), *ASK)
    assert found.code == 1 and found.finding("acceptance")["level"] == "FAIL"
    assert found.causes()[:2] == ["mask", "theta"] and "1. the mask token" in found.shown


def test_without_a_number_only_nothing_is_too_little() -> None:
    """Fails where tau is judged by a number that nobody gave, or a draft that is never accepted passes."""
    assert diagnosed(Orders(lambda request: 0.5)).finding("acceptance")["level"] == "PASS"
    assert diagnosed(Orders(lambda request: 0.05)).finding("acceptance")["level"] == "FAIL"


def test_a_part_of_the_acceptance() -> None:
    """Fails where a third less is no WARN, or a half less no FAIL."""
    assert diagnosed(Orders(lambda request: 4.0), *ASK).finding("acceptance")["level"] == "WARN"
    found = diagnosed(Orders(lambda request: 2.5), *ASK)
    assert found.finding("acceptance")["level"] == "FAIL" and found.causes()[0] == "taps"


def test_acceptance_behind_a_cached_prefix() -> None:
    """Fails where it collapses there and this is not said, or it is blamed where prompts were cached before."""
    orders = Orders(of(lambda request: request.cached > request.tokens / 2))
    found = diagnosed(orders, *ASK)
    assert found.code == 1 and found.finding("cached prefix")["level"] == "FAIL", found.shown
    again = diagnosed(orders, *ASK)  # the same questions are in the cache now
    assert again.finding("cached prefix")["level"] == "SKIP" and "--flush" in again.finding("cached prefix")["fix"]
    assert diagnosed(orders, *ASK, "--flush").finding("cached prefix")["level"] == "FAIL"
    assert diagnosed(orders, "--expect-tau", 6, "--seed", 2).finding("cached prefix")["level"] == "FAIL"


def test_a_few_more_steps_from_the_cache() -> None:
    """Fails where equal answers take a sixth more steps from the cache without a word."""
    orders = Orders(lambda request: 4.0 if request.cached > request.tokens / 2 else HIGH)
    assert diagnosed(orders, *ASK).finding("cached prefix")["level"] == "WARN"


@pytest.mark.parametrize("chunk", [8192, 512])
def test_acceptance_in_long_chats(chunk: int) -> None:
    """Fails where it collapses there and this is not said, or chunks are not suspected where there were any."""
    info = {"chunked_prefill_size": chunk}
    found = diagnosed(Orders(of(lambda request: request.tokens > 1000), info), *ASK)
    assert found.code == 1 and found.finding("long context")["level"] == "FAIL", found.shown
    assert ("chunk" in found.finding("long context")["fix"]) is (chunk == 512)
    assert ("chunk" in found.levels()) is (chunk == 8192)


def test_a_second_turn() -> None:
    """Fails where a draft that knows first turns alone passes."""
    found = diagnosed(Orders(of(lambda request: request.text.count("user:") == 2)), *ASK)
    assert found.levels()["second turn"] == "FAIL" and found.levels()["long context"] == "PASS"


@pytest.mark.parametrize("thinks", [True, False])
def test_the_thinking_mode(thinks: bool) -> None:
    """Fails where the draft fits the other mode and this is not said with the words to send, or is not the first cause
    where tau is low."""
    orders = Orders(of(lambda request: request.thinks is thinks), thinks=thinks)
    found = diagnosed(orders, *ASK)
    mode = found.finding("thinking mode")
    assert mode["level"] == "WARN" and f'"enable_thinking": {str(not thinks).lower()}' in mode["fix"]
    assert found.causes()[0] == "thinking", found.shown
    assert any(ids[-1:] == OF_THINKING for ids in orders.held)
    assert diagnosed(Orders(thinks=thinks), *ASK).levels()["thinking mode"] == "PASS"


def test_temperature_is_told_and_not_judged() -> None:
    """Fails where the lower tau of sampling is a fault."""
    found = diagnosed(Orders(of(lambda request: request.temperature > 0)), *ASK)
    assert found.levels()["temperature 1"] == "PASS" and found.code == 0


def test_one_kind_of_text(tmp_path: Path) -> None:
    """Fails where a draft that has not learnt one kind of text is blamed for its config."""
    _with_card(tmp_path, dict.fromkeys(TEXTS, 6.0))
    info = {"model_path": str(tmp_path), "speculative_draft_model_path": str(tmp_path / "draft")}
    slow = of(
        lambda request: any(text[-20:] in request.text[-80:] for kind in ("chat", "sums") for text in TEXTS[kind])
    )
    found = diagnosed(Orders(slow, info), "--seed", 1)
    assert found.finding("acceptance")["level"] == "WARN" and found.causes()[0] == "text", found.shown
    assert "chat, sums alone" in found.finding("acceptance")["said"]


def test_kinds_that_the_card_lacks(tmp_path: Path) -> None:
    """Fails where texts that the card does not know are judged by its easiest ones."""
    info = {"model_path": str(tmp_path), "speculative_draft_model_path": str(tmp_path / "draft")}
    _with_card(tmp_path, {"code": 3.0, "tables": 6.0})
    found = diagnosed(Orders(lambda request: 2.0, info), "--seed", 1)
    assert found.levels()["acceptance"] == "PASS" and "the card says 3.00 or more" in found.shown, found.shown


def _with_card(folder: Path, taus: dict[str, float]) -> None:
    """Makes a pair without anything but a card."""
    draft = folder / "draft"
    draft.mkdir()
    rows = "".join(
        f"\n  - task: {{type: text-generation}}\n    dataset: {{name: {kind}, type: {kind}}}"
        f"\n    metrics: [{{type: tau, name: Held-out tau, value: {tau}}}]"
        for kind, tau in taus.items()
    )
    (draft / "README.md").write_text(f"---\nmodel-index:\n- name: draft\n  results:{rows}\n---\n")
    for one in (folder, draft):
        (one / "config.json").write_text("{}")


def test_retractions() -> None:
    """Fails where the server's own count, or the counts of the answers, are overlooked."""
    metrics = "# TYPE sglang:num_retracted_requests_total counter\nsglang:num_retracted_requests_total 3.0\n"
    found = diagnosed(Orders(metrics=metrics), *ASK)
    assert found.finding("retraction")["level"] == "WARN" and "3 requests were retracted" in found.shown
    assert "retraction" in diagnosed(Orders(retractions=1), *ASK).levels()
    assert "retraction" not in diagnosed(Orders(metrics="# nothing\n"), *ASK).levels()


def test_break_even_by_the_server_s_own_times() -> None:
    """Fails where a draft that does not pay passes, or one that pays is doubted."""
    seconds = {"plain": 0.01, "block": 0.03}
    info = {"internal_states": [{"dflash_prefilled": 0, "dflash_step_seconds": seconds}]}
    found = diagnosed(Orders(info=info), *ASK)
    assert found.levels()["break-even"] == "PASS" and "must bring 3.00 tokens" in found.shown
    poor = diagnosed(Orders(lambda request: 1.5, info), "--expect-tau", 2.5)
    assert poor.levels() | {"break-even": "WARN"} == poor.levels() and poor.levels()["acceptance"] == "PASS"
    assert "not measured" in diagnosed(Orders(), *ASK).finding("break-even")["said"]


def test_break_even_beside_another_server() -> None:
    """Fails where speeds are swapped, or a server with speculation is taken for one without."""
    with serve(Orders(speculates=False, seconds=0.03)) as off, serve(Orders(seconds=0.01)) as on:
        found = doctor(on, *ASK, "--off-url", off)
        assert found.levels()["break-even"] == "PASS" and "3.00 times as fast" in found.shown
        assert "must bring 2.00 tokens" in found.finding("break-even")["said"]
        assert doctor(on, *ASK, "--off-url", on).code == 2
    with serve(Orders(speculates=False, seconds=0.01)) as off, serve(Orders(seconds=0.02)) as on:
        assert doctor(on, *ASK, "--off-url", off).levels()["break-even"] == "WARN"


def test_widths_that_adapt() -> None:
    """Fails where rows that were not verified make a good draft look bad."""
    found = diagnosed(Orders(lambda request: 2.0, width=3), "--expect-tau", 3)
    assert found.levels()["acceptance"] == "PASS", found.shown


def test_a_server_that_drafts_nothing() -> None:
    """Fails where steps without drafts count as drafts that were rejected."""
    found = diagnosed(Orders(lambda request: 0.0, width=1), *ASK)
    assert found.code == 1 and "no answer has verify steps with drafts" in found.finding("acceptance")["said"]


def test_other_servers() -> None:
    """Fails where speculation off, or another worker, is not the first thing that is said."""
    off = diagnosed(Orders(speculates=False))
    assert off.code == 1 and off.finding("server")["level"] == "FAIL" and "speculation off" in off.shown
    builtin = diagnosed(Orders(info={"internal_states": [{}]}), *ASK)
    assert builtin.finding("server")["level"] == "WARN" and builtin.levels()["acceptance"] == "PASS"


def test_prompts_of_yours(tmp_path: Path) -> None:
    """Fails where other prompts are asked than the file has."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"my question {number}"}) + "\n" for number in range(5)))
    orders = Orders()
    found = diagnosed(orders, *ASK, "--prompts", file)
    assert list(found.report["measured"]["kinds"]) == ["yours"] and found.code == 0
    assert all("my question" in "".join(map(chr, ids)) for ids in orders.held)
    file.write_text('{"input_ids": [1]}\n')
    refused = diagnosed(Orders(), "--prompts", file)
    assert refused.code == 2 and "doctor asks prompt, messages or turns" in refused.shown


def test_a_server_that_cannot_be_asked() -> None:
    """Fails where doctor ends with a verdict or a traceback over a server that is not there, or refuses everything."""
    gone = doctor("http://127.0.0.1:9")
    assert (
        gone.code == 2 and gone.report == {} and "error: No SGLang server answers at http://127.0.0.1:9" in gone.shown
    )
    refused = diagnosed(Orders(refuses="not today"))
    assert refused.code == 2 and "error: The server answers no question: not today" in refused.shown


def test_the_longest_prompt() -> None:
    """Fails where a long chat does not leave room for its answer."""
    assert longest_prompt(2042, 96, 2048) + 96 < 2042 and longest_prompt(0, 96, 2048) == 2048
    assert longest_prompt(40000, 96, 2048) == 2048
