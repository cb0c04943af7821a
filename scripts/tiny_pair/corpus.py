"""The seeded data: training examples, held-out prompts that share no answer with them, library text."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path

from .arithmetic import arithmetic_example
from .chat import chat_example
from .snippets import code_example
from .wording import Example

KINDS: dict[str, Callable[[random.Random], Example]] = {
    "arithmetic": arithmetic_example,
    "code": code_example,
    "chat": chat_example,
}
_SHARES = (0.42, 0.3, 0.28)
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


def make_heldout(seed: int, per_kind: int) -> list[Example]:
    """`per_kind` examples of each kind, no two with the same prompt, answer or key."""
    heldout: list[Example] = []
    for kind, make in KINDS.items():
        rng = random.Random(f"heldout-{seed}-{kind}")
        seen: set[str] = set()
        chosen: list[Example] = []
        while len(chosen) < per_kind:
            example = make(rng)
            if not seen & {example.prompt, example.answer, example.key}:
                seen |= {example.prompt, example.answer, example.key}
                chosen.append(example)
        heldout += chosen
    return heldout


def make_training(seed: int, count: int, heldout: list[Example]) -> list[Example]:
    """`count` examples in a fixed mixture; none has a prompt, an answer or a key of a held-out one."""
    rng = random.Random(f"training-{seed}")
    closed = {text for example in heldout for text in (example.prompt, example.answer, example.key)}
    makers = list(KINDS.values())
    examples: list[Example] = []
    while len(examples) < count:
        example = rng.choices(makers, _SHARES)[0](rng)
        if not closed & {example.prompt, example.answer, example.key}:
            examples.append(example)
    return examples


def shared_answers(answers: list[str], heldout: list[Example]) -> list[str]:
    """The held-out answers that also stand in `answers`: the data is sound only when there are none."""
    known = set(answers)
    return [example.answer for example in heldout if example.answer in known]


def library_text() -> list[str]:
    """Sources of the running Python's standard library, one string a module."""
    sources = []
    for name in _LIBRARY:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            sources.append(Path(spec.origin).read_text(encoding="utf-8"))
    return sources


def write_heldout(path: Path, heldout: list[Example]) -> None:
    """One JSON line a prompt: id, kind, prompt, reference."""
    numbers = dict.fromkeys(KINDS, 0)
    with path.open("w", encoding="utf-8") as file:
        for example in heldout:
            row = {
                "id": f"{example.kind}-{numbers[example.kind]:02d}",
                "kind": example.kind,
                "prompt": example.prompt,
                "reference": example.answer,
            }
            numbers[example.kind] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
