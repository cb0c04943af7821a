"""A block's tokens end a request as the same tokens do one by one; both run the host's own code on its own `Req`."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.session.session_controller import Session
from stand_ins import configured, make_req

from sglang_cpu.hooking import hooks_of
from sglang_dflash.host.patches import sessions
from sglang_dflash.host.patches.block_results import (
    accept_past_the_end,
    defer_reasoning_tokens,
    finish_token_by_token,
    restore_prefill_only,
)

ORIGINAL_FINISH = Req.update_finish_state
ORIGINAL_ACCEPT = SchedulerBatchResultProcessor._accept_grammar_tokens
ORIGINAL_REASONING = SchedulerBatchResultProcessor._maybe_update_reasoning_tokens
REGEXES = ["a+b", "b{2}", "b$", r"\.\.", "^a", "[ab]b", "(?<=a)a"]
THINK_END = [ord("b"), ord("a")]


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


class Grammar:
    """Ends with one token; `accept_token` raises after it, as in the host's backends, and at refused tokens."""

    def __init__(self, end: int, refused: Sequence[int] = ()) -> None:
        self._end = end
        self._refused = refused
        self._terminated = False
        self.finished = False

    def accept_token(self, token: int) -> None:
        if self._terminated or token in self._refused:
            raise ValueError(token)
        self._terminated = token == self._end

    def is_terminated(self) -> bool:
        return self._terminated


def processor() -> SimpleNamespace:
    """The parts of a `SchedulerBatchResultProcessor` that its two methods read."""
    config = SimpleNamespace(think_end_ids=THINK_END, self_opened_think_start_ids=None)
    return SimpleNamespace(model_config=config)


def plain(req: Req, ids: list[int]) -> None:
    """As `process_batch_result_decode` handles the tokens of plain decoding."""
    for token in ids:
        req.output_ids.append(token)
        ORIGINAL_REASONING(processor(), req, [token])
        ORIGINAL_FINISH(req, 1)
        if req.finished():
            break
        if req.grammar is not None:
            ORIGINAL_ACCEPT(processor(), req, token)


def in_blocks(req: Req, ids: list[int], sizes: list[int]) -> None:
    """As it handles verified blocks, with our hooks: first the grammar, then the ids, the reasoning, the stop."""
    ids = list(ids)
    for size in sizes:
        block, ids = ids[:size], ids[size:]
        if req.grammar is not None:
            block = accept_past_the_end(ORIGINAL_ACCEPT, processor(), req, block)
        expected = list(req.output_ids) + block
        req.output_ids.extend(block)
        defer_reasoning_tokens(ORIGINAL_REASONING, processor(), req, block)
        finish_token_by_token(ORIGINAL_FINISH, req, len(block))
        assert list(req.output_ids) == expected, "later readers expect the whole block"
        assert "dflash_reasoning" not in vars(req)
        if req.finished() or not ids:
            break


def answer(req: Req) -> dict[str, Any]:
    """What the client gets."""
    reason = req.finished_reason
    return {
        "ids": list(req.output_ids_through_stop),
        "reason": reason and (type(reason).__name__, reason.to_json()),
        "reasoning": req.reasoning_tokens,
    }


