"""Whether the draft's KV is written everywhere: a lost write changes no answer, it only costs acceptance.

The same request is drafted from KV that came about in different ways, and must take equally many verify steps: all of
it written by one prefill (`fresh`), the first half of the answer written by verified blocks of concurrent requests and
found in the radix cache (`cached`), or written by several prefills, one after the other (`pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.checking.compare import step_loss
from sglang_dflash.checking.recording import Exchange
from sglang_dflash.serving import AcceptanceStats, Client, Completion, greedy_body

WAYS = {
    "cached": "KV written by verified blocks and found in the radix cache",
    "pieces": "KV written by several prefills, one behind the other",
    "fresh": "KV written by one prefill",
}
OF_ANY_WIDTH = "steps have widths of their own; SGLANG_DFLASH_WIDTH=full makes the server's comparable"
MIN_ANSWER = 16  # tokens: shorter answers leave too few steps behind their middle
MAX_PROMPTS = 8
PIECES = 4
CACHED_SHARE = 0.6  # of a prompt: its last page is never found, and pages may be large


@dataclass(frozen=True, slots=True)
class DraftKv:
    """What the probe found.

    Fields:
        tau: by way; empty where nothing was probed.
        prompts: how many requests were compared.
        lost: one sentence per way that takes more steps than another.
        skipped: why nothing, or not everything, was probed.
    """

    tau: dict[str, float] = field(default_factory=dict)
    prompts: int = 0
    lost: list[str] = field(default_factory=list)
    skipped: str = ""


def probe_draft_kv(
    client: Client, plain: Sequence[Exchange], concurrency: int, exact: bool, on_done: Callable[[], None]
) -> DraftKv:
    """Empties the server's radix cache repeatedly.

    Args:
        plain: the plain case; its longest answers are used.
        exact: see `step_loss`.
    """
    chosen = _with_long_answers(plain)
    if not chosen:
        return DraftKv(skipped=f"no plain answer has {MIN_ANSWER} tokens; raise --max-new-tokens")
    client.flush_when_idle()
    # Verified blocks write the draft's KV of these answers.
    client.ask_all([exchange.request.body for exchange in chosen], concurrency, on_done)
    halves = [_second_half(exchange) for exchange in chosen]
    by_way: dict[str, list[Completion]] = {"cached": [_ask(client, body, on_done) for body in halves]}
    for way, pieces in (("pieces", PIECES), ("fresh", 1)):
        by_way[way] = [_ask_in_pieces(client, body, pieces, on_done) for body in halves]
    return judge(by_way, [len(body["input_ids"]) for body in halves], exact)


def requests_needed(plain: Sequence[Exchange]) -> int:
    return len(_with_long_answers(plain)) * (1 + len(WAYS))


def judge(by_way: dict[str, list[Completion]], prompt_lens: Sequence[int], exact: bool) -> DraftKv:
    """Compares the ways over the requests that took each of them as meant, with the same answer.

    Args:
        by_way: outcomes of the same requests, per way.
        prompt_lens: of these requests.
    """
    if any(outcome.adapts for outcomes in by_way.values() for outcome in outcomes):
        return DraftKv(skipped=OF_ANY_WIDTH)
    usable = [
        number
        for number, length in enumerate(prompt_lens)
        if all(outcomes[number].answered and outcomes[number].steps for outcomes in by_way.values())
        and len({tuple(outcomes[number].ids) for outcomes in by_way.values()}) == 1
        and by_way["cached"][number].cached_tokens >= CACHED_SHARE * length
        and not by_way["fresh"][number].cached_tokens
    ]
    if not usable:
        return DraftKv(skipped="no request hit the radix cache with an equal answer (is the cache disabled?)")
    steps = {way: [outcomes[number].steps for number in usable] for way, outcomes in by_way.items()}
    best = min(steps, key=lambda way: sum(steps[way]))
    tau = {way: AcceptanceStats.of(outcomes[number] for number in usable).tau for way, outcomes in by_way.items()}
    lost = []
    for way, counts in steps.items():
        loss = step_loss(counts, steps[best], exact)
        if loss.lost:
            lost.append(
                f"{loss.share:.0%} more verify steps with {WAYS[way]} than with {WAYS[best]}, for the same answers: "
                "the draft's KV is not the same"
            )
    return DraftKv(tau, len(usable), lost)


def _with_long_answers(plain: Sequence[Exchange]) -> list[Exchange]:
    long = [exchange for exchange in plain if len(exchange.outcome.ids) >= MIN_ANSWER]
    return sorted(long, key=lambda exchange: -len(exchange.outcome.ids))[:MAX_PROMPTS]


def _second_half(exchange: Exchange) -> dict[str, Any]:
    """The plain request, the first half of its answer moved into its prompt."""
    body, answer = exchange.request.body, exchange.outcome.ids
    given = len(answer) // 2
    limit = body["sampling_params"]["max_new_tokens"] - given
    return greedy_body([*body["input_ids"], *answer[:given]], max_new_tokens=limit)


def _ask(client: Client, body: dict[str, Any], on_done: Callable[[], None]) -> Completion:
    outcome = client.ask(body)
    on_done()
    return outcome


def _ask_in_pieces(client: Client, body: dict[str, Any], pieces: int, on_done: Callable[[], None]) -> Completion:
    """Each longer beginning of the prompt is asked for one token, so that the next one finds it in the cache."""
    client.flush_when_idle()  # other prompts may begin alike
    ids = body["input_ids"]
    for piece in range(1, pieces):
        client.ask(greedy_body(ids[: len(ids) * piece // pieces], max_new_tokens=1))
    return _ask(client, body, on_done)
