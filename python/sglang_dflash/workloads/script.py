"""What a coding agent is told turn by turn in a session: requests, and the results of the tools that it calls.

The texts are synthetic but look like real ones: listings, source code, test reports, search hits, tracebacks. They use
only ASCII and the vocabulary of the embedded pair, because its tokenizer knows few other words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count as counting
from typing import Any

LEAST_RESULT_CHARS = 64
"""At least as long as the longest request, and longer than the text that replaces a removed result."""
VERBS = ("build", "choose", "collect", "compute", "find", "get", "make", "pick")
NOUNS = ("ages", "data", "items", "lengths", "list", "marks", "numbers", "part", "prices", "result", "score", "values")
TOOLS = {
    "list_files": ("list the files of a folder", ("folder",)),
    "read_file": ("read a file", ("path",)),
    "find_text": ("find a text in all files", ("text",)),
    "run_tests": ("run the tests of a file", ("path",)),
    "write_file": ("write a text to a file", ("path", "text")),
    "calculate": ("compute a number", ("expression",)),
}
"""The agent's tools: name -> what it does, and its arguments."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to the agent, which the agent answers.

    Fields:
        said: the message; a tool result stands in <tool_response> tags.
        lines: number of lines of the tool result; 0 if a user speaks.
    """

    said: str
    lines: int = 0

    @classmethod
    def of_result(cls, result: str) -> Exchange:
        return cls(tool_response(result), result.count("\n") + 1)


_RESPONSE = ("<tool_response>\n", "\n</tool_response>")


def tool_response(result: str) -> str:
    """A result as Qwen's chat templates write it."""
    return result.join(_RESPONSE)


def result_of(said: str) -> str | None:
    """The result in a `tool_response`; None if it is another text."""
    start, end = _RESPONSE
    return said[len(start) : -len(end)] if said.startswith(start) and said.endswith(end) else None


def tool_lines() -> list[str]:
    """The tools as the embedded pair's chat template lists them."""
    return ["Tools:", *(f"- {name}({', '.join(arguments)}): {what}" for name, (what, arguments) in TOOLS.items())]


