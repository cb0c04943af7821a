"""The exact form of the report, and the numbers that it must not show."""

from __future__ import annotations

import csv as csv_reader
import io
import re

import pytest
from rich.console import Console
from samples import accepting, agent, cell, realistic, record, run, unequal

from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.layout import number
from sglang_dflash.bench.records import Equality, Run
from sglang_dflash.bench.tables import console, csv, markdown


def report(held: Run) -> str:
    return markdown(held, frame(held))


def terminal(held: Run) -> str:
    screen = Console(width=200, file=io.StringIO())
    screen.print(console(held, frame(held)))
    return screen.file.getvalue()


def everything(held: Run) -> dict[str, str]:
    return {"markdown": report(held), "csv": csv(frame(held)), "console": terminal(held)}


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
    """Fails for any change of the report's head. Loads are columns, methods are rows, tau is last."""
    assert report(small()).startswith(SMALL)


def test_details() -> None:
    """Fails if a percentile, a count or the speedup is not in the column of its header."""
    lines = report(small()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| method | load"))
    header = [name.strip() for name in lines[start].split("|")[1:-1]]
    row = dict(zip(header, (entry.strip() for entry in lines[start + 4].split("|")[1:-1]), strict=True))
    assert row["method"] == "dflash" and row["load"] == "concurrency 1"
    assert row["TTFT p50 (ms)"] == "1,000 (800-1,250)"
    assert row["TPOT p99 (ms)"] == "3.00 (2.40-3.75)"
    assert row["per user (tok/s)"] == "250 (200-312)"
    assert row["over off"] == "2.50x (2.50-2.50)"
    assert "over builtin" not in row
    assert (row["tau"], row["failed / requests"]) == ("2.20 (2.20-2.20)", "0 / 1")


def test_acceptance_table() -> None:
    """Fails if shares are not percentages of steps by position, or an arm without speculation has a row."""
    assert report(small()).endswith("| method | 1 (%) | 2 (%) |\n| --- | ---: | ---: |\n| dflash | 80.0 | 40.0 |\n")


def test_shape_of_a_sweep() -> None:
    """Fails if a dataset has no section, or a table lacks columns."""
    text = report(realistic())
    assert re.findall(r"^## (.+)$", text, re.M) == ["gsm8k", "humaneval", "mt-bench"]
    for table in re.findall(r"^\| method \| concurrency.+\n(?:\|.+\n)+", text, re.M):
        rows = [line.split("|")[1:-1] for line in table.splitlines()]
        assert [name.strip() for name in rows[0]][1:] == [
            *(f"concurrency {n} (tok/s)" for n in (1, 2, 4, 8)),
            "average tau",
        ]
        assert [row[0].strip() for row in rows[2:]] == ["off", "builtin", "dflash", "eagle3"]
        assert {len(row) for row in rows} == {6}


def test_withheld_row_shows_no_speed_anywhere() -> None:
    """Fails if the report, the CSV or the terminal shows a number that reveals a withheld speed."""
    # These numbers occur nowhere else: 773 tok/s, 7.73x over off, 2.577x of dflash over it, 1.29 s, 323 ms, 0.97 ms.
    cells = []
    for repeat in range(2):
        wrong = unequal(3 * (1 - repeat), 48, examples=["a/0: token 3 is 9, not 7"] * (1 - repeat))
        cells += [cell("off", 100, 1, repeat), cell("builtin", 773, 1, repeat, equality=wrong)]
        cells += [cell("dflash", 300, 1, repeat, equality=unequal(0, 48))]
    held = run(cells)
    for where, text in everything(held).items():
        for number_ in ("773", "7.73", "0.388", "2.58", "1.29", "323", "0.97", "3.88"):
            assert number_ not in text, f"{number_} in the {where}"
    assert "| builtin | withheld: 3 of 96 requests differ |" in report(held)
    assert "builtin, concurrency 1: a/0: token 3 is 9, not 7" in report(held)
    assert "withheld: 3 of 96 requests differ" in terminal(held)
    assert "| dflash | 300 (300-300), 3.00x |" in report(held)
    assert "| builtin | concurrency 1 |" + " withheld |" * 9 in report(held)


def test_withheld_turns_show_no_speed() -> None:
    """Fails if the tables by turn show a speed that the main table withholds."""
    held = agent()
    for one in held.cells:
        if one.key.arm == "dflash":
            one.equality = unequal(1, 24)
    rows = [line for line in report(held).splitlines() if re.match(r"\| dflash \| (on|off) \| \d \|", line)]
    assert len(rows) == 12
    assert all("| withheld | withheld | withheld |" in row for row in rows)


def test_failed_cell() -> None:
    """Fails if a failed cell has a speed, or its reason is not below the table."""
    held = run([cell("off", 100), cell("dflash", 773, failure="the server | died\nat start")])
    for text in everything(held).values():
        assert "773" not in text and "7.73" not in text
    assert "| dflash | failed | - |\n\n* dflash, concurrency 1: failed: the server \\| died at start" in report(held)
    assert "failed: the server | died" in terminal(held)


def test_some_repeats_failed() -> None:
    """Fails if the speed of the other repeats is shown without the failed repeat."""
    held = run([cell("off", 100), cell("off", 773, repeat=1, failure="no answer")])
    assert "| off | 100; 1 failed | - |\n\n* off, concurrency 1: failed (1 of 2 repeats): no answer" in report(held)


def test_failed_requests_are_told() -> None:
    """Fails if the report shows a speed but not that requests failed."""
    records = [record(tokens=1000, first_s=1, end_s=10), record("b", first_s=None, tokens=0, failure="400")]
    held = run([cell("off", 100, records=records)])
    assert "* off, concurrency 1: up to 1 requests failed in a repeat." in report(held)


def test_other_engines_show_the_share_of_identical_requests() -> None:
    """Fails if an engine whose tokens may differ is shown without the share, or is withheld."""
    cells = [cell("off", 100)]
    cells += [cell("vllm", 200, equality=Equality("off", False, 40, 30, different=10))]
    assert "| vllm | 200, 2.00x | 75.0% of 40 | - |" in report(run(cells))
    assert "identical" not in report(small())


def test_ties_are_told() -> None:
    """Fails if requests that differ at a tie are not mentioned."""
    tied = Equality("off", True, 40, 38, ties=2)
    assert "* dflash, concurrency 1: 2 of 40 requests differ from off at a tie" in report(
        run([cell("off", 100), cell("dflash", 200, equality=tied)])
    )


def test_missing_cell() -> None:
    """Fails if a load that an arm did not run raises or shows another load's speed."""
    assert "| dflash | - | 300, 1.50x | - |" in report(
        run([cell("off", 100), cell("off", 200, 4), cell("dflash", 300, 4)])
    )


def test_sections_by_backend_and_cache() -> None:
    """Fails if different backends or cache settings share a table, or another engine has a table of its own."""
    cells = [cell(arm, 100, backend=backend) for backend in ("fa3", "triton") for arm in ("off", "dflash")]
    cells += [cell("off", 100, backend="fa3", radix=False)]
    titles = re.findall(r"^## (.+)$", report(run(cells)), re.M)
    backend = "gsm8k, attention backend"
    assert titles == [f"{backend} fa3", f"{backend} triton", f"{backend} fa3, prefix cache off"]
    assert re.findall(r"^## (.+)$", report(run([*cells[:2], cell("vllm", 100)])), re.M) == ["gsm8k"]


def test_open_loop() -> None:
    """Fails if rates are called concurrency, or goodput is shown without its limits."""
    held = run([cell("off", 100, 0.5), cell("dflash", 200, 0.5)], "open-loop")
    held.options = {"limits": {"ttft_ms": 1500.0, "tpot_ms": None}}
    text = report(held)
    assert "| method | 0.5 requests/s (tok/s) | average tau |" in text
    assert "### Goodput: requests that meet TTFT <= 1500 ms\n\n| method | 0.5 requests/s (good requests/s) |" in text
    assert "| off | 0 |\n| dflash | 0.200 |" in text
    assert "Goodput" not in report(run([cell("off", 100, 0.5)], "open-loop"))


def test_agent_turns() -> None:
    """Fails if the tables by turn lack an arm, a cache setting or a turn, or count turns from 0."""
    text = report(agent(turns=3))
    table = text[text.index("## agent turn by turn, 4 sessions") :]
    keys = re.findall(r"^\| (\w+) \| (on|off) \| (\d) \|", table, re.M)
    assert keys == [(arm, cache, str(n)) for cache in ("on", "off") for arm in ("off", "dflash") for n in (1, 2, 3)]
    assert "| method | prefix cache | turn | prompt tokens | cached (%) | TTFT p50 (ms) |" in table
    assert "| off | on | 3 | 2,600 | 69.2 |" in table and "| off | off | 3 | 2,600 | 0 |" in table


def test_agent_sessions_at_rates_say_so() -> None:
    """Fails if a rate of sessions is called a number of sessions or a rate of requests, in a table or above one."""
    text = report(agent(turns=2, loads=(0.5,), workload="agent-open-loop"))
    assert "# Benchmark: agent sessions at given rates" in text and "| method | 0.5 sessions/s (tok/s) |" in text
    assert "## agent turn by turn, 0.5 sessions/s" in text and "requests/s" not in text


def test_agent_savings() -> None:
    """Fails if a load's table lacks what was cached, has it of another load, or shows it where unknown."""
    held = agent(turns=3, loads=(1, 2))
    for one in held.cells:
        if one.key.load == 2 and one.prefilled is not None:
            one.prefilled = 21_600 if one.key.radix else 0
    first, second = report(held).split("All turns:")[1:]
    header = "| prompt tokens | cached (%) | cached in draft (%) | tau |"
    assert header in first and header in second
    assert "| off | on | 21,600 | 51.9 | - | - |" in first
    assert re.search(r"\| dflash \| on \| 21,600 \| 51.9 \| 51.9 \| [\d.]+ \|", first)
    assert re.search(r"\| dflash \| on \| 21,600 \| 51.9 \| 0 \| [\d.]+ \|", second)
    assert re.search(r"\| dflash \| off \| 21,600 \| 0 \| 100 \|", second)


def test_csv_reads_back() -> None:
    """Fails if the CSV loses a row, rounds a median or quotes badly."""
    held = small()
    held.cells.append(cell("eagle3", 1, failure='it said "no", twice\nand died'))
    rows = list(csv_reader.DictReader(io.StringIO(csv(frame(held)))))
    assert [row["arm"] for row in rows] == ["off", "off", "dflash", "dflash", "eagle3"]
    assert float(rows[2]["speedup_off"]) == pytest.approx(2.5)
    assert rows[4]["failure"] == held.cells[-1].failure and rows[4]["tok_s"] == ""


def test_names_cannot_break_a_table() -> None:
    """Fails if a pipe in a name ends a cell, or the terminal interprets brackets as markup."""
    held = run([cell("off", 100), cell("my|[red]arm", 200)], command="a ``` b")
    text = report(held)
    assert "| my\\|[red]arm | 200, 2.00x | - |" in text and "````sh\na ``` b\n````" in text
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
