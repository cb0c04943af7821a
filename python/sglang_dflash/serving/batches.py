"""The transformers arm: our reference's `spec_generate` in a process of its own, which answers static batches."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sglang_dflash.serving.arms import Arm
from sglang_dflash.serving.completion import Completion
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.errors import ServerError
from sglang_dflash.serving.lifetime import TiedProcess
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.rendering import Renderer, prompt_of
from sglang_dflash.serving.sessions import Session


class TransformersProcess:
    """Talks to `reference.batch_worker` over its standard streams."""

    def __init__(self, arm: Arm, log: IO[bytes], stall_s: float) -> None:
        self._stall_s = stall_s
        self._process = TiedProcess(
            [*arm.launch, *arm.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **arm.environment},
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next message of the process.

        Raises:
            ServerError: the process ended, sent nothing for `timeout_s`, or reports an error.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ServerError(f"the process of the transformers arm sent nothing for {timeout_s:g} s") from None
        if not line:
            raise ServerError("the process of the transformers arm ended")
        said = json.loads(line)
        if "error" in said:
            raise ServerError(said["error"])
        return said

    def play(
        self,
        sessions: Sequence[Session],
        renderer: Renderer,
        batch: int,
        sampling: Sampling,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Record]:
        """The answers to the first turns, `batch` prompts at a time. A batch ends with its longest answer.

        A request's first token is timed at the end of the batch's prefill, its last token at the end of the batch.

        Raises:
            ServerError: the process ended, sent nothing in time, or reports an error.
        """
        prompts = [prompt_of(session, session.turns[0].messages, renderer) for session in sessions]
        records, begin = list[Record](), time.perf_counter()
        for first in range(0, len(sessions), batch):
            start_s, asked = time.perf_counter() - begin, prompts[first : first + batch]
            said = self._generate(asked, sampling)
            for index, (session, prompt) in enumerate(zip(sessions[first : first + batch], asked, strict=True)):
                reply = _completion(prompt, said, index, start_s)
                records.append(Record.of(session.id, 0, reply, "".join(map(renderer.text, reply.ids))))
                on_answer()
        return records

    def _generate(self, prompts: list[list[int]], sampling: Sampling) -> dict[str, Any]:
        """The process's answers to one batch."""
        assert self._process.stdin is not None
        request = {
            "prompts": prompts,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError("the process of the transformers arm ended") from None
        return self.hear(self._stall_s)

    def stop(self) -> None:
        self._process.end()


@contextmanager
def transformers_up(arm: Arm, log: Path, timeout_s: float, stall_s: float) -> Iterator[TransformersProcess]:
    """
    Raises:
        ServerError: the models do not load.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = TransformersProcess(arm, output, stall_s)
        try:
            process.hear(timeout_s)
            yield process
        finally:
            process.stop()


def _completion(prompt: list[int], said: dict[str, Any], index: int, start_s: float) -> Completion:
    ids, commit_lens = said["ids"][index], said["commit_lens"][index]
    return Completion(
        ids=ids,
        finish={"type": "stop"},
        prompt_tokens=len(prompt),
        tokens=len(ids),
        steps=len(commit_lens),
        drafted=len(commit_lens) * (said["block_size"] - 1),
        accept_histogram=[commit_lens.count(length) for length in range(1, max(commit_lens, default=0) + 1)],
        start_s=start_s,
        first_s=start_s + said["prefill_s"],
        end_s=start_s + said["prefill_s"] + said["decode_s"],
    )
