"""The pairs that `sglang-dflash quickstart` can show, each with the questions that it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.serving import PAIRS, TINY_ENVIRONMENT, held_out_prompts
from sglang_dflash.serving.device import device_flags, tiny_flags
from sglang_dflash.training import smollm2

NAMES = ("smollm2", *PAIRS)
_PER_KIND = 2


@dataclass(frozen=True, slots=True)
class Question:
    """`name` stands for it in the table."""

    name: str
    prompt: str


# Written for this page: none of them is of a test set or of the draft's training data.
REAL_QUESTIONS = (
    Question("apples", "A farmer has 12 boxes with 8 apples in each. He sells 30 apples. How many apples are left?"),
    Question("train", "A train travels 60 miles in one hour. How far does it travel in 3 hours and 30 minutes?"),
    Question("vowels", "Write a Python function that counts the vowels in a string."),
    Question("largest", "Write a Python function that returns the largest number in a list without using max()."),
    Question("tea", "Explain how to make a good cup of green tea."),
    Question("rain", "Why does it rain? Explain it to a child."),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A pair, how it is served, and what it is asked.

    Fields:
        name: what the server calls it.
        flags: of both servers, without the models.
        environment: of both servers.
    """

    name: str
    target: Path
    draft: Path
    questions: Sequence[Question]
    flags: Sequence[str]
    environment: Mapping[str, str]

    def arms(self) -> tuple[list[str], list[str]]:
        """Flags of the server with speculation off, and of the one with DFLASH."""
        named = ["--model-path", str(self.target), "--served-model-name", self.name, "--log-level", "warning"]
        off = [*device_flags(), *self.flags, *named]
        return off, [*off, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(self.draft)]


def embedded(name: str) -> Shown:
    """A pair of this package, which knows a small language of its own; one thread computes."""
    target, draft = PAIRS[name]
    kinds = ("code", "arithmetic", "chat")
    questions = [Question(p.id, p.prompt) for kind in kinds for p in held_out_prompts(kind)[:_PER_KIND]]
    return Shown(name, target, draft, questions, tiny_flags(16384), TINY_ENVIRONMENT)


def fetched(say: Callable[[str], None]) -> Shown:
    """SmolLM2-135M-Instruct with this package's draft; all threads compute.

    Raises:
        ValueError: the target cannot be fetched.
    """
    target = smollm2.fetch(smollm2.default_folder(), say)
    return Shown("smollm2", target, smollm2.DRAFT, REAL_QUESTIONS, tiny_flags(16384), {})


def shown(name: str, say: Callable[[str], None]) -> Shown:
    """The pair of that name; the tiny pair in the place of one that cannot be fetched.

    Args:
        name: one of NAMES.
        say: gets a line on each step.
    """
    if name in PAIRS:
        return embedded(name)
    try:
        return fetched(say)
    except ValueError as error:
        say(f"{smollm2.NAME} is not here: {error}")
        say("The tiny pair of this package is shown in its place. It knows only a small language of its own.")
        return embedded("tiny")
