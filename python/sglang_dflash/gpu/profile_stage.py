"""Profiles some decode steps of off, our worker and the built-in: the host's launches, copies and waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.gpu.budget import MARGIN, OutOfTimeError
from sglang_dflash.gpu.dummy_pairs import make_pair
from sglang_dflash.gpu.estimates import PROFILE_LOADS, PROFILE_S, TOGETHER_S
from sglang_dflash.gpu.results import Stage
from sglang_dflash.gpu.setting import Setting
from sglang_dflash.gpu.sweep_stages import ARMS, dummy_flags
from sglang_dflash.gpu.trace import count_steps, read_trace
from sglang_dflash.serving import Arm, Client, Server, ServerError, last_error, sentence
from sglang_dflash.serving.arms import Models, Serving, arms_of
from sglang_dflash.serving.server import stop_all

REHEARSED_LOADS = (1, 4)
STEPS = 24
LONG = 1536  # tokens of an answer: many more than STEPS steps produce, and the pool holds eight answers
WARM = 32
PREFILLED_S = 1.0  # after this time all requests decode
TRACE_S = 120.0
NOTES = (
    f"About {STEPS} steps under torch's profiler in the scheduler process; host_ms includes the profiler's overhead.",
    "Dummy weights, acceptance not simulated: what a step launches does not depend on it.",
    "launches: single kernel launches; kernels: kernels on the device, those within graphs included; waits: calls that "
    "block until the device is done, including those of the thread that fetches results.",
)


def profile(setting: Setting, stage: Stage, model: str) -> str:
    """Profiles every arm on the first attention backend, at each load with a constant batch size.

    Returns:
        Why another call is needed, or "".
    """
    target, draft = make_pair(model, setting.models)
    done = {(row["arm"], row["load"]) for row in stage.rows}
    stage.failures, stage.notes = [], list(NOTES)
    setting.note_absent(stage)
    every = REHEARSED_LOADS if setting.rehearsal else PROFILE_LOADS
    todo: list[tuple[str, Server, list[int]]] = []
    for arm in _arms(setting, str(target), str(draft)):
        loads = [load for load in every if (arm.name, load) not in done]
        if loads:
            todo.append((arm.name, arm.server(setting.raw / f"{stage.stage}-{arm.name}.log"), loads))
    with ExitStack() as stack:
        stack.callback(stop_all, [server for _, server, _ in todo])
        try:
            start_s = _start(setting, stage, todo)
            for name, server, loads in todo:
                if name in start_s:
                    with _failing(stage, name, server), server.at_work():
                        _count(setting, stage, name, server, loads, start_s[name])
        except OutOfTimeError as reason:
            return str(reason)
    return ""


def _start(setting: Setting, stage: Stage, todo: list[tuple[str, Server, list[int]]]) -> dict[str, float]:
    """Starts the servers at once, and pauses them when all are up. Returns the seconds that each took."""
    if not todo:
        return {}
    budget, start_s, begin = setting.budget, dict[str, float](), time.monotonic()
    names = ", ".join(name for name, _, _ in todo)
    seen = (row["start_s"] for row in stage.rows)
    budget.begin(f"starting {names}", max(seen, default=TOGETHER_S) + _cell_s(stage))
    setting.screen.print(f"starting {names} ...", style="dim")
    for name, server, _ in todo:
        with _failing(stage, name, server):
            server.launch()
    for name, server, _ in todo:
        with _failing(stage, name, server):
            server.wait(600.0, lambda seconds: budget.check(f"starting {names}"))
            start_s[name] = round(time.monotonic() - begin, 1)
    for _, server, _ in todo:
        server.pause()
    return start_s


@contextmanager
def _failing(stage: Stage, name: str, server: Server) -> Iterator[None]:
    """The stage goes on without a server that fails in this block, and says so."""
    try:
        yield
    except httpx.HTTPError:
        stage.failures.append(f"{name} stopped answering: {last_error(server.log)[:400]}")
    except (ServerError, ValueError, OSError) as error:
        stage.failures.append(f"{name}: {sentence(error, 400)}")


def _arms(setting: Setting, target: str, draft: str) -> list[Arm]:
    device = () if setting.stand_in is None else ("--device", "cpu")
    flags = (*dummy_flags(setting), *device, *setting.flags(setting.backends[0]))
    # On a CPU a compiled step goes past SGLang's runner, and so past the spans that are counted.
    environment = {"SGLANG_DFLASH_COMPILE": "0"} if setting.rehearsal else {}
    serving = Serving(flags, {}, environment, {}, setting.backends[:1], (True,), 1, "", "", "cuda")
    return setting.served(arms_of(ARMS.split(","), Models(target, {"dflash": draft}, None, 0), serving, {}))


def _count(setting: Setting, stage: Stage, name: str, server: Server, loads: list[int], start_s: float) -> None:
    """Profiles a server at these loads. start_s: how long it took to start, beside the others."""
    budget, client = setting.budget, server.client(TRACE_S)
    for load in loads:
        budget.begin(f"profiling {name} at {load}", _cell_s(stage))
        begin = time.monotonic()
        folder = setting.raw / f"{stage.stage}-{name}-{load}"
        with _decoding(client, load):
            trace = take_trace(client, folder, min(TRACE_S, budget.left_s))
        counts = count_steps(read_trace(trace)).to_json()
        if f" bs={load}]" not in counts["span"]:
            raise ValueError(f"{load} requests should decode, but the trace's longest run is {counts['span']}")
        times = {"start_s": start_s, "seconds": round(time.monotonic() - begin, 1)}
        stage.rows.append({"arm": name, "backend": setting.backends[0], "load": load, **counts, **times})
        budget.finished()
        setting.keep(stage)
        setting.screen.print(f"{name} at {load}: {counts['launches']} launches, {counts['graphs']} graphs")


def _cell_s(stage: Stage) -> float:
    return MARGIN * max((row["seconds"] for row in stage.rows), default=PROFILE_S / MARGIN)


@contextmanager
def _decoding(client: Client, load: int) -> Iterator[None]:
    """Keeps `load` requests decoding inside the `with` block, after a warm-up with the same prompts."""
    prompts = [[100 + row] * 32 for row in range(load)]
    client.generate_all(prompts, load, max_new_tokens=WARM, ignore_eos=True)
    stopped = threading.Event()
    thread = threading.Thread(target=_ask, args=(client, prompts, load, stopped), daemon=True)
    thread.start()
    time.sleep(PREFILLED_S)
    try:
        yield
    finally:
        stopped.set()
        while thread.is_alive():
            client.post("/abort_request", {"abort_all": True})
            thread.join(1.0)


def _ask(client: Client, prompts: list[list[int]], load: int, stopped: threading.Event) -> None:
    """Sends the requests in a loop: high acceptance with dummy weights could end the answers early."""
    while not stopped.is_set():
        try:
            client.generate_all(prompts, load, max_new_tokens=LONG, ignore_eos=True)
        except (httpx.HTTPError, KeyError, ValueError):
            return  # aborted, or the server is gone; take_trace reports that


def take_trace(client: Client, folder: Path, timeout_s: float) -> Path:
    """Records STEPS steps of the running requests with SGLang's profiler; returns the trace file.

    Raises:
        ServerError: no complete trace was written in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.trace.json.gz"):
        old.unlink()
    body: dict[str, Any] = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"]}
    client.post("/start_profile", body | {"with_stack": False, "record_shapes": False}).raise_for_status()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            if _whole(path):
                return path
        time.sleep(0.5)
    raise ServerError(f"no trace was written to {folder} within {timeout_s:.0f} s; did the server run {STEPS} steps?")


def _whole(path: Path) -> bool:
    try:
        read_trace(path)
    except (OSError, EOFError, ValueError):
        return False
    return True
