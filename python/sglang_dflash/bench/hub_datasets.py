"""The field's datasets: what they are called on the Hugging Face hub, and how their rows become prompts.

Names, splits and wording are those of the DFlash paper's own benchmark (z-lab/dflash), so that acceptance can be
compared with what is published for a draft.
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
"""The hub counts as out of reach after so long. `datasets` itself tries for 23 s where a name cannot be resolved."""

_MATHS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One dataset.

    Fields:
        repo: owner/name on the hub.
        config: "" where it has only one.
        texts: a row's user messages, one a turn.
        files: JSON lines that hold the rows, where the repository has a loading script, which datasets>=4 refuses.
    """

    repo: str
    config: str
    split: str
    texts: Callable[[Mapping[str, Any]], list[str]]
    files: tuple[str, ...] = ()

    @property
    def fetch_command(self) -> str:
        """Fills the cache where there is a network."""
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
    """The prompt of LiveCodeBench's own runner for chat models, its system message first."""
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
    """All rows: something with a length that an index can be taken of.

    Args:
        name: a key of HUB.

    Raises:
        ValueError: it is neither in the cache nor to be had from the hub; one sentence, with what to do.
    """
    import datasets  # takes a second: not for --help
    from huggingface_hub import constants

    spec = HUB[name]
    given_offline = bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)
    offline = given_offline or not _answers(constants.ENDPOINT)
    with _quiet(), _offline() if offline else nullcontext():
        try:
            return _read(spec)
        except Exception as error:  # of two libraries, of arrow and of the network: they share no class
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if offline and isinstance(error, OSError):
                why = "HF_HUB_OFFLINE is set" if given_offline else f"{constants.ENDPOINT} cannot be reached from here"
                reason = f"it is not in the cache, and {why}"
    raise ValueError(
        f"--dataset-name {name}: {spec.repo} cannot be loaded ({reason}); fill the cache once where there is a network "
        f"with `{spec.fetch_command}`, point HF_HOME to a cache that has it, or give a .jsonl file or a bundled "
        "dataset (arithmetic, code, chat, tiny)."
    )


def _read(spec: HubDataset) -> Any:
    import datasets

    if spec.files:
        from huggingface_hub import hf_hub_download

        # Through the hub's file cache: data_files="hf://..." finds nothing without a network, cached or not.
        paths = [hf_hub_download(spec.repo, file, repo_type="dataset") for file in spec.files]
        return datasets.load_dataset("json", data_files=paths, split=spec.split)
    return datasets.load_dataset(spec.repo, spec.config or None, split=spec.split)


@cache
def _answers(endpoint: str) -> bool:
    """Whether anything answers there within PROBE_S. In a thread, because no timeout bounds a name's resolution."""
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
    """Both libraries go to their caches at once. They read HF_HUB_OFFLINE when imported, which has happened."""
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
    """The libraries' loggers say nothing; how the loading ended is said by us."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
