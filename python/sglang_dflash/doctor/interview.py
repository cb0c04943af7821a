"""Asks a running server its questions in the ways that may differ in acceptance: alone, again, in a long chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from sglang_dflash.doctor.questions import PER_KIND, Question
from sglang_dflash.serving import Client, Completion, ServerError, greedy_body
from sglang_dflash.serving.sessions import Message

ALONE, AGAIN, SECOND_TURN = "alone", "the same prompt again", "a second turn"
LONG, LONG_AGAIN, OTHER_MODE, SAMPLED = "a long chat", "the long chat again", "the other thinking mode", "temperature 1"
NEAR_END = 16
"""Tokens that a long prompt leaves of the longest that the server takes, beside the answer's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer. `question`: its place in the list."""

    way: str
    kind: str
    question: int
    answer: Completion

    @property
    def cached(self) -> bool:
        """Whether the prefix cache had the most of its prompt."""
        return (self.answer.cached_tokens or 0) > self.answer.prompt_tokens / 2


def switched(on: bool) -> dict[str, Any]:
    """Keyword arguments of the chat template; families name the switch in two ways."""
    return {"enable_thinking": on, "thinking": on}


@dataclass(slots=True)
class Interview:
    """Asks one request at a time.

    Fields:
        max_new_tokens: of an answer.
        long_tokens: of a long prompt, about.
        on_done: called after each answer.
        thinks: whether the chat template thinks by default; None: it has no switch for it.
        ids: the prompt of each question alone.
    """

    client: Client
    questions: Sequence[Question]
    max_new_tokens: int
    long_tokens: int
    on_done: Callable[[], None]
    thinks: bool | None = None
    asked: list[Asked] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)

    def count(self) -> int:
        """Requests of the whole interview."""
        firsts, seconds, thirds = (len(self._third(number)) for number in range(3))
        other_mode = 0 if self.thinks is None else firsts
        return len(self.questions) + firsts + min(firsts, seconds) + 2 * thirds + other_mode + seconds

    def hold(self) -> list[Asked]:
        """
        Raises:
            ServerError: the server refuses or fails a plain question.
            httpx.HTTPError: it does not answer.
        """
        for place, question in enumerate(self.questions):
            self.ids[place] = self._render(question.messages)
            answer = self._ask(ALONE, place, self.ids[place]).answer
            if not answer.answered:
                raise ServerError(f"The server answers no question: {answer.refusal or answer.failure}")
        for place in self._third(0):
            self._ask(AGAIN, place, self.ids[place])
        for first, place in zip(self._third(0), self._third(1), strict=False):
            turns = [*self._turn(first), *self.questions[place].messages]
            self._ask(SECOND_TURN, place, self._render(turns))
        prompts = {place: self._long(place) for place in self._third(2)}
        for way in (LONG, LONG_AGAIN):
            for place, ids in prompts.items():
                self._ask(way, place, ids)
        for place in self._third(0) if self.thinks is not None else ():
            self._ask(OTHER_MODE, place, self._render(self.questions[place].messages, switched(not self.thinks)))
        for place in self._third(1):
            self._ask(SAMPLED, place, self.ids[place], temperature=1.0)
        return self.asked

    def _third(self, number: int) -> list[int]:
        """Every third question from that number on: one of each kind, as they come by kind."""
        return list(range(len(self.questions)))[number::PER_KIND] or [len(self.questions) - 1]

    def _ask(self, way: str, place: int, ids: list[int], **sampling: Any) -> Asked:
        answer = self.client.ask(greedy_body(ids, max_new_tokens=self.max_new_tokens, **sampling))
        self.asked.append(Asked(way, self.questions[place].kind, place, answer))
        self.on_done()
        return self.asked[-1]

    def _turn(self, place: int) -> list[Message]:
        """A question and its answer alone."""
        text = next(one.answer.text for one in self.asked if (one.way, one.question) == (ALONE, place))
        return [*self.questions[place].messages, Message("assistant", text)]

    def _long(self, place: int) -> list[int]:
        """The question behind a chat of all the others, again and again until it is long."""
        chat: list[Message] = []
        ids = self.ids[place]
        for other in cycle([one for one in range(len(self.questions)) if one != place] or [place]):
            longer = [*chat, *self._turn(other)]
            found = self._render([*longer, *self.questions[place].messages])
            if len(found) > self.long_tokens or len(found) <= len(ids):  # the latter: a template that cuts chats
                return ids
            chat, ids = longer, found
        return ids

    def _render(self, messages: Sequence[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        return render(self.client, messages, template)


def render(client: Client, messages: Sequence[Message], template: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids by the server's chat template; of the bare texts where it has none."""
    try:
        return client.tokenize(messages, dict(template) if template else None)
    except ValueError:
        return client.tokenize("\n".join(message.content for message in messages))


def thinks_by_default(client: Client, messages: Sequence[Message]) -> bool | None:
    """Finds the switch by what it changes in a prompt's ids; None: there is none."""
    on, off = (render(client, messages, switched(value)) for value in (True, False))
    return None if on == off else render(client, messages) == on


def longest_prompt(max_prompt_len: int, max_new_tokens: int, asked: int) -> int:
    """
    Args:
        max_prompt_len: the server's; 0: unknown.
        asked: tokens of a long prompt that the user wants.
    """
    room = max_prompt_len - max_new_tokens - NEAR_END
    return min(asked, room) if max_prompt_len else asked