def tools() -> tuple[dict[str, Any], ...]:
    """The tools as OpenAI's API has them."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": what,
                "parameters": {
                    "type": "object",
                    "properties": {argument: {"type": "string"} for argument in arguments},
                    "required": list(arguments),
                },
            },
        }
        for name, (what, arguments) in TOOLS.items()
    )


class Project:
    """A synthetic code base: names of functions, and texts about them."""

    def __init__(self, rng: random.Random, group: int) -> None:
        self.name = f"{rng.choice(NOUNS)}-{group}"
        self._functions = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS]
        rng.shuffle(self._functions)

    def function(self, rng: random.Random) -> str:
        return rng.choice(self._functions)

    def path(self, rng: random.Random) -> str:
        return f"src/{self.function(rng)}.py"

    def listing(self, rng: random.Random) -> Iterator[str]:
        """An endless list of files with their sizes."""
        start = rng.randrange(len(self._functions))
        for offset in counting(start):
            yield f"src/{self._functions[offset % len(self._functions)]}.py {rng.randint(10, 400)} lines"

    def source(self, rng: random.Random, chars: int) -> list[str]:
        """Functions that together have at most `chars` characters, but at least one; its shortest form has 50."""
        functions = [self._define(rng, short=True)]
        left = chars - len(functions[0])
        while True:
            more = self._define(rng)
            left -= len(more) + 2
            if left < 0:
                return functions
            functions.insert(0, more)

    def _define(self, rng: random.Random, short: bool = False) -> str:
        a, b = rng.sample(("a", "b", "x", "y", "n"), 2)
        number, other = rng.randint(10, 99), rng.randint(2, 9)
        bodies = (
            f"    return {a} * {b} + {number}",
            f"    result = {a} * {b} + {number}\n    return result",
            f"    total = {number}\n    for i in range({other}, {a} + 1):\n        total += i\n    return total",
            f"    if {a} > {number}:\n        return {b}\n    return {a} - {b}",
            f"    return [x ** {other} for x in {a} if x != {number}]",
        )
        return f"def {self.function(rng)}({a}, {b}):\n{bodies[0] if short else rng.choice(bodies)}"

    def report(self, rng: random.Random) -> Iterator[str]:
        """An endless report of tests."""
        for number in counting(1):
            failed = rng.random() < 0.15
            yield f"{number} {self.function(rng)} {'failed' if failed else 'passed'}"
            if failed:
                left, right = rng.randint(2, 99), rng.randint(2, 99)
                yield f"    assert {left} + {right} == {left + right + rng.randint(1, 9)}"

    def hits(self, rng: random.Random, wanted: str) -> Iterator[str]:
        """Endless places where a function is used."""
        while True:
            yield f"{self.path(rng)}:{rng.randint(1, 400)}: total += {wanted}({rng.choice('abxyn')})"

    def trace(self, rng: random.Random) -> Iterator[str]:
        """The lines of an endless traceback, the last call first."""
        yield f"ValueError: {rng.randint(2, 99)} is not in list"
        while True:
            yield f'  File "{self.path(rng)}", line {rng.randint(1, 400)}, in {self.function(rng)}'
            yield f"    return {self.function(rng)}({rng.choice('abxyn')})"


class Script:
    """The turns of one session: pieces of work, each with a request and the tools' results.

    Args:
        sizes: gives the limit of each long tool result in characters, at least LEAST_RESULT_CHARS.
    """

    def __init__(self, rng: random.Random, project: Project, sizes: Iterator[int]) -> None:
        self._rng = rng
        self._project = project
        self._sizes = sizes
        # Changes of files are twice as likely as any other work.
        self._works: tuple[Callable[[], Iterator[Exchange]], ...] = (
            self._change, self._change, self._show, self._find, self._test, self._list, self._compute, self._note,
            self._trace,
        )  # fmt: skip

    def exchanges(self) -> Iterator[Exchange]:
        """Endless turns. A message that is no long tool result has at most LEAST_RESULT_CHARS characters."""
        while True:
            yield from self._rng.choice(self._works)()

    def _ask(self, *wordings: str) -> Exchange:
        asked = self._rng.choice(wordings)
        assert len(asked) <= LEAST_RESULT_CHARS, asked
        return Exchange(asked)

    def _result(self, lines: Iterator[str]) -> Exchange:
        return Exchange.of_result(filled(lines, next(self._sizes)))

    def _source(self) -> list[str]:
        return self._project.source(self._rng, next(self._sizes))

    def _change(self) -> Iterator[Exchange]:
        """A number of a file is replaced, and the tests run; sometimes the user wants another number then."""
        rng, path = self._rng, self._project.path(self._rng)
        # The file is made first, because the request names a number in it.
        text = "\n\n".join(self._source())
        old = rng.choice(sorted(set(re.findall(r"\b\d\d\b", text))))
        new = rng.randint(10, 99)
        yield self._ask(f"Please change {old} to {new} in {path}.", f"In {path}, {old} must be {new}.")
        yield Exchange.of_result(text)
        yield self._result(self._project.report(rng))
        if rng.random() < 0.5:
            newer = rng.randint(10, 99)
            yield self._ask(f"Sorry, make it {newer}.", f"No, I meant {newer}.")
            yield self._result(self._project.report(rng))

    def _show(self) -> Iterator[Exchange]:
        path = self._project.path(self._rng)
        functions = self._source()
        wanted = self._rng.choice(functions)
        name = wanted[len("def ") : wanted.index("(")]
        yield self._ask(f"Show me {name} of {path}.", f"How is {name} of {path} written?")
        yield Exchange.of_result("\n\n".join(functions))

    def _find(self) -> Iterator[Exchange]:
        wanted = self._project.function(self._rng)
        yield self._ask(f"Where is {wanted} used?", f"Please find {wanted}.")
        yield self._result(self._project.hits(self._rng, wanted))

    def _test(self) -> Iterator[Exchange]:
        path = self._project.path(self._rng)
        yield self._ask(f"Run the tests of {path}.", f"Good. Now check {path}.")
        yield self._result(self._project.report(self._rng))

    def _list(self) -> Iterator[Exchange]:
        yield self._ask("Which files are in src?", "List the files, please.")
        yield self._result(self._project.listing(self._rng))

    def _compute(self) -> Iterator[Exchange]:
        rng = self._rng
        a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 99)
        path = f"{rng.choice(NOUNS)}.txt"
        asked = f"{a} * {b} + {c}"
        yield self._ask(f"What is {asked}? Save it in {path}.", f"Compute {asked} and save it in {path}.")
        yield Exchange.of_result(str(a * b + c))
        yield Exchange.of_result("saved")

    def _note(self) -> Iterator[Exchange]:
        rng, path = self._rng, f"{self._rng.choice(NOUNS)}.txt"
        note = rng.choice((str(rng.randint(2, 999)), f"{rng.choice(NOUNS)}: {rng.randint(2, 99)}"))
        yield self._ask(f"What is in {path}?", f"Please read {path}.")
        yield Exchange.of_result(note)

    def _trace(self) -> Iterator[Exchange]:
        path = self._project.path(self._rng)
        yield self._ask(f"Why does {path} fail?", f"Find the error in {path}.")
        yield self._result(self._project.trace(self._rng))


def filled(lines: Iterator[str], chars: int) -> str:
    """As many whole lines as fit into `chars`; the first line is cut if it is longer."""
    text = next(lines)[:chars]
    for line in lines:
        if len(text) + 1 + len(line) > chars:
            break
        text += "\n" + line
    return text.rstrip("\n")
