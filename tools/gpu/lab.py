"""Measures what a decode step costs on a device, by width and batch: dummy weights, no tokenizer, no HTTP.

Each arm is a process with SGLang's own scheduler, whose loop the lab turns itself, so a point takes under a second:
`widths` (whole blocks of each width), `rows` (some rows of whole blocks), `off` (no speculation) and `builtin`
(SGLang's DFLASH worker). Points are written as they come, to `points.jsonl`, and as a table in the end. An arm that
fails, or for which no time is left, does not stop the others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from sglang_dflash.core.policy import Drafting, Step
from tools.gpu import shapes

ARMS = ("widths", "off", "rows", "builtin")  # the most valuable first
PROMPT = 512  # tokens of each request's prompt
TOKENS = 1400  # of an answer; 32 requests must fit into the pool, or one is never admitted
POOL = 65536
POINT_S = 0.4
STEPS = 5  # least steps of a point, after as many unmeasured ones


class FixedRows:
    """A policy of the same rows for everybody, which keeps the measured times."""

    weighs = True

    def __init__(self) -> None:
        self.width, self.each = 1, 1
        self.draft_s: list[float] = []
        self.rest_s: list[float] = []

    def draft(self, names: Sequence[str]) -> Drafting:
        count = len(names)
        return Drafting(self.width, list(range(count)) if self.width > 1 else [], count * self.each)

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return np.zeros((len(names), depths), np.float32)

    def verify(self, survival: np.ndarray) -> np.ndarray:
        return np.full(len(survival), self.each)

    def learn(self, step: Step) -> None:
        pass

    def see_draft(self, rows: int, seconds: float) -> None:
        self.draft_s.append(seconds)

    def see_rest(self, rows: int, seconds: float) -> None:
        self.rest_s.append(seconds)

    def step_seconds(self) -> None:
        """Nobody asks `/server_info`."""


class Bench:
    """A scheduler of one arm, and the requests that it runs."""

    def __init__(self, flags: list[str], gpu: bool) -> None:
        from sglang.srt.managers import scheduler as host
        from sglang.srt.server_args import PortArgs, prepare_server_args

        host.load_plugins()
        args = prepare_server_args(flags)
        host.publish(args, role="scheduler", ranks=host.SpawnRanks(world_rank=0, gpu_id=0))
        host.configure_scheduler_process(args, 0)
        self.scheduler = host.Scheduler(args, PortArgs.init_new(args))
        self.worker = self.scheduler.draft_worker or self.scheduler.tp_worker
        self.gpu, self.asked, self.launched_s = gpu, 0, 0.0
        launch = self.worker.forward_batch_generation

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = launch(*given, **named)
            self.launched_s = time.perf_counter() - begin
            return result

        self.worker.forward_batch_generation = timed

    def _sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def ask(self, requests: int, temperature: float = 0.0) -> None:
        """So many further requests, prefilled."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        for number in range(self.asked, self.asked + requests):
            sampling = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, ignore_eos=True)
            sampling.normalize(None)
            ids = array("q", [(number * 7919 + place * 31) % 1000 + 3 for place in range(PROMPT)])
            self.scheduler.handle_generate_request(
                TokenizedGenerateReqInput(
                    rid=f"lab-{number}",
                    input_text="",
                    input_ids=ids,
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=sampling,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=False,
                )
            )
        self.asked += requests
        for _ in range(2 * requests + 2):
            self.step()
        running = len(self.scheduler.running_batch.reqs)
        assert running == self.asked, f"{running} of {self.asked} requests run"

    def forget(self) -> None:
        """Ends all requests."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(abort_all=True))
        while self.step():
            pass
        self.asked = 0

    def step(self) -> bool:
        """One turn of the scheduler's loop. Returns whether anything ran."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return bool(batch)

    def point(self) -> dict[str, float]:
        """Milliseconds of a step, and of the worker's part on the host, which on a GPU waits for nothing."""
        for _ in range(STEPS):
            self.step()
        self._sync()
        begin, launches = time.perf_counter(), []
        while len(launches) < STEPS or time.perf_counter() - begin < POINT_S:
            self.step()
            launches.append(self.launched_s)
        self._sync()
        step_s = (time.perf_counter() - begin) / len(launches)
        return {"step_ms": 1e3 * step_s, "launch_ms": 1e3 * statistics.median(launches), "steps": len(launches)}

    def calls(self) -> dict[str, float]:
        """Launches and waits of a step, from a profile."""
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * self.gpu
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(STEPS):
                self.step()
            self._sync()
        counts = {event.key: event.count / STEPS for event in profile.key_averages()}
        named = {"launches": "cudaLaunchKernel", "graphs": "cudaGraphLaunch", "copies": "cudaMemcpyAsync"}
        found = {name: sum(n for key, n in counts.items() if key.startswith(own)) for name, own in named.items()}
        waits = sum(count for key, count in counts.items() if key.endswith("Synchronize"))
        return found | {"waits": waits - 1 / STEPS * self.gpu}  # one is the lab's own


