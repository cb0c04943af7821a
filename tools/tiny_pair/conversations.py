"""Training conversations: turns of the three kinds in many lengths, with system messages and tool results."""

import random
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from sglang_dflash.workloads.script import tool_response
from tools.tiny_pair.corpus import SHARES, closed_texts, fresh_example
from tools.tiny_pair.wording import NAMES, THINGS, Example, Teller, vary

Message = dict[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a patient tutor for sums and Python.",
    "Answer in a friendly way.",
    "You help beginners with numbers and code.",
    "Be brief and clear.",
    "You are Tiny, a small language model.",
    "Help the user. Show your work where it matters.",
    "You work in a school library.",
    "Talk like a kind neighbor.",
    "Keep to the question and be polite.",
    "You know a little about sums, a little about code and no more.",
    "The user is a student. Explain things simply.",
    "You are on duty at the help desk.",
    "Today is a quiet day. Take your time.",
)
_SINGLE, _LONG = 0.5, 0.065
_SYSTEM, _TOOL, _SAME_KIND = 0.25, 0.03, 0.4
_LONG_CHARS = 2600  # about 1000 tokens: numbers and code take more tokens per character than prose


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of one conversation; `kinds` has one entry for each assistant message."""

    messages: list[Message]
    kinds: list[str]

    def answers(self) -> list[str]:
        """The assistant's messages, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]


def pair_of(example: Example) -> list[Message]:
    """The example as two messages."""
    return [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer}]


def _tool_turn(rng: random.Random) -> tuple[list[Message], list[str]]:
    """A question that a tool result answers; in some, the assistant first says that it will look."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(("shed", "shop", "attic", "box"))
    number = rng.randint(2, 99)
    ask, result, use = rng.choice(
        (
            (
                f"[How many {thing} are in the {place}?|Please count the {thing} in the {place}.]",
                rng.choice((f"{number}", f"{thing}: {number}", f"count = {number}")),
                f"there are {number} {thing} in the {place}",
            ),
            (
                f"[How old is {name}?|Can you find the age of {name}?]",
                rng.choice((f"{number}", f"{name}: {number}", f"age = {number}")),
                f"{name} is {number} years old",
            ),
            (
                f"[Where does {name} keep the {thing}?|Look up where the {thing} of {name} are.]",
                rng.choice((f"{place}", f"{name} keeps them in the {place}")),
                f"{name} keeps the {thing} in the {place}",
            ),
        )
    )
    user: Message = {"role": "user", "content": vary(rng, ask)}
    messages, teller = [user], Teller(rng, [name, thing])
    if rng.random() < 0.4:
        look = "[Let me look|I will check|One moment|I shall find out|Just a second][.|, please.| for you.| at once.]"
        messages.append({"role": "assistant", "content": teller.tell(look)})
    said = teller.tell("[I looked|The tool says|It says here|As far as I see|I just checked|By the list][:| now:] ")
    close = teller.tell("[.|, as of now.|. Is that enough?|. Shall we go on?|. I hope that helps.|. Good to know.]")
    messages += [
        {"role": "user", "content": tool_response(result)},
        {"role": "assistant", "content": f"{said}{use}{close}"},
    ]
    return messages, ["chat"] * sum(message["role"] == "assistant" for message in messages)


def make_conversation(rng: random.Random, closed: Set[str], shares: Mapping[str, float]) -> Conversation:
    """One conversation: half have a single turn, most others two to five, a few up to fourteen."""
    kinds, weights = list(shares), list(shares.values())
    length = rng.random()
    long = length < _LONG
    turns = rng.randint(8, 14) if long else 1 if length < _LONG + _SINGLE else rng.randint(2, 5)
    only = rng.choices(kinds, weights)[0] if rng.random() < _SAME_KIND else None
    messages: list[Message] = []
    done: list[str] = []
    if rng.random() < _SYSTEM:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    tool_at = rng.randrange(turns) if rng.random() < _TOOL else -1
    for turn in range(turns):
        if turn == tool_at:
            more, their_kinds = _tool_turn(rng)
        else:
            kind = only or rng.choices(kinds, weights)[0]
            more, their_kinds = pair_of(fresh_example(rng, kind, closed)), [kind]
        if long and sum(len(message["content"]) for message in [*messages, *more]) > _LONG_CHARS:
            break
        messages += more
        done += their_kinds
    return Conversation(messages, done)


def _conversations(rng: random.Random, heldout: list[Example], shares: Mapping[str, float]) -> Iterator[Conversation]:
    closed = closed_texts(heldout)
    while True:
        yield make_conversation(rng, closed, shares)


def make_conversations(
    seed: int, count: int, heldout: list[Example], shares: Mapping[str, float] = SHARES
) -> list[Conversation]:
    """`count` conversations for the target; none contains a prompt, an answer or a key of a held-out example."""
    made = _conversations(random.Random(f"training-{seed}"), heldout, shares)
    return [next(made) for _ in range(count)]


def training_prompts(
    seed: int, count: int, heldout: list[Example], shares: Mapping[str, float] = SHARES
) -> list[Conversation]:
    """`count` conversations for the draft's training; the target regenerates their assistant messages.

    Their seed differs from the target's training data, so they are new to the target.
    """
    made = _conversations(random.Random(f"draft-{seed}"), heldout, shares)
    return [next(made) for _ in range(count)]
