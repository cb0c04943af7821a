"""The rows of a file of JSON objects: JSONL, or one JSON document; as text or gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_BOM = "\ufeff"  # some editors begin a file with it; it is within a file that was put together


class Row(NamedTuple):
    """One row, not yet read as JSON. `place`: "line 3", or "item 3" of a file that is one JSON document."""

    number: int
    place: str
    text: str


def rows_of(path: Path, named: str) -> Iterator[Row]:
    """All rows but empty lines, 1 first. One JSON document is a file whose first line is "{" or begins with "[".

    Args:
        named: what errors call the file.

    Raises:
        ValueError: it is Parquet, damaged gzip, not UTF-8, or one JSON document that is not valid.
    """
    number, begun = 0, False
    try:
        with path.open("rb") as file:
            begin = file.read(4)
        if begin == b"PAR1":
            raise ValueError(f"{named} is a Parquet file; it must be JSONL.")
        opened = gzip.open if begin.startswith(b"\x1f\x8b") else open
        # Lines of bytes: str.splitlines() also splits at separators that JSON allows within strings.
        with opened(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode().strip().lstrip(_BOM)
                if not text:
                    continue
                if not begun and (text == "{" or text.startswith("[")):
                    document = json.loads(text + "\n" + file.read().decode())
                    for item, one in enumerate(document if isinstance(document, list) else [document], start=1):
                        yield Row(item, f"item {item}", json.dumps(one))
                    return
                begun = True
                yield Row(number, f"line {number}", text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{named}, line {number}: it is not UTF-8 text: {error}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{named} begins as one JSON document, which is not valid: {error}.") from None
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{named} cannot be read: {error}.") from None


def object_of(text: str) -> dict[str, Any]:
    """The JSON object of a row; raises ValueError if it is none."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}.") from None
    if not isinstance(row, dict):
        raise ValueError("it must be a JSON object.")
    return row


def check_text(value: Any, field: str) -> None:
    """Raises ValueError if a text in `value` has a lone surrogate, which no tokenizer reads; names its field.

    JSON writes a character beyond U+FFFF as two surrogates, such as \\ud83d\\ude00. A text that was cut between them
    has one alone.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{field} has half a character, \\u{ord(value[error.start]):04x}, behind its first {error.start} "
                "characters: give the whole pair of surrogates, or leave it out."
            ) from None
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_text(key, f"a key in {field}")
            check_text(one, f"{field}.{key}")
    elif isinstance(value, Sequence):
        for place, one in enumerate(value):
            check_text(one, f"{field}[{place}]")