def points(arm: str, bench: Bench, note: Any) -> None:
    """All points of an arm."""
    policy, block_size = FixedRows(), 0
    if arm in ("widths", "rows"):
        rows, block_size = bench.worker.step_rows, bench.worker.block_size
        if arm == "rows" and bench.gpu and not hasattr(rows, "size_for"):
            note({"what": "this target's blocks cannot be trimmed"})
            return
        rows.policy = policy
    halves = [block_size, block_size // 2, block_size // 4, 1]
    trimmed = dict.fromkeys([block_size, block_size // 2, block_size // 4, 2])
    choices = {"widths": [(width, width) for width in halves], "rows": [(block_size, each) for each in trimmed]}
    asked = 0
    for requests in (1, 8, 32):
        bench.ask(requests - asked)
        asked = requests
        measure(bench, policy, choices.get(arm, [(0, 0)]), {"requests": requests}, note)
        if requests == 8:
            policy.width, policy.each = choices.get(arm, [(0, 0)])[0]
            note(bench.calls() | {"requests": requests, "width": policy.width, "what": "calls"})
    bench.forget()
    bench.ask(8, temperature=0.7)
    measure(bench, policy, choices.get(arm, [(0, 0)])[:2], {"requests": 8, "sampled": True}, note)


def measure(bench: Bench, policy: FixedRows, choices: Any, words: dict[str, Any], note: Any) -> None:
    for policy.width, policy.each in choices:
        policy.draft_s, policy.rest_s = [], []
        found: dict[str, Any] = bench.point() | words | {"what": "step"}
        if policy.width:
            found |= {"width": policy.width, "rows": policy.each, "rest_ms": middle_ms(policy.rest_s)}
            found |= {"draft_ms": middle_ms(policy.draft_s)} if policy.width > 1 else {}
        note(found)


def middle_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds[-STEPS:]) if seconds else float("nan")


def run_arm(arm: str, flags: list[str], output: Path, gpu: bool, turn: Any) -> None:
    """In a process of its own, which imports SGLang at once and then waits for its turn."""
    with (output / f"{arm}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["SGLANG_DFLASH_WORKER"] = "builtin" if arm == "builtin" else "plugin"
    os.environ["SGLANG_DFLASH_WIDTH"] = "auto"
    import sglang.srt.managers.scheduler  # noqa: F401

    turn.wait()
    begin = time.perf_counter()
    bench = Bench(flags, gpu)

    def note(point: dict[str, Any]) -> None:
        with (output / "points.jsonl").open("a") as file:
            file.write(json.dumps({"arm": arm} | point) + "\n")

    note({"what": "start", "seconds": time.perf_counter() - begin})
    with torch.inference_mode():
        points(arm, bench, note)
    os._exit(0)  # the scheduler's threads would wait


def table(output: Path) -> str:
    """The points in Markdown."""
    path = output / "points.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    columns = ("arm", "requests", "sampled", "width", "rows", "step_ms", "draft_ms", "rest_ms", "launch_ms", "steps")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for one in found:
        if one["what"] == "step":
            values = [one.get(name, "") for name in columns]
            texts = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in values]
            lines.append("| " + " | ".join(texts) + " |")
    others = [json.dumps(one) for one in found if one["what"] != "step"]
    return "\n".join([*lines, "", *(f"* `{one}`" for one in others)]) + "\n"


def main(
    output: Annotated[Path, typer.Option(help="Folder of the results; new or empty.")],
    shape: Annotated[Literal["8b", "27b", "35b-a3b", "tiny"], typer.Option(help="Of target and draft.")] = "8b",
    budget_s: Annotated[float, typer.Option(help="Seconds for all arms.")] = 270.0,
    backend: Annotated[str, typer.Option(help="--attention-backend, on a GPU.")] = "fa3",
) -> None:
    """Measures the points, the most valuable first, until the budget is spent."""
    begin, gpu = time.monotonic(), torch.version.cuda is not None and Path("/dev/nvidiactl").exists()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SystemExit(f"--output {output} is not empty; give a new folder.")
    target, draft = shapes.write(shape, output / "raw")
    flags = ["--model-path", str(target), "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16"]
    flags += ["--disable-overlap-schedule", "--max-running-requests", "32", "--disable-radix-cache"]
    flags += ["--max-total-tokens", str(POOL), "--device", "cuda" if gpu else "cpu"]
    if gpu:
        flags += ["--attention-backend", backend, "--cuda-graph-bs-decode", "1", "8", "32"]
        flags += ["--cuda-graph-backend-prefill", "disabled", "--sampling-backend", "pytorch"]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    context = multiprocessing.get_context("spawn")  # a fork could not use the GPU
    started = []
    for arm in ARMS:
        turn = context.Event()
        own = flags + (speculate if arm != "off" else [])
        own += ["--disable-cuda-graph-padding"] * (arm == "widths")  # without padding, no rows are trimmed
        process = context.Process(target=run_arm, args=(arm, own, output, gpu, turn))
        process.start()
        started.append((arm, turn, process))
    for arm, turn, process in started:
        turn.set()
        process.join(max(0.0, budget_s - (time.monotonic() - begin)))
        if process.is_alive():
            process.kill()
            process.join()
        print(f"{arm}: {'done' if process.exitcode == 0 else f'ended with {process.exitcode}, see {arm}.log'}")
        (output / "README.md").write_text(table(output))
    print(table(output))
    sys.exit(0 if (output / "points.jsonl").exists() else 1)


if __name__ == "__main__":
    typer.run(main)
