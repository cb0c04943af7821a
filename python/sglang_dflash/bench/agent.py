"""Generates sessions that grow like those of coding agents: tool results, edits, pauses, shared prefixes.

The texts are synthetic but look like real ones: listings, source code, test reports, search hits, tracebacks. They use
only ASCII and the vocabulary of the embedded pair, because its tokenizer knows few other words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from itertools import count as counting

from sglang_dflash.serving.sessions import Edit, Message, Session, Turn

FEWEST_TURNS, MOST_TURNS = 6, 12
LEAST_PREFIX_CHARS = 200
LEAST_TASK_CHARS = 120
LEAST_RESULT_CHARS = 56
"""At least as long as the longest follow-up, and longer than the text that replaces a removed result."""
LARGEST_PROMPT_TOKENS = 60_000
MESSAGE_TOKENS = 20
"""Tokens that a chat template adds around a turn's two messages; the embedded pair's template adds 14."""
SLACK = 0.04
"""Share of the context left free: an answer, tokenized again as text, may have a few more tokens."""
CUT = " [...]"
CORRECTION = "\nCorrection: change no tests."
FOLLOW_UPS = (
    "Good. Now check {name} once more.",
    "Please do the same for {name}.",
    "Why is the result of {name} {number}?",
    "Use a loop in {name}, please.",
    "Can {name} take an empty list?",
)
VERBS = ("build", "choose", "collect", "compute", "find", "get", "make", "pick")
NOUNS = ("ages", "data", "items", "lengths", "list", "marks", "numbers", "part", "prices", "result", "score", "values")
TOOLS = (
    ("list_files", "list the files of a folder", "folder"),
    ("read_file", "read a part of a file", "path, first, last"),
    ("find_text", "find a text in all files", "text"),
    ("run_tests", "run the tests of a file", "path"),
    ("edit_file", "put a new text for an old one", "path, old, new"),
)


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
        follow_up_share: share of the turns after the first that send a user's sentence instead of a tool result.
        think_s: mean pause before a turn in seconds, exponential; the first turn has none.
        groups: number of groups; the sessions of a group share their system message.
    """

    turns: tuple[int, int] = (FEWEST_TURNS, MOST_TURNS)
    prefix_chars: int = 6_000
    task_chars: int = 6_000
    result_chars: int = 2_000
    results_chars: int = 30_000
    edit_share: float = 0.25
    follow_up_share: float = 0.2
    think_s: float = 1.0
    groups: int = 4

    def __post_init__(self) -> None:
        low, high = self.turns
        assert 1 <= low <= high, self.turns
        assert self.prefix_chars >= LEAST_PREFIX_CHARS and self.task_chars > len(CUT), self
        assert self.results_chars >= (high - 1) * LEAST_RESULT_CHARS, self
        assert 0 <= self.edit_share <= 1 and 0 <= self.follow_up_share <= 1 and self.think_s >= 0, self
        assert self.groups >= 1, self.groups

    @classmethod
    def fitting(
        cls,
        context_tokens: int,
        max_new_tokens: int,
        count_tokens: Callable[[str], int] | None = None,
        think_s: float = 1.0,
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

        Raises:
            ValueError: FEWEST_TURNS turns do not fit.
        """
        chars_per_token = _chars_per_token(count_tokens) if count_tokens else 1.4
        room = 0
        for most in range(MOST_TURNS, FEWEST_TURNS - 1, -1):
            tokens = int(context_tokens * (1 - SLACK)) - most * (max_new_tokens + MESSAGE_TOKENS)
            room = int(min(tokens, LARGEST_PROMPT_TOKENS) * chars_per_token) - len(CORRECTION)
            wrappers = (most - 1) * len(_wrapped(""))
            least = LEAST_PREFIX_CHARS + LEAST_TASK_CHARS + (most - 1) * LEAST_RESULT_CHARS + wrappers
            if room >= least:
                spare = room - least
                results = (most - 1) * LEAST_RESULT_CHARS + int(spare * 0.7)
                return cls(
                    turns=(FEWEST_TURNS, most),
                    prefix_chars=LEAST_PREFIX_CHARS + int(spare * 0.2),
                    task_chars=LEAST_TASK_CHARS + int(spare * 0.1),
                    result_chars=int(results / (most - 1) * 0.7),
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

    Each turn has one user message: the task, a tool result in <tool_response> tags, or a follow-up. So every chat
    template that supports a system message accepts them.

    Args:
        seeds: sessions of a dataset; the last user message of a session's first turn is a task. They are used again if
            `count` is larger.

    Raises:
        ValueError: a session of `seeds` has token ids instead of messages.
    """
    assert seeds, "a dataset is never empty"
    projects = [_Project(random.Random(f"{seed}/project/{group}"), group) for group in range(shape.groups)]
    prefixes = [project.prefix(shape.prefix_chars) for project in projects]
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


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - len(CUT)] + CUT


