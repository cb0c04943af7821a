"""Many requests for minutes, with rows that are chosen and overlap: SGLang's own packed verification crashes then
(SGLang issues 31023 and 31455).

On a GPU `pytest -m cuda tests/e2e/test_rows_soak.py`; on a CPU with `scripts/test.sh --matrix`, for half a minute.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arms import SPECULATE

from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, TINY_TARGET, Client, Server, held_out_prompts

CPU = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "32768"]
GPU = ["--dtype", "bfloat16", "--attention-backend", "fa3", "--max-total-tokens", "262144"]


def soak(client: Client, users: int, seconds: float) -> int:
    """How many requests `users` get answered, each one after the other, of lengths from 8 to 200 tokens."""
    texts = [one.prompt for one in held_out_prompts()]
    end = time.monotonic() + seconds

    def user(number: int) -> int:
        done = 0
        while time.monotonic() < end:
            tokens = 8 + (37 * number + 61 * done) % 192
            answer = client.generate(texts[(7 * number + done) % len(texts)], max_new_tokens=tokens, ignore_eos=True)
            assert len(answer.ids) == tokens
            done += 1
        return done

    with ThreadPoolExecutor(users) as pool:
        return sum(pool.map(user, range(users)))


@pytest.mark.parametrize(
    ("flags", "users", "seconds"),
    [
        pytest.param(CPU, 24, 30.0, marks=[pytest.mark.server, pytest.mark.matrix], id="CPU"),
        pytest.param(GPU, 64, 300.0, marks=pytest.mark.cuda, id="64 on a GPU"),
        pytest.param(GPU, 256, 300.0, marks=pytest.mark.cuda, id="256 on a GPU"),
    ],
)
def test_rows_for_minutes(flags: list[str], users: int, seconds: float, tmp_path: Path) -> None:
    """Fails where a step of a crowd ends the server, a request stays without an answer, or slots are lost."""
    environment = (TINY_ENVIRONMENT | TINY_OVERLAPPING if flags is CPU else {}) | {"SGLANG_DFLASH_WIDTH": "auto"}
    more = ["--model-path", str(TINY_TARGET), "--context-length", "1024", "--max-running-requests", "264"]
    with Server([*flags, *more, *SPECULATE], tmp_path / "log", environment).start() as server:
        client = server.client()
        answered = soak(client, users, seconds)
        assert answered > users and not server.ended(), server.log_tail(5)
        assert client.used_slots() == 0
    print(f"{answered} requests answered")
