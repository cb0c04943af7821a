"""Generates sessions that grow like those of coding agents: tool results, edits, pauses, shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from sglang_dflash.serving.sessions import Edit, Message, Session, Turn
from sglang_dflash.workloads.script import (
    LEAST_RESULT_CHARS,
    NOUNS,
    VERBS,
    Project,
    Script,
    filled,
    result_of,
    tool_lines,
    tool_response,
    tools,
)

FEWEST_TURNS, MOST_TURNS = 6, 12
LEAST_PREFIX_CHARS = 320
LEAST_TASK_CHARS = 120
LARGEST_PROMPT_TOKENS = 60_000
MESSAGE_TOKENS = 20
"""Tokens that a chat template adds around a turn's two messages; the embedded pair's template adds 14."""
SLACK = 0.04
"""Share of the context left free: an answer, tokenized again as text, may have a few more tokens."""
CUT = " [...]"
CORRECTION = "\nCorrection: change no tests."
_TOOL_LINES = "\n".join(tool_lines())


@dataclass(frozen=True, slots=True)
class AgentShape:
    """The shape of sessions. Sizes are in characters, because texts are made before they are tokenized.

    Fields:
        turns: minimum and maximum number of turns of a session.
        prefix_chars: size of the system message that a group's sessions share: tools, then the project's files.
        task_chars: maximum size of a task; longer tasks of the dataset are cut.
        result_chars: median size of a tool result; sizes follow a lognormal distribution (sigma 0.7).
        results_chars: maximum total size of a session's tool results.
        edit_share: share of the turns from the third on that change an earlier message.
        think_s: mean pause before a turn in seconds, exponential; the first turn has none.
        groups: number of groups; the sessions of a group share their system message.
    """

    turns: tuple[int, int] = (FEWEST_TURNS, MOST_TURNS)
    prefix_chars: int = 6_000
    task_chars: int = 6_000
    result_chars: int = 2_000
    results_chars: int = 30_000
    edit_share: float = 0.25
    think_s: float = 1.0
    groups: int = 4

    def __post_init__(self) -> None:
        low, high = self.turns
        assert 1 <= low <= high, self.turns
        assert self.prefix_chars >= LEAST_PREFIX_CHARS and self.task_chars > len(CUT), self
        assert self.results_chars >= (high - 1) * LEAST_RESULT_CHARS, self
        assert 0 <= self.edit_share <= 1 and self.think_s >= 0, self
        assert self.groups >= 1, self.groups

    @classmethod
    def fitting(
        cls,
        context_tokens: int,
        max_new_tokens: int,
        count_tokens: Callable[[str], int] | None = None,
        think_s: float = 1.0,
        reserved: int = 0,
    ) -> AgentShape:
        """The largest shape whose longest session fits. Without answers, it has at most LARGEST_PROMPT_TOKENS.

        In a small context, texts shrink first; then the maximum number of turns falls below MOST_TURNS.

        Args:
            context_tokens: limit of prompt and answer together.
            max_new_tokens: length of an answer; every answer is assumed to reach it.
            count_tokens: counts a text's tokens with the target's tokenizer. None assumes 1.4 characters per token,
                which fits the embedded pair's small vocabulary; a large vocabulary then leaves half of the room
                unused. Tasks are assumed to have no more tokens per character than tool results.
            think_s: mean pause in seconds; it does not affect sizes.
            reserved: tokens that the chat template adds once.

        Raises:
            ValueError: FEWEST_TURNS turns do not fit.
        """
        chars_per_token = _chars_per_token(count_tokens) if count_tokens else 1.4
        room = 0
        for most in range(MOST_TURNS, FEWEST_TURNS - 1, -1):
            tokens = int((context_tokens - reserved) * (1 - SLACK)) - most * (max_new_tokens + MESSAGE_TOKENS)
            room = int(min(tokens, LARGEST_PROMPT_TOKENS) * chars_per_token) - len(CORRECTION)
            wrappers = (most - 1) * len(tool_response(""))
            least = LEAST_PREFIX_CHARS + LEAST_TASK_CHARS + (most - 1) * LEAST_RESULT_CHARS + wrappers
            if room >= least:
                spare = room - least
                results = (most - 1) * LEAST_RESULT_CHARS + int(spare * 0.7)
                return cls(
                    turns=(FEWEST_TURNS, most),
                    prefix_chars=LEAST_PREFIX_CHARS + int(spare * 0.2),
                    task_chars=LEAST_TASK_CHARS + int(spare * 0.1),
                    result_chars=int(results / (most - 1) * 1.4),  # half of the turns have one
                    results_chars=results,
                    think_s=think_s,
                )
        raise ValueError(
            f"--workload agent does not fit: {FEWEST_TURNS} turns with answers of {max_new_tokens} tokens need a "
            f"context of {_tokens_short(least - room, chars_per_token) + context_tokens} tokens, but it has "
            f"{context_tokens}; lower --max-new-tokens or raise --context-tokens."
        )


def _tokens_short(chars: int, chars_per_token: float) -> int:
    return int(chars / chars_per_token / (1 - SLACK)) + 2


def agent_sessions(seeds: Sequence[Session], count: int, shape: AgentShape, seed: int) -> list[Session]:
    """Makes sessions of one shape. Session N does not depend on `count`, and its texts do not depend on `think_s`.

    Each turn has one user message: the task, a tool result in <tool_response> tags, or a request. So every chat
    template that supports a system message accepts them. `with_tools` makes the same session for a server with tools.

    Args:
        seeds: sessions of a dataset; the last user message of a session's first turn is a task. They are used again if
            `count` is larger.

    Raises:
        ValueError: a session of `seeds` has token ids instead of messages.
    """
    assert seeds, "a dataset is never empty"
    projects = [Project(random.Random(f"{seed}/project/{group}"), group) for group in range(shape.groups)]
    prefixes = [
        system_message(random.Random(f"{seed}/prefix/{group}"), project, shape.prefix_chars)
        for group, project in enumerate(projects)
    ]
    sessions = []
    for index in range(count):
        group, task = index % shape.groups, seeds[index % len(seeds)]
        said = [message.content for message in task.turns[0].messages if message.role == "user"]
        if not said:
            raise ValueError(f"--workload agent: session {task.id} has no user message to use as the agent's task.")
        maker = _SessionMaker(random.Random(f"{seed}/session/{index}"), projects[group], shape)
        turns = maker.turns(prefixes[group], _cut(said[-1], shape.task_chars))
        sessions.append(Session(f"agent-{index}-{task.id}", turns, task.template))
    return sessions


def with_tools(session: Session) -> Session:
    """The same session with tools as OpenAI's API has them: the server lists them, and results have their own role.

    The embedded pair's chat template makes the same prompts of both.
    """

    def message(one: Message) -> Message:
        if one.role == "system":
            return replace(one, content=one.content.removesuffix(f"\n{_TOOL_LINES}"))
        result = result_of(one.content)
        return one if result is None else Message("tool", result)

    def edit(one: Edit) -> Edit:
        result = result_of(one.content)
        return one if result is None else replace(one, content=result)

    turns = [
        replace(turn, messages=tuple(map(message, turn.messages)), edits=tuple(map(edit, turn.edits)))
        for turn in session.turns
    ]
    return replace(session, turns=tuple(turns), tools=tools())


def system_message(rng: random.Random, project: Project, chars: int) -> str:
    """The project, its files and a part of its source in `chars` characters; the tools are last.

    It differs between projects from the first line on.
    """
    listing = islice(project.listing(rng), len(VERBS) * len(NOUNS))
    source = chain.from_iterable(function.split("\n") for function in project.source(rng, chars))
    head = [f"Project {project.name}: you are a coding agent. Files:"]
    return f"{filled(chain(head, listing, source), chars - len(_TOOL_LINES) - 1)}\n{_TOOL_LINES}"


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - len(CUT)] + CUT


class _SessionMaker:
    """Makes the turns of one session and tracks which of its messages may still be edited."""

    def __init__(self, rng: random.Random, project: Project, shape: AgentShape) -> None:
        self._rng = rng
        self._project = project
        self._shape = shape
        self._spare = 0  # characters that tool results may have beyond LEAST_RESULT_CHARS per turn
        self._results: dict[int, int] = {}  # index of a message with a tool result -> number of lines
        self._corrected = False

    def turns(self, prefix: str, task: str) -> tuple[Turn, ...]:
        rng, shape = self._rng, self._shape
        number_of_turns = rng.randint(*shape.turns)
        turns = [Turn((Message("system", prefix), Message("user", task)))]
        self._spare = shape.results_chars - (number_of_turns - 1) * LEAST_RESULT_CHARS
        exchanges = Script(rng, self._project, self._sizes()).exchanges()
        for number, exchange in enumerate(islice(exchanges, number_of_turns - 1), start=1):
            edits = self._edits(task) if number >= 2 and rng.random() < shape.edit_share else ()
            think_s = rng.expovariate(1.0) * shape.think_s
            turns.append(Turn((Message("user", exchange.said),), edits, think_s))
            if exchange.lines:
                self._results[2 * number + 1] = exchange.lines
        return tuple(turns)

    def _sizes(self) -> Iterator[int]:
        """Sizes of tool results, which together with LEAST_RESULT_CHARS per turn are at most `results_chars`."""
        while True:
            drawn = int(self._rng.lognormvariate(0, 0.7) * self._shape.result_chars)
            above = min(max(0, drawn - LEAST_RESULT_CHARS), self._spare)
            self._spare -= above
            yield LEAST_RESULT_CHARS + above

    def _edits(self, task: str) -> tuple[Edit, ...]:
        """Removes the text of a tool result that still has it, or corrects the task (once); else makes no edit."""
        if not self._corrected and (not self._results or self._rng.random() < 0.2):
            self._corrected = True
            return (Edit(1, task + CORRECTION),)
        if not self._results:
            return ()
        index = self._rng.choice(sorted(self._results))
        lines = self._results.pop(index)
        return (Edit(index, tool_response(f"[output of {lines} lines removed]")),)


def _chars_per_token(count_tokens: Callable[[str], int]) -> float:
    """Characters per token of the kind of text that needs the most tokens."""
    rng = random.Random(0)
    project = Project(rng, 0)
    kinds = (project.listing(rng), project.report(rng), project.hits(rng, project.function(rng)), project.trace(rng))
    texts = [_TOOL_LINES, "\n\n".join(project.source(rng, 2_000)), *(filled(kind, 2_000) for kind in kinds)]
    return min(len(text) / count_tokens(text) for text in texts)
