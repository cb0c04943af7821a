"""Agent sessions keep their shape, share only the intended prefixes, and fit the context they are made for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise, repeat
from statistics import mean, median

import pytest

from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.sessions import Message, Session, ToolCall, Turn, as_openai
from sglang_dflash.workloads.agent import AgentShape, agent_sessions, with_tools
from sglang_dflash.workloads.datasets import load
from sglang_dflash.workloads.script import (
    LEAST_RESULT_CHARS,
    Exchange,
    Project,
    Script,
    tool_lines,
    tool_response,
    tools,
)

CONTEXT = 2_048
SEEDS = load("tiny", 40, 0)
SMALL = AgentShape.fitting(CONTEXT, 48)
MANY = agent_sessions(SEEDS, 300, SMALL, 5)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(TINY_TARGET), {})


def tool_call(name: str, **arguments: str) -> str:
    """A call as Qwen's chat templates write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def counter(renderer: Renderer) -> Callable[[str], int]:
    return lambda text: len(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


def prompts(session: Session, answer: str) -> list[list[Message]]:
    """The chat of each turn's request, if every answer is `answer`."""
    chat: list[Message] = []
    asked = []
    for turn in session.turns:
        for edit in turn.edits:
            chat[edit.index] = replace(chat[edit.index], content=edit.content)
        chat += turn.messages
        asked.append(list(chat))
        chat.append(Message("assistant", answer))
    return asked


def test_deterministic_and_independent_of_the_count() -> None:
    """Fails where a seed does not give the same sessions again, or more sessions change the first ones."""
    assert agent_sessions(SEEDS, 300, SMALL, 5) == MANY
    assert agent_sessions(SEEDS, 7, SMALL, 5) == MANY[:7]
    assert agent_sessions(SEEDS, 7, SMALL, 6) != MANY[:7]
    assert len({session.id for session in MANY}) == len(MANY)


def test_turns_are_six_to_twelve() -> None:
    """Fails where a session is shorter or longer, or a number of turns never occurs."""
    assert {len(session.turns) for session in MANY} == set(range(6, 13))


def test_roles_alternate() -> None:
    """Fails where a strict chat template would reject a session: two user messages without an answer between them."""
    for session in MANY:
        assert [message.role for message in session.turns[0].messages] == ["system", "user"]
        assert all([message.role for message in turn.messages] == ["user"] for turn in session.turns[1:])


def test_prefixes_are_shared_within_a_group_only() -> None:
    """Fails where sessions of a group differ in their system message, or groups share more than its first word."""
    prefixes = [session.turns[0].messages[0].content for session in MANY]
    assert prefixes == [prefixes[index % SMALL.groups] for index in range(len(MANY))]
    first_words = {" ".join(prefix.split()[:2]) for prefix in prefixes}
    assert len(first_words) == SMALL.groups
    tasks = [session.turns[0].messages[1].content for session in MANY[: len(SEEDS)]]
    assert len(set(tasks)) == len(SEEDS)


def test_tasks_are_the_datasets() -> None:
    """Fails where a session's task is not its dataset's prompt, or the template's arguments are lost."""
    seed = Session("s", (Turn((Message("system", "S"), Message("user", "Do it."))),), {"enable_thinking": False})
    (session,) = agent_sessions([seed], 1, SMALL, 0)
    assert session.turns[0].messages[1] == Message("user", "Do it.")
    assert session.template == seed.template and session.id == "agent-0-s"
    long = Session.of_texts("long", ["word " * 1_000])
    cut = agent_sessions([long], 1, SMALL, 0)[0].turns[0].messages[1].content
    assert len(cut) == SMALL.task_chars and cut.endswith("[...]")


def test_token_ids_cannot_be_a_task() -> None:
    """Fails where a dataset of token ids gives empty tasks."""
    with pytest.raises(ValueError, match="ids has no user message"):
        agent_sessions([Session("ids", (Turn(()),), {}, (1, 2))], 1, SMALL, 0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_share_of_edits(share: float) -> None:
    """Fails where turns edit earlier messages clearly more or less often than requested."""
    sessions = agent_sessions(SEEDS, 300, replace(SMALL, edit_share=share), 5)
    later = [bool(turn.edits) for session in sessions for turn in session.turns[2:]]
    assert share * 0.85 - 0.01 <= mean(later) <= share * 1.1
    assert not any(turn.edits for session in sessions for turn in session.turns[:2])


def test_edits_change_what_is_there() -> None:
    """Fails where an edit is of a later message or an answer, changes nothing, or miscounts lines."""
    kinds = set()
    for session in agent_sessions(SEEDS, 300, replace(SMALL, edit_share=0.6), 5):
        chat: list[Message] = []
        for turn in session.turns:
            for edit in turn.edits:
                assert 0 < edit.index < len(chat), session.id
                old = chat[edit.index]
                assert old.role == "user" and old.content != edit.content
                if old.content.startswith("<tool_response>"):
                    lines = old.content.count("\n") - 1
                    assert edit.content == f"<tool_response>\n[output of {lines} lines removed]\n</tool_response>"
                    kinds.add("result")
                else:
                    assert edit.index == 1 and edit.content.startswith(old.content)
                    kinds.add("task")
                chat[edit.index] = replace(old, content=edit.content)
            chat += [*turn.messages, Message("assistant", "")]
    assert kinds == {"result", "task"}


def test_edits_leave_a_shared_prefix() -> None:
    """Fails where an edit changes the system message, which other sessions share."""
    assert all(edit.index > 0 for session in MANY for turn in session.turns for edit in turn.edits)


def test_think_times() -> None:
    """Fails where pauses miss their mean, the first turn waits, or a mean of 0 leaves pauses or changes texts."""
    thinks = [turn.think_s for session in MANY for turn in session.turns[1:]]
    assert 0.9 < mean(thinks) < 1.1 and 0.6 < median(thinks) < 0.78  # exponential: ln 2
    assert all(session.turns[0].think_s == 0 for session in MANY)
    still = agent_sessions(SEEDS, 300, AgentShape.fitting(CONTEXT, 48, think_s=0), 5)
    assert not any(turn.think_s for session in still for turn in session.turns)
    assert [[turn.messages for turn in session.turns] for session in still] == [
        [turn.messages for turn in session.turns] for session in MANY
    ]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("max_new_tokens", [32, 48])
def test_the_longest_session_fits_the_embedded_pair(renderer: Renderer, max_new_tokens: int, measured: bool) -> None:
    """Fails where a turn's prompt and answer exceed 2,048 tokens, or leave more than a third (guessed: half) free."""
    answer = " result" * max_new_tokens
    assert counter(renderer)(answer) == max_new_tokens
    shape = AgentShape.fitting(CONTEXT, max_new_tokens, counter(renderer) if measured else None)
    assert shape.turns == (6, 12)
    totals = []
    for session in agent_sessions(load("tiny", None, 0), 60, replace(shape, turns=(12, 12)), 1):
        sizes = [len(renderer(as_openai(chat), {})) + max_new_tokens for chat in prompts(session, answer)]
        totals.append(max(sizes))
    assert max(totals) <= CONTEXT
    assert max(totals) > CONTEXT * (0.65 if measured else 0.5)


def test_the_worst_texts_fit_the_embedded_pair(renderer: Renderer) -> None:
    """Fails where sessions fit only because dense tool results (listings: digits) are rare."""
    shape = replace(SMALL, turns=(SMALL.turns[1],) * 2, edit_share=0.0)
    answer = " result" * 64
    worst = max(agent_sessions(SEEDS, 300, shape, 9), key=lambda s: str(s).count(" lines"))
    assert len(renderer(as_openai(prompts(worst, answer)[-1]), {})) + 64 <= CONTEXT


def test_small_contexts_get_fewer_turns_then_a_sentence() -> None:
    """Fails where a small context is refused too early or overfilled, or the message does not name a sufficient one."""
    assert AgentShape.fitting(CONTEXT, 128).turns == (6, 7)
    with pytest.raises(ValueError, match="--workload agent does not fit: 6 turns with answers of 400") as caught:
        AgentShape.fitting(CONTEXT, 400)
    needed = int(str(caught.value).split("context of ")[1].split()[0])
    assert AgentShape.fitting(needed, 400).turns == (6, 6)
    with pytest.raises(ValueError):
        AgentShape.fitting(needed - 20, 400)


def test_large_contexts_get_sessions_as_agents_have() -> None:
    """Fails where prompts do not grow to 10,000 to 60,000 tokens of three to four characters."""
    for context, least, most in ((40_960, 30_000, 60_000), (131_072, 60_000, 180_000), (1_000_000, 60_000, 180_000)):
        sessions = agent_sessions(SEEDS, 20, AgentShape.fitting(context, 512), 0)
        chars = [sum(len(message.content) for message in prompts(s, "")[-1]) for s in sessions]
        assert least * 0.6 < mean(chars) and max(chars) < most, (context, mean(chars), max(chars))


def test_tool_results_keep_their_total() -> None:
    """Fails where many long tool results make a session longer than its shape allows."""
    shape = AgentShape.fitting(40_960, 512)
    for session in agent_sessions(SEEDS, 60, replace(shape, result_chars=3 * shape.result_chars), 0):
        texts = [message.content for turn in session.turns[1:] for message in turn.messages]
        wrapper = len(tool_response(""))
        assert sum(len(text) - wrapper for text in texts) <= shape.results_chars


def test_sizes_vary() -> None:
    """Fails where tool results have a wrong median, or nearly equal sizes."""
    shape = AgentShape.fitting(131_072, 512)
    results = [
        len(message.content)
        for session in agent_sessions(SEEDS, 60, shape, 0)
        for turn in session.turns[1:]
        for message in turn.messages
        if message.content.startswith("<tool_response>")
    ]
    assert 0.7 * shape.result_chars < median(results) < 1.3 * shape.result_chars
    assert max(results) > 4 * min(results)


def exchanges(seed: int, sizes: int, count: int = 200) -> list[Exchange]:
    rng = random.Random(seed)
    return list(islice(Script(rng, Project(rng, 0), repeat(sizes)).exchanges(), count))


def test_texts_keep_to_ascii_and_to_their_size() -> None:
    """Fails where a text is not ASCII, or a request or a result is longer than its limit."""
    assert all(message.content.isascii() for s in MANY for turn in s.turns for message in turn.messages)
    for size in (LEAST_RESULT_CHARS, 100, 1_000):
        for exchange in exchanges(size, size):
            wrapper = len(tool_response("")) if exchange.lines else 0
            assert len(exchange.said) - wrapper <= (size if exchange.lines else LEAST_RESULT_CHARS), exchange


def test_scripts_are_coherent() -> None:
    """Fails where no tool result follows a request, or the file that follows lacks what the request names."""
    named = 0
    for one, then in pairwise(exchanges(1, 300, 400)):
        if not one.lines:
            assert then.lines, (one, then)
            if found := re.match(r"(?:Please change|In \S+,|Show me|How is) (\w+)", one.said):
                assert re.search(rf"\b{found[1]}\b", then.said), (one, then)
                named += 1
    assert named > 50


def test_the_embedded_template_writes_tools_as_the_scripts_do(renderer: Renderer) -> None:
    """Fails where real tools, calls and results reach the embedded pair in another form than it was trained on."""
    call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": "a.txt"}}}
    said = [
        {"role": "user", "content": "Read."},
        {"role": "assistant", "content": "I will.\n", "tool_calls": [call]},  # parsers keep the newline
        {"role": "tool", "content": "12"},
    ]
    scripted = [
        {"role": "user", "content": "Read."},
        {"role": "assistant", "content": "I will.\n" + tool_call("read_file", path="a.txt")},
        {"role": "user", "content": tool_response("12")},
    ]
    for system in ("", "Be brief."):
        head = [{"role": "system", "content": system}] if system else []
        lines = "\n".join([*([system] if system else []), *tool_lines()])
        given = renderer.tokenizer.apply_chat_template([*head, *said], tools=list(tools()), tokenize=False)
        wanted = [{"role": "system", "content": lines}, *scripted]
        assert given == renderer.tokenizer.apply_chat_template(wanted, tokenize=False)


def test_with_tools_the_prompts_stay_the_same(renderer: Renderer) -> None:
    """Fails where a session with tools asks the embedded pair anything else than the same session as text."""
    call, edits = ToolCall("1", "read_file", '{"path": "a.txt"}'), 0
    for session in MANY[:40]:
        real = with_tools(session)
        texts: list[Message] = []
        chat: list[Message] = []
        for turn, real_turn in zip(session.turns, real.turns, strict=True):
            for messages, edited in ((texts, turn.edits), (chat, real_turn.edits)):
                for edit in edited:
                    messages[edit.index] = replace(messages[edit.index], content=edit.content)
                    edits += 1
            texts += turn.messages
            chat += real_turn.messages
            assert renderer(as_openai(chat), {}, real.tools) == renderer(as_openai(texts), {})
            # A call comes only where its result follows.
            index = real.turns.index(real_turn) + 1
            if index < len(real.turns) and real.turns[index].messages[0].role == "tool":
                texts.append(Message("assistant", "I will.\n" + tool_call("read_file", path="a.txt")))
                chat.append(Message("assistant", "I will.", (call,)))
            else:
                texts.append(Message("assistant", "Yes."))
                chat.append(Message("assistant", "Yes.", (call,)))
    assert edits > 10
