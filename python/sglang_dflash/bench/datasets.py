"""Loads sessions from a hub dataset, a JSONL file, or the embedded pair's held-out prompts.

A JSONL file has one session per line. Its fields:

    id                    names the session in reports; unique in the file. Default: line-N.
    prompt                a string: one user message.
    turns                 a list of strings: consecutive user messages; the server answers each before the next.
    messages              a chat for one request: objects with `role` (system, user or assistant) and `content` (a
                          string). Messages after the last user message are dropped; earlier answers are context.
    input_ids             a list of token ids, sent as they are.
    system                a system message before `prompt`, `turns` or `messages`.
    chat_template_kwargs  keyword arguments of the chat template.

A line has exactly one of `prompt`, `turns`, `messages` and `input_ids`. Other fields, such as an answer, are ignored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sglang_dflash.bench.hub_datasets import HUB, hub_rows
from sglang_dflash.bench.sessions import Message, Session, Turn
from sglang_dflash.serving import KINDS, held_out_prompts, held_out_prompts_in_turn

CONTENTS = ("prompt", "turns", "messages", "input_ids")
ROLES = ("system", "user", "assistant")


def load(name: str, count: int | None, seed: int) -> list[Session]:
    """The first `count` sessions of a dataset, in an order that depends only on `name` and `seed`.

    A hub dataset is shuffled with `seed`: a few sessions are a random sample of it, and the first ones of a larger
    sample. A file and the bundled prompts keep their order. There are never more sessions than the dataset has,
    because a repeated prompt would hit the prefix cache.

    Args:
        name: a key of HUB, the path of a .jsonl file, one of KINDS, or `tiny`.
        count: maximum number of sessions; None for all.

    Raises:
        ValueError: the dataset is unknown, cannot be loaded here, or has wrong content. The message is one sentence.
    """
    if count is not None and count < 1:
        raise ValueError(f"--dataset-name {name}: {count} prompts requested; the number must be at least 1.")
    if name.endswith(".jsonl"):
        return list(islice(_file_sessions(Path(name)), count)) or _refuse_empty(name)
    if name in HUB:
        return _hub_sessions(name, count, seed)
    if name in KINDS or name == "tiny":
        return _bundled_sessions(name)[:count]
    raise ValueError(
        f"--dataset-name {name} is unknown; it must be one of {', '.join((*HUB, *KINDS, 'tiny'))}, or a file whose "
        "name ends in .jsonl."
    )


def _refuse_empty(name: str) -> list[Session]:
    raise ValueError(f"--dataset-name {name} has no prompts; it must have at least one.")


def _bundled_sessions(name: str) -> list[Session]:
    prompts = held_out_prompts_in_turn() if name == "tiny" else held_out_prompts(name)
    return [Session.of_texts(prompt.id, [prompt.prompt]) for prompt in prompts]


def _hub_sessions(name: str, count: int | None, seed: int) -> list[Session]:
    rows = hub_rows(name)
    # Not random.sample: its first picks depend on the sample size.
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    if not order:
        _refuse_empty(name)
    try:
        return [Session.of_texts(f"{name}-{index}", HUB[name].texts(rows[index])) for index in order[:count]]
    except KeyError as error:
        raise ValueError(
            f"--dataset-name {name}: {HUB[name].repo} has no column {error}; give the prompts as a .jsonl file."
        ) from None


def _file_sessions(path: Path) -> Iterator[Session]:
    if not path.is_file():
        raise ValueError(f"--dataset-name {path}: the file does not exist.")
    lines: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:  # splitlines() would also split a line at U+2028
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                session = _session(json.loads(line), number)
                if session.id in lines:
                    raise ValueError(f"the id {session.id} is already used in line {lines[session.id]}.")
                lines[session.id] = number
                yield session
        except UnicodeDecodeError as error:
            raise ValueError(f"--dataset-name {path} is not UTF-8 text: {error}.") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"--dataset-name {path}, line {number}: it is not valid JSON: {error}.") from None
        except ValueError as error:
            raise ValueError(f"--dataset-name {path}, line {number}: {error}") from None


def _session(row: Any, number: int) -> Session:
    if not isinstance(row, dict):
        raise ValueError("it must be a JSON object.")
    found = [key for key in CONTENTS if key in row]
    if len(found) != 1:
        raise ValueError(f"it has the fields {sorted(row)}; it must have exactly one of {', '.join(CONTENTS)}.")
    (kind,) = found
    id, system, template = row.get("id", f"line-{number}"), row.get("system", ""), row.get("chat_template_kwargs", {})
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise ValueError(f"id is {id!r}; it must be a string or an integer.")
    if not isinstance(system, str):
        raise ValueError(f"system is {system!r}; it must be a string.")
    if not isinstance(template, dict):
        raise ValueError(f"chat_template_kwargs is {template!r}; it must be an object.")
    if kind == "input_ids":
        return Session(str(id), (Turn(()),), template, _token_ids(row[kind], system))
    first = (Message("system", system),) if system else ()
    if kind == "messages":
        return Session(str(id), (Turn((*first, *_chat(row[kind], system))),), template)
    texts = row[kind] if kind == "turns" else [row[kind]]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{kind} must be a non-empty {'list of non-empty strings' if kind == 'turns' else 'string'}.")
    return Session(str(id), Session.of_texts("", texts, system).turns, template)


def _token_ids(content: Any, system: str) -> tuple[int, ...]:
    valid = isinstance(content, list) and content
    if not valid or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in content):
        raise ValueError("input_ids must be a non-empty list of integers that are at least 0.")
    if system:
        raise ValueError("it has both `system` and `input_ids`; token ids are sent as they are.")
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
