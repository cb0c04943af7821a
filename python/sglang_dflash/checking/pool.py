"""KV slots of the on arm: counts leaked slots, and empties the radix cache."""

from __future__ import annotations

import time

import httpx

from sglang_dflash.checking.asking import ask, greedy_body
from sglang_dflash.serving import Client, ServerError


def used_slots(client: Client, floor: int = 0, patience_s: float = 20.0) -> int | None:
    """Number of KV slots in use that belong to no request and not to the radix cache; None if the server stays busy.

    The server frees a request's slots shortly after its answer. So the count is read until it is `floor` or less, or
    has not fallen over three readings.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    deadline = time.monotonic() + patience_s
    seen: list[int] = []
    published = 0.0
    while time.monotonic() < deadline:
        ask(client, greedy_body([1], max_new_tokens=1))  # makes the scheduler publish its load again
        loads = client.get("/v1/loads")["loads"]
        before, published = published, max(load["timestamp"] for load in loads)
        if published > before and not any(load["num_running_reqs"] for load in loads):
            seen.append(sum(load["num_used_tokens"] for load in loads))
            if seen[-1] <= floor or (len(seen) >= 3 and seen[-3] <= seen[-2] <= seen[-1]):
                return seen[-1]
        time.sleep(0.3)
    return None


def empty_cache(client: Client) -> None:
    """Empties the radix cache once the server is idle, which is shortly after its last answer.

    This also returns leaked slots: count them first.

    Raises:
        ServerError: the server does not become idle.
    """
    for _ in range(50):
        try:
            return client.flush_cache()
        except httpx.HTTPStatusError:
            time.sleep(0.1)
    raise ServerError(f"The server at {client.url} does not become idle, so its radix cache cannot be emptied.")
