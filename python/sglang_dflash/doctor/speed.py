"""Break-even tau: how many tokens a drafted step must bring to be worth its time, at one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.core.policy import StepSeconds
from sglang_dflash.doctor.findings import Finding, ok, skip, warn
from sglang_dflash.doctor.interview import Asked
from sglang_dflash.serving import Client, greedy_body

NOT_MEASURED = (
    "--off-url URL of the same server without speculation; or SGLANG_DFLASH_WIDTH=auto, which times plain steps"
)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a token of the same prompts, with and without speculation, and the tokens of a step of the former."""

    on_s: float
    off_s: float
    tokens_per_step: float

    @property
    def speedup(self) -> float:
        return self.off_s / self.on_s

    @property
    def break_even(self) -> float:
        """Tokens a step at which both are equally fast."""
        return self.tokens_per_step / self.speedup


def measure(
    on: Client, off: Client, alone: Sequence[Asked], prompts: Sequence[Sequence[int]], tokens: int
) -> Pace | None:
    """Asks both servers for the same answers, one at a time; the prompts are in their caches then.

    Args:
        alone: answers of the on server to these prompts, which say how many tokens its steps bring.
        tokens: of an answer.

    Returns:
        None where a server answers none of them.
    """
    on_s, off_s = (_seconds_per_token(client, prompts, tokens) for client in (on, off))
    steps = sum(one.answer.steps for one in alone)
    accepted = sum(n * count for one in alone for n, count in enumerate(one.answer.accept_histogram))
    if not on_s or not off_s or not steps:
        return None
    return Pace(on_s, off_s, 1 + accepted / steps)


def _seconds_per_token(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Of decoding alone: an answer of one token takes the same prefill. SGLang measures on its side."""
    seconds, count = 0.0, 0
    for ids in prompts:
        client.ask(greedy_body(ids, max_new_tokens=1))  # the prompt is in the cache from now on
        short, whole = (client.ask(greedy_body(ids, max_new_tokens=most)) for most in (1, tokens))
        if whole.answered and whole.tokens > 1:
            seconds += whole.meta.get("e2e_latency", 0.0) - short.meta.get("e2e_latency", 0.0)
            count += whole.tokens - 1
    return max(0.0, seconds) / count if count else 0.0


def judge(tau: float, pace: Pace | None, steps: StepSeconds | None) -> Iterator[Finding]:
    """
    Args:
        tau: of whole blocks, over kinds.
        steps: how long the server says its steps take; None: it does not say.
    """
    about = "break-even"
    if pace is not None:
        said = (
            f"at one request it is {pace.speedup:.2f} times as fast as with speculation off; a step must bring "
            f"{pace.break_even:.2f} tokens to be as fast, and brings {pace.tokens_per_step:.2f}."
        )
        fix = (
            f"a draft with tau above {pace.break_even:.1f} on such text, or a shorter --speculative-num-draft-tokens; "
            "SGLANG_DFLASH_WIDTH=auto decodes plainly where drafting does not pay"
        )
        yield ok(about, said) if pace.speedup >= 1 else warn(about, said, fix)
    elif steps is not None and steps.plain > 0:
        break_even = steps.block / steps.plain
        said = (
            f"a step with a whole block takes {1e3 * steps.block:.1f} ms and a plain one {1e3 * steps.plain:.1f} ms: a "
            f"whole block must bring {break_even:.2f} tokens at one request, and brings {tau:.2f}."
        )
        fix = f"a draft with tau above {break_even:.1f} on such text; until then the worker verifies fewer rows"
        yield ok(about, said) if tau >= break_even else warn(about, said, fix)
    else:
        yield skip(about, "not measured: the server times no plain steps.", NOT_MEASURED)


def as_json(pace: Pace | None, steps: StepSeconds | None) -> dict[str, Any]:
    return {
        "speedup": None if pace is None else pace.speedup,
        "break_even": None if pace is None else pace.break_even,
        "step_seconds": None if steps is None else steps._asdict(),
    }
