"""Times requests with `sglang.benchmark.serving`, SGLang's own client, as a child process.

Its dataset `openai` gives every field of a row to the request, so that the rows' token ids replace the messages that it
asks for: each arm gets exactly the same prompts. It reports times and texts, no ids.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.errors import ServerError, last_error, sentence
from sglang_dflash.serving.lifetime import TiedProcess
from sglang_dflash.serving.records import Record

COMMAND: tuple[str, ...] = (sys.executable, "-m", "sglang.benchmark.serving")
_REQUIRED = {"messages": [{"role": "user", "content": "."}]}
_BAR = re.compile(rb" (\d+)/\d+ \[")


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests are sent.

    Fields:
        load: so many at a time, or so many a second.
        at_random: at random times, which `seed` decides: the same for every arm.
        flush: empty the prefix cache first.
        stall_s: the longest time without an answer.
    """

    load: float
    at_random: bool
    seed: int
    flush: bool
    stall_s: float

    @property
    def flags(self) -> list[str]:
        rate = ["--request-rate", str(self.load)] if self.at_random else ["--max-concurrency", f"{self.load:.0f}"]
        return [*rate, "--seed", str(self.seed), *["--flush-cache"] * self.flush]


class Timer:
    """SGLang's client for one server."""

    def __init__(self, endpoint: Endpoint, tokenizer: str, count: Callable[[str], int], log: Path) -> None:
        """
        Args:
            tokenizer: the target.
            count: counts the tokens of a text with it.
            log: file for the client's output; appended.
        """
        self._endpoint, self._tokenizer, self._count, self._log = endpoint, tokenizer, count, log

    def time(
        self,
        asked: Sequence[tuple[Record, list[int]]],
        sampling: Sampling,
        traffic: Traffic,
        on_answer: Callable[[], None],
    ) -> tuple[list[Record], float]:
        """Sends prompts once more; returns the timed requests in their order, and the seconds that they took together.

        Args:
            asked: earlier answers to the prompts, and the prompts.
            on_answer: called for each answer.

        Raises:
            ServerError: the client failed, or got no answer for `stall_s`.
        """
        requests = [{**_REQUIRED, **self._endpoint.request(prompt, sampling)} for _, prompt in asked]
        with TemporaryDirectory(prefix="sglang-dflash-bench-") as folder:
            rows, found = Path(folder, "rows.jsonl"), Path(folder, "found.jsonl")
            rows.write_text("".join(json.dumps(one) + "\n" for one in requests), encoding="utf-8")
            command = [*self._command(), "--dataset-path", str(rows), "--num-prompts", str(len(requests))]
            command += [*traffic.flags, "--output-file", str(found), "--output-details"]
            code = _run(command, self._environment(), traffic.stall_s, self._log, on_answer)
            if code or not found.is_file():
                raise ServerError(f"SGLang's client ended with code {code}: {last_error(self._log)}")
            result = json.loads(found.read_text(encoding="utf-8").splitlines()[-1])
        columns = [result[name] for name in ("ttfts", "itls", "output_lens", "generated_texts", "errors")]
        rows_ = zip(asked, *columns, strict=True)
        return [self._record(*one, sampling.max_new_tokens, *row) for one, *row in rows_], result["duration"]

    def _command(self) -> list[str]:
        backend = "sglang" if self._endpoint.engine == "sglang" else "vllm"  # /generate, or /v1/completions
        command = [*COMMAND, "--backend", backend, "--base-url", self._endpoint.url, "--dataset-name", "openai"]
        command += ["--model", self._tokenizer, "--tokenizer", self._tokenizer]
        command += ["--served-model-name", self._endpoint.model, "--ready-check-timeout-sec", "0"]
        return [*command, "--warmup-requests", "0", "--disable-ignore-eos"]

    def _environment(self) -> dict[str, str]:
        """The client sends these variables as a key to every server; only the server that has one may get it."""
        kept = {name: value for name, value in os.environ.items() if name not in ("OPENAI_API_KEY", "API_KEY")}
        return kept | ({"OPENAI_API_KEY": self._endpoint.key} if self._endpoint.key else {})

    def _record(
        self,
        answer: Record,
        prompt: list[int],
        most: int,
        ttft_s: float,
        gaps_s: list[float],
        tokens: int,
        text: str,
        error: str,
    ) -> Record:
        """SGLang reports the tokens of an answer; those of others are counted in its text, which lacks the end token of
        an answer below the limit."""
        failure = sentence(error.strip().splitlines()[-1], 300) if error else ""
        if not failure and not text:  # the client then reports the limit
            tokens, failure = answer.tokens, "the answer has no text" if answer.text else ""
        elif self._endpoint.engine != "sglang":
            counted = self._count(text)
            tokens = counted + (counted < most)
        first_s = ttft_s if text and not failure else None
        times = {"start_s": 0.0, "first_s": first_s, "end_s": ttft_s + math.fsum(gaps_s)}
        kept: dict[str, Any] = {"prompt_tokens": len(prompt), "tokens": tokens, "ids": [], "text": "", "finish": ""}
        return Record(answer.session, answer.turn, **times, **kept, failure=failure)


def _run(
    command: list[str], environment: dict[str, str], stall_s: float, log: Path, on_answer: Callable[[], None]
) -> int:
    """Runs the client to its end; it ends with this function, however that ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.PIPE}
        process = TiedProcess(command, env=environment, **streams)
        try:
            _watch(process, stall_s, output.write, on_answer)
            return process.wait()
        finally:
            process.end()


def _watch(process: TiedProcess, stall_s: float, keep: Callable[[bytes], Any], on_answer: Callable[[], None]) -> None:
    """Reads the client's progress bar until its end."""
    assert process.stderr is not None
    answered, heard = 0, time.monotonic()
    while True:
        if select.select([process.stderr], [], [], 1.0)[0]:
            said = os.read(process.stderr.fileno(), 65536)
            if not said:
                return
            keep(said)
            for _ in range(answered, max([answered, *map(int, _BAR.findall(said))])):
                answered, heard = answered + 1, time.monotonic()
                on_answer()
        elif time.monotonic() - heard > stall_s:
            raise ServerError(f"no answer came for {stall_s:g} s (--stall-s)")
