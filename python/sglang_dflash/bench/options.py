"""Checks the command line's options; an error is one sentence that names the flag and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.bench.arms import ARMS, VLLM_ARMS
from sglang_dflash.bench.measures import Limits
from sglang_dflash.bench.plan import WORKLOADS

RADIX = {"on": (True,), "off": (False,), "both": (True, False)}
EXTENDABLE = ("arms", "loads", "datasets", "base_urls", "repeats")
"""Options to which a resumed run may add values."""
FLAGS = {
    "loads": "--concurrencies (or --request-rate)",
    "datasets": "--dataset-name",
    "prompts": "the content of --dataset-name",
    "base_urls": "--base-url",
    "environment": "--env",
    "limits": "--ttft-limit-ms and --tpot-limit-ms",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `benchmark_sglang.py --help`; comma-separated texts are not yet split."""

    target_model: str | None
    draft_model: str | None
    draft_tokens: int | None
    eagle3_draft: str | None
    standalone_draft: str | None
    arms: str | None
    vllm_python: str
    base_url: Sequence[str]
    workload: str
    dataset_name: str | None
    num_prompts: int | None
    max_new_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    ignore_eos: bool
    enable_thinking: bool
    concurrencies: str
    request_rate: str
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None
    think_s: float
    context_tokens: int | None
    attention_backends: str
    radix_cache: str
    tp_size: int
    dtype: str
    server_flags: str
    arm_flags: Sequence[str]
    env: Sequence[str]
    repeats: int
    interleave: bool
    warm_up: bool
    stall_s: float
    start_s: float
    output_md: Path
    logs: Path | None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        if (self.target_model is None) != (self.draft_model is None) and self.wants_draft():
            missing = "--draft-model" if self.draft_model is None else "--target-model"
            raise ValueError(
                f"--target-model and --draft-model belong together, but {missing} is missing; give both, or neither to "
                "use the embedded pair."
            )
        _one_of("--workload", self.workload, WORKLOADS)
        _one_of("--radix-cache", self.radix_cache, RADIX)
        if self.output_md.suffix != ".md":
            raise ValueError(f"--output-md is {self.output_md}; it must end in .md. JSON and CSV get the same name.")
        if self.dataset_name is not None and not words(self.dataset_name):
            raise ValueError("--dataset-name is empty; give at least one dataset, or omit the flag.")
        for flag, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--repeats", self.repeats, 1),
            ("--tp-size", self.tp_size, 1),
            ("--draft-tokens", self.draft_tokens, 2),
            ("--context-tokens", self.context_tokens, 256),
            ("--temperature", self.temperature, 0.0),
            ("--think-s", self.think_s, 0.0),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{flag} is {value}; it must be at least {least}.")
        for flag, number in (("--stall-s", self.stall_s), ("--start-s", self.start_s)):
            if not number > 0:
                raise ValueError(f"{flag} is {number}; it must be more than 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")
        self._check_arms()
        self.loads()
        self.urls()
        self.flags_by_arm()
        self.environment()

    def _check_arms(self) -> None:
        for name in self.arm_names():
            _one_of("--arms", name, ARMS)
        names = self.arm_names()
        if "transformers" in self.flags_by_arm():
            raise ValueError("--arm-flags has transformers; this arm has no server and takes no flags.")
        needed = {"eagle3": self.eagle3_draft, "standalone": self.standalone_draft}
        for name, draft in needed.items():
            if name in names and draft is None:
                raise ValueError(f"--arms has {name}; it needs --{name}-draft.")
        if not self.vllm_python and set(names) & set(VLLM_ARMS):
            raise ValueError("--arms has vllm or vllm-off; it needs --vllm-python, a Python that has vLLM installed.")
        if "transformers" in names and (self.workload != "closed" or self.top_p != 1):
            raise ValueError(
                f"--arms has transformers, but --workload is {self.workload} and --top-p is {self.top_p:g}; this arm "
                "supports only --workload closed with --top-p 1."
            )
        if not names and not self.base_url:
            raise ValueError("--arms is empty; give at least one arm, or --base-url.")

    def wants_draft(self) -> bool:
        return bool(set(self.arm_names()) & {"dflash", "builtin", "vllm", "transformers"})

    def arm_names(self) -> list[str]:
        """The names in --arms; by default off, dflash, and each arm whose draft or Python is given."""
        if self.arms is not None:
            return list(dict.fromkeys(words(self.arms)))
        extra = {"eagle3": self.eagle3_draft, "standalone": self.standalone_draft, "vllm": self.vllm_python}
        return ["off", "dflash", *(name for name, given in extra.items() if given)]

    def loads(self) -> tuple[float, ...]:
        """Concurrencies, or request rates if the workload is open-loop."""
        if self.workload == "open-loop":
            return _numbers("--request-rate", self.request_rate, float)
        return tuple(float(number) for number in _numbers("--concurrencies", self.concurrencies, int))

    def urls(self) -> dict[str, str]:
        urls = {}
        for given in self.base_url:
            name, _, url = given.partition("=")
            if not name or name in ARMS or name in urls or not _is_url(url):
                raise ValueError(
                    f"--base-url is {given}; it must be NAME=URL with an http or https URL. NAME must be unique and "
                    f"none of {', '.join(ARMS)}."
                )
            urls[name] = url.rstrip("/").removesuffix("/v1")
        return urls

    def flags_by_arm(self) -> dict[str, str]:
        flags: dict[str, str] = {}
        for given in self.arm_flags:
            name, equals, rest = given.partition("=")
            if name not in ARMS or not equals:
                raise ValueError(f"--arm-flags is {given}; it must be ARM=FLAGS. ARM must be one of {', '.join(ARMS)}.")
            flags[name] = f"{flags.get(name, '')} {rest}"
        return flags

    def environment(self) -> dict[str, dict[str, str]]:
        """Variables by arm; the key "" holds those of all arms."""
        found: dict[str, dict[str, str]] = {}
        for given in self.env:
            name, equals, value = given.partition("=")
            arm, colon, variable = name.rpartition(":")
            if not equals or not variable or (colon and arm not in ARMS):
                raise ValueError(
                    f"--env is {given}; it must be NAME=VALUE or ARM:NAME=VALUE. ARM must be one of {', '.join(ARMS)}."
                )
            found.setdefault(arm, {})[variable] = value
        return found

    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(words(self.attention_backends))) or ("",)

    def limits(self) -> Limits | None:
        given = self.ttft_limit_ms is not None or self.tpot_limit_ms is not None
        return Limits(self.ttft_limit_ms, self.tpot_limit_ms) if given else None

    def to_json(self, prompts: dict[str, str]) -> dict[str, Any]:
        """The options that affect the numbers. A resumed run must have the same, except for EXTENDABLE.

        Args:
            prompts: a digest of each dataset's prompts.
        """
        limits = self.limits()
        return {
            "target_model": self.target_model,
            "draft_model": self.draft_model,
            "draft_tokens": self.draft_tokens,
            "eagle3_draft": self.eagle3_draft,
            "standalone_draft": self.standalone_draft,
            "arms": self.arm_names(),
            "base_urls": list(self.base_url),
            "datasets": list(prompts),
            "prompts": prompts,
            "loads": list(self.loads()),
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "enable_thinking": self.enable_thinking,
            "think_s": self.think_s,
            "context_tokens": self.context_tokens,
            "attention_backends": list(self.backends()),
            "radix_cache": self.radix_cache,
            "tp_size": self.tp_size,
            "dtype": self.dtype,
            "server_flags": self.server_flags,
            "arm_flags": self.flags_by_arm(),
            "environment": self.environment(),
            "repeats": self.repeats,
            "warm_up": self.warm_up,
            "limits": None if limits is None else {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        }


def check_resumable(workload: str, options: dict[str, Any], held_workload: str, held: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: the finished cells were measured with other options.
    """
    if workload != held_workload:
        raise ValueError(f"--workload is {workload}, but the run to --resume has {held_workload}.")
    for name, value in options.items():
        former = held.get(name)
        more = value == former
        if name == "repeats":
            more = value >= (former or 0)
        elif name in EXTENDABLE:
            more = set(value) >= set(former or [])
        elif name == "prompts":
            more = all(value.get(dataset) == digest for dataset, digest in (former or {}).items())
        if not more:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise ValueError(f"{flag} is {value}, but the run to --resume has {held.get(name)}.")


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _one_of(flag: str, value: str, allowed: Sequence[str] | dict[str, Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} has {value}; it must be one of {', '.join(allowed)}.")


def _numbers(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        numbers = tuple(dict.fromkeys(kind(word) for word in words(text)))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        kinds = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{flag} is {text}; it must be {kinds} above 0, separated by commas, such as 1,4,16.")
    return numbers
