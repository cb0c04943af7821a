"""The questions that `doctor URL` asks: of each kind a few, in words that no test set has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sglang_dflash.serving import KINDS, PAIRS, held_out_prompts
from sglang_dflash.serving.prompts import read_prompts
from sglang_dflash.serving.sessions import Message

PER_KIND = 3
YOURS = "yours"
MOST_OF_YOURS = 12
TEXTS: Mapping[str, Sequence[str]] = {
    "chat": (
        "Explain to a friend how to make a good cup of green tea.",
        "My neighbour plays loud music at night. Write a short and friendly letter to him.",
        "Why is the sky blue, and why is it red in the evening? Explain it to a child.",
    ),
    "code": (
        "Write a Python function that counts the vowels of a string, with a docstring and two examples.",
        "Write a Python class for a bank account with deposit, withdraw and a history of both.",
        "Write a JavaScript function that returns the largest number of an array without Math.max.",
    ),
    "sums": (
        "A farmer fills 12 boxes with 8 apples each and sells 30 apples. How many are left? Show your steps.",
        "A train goes 60 miles in an hour. How far does it go in 3 hours and 30 minutes? Show your steps.",
        "A shirt costs 40 coins and is sold at 15 % less. What do three such shirts cost? Show your steps.",
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """`kind`: chat, code, sums; of an embedded pair one of KINDS; or YOURS."""

    kind: str
    messages: tuple[Message, ...]


def questions_for(model_path: str, rng: Random, prompts: Path | None = None) -> list[Question]:
    """
    Questions begin with a number of their own, so that no prefix cache knows them from an earlier run. Those of an
    embedded pair are drawn from its 600 held-out prompts, because its target knows nothing else.

    Args:
        model_path: the target's, as the server says it.
        prompts: a prompt file, whose first MOST_OF_YOURS prompts are asked instead.

    Raises:
        ValueError: the file cannot be read, or holds token ids or texts without a chat.
    """
    if prompts is not None:
        sessions = read_prompts(prompts, "--prompts", MOST_OF_YOURS)
        if any(not session.turns[0].messages for session in sessions):
            raise ValueError(f"--prompts {prompts} has input_ids or text; doctor asks prompt, messages or turns.")
        return [Question(YOURS, session.turns[0].messages) for session in sessions]
    if model_path in {str(target) for target, _ in PAIRS.values()}:
        drawn = {kind: rng.sample(held_out_prompts(kind), PER_KIND) for kind in KINDS}
        return [_question(kind, one.prompt) for kind, ones in drawn.items() for one in ones]
    number = rng.randrange(1000, 10_000)
    return [_question(kind, f"Question {number}: {text}") for kind, texts in TEXTS.items() for text in texts]


def _question(kind: str, text: str) -> Question:
    return Question(kind, (Message("user", text),))
