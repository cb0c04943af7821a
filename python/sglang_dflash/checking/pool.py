"""KV slots of the on arm: whether all of them come back, and an empty radix cache."""

from __future__ import annotations

import time

import httpx

from sglang_dflash.checking.asking import ask, greedy_body
from sglang_dflash.serving import Client, ServerError


def used_slots(client: Client, floor: int = 0, patience_s: float = 20.0) -> int | None:
    """KV slots in use that no request and no radix cache accounts for; None where others keep the server busy.

    The server frees a request's slots a little after it answered: read until `floor` is reached, or the count has
    not fallen for three readings.

    Raises:
        httpx.HTTPError: the server is not there any more.
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
    """Forgets leaked slots, too: count them first. Waits for the server, which frees a request a little after it
    answered, to be idle.

    Raises:
        ServerError: it does not become idle.
    """
    for _ in range(50):
        try:
            return client.flush_cache()
        except httpx.HTTPStatusError:
            time.sleep(0.1)
    raise ServerError(f"The server at {client.url} does not become idle, so that its radix cache cannot be emptied.")
