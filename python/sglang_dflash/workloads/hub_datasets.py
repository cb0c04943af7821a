"""Loads common datasets from the Hugging Face hub and turns their rows into prompts.

Names, splits and wording are those of the DFlash paper's benchmark (z-lab/dflash), so that acceptance can be compared
with published values.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

PROBE_S = 5.0
"""Seconds after which the hub counts as unreachable. `datasets` itself tries for 23 s if the name does not resolve."""

_MATHS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One dataset.

    Fields:
        repo: owner/name on the hub.
        config: "" if it has only one.
        texts: returns a row's user messages, one per turn.
        files: JSONL files with the rows, if the repository has a loading script, which datasets>=4 refuses.
    """

    repo: str
    config: str
    split: str
    texts: Callable[[Mapping[str, Any]], list[str]]
    files: tuple[str, ...] = ()

    @property
    def fetch_command(self) -> str:
        """The shell command that fills the cache over a network."""
        if self.files:
            return f"hf download {self.repo} {' '.join(self.files)} --repo-type dataset"
        names = ", ".join(repr(name) for name in (self.repo, self.config) if name)
        return f'python -c "import datasets; datasets.load_dataset({names}, split={self.split!r})"'


def _maths(column: str) -> Callable[[Mapping[str, Any]], list[str]]:
    return lambda row: [row[column] + _MATHS]


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{asked}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Mapping[str, Any]) -> list[str]:
    """The prompt of LiveCodeBench's own runner for chat models, with its system message first."""
    given = row["starter_code"]
    how = "Use the following code structure:" if given else "Write your code in the following format:"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {how}\n"
        f"```python\n{given or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


def _swe_bench(row: Mapping[str, Any]) -> list[str]:
    return [f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."]


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


HUB: dict[str, HubDataset] = {
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", _maths("question")),
    "math500": HubDataset("HuggingFaceH4/MATH-500", "", "test", _maths("problem")),
    "aime24": HubDataset("HuggingFaceH4/aime_2024", "", "train", _maths("problem")),
    "aime25": HubDataset("MathArena/aime_2025", "", "train", _maths("problem")),
    "humaneval": HubDataset("openai/openai_humaneval", "", "test", _humaneval),
    "mbpp": HubDataset("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "livecodebench": HubDataset(
        "livecodebench/code_generation_lite",
        "",
        "train",
        _livecodebench,
        ("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
    ),
    "swe-bench": HubDataset("princeton-nlp/SWE-bench_Lite", "", "test", _swe_bench),
    "mt-bench": HubDataset("HuggingFaceH4/mt_bench_prompts", "", "train", lambda row: list(row["prompt"])),
    "alpaca": HubDataset("tatsu-lab/alpaca", "", "train", _alpaca),
}


def hub_rows(name: str) -> Any:
    """All rows of a dataset, as an object with a length and an index.

    Args:
        name: a key of HUB.

    Raises:
        ValueError: the dataset is neither in the cache nor available from the hub. The message says what to do.
    """
    import datasets  # takes a second, which --help must not
    from huggingface_hub import constants

    spec = HUB[name]
    given_offline = bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)
    offline = given_offline or not _answers(constants.ENDPOINT)
    with _quiet(), _offline() if offline else nullcontext():
        try:
            return _read(spec)
        except Exception as error:  # two libraries, arrow and the network raise errors of no common class
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if offline and isinstance(error, OSError):
                why = "HF_HUB_OFFLINE is set" if given_offline else f"{constants.ENDPOINT} cannot be reached"
                reason = f"it is not in the cache, and {why}"
    raise ValueError(
        f"--dataset-name {name}: {spec.repo} cannot be loaded ({reason}); fill the cache over a network with "
        f"`{spec.fetch_command}`, set HF_HOME to a cache that has it, or use a .jsonl file or a bundled dataset "
        "(arithmetic, code, chat, tiny)."
    )


def _read(spec: HubDataset) -> Any:
    import datasets

    if spec.files:
        from huggingface_hub import hf_hub_download

        # Use the hub's file cache: data_files="hf://..." needs a network even if the files are cached.
        paths = [hf_hub_download(spec.repo, file, repo_type="dataset") for file in spec.files]
        return datasets.load_dataset("json", data_files=paths, split=spec.split)
    return datasets.load_dataset(spec.repo, spec.config or None, split=spec.split)


@cache
def _answers(endpoint: str) -> bool:
    """Whether the endpoint answers within PROBE_S. Runs in a thread, because no timeout bounds name resolution."""
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def knock() -> None:
        try:
            httpx.head(endpoint, timeout=PROBE_S)
            results.put(True)
        except (httpx.HTTPError, httpx.InvalidURL):
            results.put(False)

    threading.Thread(target=knock, daemon=True).start()
    try:
        return results.get(timeout=PROBE_S)
    except queue.Empty:
        return False


@contextmanager
def _offline() -> Iterator[None]:
    """Makes both libraries use only their caches. They read HF_HUB_OFFLINE at import, so it is too late to set it."""
    import datasets
    from huggingface_hub import constants

    held = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = held


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the libraries' loggers; `hub_rows` reports the result itself."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
