"""Sessions over a small pool, host memory and a store, while servers are killed and start anew: `--matrix`.

`SGLANG_DFLASH_SOAK_MINUTES` says how long, one minute by default.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from arms import ADMIT_ALL, PLAIN, POISONED, SPECULATE, STORE, TIERS, assert_same_steps
from kept_steps import assert_steps_kept
from reference_pair import ReferenceAnswer, ReferencePair

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Completion, Server, held_out_prompts_in_turn
from sglang_dflash.serving.server import _signal_group

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(7200)]
MINUTES = float(os.environ.get("SGLANG_DFLASH_SOAK_MINUTES", "1"))
SESSIONS, TURNS, TURN = 48, 4, 40  # conversations, turns of each, most tokens of an answer: five times the host's pool
USERS = 6  # who talk at once
LIFE_S = (15.0, 45.0)  # of a server


@dataclass(slots=True)
class Soak:
    """The server that runs now, and what users saw.

    Fields:
        starts: how many servers were started.
        seen: counts of answers, of hits by tier, of retractions, of requests that a dying server lost.
    """

    server: Server
    starts: int = 1
    over: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, answer: Completion) -> None:
        with self.lock:
            self.seen["answers"] += 1
            self.seen["retractions"] += answer.meta["num_retractions"]
            for tier, tokens in (answer.meta.get("cached_tokens_details") or {}).items():
                if isinstance(tokens, int):
                    self.seen[f"tokens from {tier}"] += tokens


def sessions(tokenizer, oracle: ReferencePair) -> list[list[tuple[list[int], ReferenceAnswer]]]:
    """Conversations: for each turn all of its prompt, and the answer of the reference to it."""
    rows = [[number, *tokenizer.encode(one.prompt)[:48]] for number, one in enumerate(held_out_prompts_in_turn())]
    histories, found = rows[:SESSIONS], [list[tuple[list[int], ReferenceAnswer]]() for _ in range(SESSIONS)]
    more = itertools.cycle(rows[SESSIONS : 2 * SESSIONS])
    for _ in range(TURNS):
        answers = oracle.generate(histories, TURN)
        for own, history, answer in zip(found, histories, answers, strict=True):
            own.append((history, answer))
        histories = [[*h, *a.ids, *next(more)[:8]] for h, a in zip(histories, answers, strict=True)]
    return found


def talk(soak: Soak, talks: list, oracle: ReferencePair, rng: random.Random) -> None:
    """One user, who repeats a question only if the server that it was put to has died."""
    while not soak.over:
        for prompt, expected in rng.choice(talks):
            asked = ask(soak, prompt)
            if asked is None:
                return
            answer, server = asked
            assert answer.ids == expected.ids
            if answer.meta["num_retractions"]:
                with soak.lock:
                    assert_steps_kept(server, oracle, [prompt], [answer])
            else:
                assert_same_steps(answer, expected.commit_lens)
            soak.count(answer)


def ask(soak: Soak, prompt: list[int]) -> tuple[Completion, Server] | None:
    """The answer and who gave it; None once all is over."""
    while not soak.over:
        server = soak.server
        try:
            answer = server.client(60).ask(
                {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TURN}}
            )
            if answer.answered:
                return answer, server
        except httpx.HTTPError as error:
            answer = error
        deadline = time.monotonic() + 90
        while soak.server is server and not soak.over:
            assert time.monotonic() < deadline, f"a server that nobody killed answered: {answer}"
            time.sleep(0.1)
        with soak.lock:
            soak.seen["asked again"] += 1
    return None


def test_sessions_outlive_servers(tokenizer, oracle: ReferencePair, tmp_path: Path) -> None:
    """Fails where an answer or a step is another one, a request stays without an answer, or a store that killed
    servers have left keeps a new one from starting or from hitting."""
    talks, rng = sessions(tokenizer, oracle), random.Random(5)
    environment = TINY_OVERLAPPING | ADMIT_ALL | POISONED | {STORE: str(tmp_path / "store")}
    flags = [*PLAIN, *TIERS, "--page-size", "16", *SPECULATE]

    def start(number: int) -> Server:
        return PreloadedServer(flags, tmp_path / f"{number}.log", environment).start()

    soak, end = Soak(start(0)), time.monotonic() + 60 * MINUTES
    with ThreadPoolExecutor(USERS) as pool:
        users = [pool.submit(talk, soak, talks, oracle, random.Random(number)) for number in range(USERS)]
        try:
            while time.monotonic() < end and not any(user.done() for user in users):
                time.sleep(min(rng.uniform(*LIFE_S), max(end - time.monotonic(), 0)))
                if time.monotonic() < end and rng.random() < 0.7:
                    _signal_group(soak.server._process, signal.SIGKILL)
                soak.server.stop()
                soak.server = start(soak.starts)
                soak.starts += 1
                print(f"{soak.starts} servers, {dict(soak.seen)}", flush=True)
        finally:
            soak.over = True
            soak.server.stop()
    for user in users:
        user.result()
    assert soak.seen["tokens from storage"] and soak.seen["tokens from host"], soak.seen
