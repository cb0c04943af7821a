"""Plays sessions on a server: so many at a time, each turn after the answer to the one before, with pauses."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from sglang_dflash.serving.completion import Completion
from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.errors import sentence
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.rendering import Renderer, prompt_of
from sglang_dflash.serving.sessions import Message, Session


def play(
    endpoint: Endpoint,
    renderer: Renderer,
    sessions: Sequence[Session],
    at_once: int,
    sampling: Sampling,
    on_answer: Callable[[], None] = lambda: None,
    think_s: float = 0.0,
) -> list[Record]:
    """The answers, in the order of the sessions and their turns. A session ends with a failure, or when its context is
    full.

    Args:
        think_s: mean pause before a later turn in seconds, exponential; drawn from the session's id.

    Raises:
        ServerError: the server sends nothing any more.
    """
    begin, stop = time.perf_counter(), Event()

    def one(session: Session) -> list[Record]:
        messages: list[Message] = []
        records: list[Record] = []
        pauses = random.Random(session.id)
        for number, turn in enumerate(session.turns):
            stop.wait(pauses.expovariate(1.0) * think_s if number else 0.0)
            messages += turn.messages
            try:
                prompt = prompt_of(session, messages, renderer)
                if stop.is_set() or (number and endpoint.context and len(prompt) >= endpoint.context):
                    break
                reply = endpoint.ask(prompt, sampling, begin)
            except ValueError as error:  # the chat template refuses an answer of this session
                now = time.perf_counter() - begin
                reply = Completion(start_s=now, end_s=now, failure=sentence(error))
            records.append(Record.of(session.id, number, reply))
            on_answer()
            if reply.failure:
                break
            messages.append(Message("assistant", reply.text))
        return records

    # No `with`: leaving it waits for the requests in flight, and Ctrl-C must not wait for them.
    pool = ThreadPoolExecutor(at_once)
    try:
        return [record for records in pool.map(one, sessions) for record in records]
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def prompted(
    sessions: Sequence[Session], records: Sequence[Record], renderer: Renderer
) -> list[tuple[Record, list[int]]]:
    """The answers with their prompts, which are made again of the earlier answers. Failures are left out.

    Args:
        records: of one cell; a session's turns in order.
    """
    by_id, chats = {session.id: session for session in sessions}, defaultdict[str, list[Message]](list)
    found = []
    for record in records:
        if not record.failure and record.session in by_id:
            session, messages = by_id[record.session], chats[record.session]
            messages += session.turns[record.turn].messages
            found.append((record, prompt_of(session, messages, renderer)))
            messages.append(Message("assistant", record.text))
    return found
