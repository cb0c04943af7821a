"""Every combination of pages, chunks, overlap, widths and compiled forwards: `scripts/test.sh --matrix`.

`test_equality.py` and `test_lifecycle.py` cover each of these settings once; this file covers their combinations. The
table goes to `build/matrix.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from arms import COMPILED, EVERY_WIDTH, FULL, MAX_NEW_TOKENS, PLAIN, POOL, SPECULATE, Baseline

from equality import assert_equal_tokens, steps_by_accept_len, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING

pytestmark = [pytest.mark.server, pytest.mark.matrix]
TABLE = Path(__file__).parents[2] / "build" / "matrix.md"
FLAGS = {
    "page 1": [],
    "page 16": ["--page-size", "16"],
    "page 16, chunks of 64, mixed": ["--page-size", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk"],
}
OVERLAP = {"no overlap": TINY_ENVIRONMENT, "overlap": TINY_OVERLAPPING}
WIDTHS = {"auto": {}, "whole blocks": FULL, "every width": EVERY_WIDTH}
FORWARDS = {"eager": {}, "compiled": COMPILED}
CELLS = list(product(FLAGS, OVERLAP, WIDTHS, FORWARDS))


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    rows = [
        "| flags | overlap | widths | forwards | requests | tau | steps by accept_len |",
        "|---|---|---|---|---|---|---|",
    ]
    yield rows
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(rows) + "\n")
    print(f"\n{TABLE}:\n" + "\n".join(rows))


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_tokens_equal_speculation_off(
    cell: tuple[str, str, str, str], baseline: Baseline, rows: list[str], tmp_path: Path
) -> None:
    """Fails where one token of any held-out prompt differs under this combination."""
    flags, overlap, widths, forwards = cell
    environment = OVERLAP[overlap] | WIDTHS[widths] | FORWARDS[forwards]
    arguments = [*PLAIN, *POOL, *SPECULATE, *FLAGS[flags]]
    with PreloadedServer(arguments, tmp_path / "server.log", environment) as server:
        answers = server.client().generate_all(baseline.prompts, 8, max_new_tokens=MAX_NEW_TOKENS)
    steps = " ".join(map(str, steps_by_accept_len(answers)))
    rows.append(f"| {' | '.join(cell)} | {len(answers)} | {tau(answers):.2f} | {steps} |")
    assert_equal_tokens(answers, baseline.answers, baseline.prompts)
    assert widths == "auto" or tau(answers) > 1.8, "the draft is inert"
