"""`sglang-dflash watch`: a board of running servers on the terminal, from their `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from sglang_dflash.cli.output import console_for, put_json
from sglang_dflash.serving.client import Client
from sglang_dflash.serving.errors import first_line
from sglang_dflash.serving.load import Load, Reading, load_between

TIMEOUT_S = 5.0  # of one reading: a server that answers later is shown as away
BARS = " ▁▂▃▄▅▆▇█"
UP = "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """The options of `sglang-dflash watch --help`."""

    urls: Annotated[tuple[str, ...], typer.Argument(metavar="URL...", help="URLs of running servers.")]
    interval: Annotated[float, typer.Option(help="Seconds between readings.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Read twice, an interval apart, print, and end.")] = False
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --once: write the board to this file; - is standard output.")
    ] = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"URL is {url}; it must begin with http:// or https://.")
        if not self.interval >= 0.1:
            raise ValueError(f"--interval is {self.interval:g}; it must be at least 0.1 seconds.")
        if self.json_file is not None and not self.once:
            raise ValueError(f"--json is {self.json_file}; it needs --once, because a live board has no end.")


class Watched:
    """One server: what it did between its last two readings. A server that is away is asked again."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.state, self.load = "not asked yet", Load("", 0, 0)
        self._client, self._before = Client(self.url, TIMEOUT_S), None

    def read(self) -> None:
        try:
            now = Reading.of(self._client.get_text("/metrics"))
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            self._lose("without --enable-metrics" if code == 404 else f"HTTP {code}")
        except (httpx.HTTPError, ValueError) as error:
            self._lose(f"away: {first_line(error)}")
        else:
            self.state, self.load, self._before = UP, load_between(self._before, now), now

    def _lose(self, why: str) -> None:
        self.state, self.load, self._before = why, Load(self.load.model, 0, 0), None

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "state": self.state, **asdict(self.load)}


def watch(options: WatchOptions) -> int:
    """Watch running servers: a board with a line for each.

    Tokens per second, requests that run and wait, tau, acceptance by draft
    position, rows of a request in a step, and the share of steps without a
    draft, all since the last reading. Servers need --enable-metrics. One that
    goes away is shown so until it comes back. Ctrl-C ends the board.

    Exit codes: 0, or with --once 1 if a server does not answer; 2 wrong
    options, 130 Ctrl-C, 143 SIGTERM.
    """
    servers = [Watched(url) for url in dict.fromkeys(options.urls)]
    console = console_for(options.json_file)
    with ThreadPoolExecutor(len(servers)) as pool:
        if options.once:
            return _once(options, servers, pool, console)
        with Live(_table(servers), console=console, auto_refresh=False, screen=False) as live:
            while True:
                list(pool.map(Watched.read, servers))
                live.update(_table(servers), refresh=True)
                time.sleep(options.interval)


def _once(options: WatchOptions, servers: Sequence[Watched], pool: ThreadPoolExecutor, console: Console) -> int:
    list(pool.map(Watched.read, servers))
    time.sleep(options.interval)
    list(pool.map(Watched.read, servers))
    console.print(_table(servers))
    whole = {"servers": [server.to_json() for server in servers]}
    away = sum(server.state != UP for server in servers)
    put_json(options.json_file, whole, {"servers": len(servers), "away": away})
    return min(away, 1)


def _table(servers: Sequence[Watched]) -> Table:
    table = Table(Column("server"), title_justify="left")
    for name in ("tok/s", "running", "queued", "tau", "rows", "plain steps"):
        table.add_column(name, justify="right")
    table.add_column("draft 1, 2, ... accepted in % of blocks")
    for server in servers:
        load = server.load
        name = escape(server.url.partition("://")[2])
        if server.state != UP:
            table.add_row(name, *["-"] * 6, f"[yellow]{escape(server.state)}[/yellow]", style="dim")
            continue
        shares = [f"{share:.0%}"[:-1] for share in load.by_position]
        bar = "".join(BARS[round(share * (len(BARS) - 1))] for share in load.by_position)
        plain = "-" if load.plain_share is None else f"{load.plain_share:.0%}"
        means = (
            _number(load.tok_s, 0),
            str(load.running),
            str(load.queued),
            _number(load.tau, 2),
            _number(load.rows, 2),
        )
        table.add_row(name, *means, plain, f"[green]{bar}[/green]  {' '.join(shares)}" if bar else "")
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
