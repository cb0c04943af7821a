"""Prints a check's report on a console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sglang_dflash.checking.compare import OFF, ON, describe_token
from sglang_dflash.checking.draft_kv import DraftKv
from sglang_dflash.checking.report import SHOWN, CaseResult, Found, Report
from sglang_dflash.serving import AcceptanceStats


def show(report: Report, console: Console) -> None:
    """Prints everything that was found, the verdict last."""
    _show_cases("Requests with the same answer as alone with speculation off", report.results, console)
    if report.control:
        _show_cases("Control: speculation off, several at a time", report.control, console)
    _show_differences(report, console)
    _show_refusals(report, console)
    _show_probes(report, console)
    if not report.off.deterministic:
        console.print("sampled requests were not compared: that needs --enable-deterministic-inference", style="dim")
    for note in report.notes():
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    for reason in report.failures():
        console.print(f"[red]NOT LOSSLESS:[/red] {escape(reason)}", soft_wrap=True)
    if report.lossless:
        ties = f"; {report.ties} requests differ only by a tie" if report.ties else ""
        asked = f"{report.compared} requests, {report.tokens:,} tokens"
        console.print(f"[green]Lossless:[/green] {asked}, the same as with speculation off{ties}.")


def _show_cases(title: str, results: Sequence[CaseResult], console: Console) -> None:
    if not results:
        return
    concurrencies = sorted({result.concurrency for result in results})
    table = Table(Column("case"), title=title, title_justify="left")
    for concurrency in concurrencies:
        table.add_column(f"{concurrency} at a time", justify="right")
    table.add_column("changed", justify="right")
    table.add_column("tau", justify="right")
    table.add_column("draft 1, 2, ... accepted in % of steps")
    for case in dict.fromkeys(result.case for result in results):
        of_case = {result.concurrency: result for result in results if result.case == case}
        cells = [_cell(of_case[c]) if c in of_case else "" for c in concurrencies]
        taus = [_tau(result.acceptance) for result in of_case.values()]
        first = next(iter(of_case.values()))
        shares = " ".join(f"{share:.0%}"[:-1] for share in first.acceptance.shares)
        table.add_row(escape(case), *cells, str(first.changed), " / ".join(taus), shares)
    console.print(table)
    console.print("changed: number of answers that the parameters change, with speculation off", style="dim")


def _tau(acceptance: AcceptanceStats) -> str:
    return f"{acceptance.tau:.2f}" if acceptance.steps else "-"


def _cell(result: CaseResult) -> str:
    parts = [f"{result.identical}/{result.compared}"] if result.compared else []
    if result.ties:
        parts.append(f"{result.ties} tie")
    if result.different:
        parts.append(f"[red]{result.different} DIFFERENT[/red]")
    if result.refused:
        parts.append(f"{sum(result.refused.values())} refused")
    if result.unknown:
        parts.append(f"{result.unknown} without a baseline")
    return ", ".join(parts)


def _show_differences(report: Report, console: Console) -> None:
    found = list(report.found())
    for one in found[:SHOWN]:
        console.print(_difference_line(one, report), soft_wrap=True)
    if len(found) > SHOWN:
        console.print(f"... and {len(found) - SHOWN} more (--json has all of them)")


def _difference_line(one: Found, report: Report) -> str:
    d = one.difference
    label = "tie" if d.tie else "[red]different[/red]"
    words = [f"{label}: {escape(one.case)}, prompt {escape(one.prompt_id)}, {one.concurrency} at a time:"]
    if d.kind in ("token", "length"):
        off, on = (escape(describe_token(token, report.token_texts)) for token in (d.off_id, d.on_id))
        words.append(f"token {d.index} is {off} {OFF} and {on} {ON}")
    else:
        words.append(d.kind)
    if d.gap is not None:
        words.append(
            f"(logprob gap {'over ' if d.said else ''}{d.gap:.2e}; up to {report.tie_policy.tie_gap:.2e} is a tie)"
        )
    if d.said:
        words.append(f"({escape(d.said)})")
    return " ".join(words)


def _show_refusals(report: Report, console: Console) -> None:
    refused: Counter[str] = Counter()
    cases: dict[str, set[str]] = {}
    for result in report.results:
        for sentence, count in result.refused.items():
            refused[sentence] += count
            cases.setdefault(sentence, set()).add(result.case)
    for sentence, count in refused.most_common(SHOWN):
        where = ", ".join(sorted(cases[sentence]))
        console.print(f"refused {count} times ({escape(where)}): {escape(sentence)}", soft_wrap=True)


def _show_probes(report: Report, console: Console) -> None:
    heard = report.contamination
    if heard is not None:
        console.print(
            f"markers: {heard.asked} concurrent requests answered; {heard.own} answers hold their own marker, "
            f"{len(heard.foreign)} another request's"
        )
        for sentence in heard.foreign[:SHOWN]:
            console.print(f"[red]foreign marker:[/red] {escape(sentence)}", soft_wrap=True)
        for sentence in heard.failed[:SHOWN]:
            console.print(f"[red]failed:[/red] {escape(sentence[:200])}", soft_wrap=True)
    for name, probe in (("draft KV", report.draft_kv), ("reference", report.reference)):
        if probe is not None and probe.tau:
            console.print(_draft_kv_line(name, probe))
    if report.rows is not None:
        console.print(f"rows: {report.rows}", soft_wrap=True)
    if report.slots_after:
        most, times = max(report.slots_after), len(report.slots_after)
        console.print(
            f"KV slots in use on the idle server: {report.slots_before} before, "
            f"at most {most} afterwards ({times} readings)"
        )


def _draft_kv_line(name: str, probe: DraftKv) -> str:
    taus = ", ".join(f"{way} {tau:.2f}" for way, tau in probe.tau.items())
    return f"{name}: tau over {probe.prompts} requests: {taus}"
