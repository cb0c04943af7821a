"""`sglang-dflash watch` over servers that answer `/metrics` and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from sglang_dflash.cli import watch
from sglang_dflash.cli.watch import UP, Watched, WatchOptions
from sglang_dflash.serving.load import Reading, load_between

BLOCK = 8
REPLICAS = 2


def page(steps: int, running: int = 3) -> str:
    """What a server of two replicas says after so many steps of each, of two requests, every other one plain. A drafted
    block has 4 rows of which 1 draft is accepted, in every second block 3."""
    lines = []
    for replica in range(REPLICAS):
        own = f'model_name="tiny",dp_rank="{replica}"'

        def say(name: str, value: float, label: str = "", own: str = own, prefix: str = "sglang_dflash:") -> None:
            lines.append(f"{prefix}{name}{{{own}{label}}} {float(value)}")

        drafts, half = steps, steps // 2  # two requests, in every other step
        say("num_running_reqs", running, prefix="sglang:")
        say("num_queue_reqs", replica, prefix="sglang:")
        say("num_queue_reqs", 7, ',priority="1"', prefix="sglang:")
        say("realtime_tokens_total", 4 * steps, ',mode="decode"', prefix="sglang:")
        say("realtime_tokens_total", 1000 * steps, ',mode="prefill_compute"', prefix="sglang:")
        say("spec_decode_num_request_steps_total", 2 * steps)
        say("spec_decode_num_drafts_total", drafts)
        say("spec_decode_num_draft_tokens_total", 3 * drafts)
        say("spec_decode_num_accepted_tokens_total", drafts + 2 * half)
        for position in range(BLOCK - 1):
            accepted = (drafts, half, half, 0)[min(position, 3)]
            say("spec_decode_num_accepted_tokens_per_pos_total", accepted, f',position="{position}"')
        for width in range(1, BLOCK + 1):
            say("spec_decode_num_steps_total", half if width in (1, 4) else 0, f',width="{width}"')
    types = {line.partition("{")[0] for line in lines}
    return "".join(
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        + "".join(f"{line}\n" for line in lines if line.partition("{")[0] == name)
        for name in sorted(types)
    )


@contextmanager
def serve(answer: Callable[[], tuple[int, str]], port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answer() if self.path == "/metrics" else (404, "")
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_load_between_two_readings():
    """Fails where replicas are not summed, prompt tokens or priorities count, or a mean has another denominator than it
    says."""
    before, now = Reading.of(page(100)), Reading.of(page(300))
    load = load_between(before, now)
    assert (load.model, load.running, load.queued) == ("tiny", 6, 1)
    assert load.tok_s == pytest.approx(REPLICAS * 4 * 200 / max(now.at_s - before.at_s, 1e-3))
    assert (load.tau, load.rows, load.plain_share) == (2.0, 2.5, 0.5)
    assert load.by_position == [1.0, 0.5, 0.5, 0, 0, 0, 0]


def test_what_is_not_known_is_not_shown():
    """Fails where a first reading, a restart or an idle server shows means of nothing, or of all time."""
    first = Reading.of(page(100))
    for before, now in ((None, first), (Reading.of(page(200)), first)):
        load = load_between(before, now)
        assert (load.running, load.tok_s, load.tau, load.by_position) == (6, None, None, [])
    idle = load_between(first, Reading.of(page(100, running=0)))
    assert (idle.running, idle.tok_s, idle.tau, idle.plain_share) == (0, 0.0, None, None)
    another = load_between(Reading.of(""), Reading.of("sglang:num_running_reqs 2\n"))
    assert (another.running, another.tau) == (2, None)


def test_a_server_goes_and_comes_back():
    """Fails where a server that is away ends the board, keeps its old numbers, or is not seen again."""
    steps = iter(range(100, 1000, 100))
    with serve(lambda: (200, page(next(steps)))) as url:
        server = Watched(url + "/")
        server.read()
        server.read()
        assert (server.state, server.load.tau) == (UP, 2.0)
    server.read()
    assert server.state.startswith("away: ") and server.load.tau is None and server.load.running == 0
    with serve(lambda: (404, ""), int(url.rpartition(":")[2])):
        server.read()
        assert server.state == "without --enable-metrics"
    with serve(lambda: (200, page(next(steps))), int(url.rpartition(":")[2])):
        server.read()
        assert (server.state, server.load.tau) == (UP, None)
        server.read()
        assert server.load.tau == 2.0


def test_once_with_json(capsys, tmp_path):
    """Fails where the board does not name each server once, JSON is mixed with the board, or a server that is away does
    not show in the exit code."""
    steps = iter(range(100, 10000, 100))
    with serve(lambda: (200, page(next(steps)))) as url:
        words = (url, "http://127.0.0.1:1", url)
        code = watch.watch(WatchOptions(urls=words, interval=0.1, once=True, json_file=watch.Path("-")))
        out, err = capsys.readouterr()
        up, away = json.loads(out)["servers"]
        assert (code, up["url"], up["state"], up["tau"], away["state"][:5]) == (1, url, UP, 2.0, "away:")
        assert "█▄▄" in err and "100 50 50 0 0 0 0" in err and "2.50" in err and url.partition("://")[2] in err
        code = watch.watch(WatchOptions(urls=(url,), interval=0.1, once=True, json_file=tmp_path / "board.json"))
        assert code == 0 and json.loads((tmp_path / "board.json").read_text())["servers"][0]["running"] == 6
        assert capsys.readouterr().out.splitlines()[-1] == '{"servers": 1, "away": 0}'


def test_the_live_board_goes_on(monkeypatch):
    """Fails where the board shows the first reading only, or ends by itself."""
    steps = iter(range(100, 10000, 100))
    shown: list[int] = []

    def sleep(seconds: float) -> None:
        shown.append(next(steps))
        if len(shown) == 3:
            raise KeyboardInterrupt

    console = Console(width=160, record=True, force_terminal=True)
    monkeypatch.setattr(watch, "console_for", lambda file: console)
    monkeypatch.setattr(watch.time, "sleep", sleep)
    with serve(lambda: (200, page(next(steps)))) as url, pytest.raises(KeyboardInterrupt):
        watch.watch(WatchOptions(urls=(url,)))
    assert "█▄▄" in console.export_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": ("localhost:30000",)}, "URL is localhost:30000; it must begin with http:// or https://."),
        ({"urls": ("http://a",), "interval": 0.0}, "--interval is 0; it must be at least 0.1 seconds."),
        ({"urls": ("http://a",), "json_file": watch.Path("b")}, "--json is b; it needs --once"),
    ],
)
def test_wrong_options(options, message):
    """Fails where a wrong option is not named with what is allowed."""
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        WatchOptions(**options)
