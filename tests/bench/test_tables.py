"""The exact form of the report, and the numbers that it must not show."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from samples import accepting, cell, record, run, small_sweep, unequal

from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.records import Equality, Run
from sglang_dflash.bench.tables import console, markdown, number


def report(held: Run) -> str:
    return markdown(held, frame(held))


def terminal(held: Run) -> str:
    screen = Console(width=200, file=io.StringIO())
    screen.print(console(held, frame(held)))
    return screen.file.getvalue()


def details(held: Run) -> list[dict[str, str]]:
    """The rows of the first table of latencies, by header."""
    lines = report(held).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| method | load"))
    table = [[entry.strip() for entry in line.split("|")[1:-1]] for line in lines[start:]]
    ends = next((i for i, row in enumerate(table) if not row), len(table))
    return [dict(zip(table[0], row, strict=True)) for row in table[2:ends]]


def small() -> Run:
    cells = []
    for repeat, factor in enumerate((1, 0.8, 1.25)):
        cells += [cell("off", 100 * factor, 1, repeat), cell("off", 200 * factor, 4, repeat)]
        tau = {"acceptance": accepting(8, 4, steps=10, drafts=2), "equality": unequal(0, 1)}
        cells += [cell("dflash", 250 * factor, 1, repeat, **tau), cell("dflash", 300 * factor, 4, repeat, **tau)]
    return run(cells, machine={"cpu": "Xeon", "gpus": []}, versions={"sglang": "0.5.23"}, notes=["Quiet machine."])


SMALL = """\
# Benchmark: requests in flight

```sh
benchmark_sglang.py --arms off,dflash
```

Machine: cpu Xeon.

Versions: sglang 0.5.23.

* Quiet machine.

## gsm8k

Output tok/s of all requests together, median of 3 repeats (lowest-highest), then the speedup over `off` \
(median of the ratios per repeat); higher is better. tau: tokens per verify step.

| method | concurrency 1 (tok/s) | concurrency 4 (tok/s) | average tau |
| --- | ---: | ---: | ---: |
| off | 100 (80.0-125) | 200 (160-250) | - |
| dflash | 250 (200-312), 2.50x | 300 (240-375), 1.50x | 2.20 |

### Latency and acceptance
"""


def test_exact_report() -> None:
    """Fails for any change of the report's head or of the shares by position."""
    text = report(small())
    assert text.startswith(SMALL)
    assert text.endswith("| method | 1 (%) | 2 (%) |\n| --- | ---: | ---: |\n| dflash | 80.0 | 40.0 |\n")


def test_details() -> None:
    """Fails if a percentile, a count or the speedup is not in the column of its header."""
    row = details(small())[2]
    assert row["method"] == "dflash" and row["load"] == "concurrency 1"
    assert row["TTFT p50 (ms)"] == "1,000 (800-1,250)"
    assert row["TPOT p99 (ms)"] == "3.00 (2.40-3.75)"
    assert row["per user (tok/s)"] == "250 (200-312)"
    assert row["over off"] == "2.50x (2.50-2.50)"
    assert "over builtin" not in row and "cached (%)" not in row
    assert (row["tau"], row["failed / requests"]) == ("2.20 (2.20-2.20)", "0 / 1")


def test_shape_of_a_sweep() -> None:
    """Fails if a dataset has no section, a table lacks columns or rows, or the terminal shows other speedups."""
    text = report(small_sweep())
    assert re.findall(r"^## (.+)$", text, re.M) == ["gsm8k", "mt-bench"]
    tables = re.findall(r"^\| method \| concurrency 1 .+\| concurrency 8 .+\| average tau \|\n(?:\|.+\n)+", text, re.M)
    for table in tables:
        assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["off", "builtin", "dflash"]
    assert len(tables) == 2 and "gpus H100" in text
    assert set(re.findall(r"\d\.\d\dx", terminal(small_sweep()))) == {"2.10x", "2.90x"}


def test_withheld_row_shows_no_speed_anywhere() -> None:
    """Fails if the report, the CSV or the terminal shows a number that reveals a withheld speed."""
    # These numbers occur nowhere else: 773 tok/s, 7.73x over off, 2.577x of dflash over it, 1.29 s, 323 ms, 0.97 ms.
    cells = []
    for repeat in range(2):
        wrong = unequal(3 * (1 - repeat), 48, examples=["a/0: token 3 is 9, not 7"] * (1 - repeat))
        cells += [cell("off", 100, 1, repeat), cell("builtin", 773, 1, repeat, equality=wrong)]
        cells += [cell("dflash", 300, 1, repeat, equality=unequal(0, 48))]
    held = run(cells)
    for where, text in {"report": report(held), "csv": frame(held).to_csv(), "terminal": terminal(held)}.items():
        for number_ in ("773", "7.73", "0.388", "2.58", "1.29", "323", "0.97", "3.88"):
            assert number_ not in text, f"{number_} in the {where}"
    assert "| builtin | withheld: 3 of 96 requests differ |" in report(held)
    assert "builtin, concurrency 1: a/0: token 3 is 9, not 7" in report(held)
    assert "withheld: 3 of 96 requests differ" in terminal(held)
    assert "| dflash | 300 (300-300), 3.00x |" in report(held)
    assert "| builtin | concurrency 1 |" + " withheld |" * 8 + " - |" in report(held)


