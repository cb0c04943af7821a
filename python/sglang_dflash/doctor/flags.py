"""Asks SGLang, in a child process, what it would make of a pair and its server flags, before a server is started."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.doctor.findings import Finding, fail, ok, skip, warn
from sglang_dflash.serving.device import device_flags
from sglang_dflash.serving.errors import last_error
from sglang_dflash.serving.lifetime import TiedProcess

REPORTER = "sglang_dflash.host.start.start_report"
MARK = '{"start": '
LONGEST_S = 300.0
"""SGLang's imports take half a minute on two cores, and some minutes from a cold disk."""
WAITING_BACKENDS = ("flashinfer",)
"""Attention backends that take lengths on the host, so that each step waits for the one before (start/waiting.py)."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Start:
    """What the child said. `kind`: settings, refused or failed; `values`: as `start_report.settings` names them."""

    kind: str
    said: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def server_flags(target: str, draft: str, given: Sequence[str]) -> list[str]:
    """The flags of `sglang.launch_server` for this pair on this machine."""
    own = ["--model-path", target, *device_flags(given), *given]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]
    return own if "--speculative-algorithm" in given else [*own, *speculate]


def ask_sglang(flags: Sequence[str], on_wait: Callable[[float], None]) -> Start:
    """
    Args:
        flags: of `server_flags`.
        on_wait: called about twice a second with the seconds waited.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-dflash-doctor-") as folder:
        log, answers = Path(folder) / "log", Path(folder) / "answers"
        began = time.monotonic()
        with log.open("wb") as errors, answers.open("wb") as output:
            child = TiedProcess(
                [sys.executable, "-m", REPORTER, *flags], stdout=output, stderr=errors, stdin=subprocess.DEVNULL
            )
            try:
                while child.poll() is None and time.monotonic() - began < LONGEST_S:
                    on_wait(time.monotonic() - began)
                    time.sleep(0.5)
            finally:
                child.terminate()
                child.wait()
        said = list(_answers(answers.read_text(errors="replace")))
        if said and said[-1].kind != "imported":
            return said[-1]
        return Start("failed", last_error(log).rpartition(" (log:")[0])


def _answers(text: str) -> Iterator[Start]:
    for line in text.splitlines():
        if line.startswith(MARK):
            values = json.loads(line)
            yield Start(values.pop("start"), values.pop("said", ""), values)


def judge(start: Start, weight_bytes: int | None) -> Iterator[Finding]:
    """
    Args:
        weight_bytes: of target and draft together on one rank; None: unknown.
    """
    if start.kind == "refused":
        yield fail("start", start.said, "change what the sentence names; docs/troubleshooting.md has the sentences")
        return
    if start.kind == "failed":
        fix = "see the sentence; SGLang itself ends with it"
        yield fail("start", f"SGLang does not take these flags: {start.said}", fix)
        return
    values = start.values
    yield from _worker(values)
    yield from _attention(values)
    yield from _memory(values, weight_bytes)


def _worker(values: dict[str, Any]) -> Iterator[Finding]:
    if values["algorithm"] != "DFLASH":
        said = f"--speculative-algorithm is {values['algorithm']}: the flags start no DFLASH worker."
        yield warn("start", said, "leave the flag out; doctor adds --speculative-algorithm DFLASH")
    elif values["worker"] == "builtin":
        said = "SGLANG_DFLASH_WORKER=builtin: SGLang's own worker would serve, not this package's."
        yield warn("start", said, "unset the variable")
    else:
        said = f"SGLang takes the flags: blocks of {values['block_size']} rows, {values['dtype']}"
        window = f", a draft window of {values['window']} tokens" if values["window"] else ""
        yield ok("start", f"{said}{window}.")


def _attention(values: dict[str, Any]) -> Iterator[Finding]:
    target, draft = values["attention"], values["draft_attention"]
    waiting = [name for name in WAITING_BACKENDS if name in f"{target}/{draft}"]
    said = f"target {target}, draft {draft}, overlap scheduling {'on' if values['overlap'] else 'off'}"
    if values["device"] == "cuda" and waiting:
        yield warn(
            "attention backend",
            f"{said}: {waiting[0]} takes lengths on the host, so each step waits for the one before.",
            "--attention-backend fa3 (SM 8.x without MLA, SM 9.x), trtllm_mha (SM 10.x) or triton",
        )
    elif values["device"] == "cuda" and not values["overlap"]:
        yield warn("attention backend", f"{said}.", "leave --disable-overlap-schedule out")
    elif values["device"] == "cpu" and values["dtype"] == "float16":
        said = "float16, which the native ops do not take on a CPU: their specification computes, and slowly."
        yield warn("dtype", said, "--dtype bfloat16 or float32")
    else:
        yield ok("attention backend", f"{said}.")


def _memory(values: dict[str, Any], weight_bytes: int | None) -> Iterator[Finding]:
    """SGLang sizes the pools by what is free before the weights, times the static share, less the weights."""
    target, draft, asked = values["token_bytes"], values["draft_token_bytes"], values["max_total_tokens"]
    each = f"a token takes {target:,} bytes in the target's pool and {draft:,} in the draft's"
    if weight_bytes is None or not values["static_share"]:
        yield skip("KV pools", f"{each}; how many fit is not known before the weights are here.")
        return
    left = values["free_bytes"] * values["static_share"] - weight_bytes
    fit = int(max(0.0, left) / (target + draft))
    free = f"{values['free_bytes'] / GB:.1f} GB are free, {weight_bytes / GB:.1f} GB of it for weights"
    tokens = fit if asked is None else min(fit, asked)
    if left <= 0:
        fix = "a larger --mem-fraction-static, more ranks, or a smaller target"
        yield fail(
            "KV pools", f"{free}: nothing is left for KV at --mem-fraction-static {values['static_share']}.", fix
        )
    elif asked is not None and asked > fit:
        said = f"{free}; --max-total-tokens is {asked:,}, and some {fit:,} fit: {each}."
        yield warn("KV pools", said, f"--max-total-tokens {fit} or less")
    elif tokens < values["context"]:
        said = f"some {tokens:,} tokens fit, fewer than one context of {values['context']:,}: requests are retracted."
        yield warn(
            "KV pools", said, "a larger --max-total-tokens or --mem-fraction-static, or a shorter --context-length"
        )
    else:
        yield ok("KV pools", f"some {tokens:,} tokens fit: {free}; {each}.")
