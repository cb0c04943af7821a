"""The seeded data: examples by kind, held-out prompts that no training example shares, library text."""

import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from tools.tiny_pair.arithmetic import arithmetic_example
from tools.tiny_pair.chat import chat_example
from tools.tiny_pair.snippets import code_example
from tools.tiny_pair.wording import Example

KINDS: dict[str, Callable[[random.Random], Example]] = {
    "arithmetic": arithmetic_example,
    "code": code_example,
    "chat": chat_example,
}
SHARES = {"arithmetic": 0.5, "code": 0.22, "chat": 0.28}
_TRIES = 200
_LIBRARY = (
    "abc", "argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "collections",
    "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis", "enum",
    "fileinput", "fnmatch", "fractions", "functools", "getopt", "gettext", "glob", "graphlib", "gzip",
    "hashlib", "heapq", "hmac", "imaplib", "inspect", "json", "keyword", "linecache", "locale", "logging",
    "mailbox", "mimetypes", "numbers", "operator", "optparse", "pathlib", "pickle", "platform",
    "plistlib", "pprint", "profile", "queue", "quopri", "random", "re", "reprlib", "sched", "secrets",
    "selectors", "shelve", "shlex", "shutil", "signal", "smtplib", "socket", "socketserver", "statistics",
    "string", "stringprep", "struct", "subprocess", "symtable", "tarfile", "tempfile", "textwrap",
    "threading", "timeit", "token", "tokenize", "trace", "traceback", "types", "typing", "urllib.parse",
    "uuid", "warnings", "wave", "weakref", "zipfile",
)  # fmt: skip


def _texts(example: Example) -> set[str]:
    return {example.prompt, example.answer, example.key}


def closed_texts(heldout: list[Example]) -> set[str]:
    """Every prompt, answer and key of `heldout`; no training example may contain one of them."""
    return {text for example in heldout for text in _texts(example)}


def fresh_example(rng: random.Random, kind: str, closed: Set[str]) -> Example:
    """An example of `kind` that has none of the `closed` texts."""
    for _ in range(_TRIES):
        example = KINDS[kind](rng)
        if closed.isdisjoint(_texts(example)):
            return example
    raise RuntimeError(f"No new {kind} example in {_TRIES} tries: ask for fewer held-out prompts.")


def make_heldout(seed: int, per_kind: int) -> list[Example]:
    """`per_kind` examples of each kind, no two with the same prompt, answer or key."""
    heldout: list[Example] = []
    seen: set[str] = set()
    for kind in KINDS:
        rng = random.Random(f"heldout-{seed}-{kind}")
        for _ in range(per_kind):
            heldout.append(fresh_example(rng, kind, seen))
            seen |= _texts(heldout[-1])
    return heldout


def shared_answers(answers: Iterable[str], heldout: list[Example]) -> list[str]:
    """The held-out answers that also occur in `answers`; there must be none."""
    known = set(answers)
    return [example.answer for example in heldout if example.answer in known]


def library_text() -> list[str]:
    """Sources of the running Python's standard library, one string per module."""
    sources = []
    for name in _LIBRARY:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            sources.append(Path(spec.origin).read_text(encoding="utf-8"))
    return sources


def write_heldout(path: Path, heldout: list[Example]) -> None:
    """Writes one JSON line per prompt: id, kind, prompt, reference."""
    numbers = dict.fromkeys(KINDS, 0)
    with path.open("w", encoding="utf-8") as file:
        for example in heldout:
            row = {
                "id": f"{example.kind}-{numbers[example.kind]:03d}",
                "kind": example.kind,
                "prompt": example.prompt,
                "reference": example.answer,
            }
            numbers[example.kind] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
