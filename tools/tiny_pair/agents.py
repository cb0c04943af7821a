"""Training sessions of a coding agent: the benchmark's scripts, made with other seeds and answered as they expect."""

import random
from collections.abc import Iterable, Iterator, Set
from itertools import islice

from sglang_dflash.workloads.agent import system_message
from sglang_dflash.workloads.script import LEAST_RESULT_CHARS, Exchange, Project, Script, tool_lines
from tools.tiny_pair.conversations import SYSTEMS, Conversation, Message
from tools.tiny_pair.corpus import SHARES, fresh_example

_TURNS = (6, 12)
_CHARS = 4_000  # of a whole session: about 2,000 tokens, the pair's context
_MEDIAN_RESULT_CHARS = 130
_PROJECT, _TASK, _ALL_TOOLS = 0.7, 0.4, 0.7
_LONG_ANSWER_CHARS = 150  # shorter answers are alike by chance


def _system(rng: random.Random, project: Project) -> str:
    """A project with its files, or any system message; then all tools, or some of them in any order."""
    if rng.random() < _PROJECT:
        return system_message(rng, project, rng.randint(320, 900))
    head, *tools = tool_lines()
    if rng.random() >= _ALL_TOOLS:
        tools = rng.sample(tools, rng.randint(3, len(tools)))
    return "\n".join([rng.choice(SYSTEMS), head, *tools])


def _sizes(rng: random.Random) -> Iterator[int]:
    while True:
        yield LEAST_RESULT_CHARS + int(rng.lognormvariate(0, 0.6) * _MEDIAN_RESULT_CHARS)


def make_session(rng: random.Random, closed: Set[str]) -> Conversation:
    """One session of 6 to 12 turns, or fewer where the context ends; its first task may be a sum, code or chat.

    Args:
        closed: texts of held-out examples, none of which it contains.
    """
    project = Project(rng, rng.randrange(100))
    turns = list(islice(Script(rng, project, _sizes(rng)).exchanges(), rng.randint(*_TURNS)))
    if rng.random() < _TASK:
        task = fresh_example(rng, rng.choices(list(SHARES), list(SHARES.values()))[0], closed)
        turns.insert(0, Exchange(task.prompt, task.answer))
    messages: list[Message] = [{"role": "system", "content": _system(rng, project)}]
    left = _CHARS - len(messages[0]["content"])
    for turn in turns:
        left -= len(turn.said) + len(turn.answer)
        if left < 0:
            break
        messages += [{"role": "user", "content": turn.said}, {"role": "assistant", "content": turn.answer}]
    return Conversation(messages, ["agent"] * (len(messages) // 2))


def make_sessions(purpose: str, seed: int, count: int, closed: Set[str]) -> list[Conversation]:
    """`count` sessions; another `purpose` gets others."""
    rng = random.Random(f"{purpose}-{seed}")
    return [make_session(rng, closed) for _ in range(count)]


def _long_answers(sessions: Iterable[Conversation]) -> Iterator[str]:
    return (text for session in sessions for text in session.answers() if len(text) >= _LONG_ANSWER_CHARS)


def shared_answers(sessions: Iterable[Conversation], heldout: Iterable[Conversation]) -> set[str]:
    """The long answers that both have; there must be none."""
    return set(_long_answers(sessions)) & set(_long_answers(heldout))
