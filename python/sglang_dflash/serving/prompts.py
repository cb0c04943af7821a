"""Reads prompt files, in one dialect for every command: JSONL in UTF-8, one session per line, or what else
`rows_of` takes. Its fields:

    id                    names the session in reports; unique in the file. Default: line-N.
    prompt                a string: one user message.
    text                  a string that gets no chat template.
    messages              a chat for one request: objects with `role` (system, user or assistant) and `content` (a
                          string). Messages after the last user message are dropped; earlier answers are context.
    turns                 a list of strings: consecutive user messages; the server answers each before the next.
    input_ids             a list of token ids, sent as they are.
    system                a system message before `prompt`, `messages` or `turns`.
    chat_template_kwargs  keyword arguments of the chat template.

A line has exactly one of `prompt`, `text`, `messages`, `turns` and `input_ids`. Other fields, such as an answer, are
ignored. docs/prompt-files.md says the same to users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sglang_dflash.serving.rows import check_text, object_of, rows_of
from sglang_dflash.serving.sessions import Message, Session, Turn
from sglang_dflash.serving.tiny_pair import held_out_prompts, held_out_prompts_in_turn

CONTENTS = ("prompt", "text", "messages", "turns", "input_ids")
ROLES = ("system", "user", "assistant")
T = TypeVar("T")


def read_prompts(path: Path, flag: str, most: int | None = None) -> list[Session]:
    """The first `most` sessions of a file, in its order; None for all.

    Args:
        flag: the flag that names the file, for errors.

    Raises:
        ValueError: the file does not exist, holds nothing, or a line is wrong; the message names flag, file and line.
    """
    lines: dict[str, int] = {}

    def session(row: dict[str, Any], number: int) -> Session:
        made = session_of(row, number)
        if made.id in lines:
            raise ValueError(f"the id {made.id} is already used in line {lines[made.id]}.")
        lines[made.id] = number
        return made

    found = list(islice(read_rows(path, flag, session), most))
    if not found:
        raise ValueError(f"{flag} {path} has no prompts; it must have at least one.")
    return found


def read_rows(path: Path, flag: str, take: Callable[[dict[str, Any], int], T]) -> Iterator[T]:
    """What `take` makes of each row's JSON object and number, as `rows_of` finds them.

    Raises:
        ValueError: no such file, none that `rows_of` reads, no JSON object, or `take` refuses one. The message names
            flag and line.
    """
    if not path.is_file():
        raise ValueError(f"{flag} is {path}; it must be an existing JSONL file.")
    named = f"{flag} {path}"
    for number, place, text in rows_of(path, named):
        try:
            taken = take(object_of(text), number)
        except ValueError as error:
            raise ValueError(f"{named}, {place}: {error}") from None
        yield taken


def bundled_prompts(kind: str | None = None) -> list[Session]:
    """Held-out questions of the embedded pair, of one of KINDS; None: of all of them in turn."""
    prompts = held_out_prompts_in_turn() if kind is None else held_out_prompts(kind)
    return [Session.of_texts(prompt.id, [prompt.prompt]) for prompt in prompts]


def session_of(row: dict[str, Any], number: int) -> Session:
    """The session of line `number`; raises ValueError with a sentence on what is wrong."""
    found = [key for key in CONTENTS if key in row]
    if len(found) != 1:
        raise ValueError(f"it has the fields {sorted(row)}; it must have exactly one of {', '.join(CONTENTS)}.")
    (kind,) = found
    for key in (kind, "id", "system", "chat_template_kwargs"):
        check_text(row.get(key), key)
    id, system, template = row.get("id", f"line-{number}"), row.get("system", ""), row.get("chat_template_kwargs", {})
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise ValueError(f"id is {id!r}; it must be a string or an integer.")
    if not isinstance(system, str):
        raise ValueError(f"system is {system!r}; it must be a string.")
    if not isinstance(template, dict):
        raise ValueError(f"chat_template_kwargs is {template!r}; it must be an object.")
    if system and kind in ("input_ids", "text"):
        kinds = {"input_ids": "token ids are sent as they are", "text": "a text gets no chat template"}
        raise ValueError(f"it has both `system` and `{kind}`; {kinds[kind]}.")
    if kind == "input_ids":
        return Session(str(id), (Turn(()),), template, input_ids=_token_ids(row[kind]))
    first = (Message("system", system),) if system else ()
    if kind == "messages":
        return Session(str(id), (Turn((*first, *_chat(row[kind], system))),), template)
    texts = row[kind] if kind == "turns" else [row[kind]]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{kind} must be a non-empty {'list of non-empty strings' if kind == 'turns' else 'string'}.")
    if kind == "text":
        return Session(str(id), (Turn(()),), template, text=texts[0])
    return Session(str(id), Session.of_texts("", texts, system).turns, template)


def _token_ids(content: Any) -> tuple[int, ...]:
    valid = isinstance(content, list) and content
    if not valid or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in content):
        raise ValueError("input_ids must be a non-empty list of integers that are at least 0.")
    return tuple(content)


def _chat(content: Any, system: str) -> list[Message]:
    """The messages up to the last user message."""
    if not isinstance(content, list) or not all(isinstance(message, dict) for message in content):
        raise ValueError("messages must be a list of objects with role and content.")
    chat = [Message(message.get("role"), message.get("content")) for message in content]
    for message in chat:
        if message.role not in ROLES:
            raise ValueError(
                f"a message has the role {message.role!r}; it must be one of {', '.join(ROLES)} "
                "(give a tool result as a user message)."
            )
        if not isinstance(message.content, str):
            raise ValueError(f"the content of a message is {message.content!r}; it must be a string.")
    if system and chat and chat[0].role == "system":
        raise ValueError("it has both `system` and messages that begin with a system message.")
    while chat and chat[-1].role != "user":
        chat.pop()
    if not chat:
        raise ValueError("messages must contain a user message.")
    return chat