def _wrapped(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


class _SessionMaker:
    """Makes the turns of one session and tracks which of its messages may still be edited."""

    def __init__(self, rng: random.Random, project: _Project, shape: AgentShape) -> None:
        self._rng = rng
        self._project = project
        self._shape = shape
        self._results: dict[int, int] = {}  # index of a message with a tool result -> number of lines
        self._corrected = False

    def turns(self, prefix: str, task: str) -> tuple[Turn, ...]:
        rng, shape = self._rng, self._shape
        number_of_turns = rng.randint(*shape.turns)
        turns = [Turn((Message("system", prefix), Message("user", task)))]
        for number, chars in enumerate(self._sizes(number_of_turns - 1), start=1):
            edits = self._edits(task) if number >= 2 and rng.random() < shape.edit_share else ()
            think_s = rng.expovariate(1.0) * shape.think_s
            turns.append(Turn((self._next_message(2 * number + 1, chars),), edits, think_s))
        return tuple(turns)

    def _sizes(self, number: int) -> list[int]:
        """Sizes of the messages after the task: each at least LEAST_RESULT_CHARS, in total at most `results_chars`."""
        drawn = [self._rng.lognormvariate(0, 0.7) * self._shape.result_chars for _ in range(number)]
        above = [max(0.0, chars - LEAST_RESULT_CHARS) for chars in drawn]
        spare = self._shape.results_chars - number * LEAST_RESULT_CHARS
        scale = min(1.0, spare / sum(above)) if sum(above) else 1.0
        return [LEAST_RESULT_CHARS + int(chars * scale) for chars in above]

    def _next_message(self, index: int, chars: int) -> Message:
        if self._rng.random() < self._shape.follow_up_share:
            asked = self._rng.choice(FOLLOW_UPS)
            text = asked.format(name=self._project.function(self._rng), number=self._rng.randint(2, 99))
            return Message("user", text)
        result = _filled(self._project.tool_result(self._rng), chars)
        self._results[index] = result.count("\n") + 1
        return Message("user", _wrapped(result))

    def _edits(self, task: str) -> tuple[Edit, ...]:
        """Removes the text of a tool result that still has it, or corrects the task (once); else makes no edit."""
        if not self._corrected and (not self._results or self._rng.random() < 0.2):
            self._corrected = True
            return (Edit(1, task + CORRECTION),)
        if not self._results:
            return ()
        index = self._rng.choice(sorted(self._results))
        lines = self._results.pop(index)
        return (Edit(index, _wrapped(f"[output of {lines} lines removed]")),)


class _Project:
    """A synthetic code base that the sessions of a group work on."""

    def __init__(self, rng: random.Random, group: int) -> None:
        self._name = f"{rng.choice(NOUNS)}-{group}"
        self._rng = rng
        self._functions = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS]
        rng.shuffle(self._functions)
        # Source code is twice as likely as any other kind.
        source = self._source
        self.kinds = (self._listing, source, source, self._report, self._hits, self._trace, self._sums)

    def prefix(self, chars: int) -> str:
        """The system message. It differs between groups from the first line on."""
        # A short prefix omits how to call the tools, to keep room for files.
        short = chars < 4 * LEAST_PREFIX_CHARS
        tools = [f"- {name}" if short else f"- {name}({arguments}): {what}" for name, what, arguments in TOOLS]
        head = [f"Project {self._name}: you are a coding agent. Tools:", *tools, "Files:"]
        listing = islice(self._listing(self._rng), len(self._functions))
        return _filled(chain(head, listing, self._source(self._rng)), chars)

    def function(self, rng: random.Random) -> str:
        return rng.choice(self._functions)

    def tool_result(self, rng: random.Random) -> Iterator[str]:
        """An endless iterator of lines."""
        return rng.choice(self.kinds)(rng)

    def _path(self, rng: random.Random) -> str:
        return f"src/{self.function(rng)}.py"

    def _listing(self, rng: random.Random) -> Iterator[str]:
        start = rng.randrange(len(self._functions))
        for offset in counting(start):
            yield f"src/{self._functions[offset % len(self._functions)]}.py {rng.randint(10, 400)} lines"

    def _source(self, rng: random.Random) -> Iterator[str]:
        while True:
            a, b = rng.sample(("a", "b", "x", "y", "n"), 2)
            number, other = rng.randint(2, 40), rng.randint(2, 9)
            bodies = (
                f"    result = {a} * {b} + {number}\n    return result",
                f"    total = 0\n    for i in range({other}, {a} + 1):\n        total += i\n    return total",
                f"    if {a} > {number}:\n        return {b}\n    return {a} - {b}",
                f"    return [x ** {other} for x in {a} if x != {b}]",
            )
            yield f"def {self.function(rng)}({a}, {b}):"
            yield from rng.choice(bodies).split("\n")
            yield ""

    def _report(self, rng: random.Random) -> Iterator[str]:
        for number in counting(1):
            failed = rng.random() < 0.15
            yield f"{number} {self.function(rng)} {'failed' if failed else 'passed'}"
            if failed:
                left, right = rng.randint(2, 99), rng.randint(2, 99)
                yield f"    assert {left} + {right} == {left + right + rng.randint(1, 9)}"

    def _hits(self, rng: random.Random) -> Iterator[str]:
        wanted = self.function(rng)
        while True:
            yield f"{self._path(rng)}:{rng.randint(1, 400)}: total += {wanted}({rng.choice('abxyn')})"

    def _trace(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield "Traceback:"
            for _ in range(rng.randint(2, 6)):
                yield f'  File "{self._path(rng)}", line {rng.randint(1, 400)}, in {self.function(rng)}'
                yield f"    return {self.function(rng)}({rng.choice('abxyn')})"
            yield f"ValueError: {rng.randint(2, 99)} is not in list"

    def _sums(self, rng: random.Random) -> Iterator[str]:
        while True:
            left, right, more = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 99)
            yield f"First: {left} * {right} = {left * right}."
            yield f"Then: {left * right} + {more} = {left * right + more}."


def _filled(lines: Iterator[str], chars: int) -> str:
    """As many whole lines as fit into `chars`; the first line is cut if it is longer."""
    text = next(lines)[:chars]
    for line in lines:
        if len(text) + 1 + len(line) > chars:
            break
        text += "\n" + line
    return text.rstrip("\n")


def _chars_per_token(count_tokens: Callable[[str], int]) -> float:
    """Characters per token of the kind of text that needs the most tokens."""
    rng = random.Random(0)
    project = _Project(rng, 0)
    texts = [_wrapped(""), *(_filled(kind(rng), 2_000) for kind in project.kinds)]
    return min(len(text) / count_tokens(text) for text in texts)