def test_failures_are_told() -> None:
    """Fails if a failed cell or repeat has a speed, a failed request is hidden, or a reason is not below the table."""
    held = run([cell("off", 100), cell("dflash", 773, failure="the server | died\nat start")])
    assert not re.search("773|7.73", report(held) + frame(held).to_csv() + terminal(held))
    assert "| dflash | failed | - |\n\n* dflash, concurrency 1: failed: the server \\| died at start" in report(held)
    assert "failed: the server | died" in terminal(held)
    held = run([cell("off", 100), cell("off", 773, repeat=1, failure="no answer")])
    assert "| off | 100; 1 failed | - |\n\n* off, concurrency 1: failed (1 of 2 repeats): no answer" in report(held)
    records = [record(tokens=1000, first_s=1, end_s=10), record("b", first_s=None, tokens=0, failure="400")]
    held = run([cell("off", 100, records=records)])
    assert "* off, concurrency 1: up to 1 requests failed in a repeat." in report(held)


def test_equality_is_told() -> None:
    """Fails if an engine whose tokens may differ is shown without its share or is withheld, or ties are hidden."""
    cells = [cell("off", 100), cell("vllm", 200, equality=Equality("off", False, 40, 30, different=10))]
    assert "| vllm | 200, 2.00x | 75.0% of 40 | - |" in report(run(cells))
    assert "identical" not in report(small())
    tied = Equality("off", True, 40, 38, ties=2)
    text = report(run([cell("off", 100), cell("dflash", 200, equality=tied)]))
    assert "* dflash, concurrency 1: 2 of 40 requests differ from off at a tie" in text


def test_missing_cell() -> None:
    """Fails if a load that an arm did not run raises or shows another load's speed."""
    held = run([cell("off", 100), cell("off", 200, 4), cell("dflash", 300, 4)])
    assert "| dflash | - | 300, 1.50x | - |" in report(held)


def test_sections_by_backend_and_cache() -> None:
    """Fails if different backends or cache settings share a table, or another engine has a table of its own."""
    cells = [cell(arm, 100, backend=backend) for backend in ("fa3", "triton") for arm in ("off", "dflash")]
    cells += [cell("off", 100, backend="fa3", radix=False)]
    titles = re.findall(r"^## (.+)$", report(run(cells)), re.M)
    backend = "gsm8k, attention backend"
    assert titles == [f"{backend} fa3", f"{backend} triton", f"{backend} fa3, prefix cache off"]
    assert re.findall(r"^## (.+)$", report(run([*cells[:2], cell("vllm", 100)])), re.M) == ["gsm8k"]


def test_other_workloads() -> None:
    """Fails if rates are called concurrency, goodput is shown without its limits, or sessions lack what was cached."""
    options = {"limits": {"ttft_ms": 1500.0, "tpot_ms": None}}
    held = run([cell("off", 100, 0.5), cell("dflash", 200, 0.5)], "open-loop", options=options)
    assert "| method | 0.5 requests/s (tok/s) | average tau |" in report(held)
    assert "Goodput: requests that meet TTFT <= 1500 ms." in report(held)
    assert [row["goodput (requests/s)"] for row in details(held)] == ["0", "0.200"]
    records = [record(tokens=1000, first_s=1, end_s=10, prompt_tokens=80, cached_tokens=60)]
    (row,) = details(run([cell("dflash", 100, 2, records=records, prefilled=40)], "agent"))
    assert (row["load"], row["cached (%)"], row["cached in draft (%)"]) == ("2 sessions", "75.0", "50.0")


def test_names_cannot_break_a_table() -> None:
    """Fails if a pipe in a name ends a cell, or the terminal interprets brackets as markup."""
    held = run([cell("off", 100), cell("my|[red]arm", 200)], command="a ``` b")
    assert "| my\\|[red]arm | 200, 2.00x | - |" in report(held) and "````sh\na ``` b\n````" in report(held)
    assert "my|[red]arm" in terminal(held)


def test_nothing_measured() -> None:
    """Fails if a run without cells raises."""
    assert "Nothing was measured." in report(run([])) and "Nothing was measured." in terminal(run([]))


@pytest.mark.parametrize(
    ("held", "said"),
    [(412.4, "412"), (2.606, "2.61"), (12345, "12,300"), (99.96, "100"), (0.0123, "0.0123"), (0, "0"), (-1.5, "-1.50")],
)
def test_three_digits(held: float, said: str) -> None:
    """Fails if a number does not have three significant digits, or has an exponent."""
    assert number(held) == said
    assert number(float("nan")) == "-"
