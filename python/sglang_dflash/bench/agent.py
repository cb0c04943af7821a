"""Growing sessions as coding agents make them: tool results, edits of what was said, pauses, shared prefixes.

The texts are made up, but shaped like the real ones: listings, sources, test reports, search hits, traces. They keep to
plain ASCII and to the words of the embedded pair, whose tokenizer knows few others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from itertools import count as counting

from sglang_dflash.bench.sessions import Edit, Message, Session, Turn

FEWEST_TURNS, MOST_TURNS = 6, 12
LEAST_PREFIX_CHARS = 200
LEAST_TASK_CHARS = 120
LEAST_RESULT_CHARS = 56
"""The longest follow-up, and more than what is left of a removed result."""
LARGEST_PROMPT_TOKENS = 60_000
MESSAGE_TOKENS = 20
"""What a chat template puts around a turn's two messages; 14 with the embedded pair's."""
SLACK = 0.04
"""Share of the context left free: an answer's text may come back as a few more tokens than it was."""
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
    """How sessions look. Sizes are in characters, because texts are made before any tokenizer sees them.

    Fields:
        turns: the least and the most of a session.
        prefix_chars: of the system message that the sessions of a group share: tools, then the project's files.
        task_chars: a dataset's task is cut to so much.
        result_chars: the median of a tool result; sizes follow a lognormal distribution (sigma 0.7).
        results_chars: at most, of all tool results of a session together.
        edit_share: of the turns from the third on, how many change an earlier message.
        follow_up_share: of the turns after the first, how many are a user's sentence and no tool result.
        think_s: mean pause before a turn, exponential; the first turn has none.
        groups: of sessions that share their system message.
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
        """The largest shape whose longest session fits, at most LARGEST_PROMPT_TOKENS beside the answers.

        Where the context is small, texts shrink first; then sessions get fewer than MOST_TURNS turns.

        Args:
            context_tokens: of prompt and answer together.
            max_new_tokens: of each answer; every answer is taken to be so long.
            count_tokens: of a text, by the target's tokenizer. Without it: 1.4 characters a token, which holds for
                the embedded pair's small vocabulary and leaves half of the room unused with a large one. Tasks are
                taken to be no denser.
            think_s: mean pause; it changes no size.

        Raises:
            ValueError: not even FEWEST_TURNS turns fit.
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
            f"context of {_tokens_short(least - room, chars_per_token) + context_tokens} tokens, and it has "
            f"{context_tokens}; lower --max-new-tokens or raise the context."
        )


def _tokens_short(chars: int, chars_per_token: float) -> int:
    return int(chars / chars_per_token / (1 - SLACK)) + 2


def agent_sessions(seeds: Sequence[Session], count: int, shape: AgentShape, seed: int) -> list[Session]:
    """Sessions of one shape; session N is the same whatever `count` is, and its texts whatever `think_s` is.

    One user message a turn: the task, a tool result in <tool_response> tags, or a follow-up. So every chat template
    that takes a system message takes them.

    Args:
        seeds: sessions of a dataset; what each one's user says first is a task. Used again where `count` is more.

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
            raise ValueError(f"--workload agent: {task.id} has no user message that could be an agent's task.")
        maker = _SessionMaker(random.Random(f"{seed}/session/{index}"), projects[group], shape)
        turns = maker.turns(prefixes[group], _cut(said[-1], shape.task_chars))
        sessions.append(Session(f"agent-{index}-{task.id}", turns, task.template))
    return sessions


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - len(CUT)] + CUT


def _wrapped(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


class _SessionMaker:
    """Makes the turns of one session, and remembers which of its messages may still be edited."""

    def __init__(self, rng: random.Random, project: _Project, shape: AgentShape) -> None:
        self._rng = rng
        self._project = project
        self._shape = shape
        self._results: dict[int, int] = {}  # index of a message with a tool result -> its lines
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
        """Of the messages after the task, none below LEAST_RESULT_CHARS, all together at most `results_chars`."""
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
        """Shortens a tool result that was not yet, or corrects the task, once; nothing where neither is left."""
        if not self._corrected and (not self._results or self._rng.random() < 0.2):
            self._corrected = True
            return (Edit(1, task + CORRECTION),)
        if not self._results:
            return ()
        index = self._rng.choice(sorted(self._results))
        lines = self._results.pop(index)
        return (Edit(index, _wrapped(f"[output of {lines} lines removed]")),)


class _Project:
    """A made-up code base: what the sessions of a group work on."""

    def __init__(self, rng: random.Random, group: int) -> None:
        self._name = f"{rng.choice(NOUNS)}-{group}"
        self._rng = rng
        self._functions = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS]
        rng.shuffle(self._functions)
        # Sources come twice as often.
        source = self._source
        self.kinds = (self._listing, source, source, self._report, self._hits, self._trace, self._sums)

    def prefix(self, chars: int) -> str:
        """The system message. Groups differ from its first line on."""
        # Where there is little room, files say more than how to call the tools.
        short = chars < 4 * LEAST_PREFIX_CHARS
        tools = [f"- {name}" if short else f"- {name}({arguments}): {what}" for name, what, arguments in TOOLS]
        head = [f"Project {self._name}: you are a coding agent. Tools:", *tools, "Files:"]
        listing = islice(self._listing(self._rng), len(self._functions))
        return _filled(chain(head, listing, self._source(self._rng)), chars)

    def function(self, rng: random.Random) -> str:
        return rng.choice(self._functions)

    def tool_result(self, rng: random.Random) -> Iterator[str]:
        """Lines without end."""
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
    """As many whole lines as fit; of the first one what fits."""
    text = next(lines)[:chars]
    for line in lines:
        if len(text) + 1 + len(line) > chars:
            break
        text += "\n" + line
    return text.rstrip("\n")


def _chars_per_token(count_tokens: Callable[[str], int]) -> float:
    """Of the kind of text that takes most tokens."""
    rng = random.Random(0)
    project = _Project(rng, 0)
    texts = [_wrapped(""), *(_filled(kind(rng), 2_000) for kind in project.kinds)]
    return min(len(text) / count_tokens(text) for text in texts)