def both(ids: list[int], sizes: list[int], grammar: int | None = None, reasoning: bool = False, **sampling: Any):
    """Gives the same tokens to two equal requests: to one by one, to the other in blocks."""
    reqs = [make_req(**{"max_new_tokens": 99, **sampling}) for _ in range(2)]
    for req in reqs:
        req.grammar = None if grammar is None else Grammar(grammar)
        req.require_reasoning = reasoning
    plain(reqs[0], ids)
    in_blocks(reqs[1], ids, sizes)
    return answer(reqs[0]), answer(reqs[1])


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def text(rng: random.Random, alphabet: str, shortest: int, longest: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


@pytest.mark.parametrize("seed", range(10))
def test_blocks_end_as_tokens_do(seed):
    """Fails where a request ends at another token, or for another reason, than in plain decoding: with stop strings,
    regexes, stop tokens, the end of sequence and the length limit."""
    rng = random.Random(seed)
    for _ in range(100):
        sampling = {
            "stop": [text(rng, "ab.", 1, 3) for _ in range(rng.choice([0, 0, 1, 3]))],
            "stop_regex": rng.sample(REGEXES, rng.choice([0, 0, 1, 2])),
            "stop_token_ids": rng.sample(ids_of("ab."), rng.choice([0, 0, 0, 1])),
            "ignore_eos": rng.random() < 0.3,
            "max_new_tokens": rng.choice([rng.randint(1, 25), 99]),
        }
        ids = ids_of(text(rng, rng.choice(["\0ab.", "\0ab......", "ab.xyz", "\0abxyz"]), 1, 30))
        sizes = [rng.randint(1, 8) for _ in ids]
        one_by_one, in_one_go = both(ids, sizes, reasoning=rng.random() < 0.5, **sampling)
        assert in_one_go == one_by_one, (sampling, ids, sizes)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_end_a_grammar_as_tokens_do(seed):
    """Fails where the token past a grammar's end, which plain decoding emits with `ignore_eos`, is lost or followed by
    another; also if the grammar ends with the last token of a block, or a stop string comes first."""
    rng = random.Random(seed)
    for _ in range(100):
        sampling = {
            "stop": [text(rng, "ab\0", 1, 2) for _ in range(rng.choice([0, 0, 1, 2]))],
            "ignore_eos": rng.random() < 0.7,
            "max_new_tokens": rng.choice([rng.randint(1, 14), 99]),
        }
        ids = ids_of(text(rng, "abx", 0, 9) + "\0" + text(rng, "\0ab", 9, 9))
        sizes = [rng.randint(1, 6) for _ in ids]
        one_by_one, in_one_go = both(ids, sizes, grammar=0, **sampling)
        assert in_one_go == one_by_one, (sampling, ids, sizes)


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_wins_over_a_token_that_the_grammar_refuses(seed):
    """Fails where an answer ends with the grammar's error although plain decoding stops at that token or before it, or
    the other way round: plain decoding looks for stops first."""
    rng, ends = random.Random(seed), set()
    for _ in range(100):
        sampling = {
            "stop": [text(rng, "abx", 1, 2) for _ in range(rng.choice([0, 1, 2]))],
            "stop_regex": rng.sample(REGEXES, rng.choice([0, 1])),
            "ignore_eos": rng.random() < 0.3,
            "max_new_tokens": 99,
        }
        ids = ids_of(text(rng, "ab", 1, 9) + "x" + text(rng, "ab", 3, 3))
        sizes = [rng.randint(1, 6) for _ in ids]
        reqs = [make_req(**sampling) for _ in range(2)]
        for req in reqs:
            req.grammar = Grammar(0, refused=ids_of("x"))
        plain(reqs[0], ids)
        in_blocks(reqs[1], ids, sizes)
        one_by_one, in_one_go = map(answer, reqs)
        assert in_one_go["reason"] == one_by_one["reason"], (sampling, ids, sizes)
        ends.add(one_by_one["reason"][0])
        if one_by_one["reason"][0] != "FINISH_ABORT":  # of an aborted answer, the client gets only the error
            assert in_one_go == one_by_one, (sampling, ids, sizes)
    assert len(ends) == 3, ends


@pytest.mark.parametrize(
    ("text", "sampling", "end", "kind"),
    [
        ("xa\0bab", {"stop": ["ab"]}, 3, "FINISH_MATCHED_TOKEN"),  # the host alone: the string behind it
        ("xabcd.", {"stop": ["cd", "ab"]}, 3, "FINISH_MATCHED_STR"),  # the host alone: "cd", listed first
        ("xaab.ab", {"stop": ["ab"], "stop_regex": ["a{2}"]}, 3, "FINISHED_MATCHED_REGEX"),  # alone: the string
        ("xa\0bb", {"stop_regex": ["b{2}"]}, 3, "FINISH_MATCHED_TOKEN"),  # alone: the regex
        ("xabb", {"stop_regex": ["b{2}", "a+b"]}, 3, "FINISHED_MATCHED_REGEX"),  # alone: the first listed
        ("xyabz", {"stop": ["ab"], "max_new_tokens": 3}, 3, "FINISH_LENGTH"),
        ("xyabz", {"stop": ["ab"], "max_new_tokens": 4}, 4, "FINISH_MATCHED_STR"),
        ("xy\0bz", {"stop": ["ab"], "max_new_tokens": 3}, 3, "FINISH_MATCHED_TOKEN"),
        ("xy\0bz", {"max_new_tokens": 2}, 2, "FINISH_LENGTH"),
        ("xyz", {"stop": ["ab"]}, 3, "NoneType"),
    ],
)
def test_whatever_comes_first_ends(text, sampling, end, kind):
    """Fails where a block does not end at the first stop that it reaches, or ends for another reason."""
    req = make_req(**{"max_new_tokens": 99, **sampling})
    in_blocks(req, ids_of(text), [len(text)])
    assert (len(req.output_ids_through_stop), type(req.finished_reason).__name__) == (end, kind)
    assert list(req.output_ids) == ids_of(text)
    one_by_one, in_one_go = both(ids_of(text), [len(text)], **sampling)
    assert in_one_go == one_by_one


def test_these_tests_see_the_hosts_own_precedence():
    """Fails where the host itself ends blocks as plain decoding does, so that the hook is not needed."""
    req = make_req(stop=["ab"], max_new_tokens=99)
    req.output_ids.extend(ids_of("xa\0bab"))
    ORIGINAL_FINISH(req, 6)
    assert answer(req)["ids"] == ids_of("xa\0bab")


@pytest.mark.parametrize("stop", [None, ["ab"]])
def test_an_abort_ends_with_the_next_token(stop):
    """Fails where a request that must abort continues, gets another reason, or gets more than the one token that plain
    decoding emits: the rest of the block may lie behind a stop or the last token that was asked for."""
    req = make_req(stop=stop, max_new_tokens=99)
    req.output_ids.append(7)
    req.to_finish = FINISH_ABORT("gone")
    req.output_ids.extend(ids_of("xab\0"))
    finish_token_by_token(ORIGINAL_FINISH, req, 4)
    assert req.finished_reason.message == "gone" and req.to_finish is None
    assert list(req.output_ids) == [7, *ids_of("xab\0")]
    assert isinstance(req.output_ids, array)
    assert answer(req)["ids"] == [7, ord("x")]


def test_the_token_past_a_grammars_end_may_come_from_a_prefill():
    """Fails where a request that emits the token past its grammar's end in a prefill, after a retraction, emits one
    more."""
    req = make_req(max_new_tokens=99, ignore_eos=True)
    req.grammar = Grammar(0)
    in_blocks(req, ids_of("ab\0"), [3])  # the grammar ends with the block: one token is to follow
    assert not req.finished()
    req.output_ids.append(ord("x"))  # as `process_batch_result_prefill` does, which gives the grammar no token before
    finish_token_by_token(ORIGINAL_FINISH, req, 1)
    assert req.finished_reason.to_json()["matched"] == ord("x")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefill_is_no_block(overlap):
    """Fails where a grammar that the prefill's own token ends is taken for ended before that token."""
    req = make_req(max_new_tokens=99, ignore_eos=True)
    req.grammar = Grammar(0)
    if overlap:  # the host gives the token to the grammar before it looks for stops
        accept_past_the_end(ORIGINAL_ACCEPT, processor(), req, 0)
    req.output_ids.append(0)
    finish_token_by_token(ORIGINAL_FINISH, req, 1)
    if not overlap:
        req.grammar.accept_token(0)
    assert not req.finished()
    in_blocks(req, ids_of("xy"), [2])
    assert list(req.output_ids) == [0, ord("x")] and req.finished()


def test_a_finished_request_stays_as_it_is():
    """Fails where a block after the end moves the end."""
    req = make_req(stop=["ab"], max_new_tokens=99)
    in_blocks(req, ids_of("xab"), [3])
    before = answer(req)
    req.output_ids.extend(ids_of("yab"))
    finish_token_by_token(ORIGINAL_FINISH, req, 3)
    assert answer(req) == before
    assert list(req.output_ids) == ids_of("xabyab")


@pytest.mark.parametrize("stop", [None, ["zz"]])
def test_the_grammar_is_back_afterwards(stop):
    """Fails where the request loses its grammar, or ends with the grammar before its last token."""
    req = make_req(stop=stop, max_new_tokens=99, ignore_eos=True)
    req.grammar = grammar = Grammar(0)
    in_blocks(req, ids_of("ab\0"), [3])  # the grammar ends with the block: one token is to follow
    assert req.grammar is grammar and not req.finished()
    in_blocks(req, ids_of("xyz"), [3])
    assert req.grammar is grammar
    assert list(req.output_ids) == ids_of("ab\0x")
    assert req.finished_reason.to_json()["matched"] == ord("x")


@pytest.mark.parametrize(
    ("text", "sampling", "count"),
    [
        ("xxxx", {}, 4),
        ("xbax", {}, 3),  # the end of the reasoning counts
        ("x\0xx", {}, 2),
        ("x\0ba", {}, 2),
        ("xxxx", {"max_new_tokens": 3}, 3),
        ("xybb", {"stop": ["y"]}, 2),
    ],
)
def test_reasoning_tokens_end_with_the_answer(text, sampling, count):
    """Fails where `usage.reasoning_tokens` counts tokens that the client does not get."""
    one_by_one, in_one_go = both(ids_of(text), [len(text)], reasoning=True, **sampling)
    assert in_one_go["reasoning"] == one_by_one["reasoning"] == count


def test_single_tokens_are_counted_at_once():
    """Fails where a prefill's token is not counted at once: no search for a stop follows it."""
    req = make_req()
    req.require_reasoning = True
    defer_reasoning_tokens(ORIGINAL_REASONING, processor(), req, 5)
    defer_reasoning_tokens(ORIGINAL_REASONING, processor(), req, [5])
    assert req.reasoning_tokens == 2
    defer_reasoning_tokens(ORIGINAL_REASONING, processor(), req, [5, 6])
    assert req.reasoning_tokens == 2


@pytest.mark.parametrize("drop", [False, True])
def test_a_session_continues_what_was_answered(drop):
    """Fails where tokens verified beyond the end of an answer become part of the next turn's prompt."""
    (hook,) = (hook.function for target, hook in hooks_of(sessions).items() if "_concat_token_arrays" in target)
    req = make_req(max_new_tokens=99, prompt=[1, 2])
    in_blocks(req, ids_of("x\0yz"), [4])
    follow_up = SimpleNamespace(input_ids=array("q", [8, 9]))
    params = SimpleNamespace(drop_previous_output=drop, offset=None)
    ids, unpadded = hook(Session._concat_token_arrays, req, follow_up, params)
    assert list(ids) == list(unpadded) == [1, 2, *([] if drop else ids_of("x\0")), 8, 9]
    again, _ = hook(Session._concat_token_arrays, req, follow_up, params)
    assert list(again) == list(ids)


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE"])
def test_prefill_only_requests_stay_so(monkeypatch, algorithm):
    """Fails where a request with `max_new_tokens` 0, as in scoring, is sampled; or where servers of other algorithms
    change."""
    host = Req.__dict__["is_prefill_only"]
    monkeypatch.setattr(Req, "is_prefill_only", host)  # restored after the test
    restore_prefill_only()
    with configured(speculative_algorithm=algorithm):
        assert make_req(max_new_tokens=0).is_prefill_only == (algorithm != "EAGLE")
        assert not make_req(max_new_tokens=1).is_prefill_only
