"""The files that hold rows: lines, one document, gzip, marks and ends of lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sglang_dflash.serving.prompts import read_rows

ROWS = [{"prompt": "Hi"}, {"prompt": "你好 \u2028 😀"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.removesuffix(b"\n"),
        LINES.replace(b"\n", b"\r\n"),
        LINES.replace(b"\n", b"\n\n \n"),
        b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\n\xef\xbb\xbf"),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent="\t").encode(),
        gzip.compress(LINES, mtime=0),
        gzip.compress(json.dumps(ROWS).encode(), mtime=0),
    ],
    ids=["lines", "no end", "crlf", "empty", "marks", "array", "indented", "mark and array", "gzip", "gzip array"],
)
def test_rows_are_found(content: bytes, tmp_path: Path) -> None:
    """Fails where a row is lost, split at a separator in its text, or refused for how the file is written."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert list(read_rows(path, "DATA", lambda row, number: row)) == ROWS


def test_one_object_over_several_lines(tmp_path: Path) -> None:
    """Fails where a file that is one conversation is refused."""
    path = tmp_path / "data.json"
    path.write_text(json.dumps(ROWS[1], indent=2))
    assert list(read_rows(path, "DATA", lambda row, number: (number, row))) == [(1, ROWS[1])]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LINES + b"\n{", ", line 4: it is not valid JSON: "),
        (b'[{"prompt": "Hi"},\n 3]', ", item 2: it must be a JSON object."),
        (b'{\n"prompt": "Hi"', " begins as one JSON document, which is not valid: "),
        (b"[1]\n[2]\n", " begins as one JSON document, which is not valid: Extra data: line 2"),
        (LINES + b"\xff", ", line 3: it is not UTF-8 text: "),
        (b"PAR1\x00", " is a Parquet file; it must be JSONL."),
        (gzip.compress(LINES, mtime=0)[:-9], " cannot be read: "),
        (gzip.compress(LINES, mtime=0)[:-8] + b"\0" * 8, " cannot be read: CRC check failed"),
        (gzip.compress(LINES, mtime=0)[:10] + b"\7" * 40, " cannot be read: Error -3"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    """Fails where a wrong file gives a traceback, or a sentence without flag, file and line."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        list(read_rows(path, "DATA", lambda row, number: row))
    assert str(refused.value).startswith(f"DATA {path}{said}") and str(refused.value).endswith(".")
