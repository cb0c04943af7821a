"""The prompts of a check: bundled ones, or the user's own file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.serving import Client, held_out_prompts_in_turn

KEYS = ("text", "messages", "input_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, before it is tokenized.

    Fields:
        id: names it in reports.
        kind: which of KEYS `content` is.
        content: a text that gets no chat template, a chat's messages, or token ids.
        template: keyword arguments of the chat template.
    """

    id: str
    kind: str
    content: Any
    template: dict[str, Any]

    def token_ids(self, client: Client) -> list[int]:
        """Token ids by the server's own tokenizer and chat template.

        Raises:
            ValueError: the server refuses the prompt.
        """
        if self.kind == "input_ids":
            return list(self.content)
        body: dict[str, Any] = {"prompt": self.content}
        if self.kind == "messages":
            body = {"messages": self.content, **({"chat_template_kwargs": self.template} if self.template else {})}
        response = client.post("/tokenize", body)
        if response.status_code != 200:
            raise ValueError(f"The server cannot tokenize prompt {self.id}: {' '.join(response.text.split())}")
        return list(response.json()["tokens"])


def bundled_prompts(limit: int) -> list[Prompt]:
    """Held-out questions of the embedded pair, the three kinds in turn."""
    prompts = held_out_prompts_in_turn()[:limit]
    return [Prompt(p.id, "messages", [{"role": "user", "content": p.prompt}], {}) for p in prompts]


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """Reads a JSONL file; every row has one of KEYS, optionally `id` and, with messages, `chat_template_kwargs`.

    Raises:
        ValueError: a line cannot be read; the message names it.
    """
    if not path.is_file():
        raise ValueError(f"--prompts is {path}; it must be an existing JSONL file.")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip() and len(prompts) < limit:
            try:
                prompts.append(_prompt(json.loads(line), number))
            except ValueError as error:
                raise ValueError(f"--prompts {path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"--prompts {path} holds no prompt.")
    return prompts


def _prompt(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError("it must be a JSON object.")
    found = [key for key in KEYS if key in row]
    if len(found) != 1:
        raise ValueError(f"it has the keys {sorted(row)}; it must have exactly one of {', '.join(KEYS)}.")
    (kind,) = found
    content = row[kind]
    kinds = {"text": str, "messages": dict, "input_ids": int}
    parts = [content] if kind == "text" else content if isinstance(content, list) else []
    if not content or not parts or not all(isinstance(part, kinds[kind]) for part in parts):
        shape = {"text": "a text", "messages": "a list of messages", "input_ids": "a list of token ids"}[kind]
        raise ValueError(f"{kind} must be {shape}, and not empty.")
    return Prompt(str(row.get("id", f"line-{number}")), kind, content, row.get("chat_template_kwargs") or {})
