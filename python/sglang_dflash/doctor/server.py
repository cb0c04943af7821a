"""Examines a running server: what it says of itself, its answers to some twenty questions, and its speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.core.row_counts import RowCounts
from sglang_dflash.doctor import acceptance, speed
from sglang_dflash.doctor.acceptance import Answers
from sglang_dflash.doctor.card import Card
from sglang_dflash.doctor.expected import Expected, expected
from sglang_dflash.doctor.files import examine, open_pair
from sglang_dflash.doctor.findings import Diagnosis, Finding, Level, fail, ok, skip, warn
from sglang_dflash.doctor.interview import ALONE, Asked, Interview, longest_prompt, thinks_by_default
from sglang_dflash.doctor.questions import questions_for
from sglang_dflash.doctor.tau import Tau
from sglang_dflash.serving import Client, Progress, ServerError, ServerInfo, row_counts
from sglang_dflash.serving.errors import first_line
from sglang_dflash.serving.info import step_seconds

RETRACTED = "sglang:num_retracted_requests"


@dataclass(frozen=True, slots=True)
class Order:
    """What the user asks for.

    Fields:
        model_path, draft: where their files are; None: where the server says.
        expect_tau: None: by the card.
        long_tokens: of a long prompt.
        seed: of the questions; None: other ones each time.
    """

    url: str
    model_path: str | None = None
    draft: str | None = None
    off_url: str | None = None
    prompts: Path | None = None
    expect_tau: float | None = None
    max_new_tokens: int = 96
    long_tokens: int = 2048
    flush: bool = False
    seed: int | None = None


def examine_server(order: Order, progress: Progress) -> Diagnosis:
    """
    Raises:
        ServerError: no SGLang server answers there, or it stops answering.
        ValueError: the prompts cannot be read.
    """
    client = Client(order.url)
    info = ServerInfo.ask(client)
    found = [*_server(info)]
    files, card = _files(order, info)
    found += files
    if any(one.level == Level.FAIL for one in found if one.about == "server"):
        return Diagnosis(order.url, found, {"server": info.to_json()})
    try:
        return _ask(order, client, info, found, expected(card, order.expect_tau), progress)
    except httpx.HTTPError as error:
        raise ServerError(f"The server at {order.url} stopped answering: {first_line(error)}") from None


def _ask(
    order: Order, client: Client, info: ServerInfo, found: list[Finding], wanted: Expected | None, progress: Progress
) -> Diagnosis:
    if order.flush:
        client.flush_when_idle()
    questions = questions_for(info.model_path, Random(order.seed), order.prompts)
    thinks = thinks_by_default(client, questions[0].messages)
    long_tokens = longest_prompt(info.max_prompt_len, order.max_new_tokens, order.long_tokens)
    before = row_counts(client)
    talk = Interview(client, questions, order.max_new_tokens, long_tokens, lambda: None, thinks)
    with progress.phase("Questions", talk.count()) as advance:
        talk.on_done = advance
        asked = talk.hold()
    after, steps = row_counts(client), step_seconds(client)
    answers = Answers(asked, info.chunk, thinks, max(0, info.block_size - 1))
    pace = _pace(order, client, talk, answers.of(ALONE), progress)
    found += acceptance.judge(answers, wanted, list(found))
    found += [*_counted_retractions(client), *speed.judge(answers.mean_tau(), pace, steps), *_rows(before, after)]
    measured = {
        "server": info.to_json(),
        "kinds": {kind: _tau_json(one, wanted, kind) for kind, one in answers.by_kind().items()},
        "ways": {way: _tau_json(answers.tau(way)) for way in dict.fromkeys(one.way for one in asked)},
        "speed": speed.as_json(pace, steps),
    }
    return Diagnosis(order.url, found, measured)


def _server(info: ServerInfo) -> Iterator[Finding]:
    said = f"SGLang {info.version} serves {info.model_path} in {info.dtype}"
    if not info.algorithm:
        fix = "start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFT"
        yield fail("server", f"{said}, with speculation off.", fix)
    elif not info.own_worker:
        fix = "unset SGLANG_DFLASH_WORKER, and see docs/troubleshooting.md (with our worker or without)"
        yield warn("server", f"{said}, with {info.algorithm} of another worker than this package's.", fix)
    else:
        yield ok("server", f"{said}, with {info.algorithm}: blocks of {info.block_size} rows.")


def _files(order: Order, info: ServerInfo) -> tuple[Sequence[Finding], Card]:
    """Findings of the files, where they are here: they say which causes are likely."""
    target, draft = order.model_path or info.model_path, order.draft or info.draft_path
    if not info.algorithm:
        return [], Card()
    try:
        pair = open_pair(target, draft)
    except ValueError as error:
        fix = "give --model-path and --draft, so that configs and card can be read"
        return [skip("files", f"they were not examined: {error}", fix)], Card()
    found = examine(pair)
    if order.expect_tau is not None:
        found = [one for one in found if one.about != "card"]
    return found, pair.card


def _rows(before: RowCounts | None, after: RowCounts | None) -> Iterator[Finding]:
    """How many steps the worker drafted at all, where it chooses."""
    if before is not None and after is not None and (rows := after.since(before)).steps:
        yield ok("rows", f"{rows}.")


def _pace(
    order: Order, client: Client, talk: Interview, alone: Sequence[Asked], progress: Progress
) -> speed.Pace | None:
    if not order.off_url:
        return None
    off = Client(order.off_url.rstrip("/"))
    if ServerInfo.ask(off).algorithm:
        raise ValueError(f"--off-url is {order.off_url}, which serves with speculation; it must be one without.")
    some = alone[::3]
    prompts = [talk.ids[one.question] for one in some]
    with progress.phase("Speed beside the server without speculation", 1) as advance:
        pace = speed.measure(client, off, some, prompts, order.max_new_tokens)
        advance()
    return pace


def _counted_retractions(client: Client) -> Iterator[Finding]:
    """Where the server has metrics, it counts them."""
    try:
        text = client.get_text("/metrics")
    except httpx.HTTPError:
        return
    samples = [s for family in text_string_to_metric_families(text) if family.name == RETRACTED for s in family.samples]
    count = sum(int(one.value) for one in samples if one.name.endswith("_total"))
    if count:
        said = f"{count} requests were retracted since the start: the KV pool was full, and each is prefilled anew."
        yield warn(
            "retraction", said, "a larger --max-total-tokens or --mem-fraction-static, or fewer --max-running-requests"
        )


def _tau_json(one: Tau, wanted: Expected | None = None, kind: str = "") -> dict[str, Any]:
    said = None if wanted is None else wanted.by_kind.get(kind)
    return {"tau": one.tau, **asdict(one), "card": said}
