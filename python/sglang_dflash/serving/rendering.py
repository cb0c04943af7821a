"""Turns chats into token ids with the target's own tokenizer, so that every arm gets the same ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.serving.errors import sentence
from sglang_dflash.serving.messages import as_served, render, tools_of
from sglang_dflash.serving.sessions import Message, Session, as_openai


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the marks that a tokenizer adds to its vocabulary: no ordinary text has them."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


class Renderer:
    """Holds the tokenizer and the chat template's keyword arguments."""

    def __init__(self, model: str, template: dict[str, Any], flag: str = "--target-model") -> None:
        """
        Args:
            model: the target: a folder, or a hub name that is cached or can be fetched.
            template: keyword arguments of the chat template, such as enable_thinking.
            flag: the flag that names the model, for errors.

        Raises:
            ValueError: the model has no tokenizer or no chat template.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer  # takes seconds, which --help must not

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag} {model}: its tokenizer cannot be read: {sentence(error, 200)}") from None
        if not self.tokenizer.chat_template:
            raise ValueError(f"{flag} {model}: its tokenizer has no chat template, which the prompts need.")
        self.template = template

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The prompt for the next answer, as token ids: those that SGLang's chat endpoint makes.

        Args:
            messages, tools: as OpenAI's API has them.
            template: more keyword arguments of the chat template; they override those of the run.

        Raises:
            ValueError: the template rejects the chat.
        """
        given = {**self.template, **template, **tools_of({"tools": list(tools)})}
        try:
            text = render(self.tokenizer, as_served(messages), True, **given)
        except ValueError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"The target's chat template gets a chat with the roles {roles}: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def plain(self, text: str) -> list[int]:
        """A text without a chat template, as token ids."""
        return list(self.tokenizer(text)["input_ids"])

    def count(self, text: str) -> int:
        """Number of tokens of a text, without a chat template."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])


def prompt_of(session: Session, messages: Sequence[Message], renderer: Renderer) -> list[int]:
    """The prompt for the next answer to `messages` of a session, as token ids."""
    if session.text:
        return renderer.plain(session.text)
    return list(session.input_ids) or renderer(as_openai(messages), session.template)
