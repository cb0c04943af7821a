"""Loads sessions: of datasets of the Hugging Face hub, of prompt files, of the embedded pair, and those of agents.

Names, splits and wording of the hub's datasets are those of the DFlash paper's benchmark (z-lab/dflash), so that
acceptance can be compared with published values. SGLang's client has none of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from sglang_dflash.serving import KINDS, sentence
from sglang_dflash.serving.prompts import bundled_prompts, read_prompts
from sglang_dflash.serving.sessions import Session, Turn

AGENTS = Path(__file__).parents[1] / "assets" / "agent-sessions"
"""Sessions of 6 to 12 turns for LONG_CONTEXT tokens with answers of 512, and of 6 to 9 turns for 2,048 tokens of the
embedded pair's small vocabulary with answers of 96."""
LONG_CONTEXT = 32768
_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
_ISSUE = "Problem Statement:\n{problem_statement}\nPlease fix the issue described above."


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One dataset.

    Fields:
        repo: owner/name on the hub.
        config: None if it has only one.
        prompt: of a row, a text with its columns; or a function that returns its user messages, one per turn.
        files: JSONL files with the rows, if the repository has a loading script, which datasets>=4 refuses.
    """

    repo: str
    config: str | None
    split: str
    prompt: str | Callable[[Mapping[str, Any]], list[str]]
    files: tuple[str, ...] = ()

    def rows(self) -> Any:
        """All rows, as an object with a length and an index. Without a network the libraries read their caches, after
        they have tried for some 20 s."""
        import datasets  # takes a second, which --help must not
        from huggingface_hub import hf_hub_download

        if not self.files:
            return datasets.load_dataset(self.repo, self.config, split=self.split)
        # Use the hub's file cache: data_files="hf://..." needs a network even if the files are cached.
        paths = [hf_hub_download(self.repo, file, repo_type="dataset") for file in self.files]
        return datasets.load_dataset("json", data_files=paths, split=self.split)

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        return [self.prompt.format_map(row)] if isinstance(self.prompt, str) else self.prompt(row)

    @property
    def fetch_command(self) -> str:
        """The shell command that fills the cache over a network."""
        if self.files:
            return f"hf download {self.repo} {' '.join(self.files)} --repo-type dataset"
        names = ", ".join(repr(name) for name in (self.repo, self.config) if name)
        return f'python -c "import datasets; datasets.load_dataset({names}, split={self.split!r})"'


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


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


_CODE_FILES = ("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7)))
HUB: dict[str, HubDataset] = {
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", "{question}" + _REASON),
    "math500": HubDataset("HuggingFaceH4/MATH-500", None, "test", "{problem}" + _REASON),
    "aime24": HubDataset("HuggingFaceH4/aime_2024", None, "train", "{problem}" + _REASON),
    "aime25": HubDataset("MathArena/aime_2025", None, "train", "{problem}" + _REASON),
    "humaneval": HubDataset("openai/openai_humaneval", None, "test", _PROGRAM),
    "mbpp": HubDataset("google-research-datasets/mbpp", "sanitized", "test", "{prompt}"),
    "livecodebench": HubDataset("livecodebench/code_generation_lite", None, "train", _livecodebench, _CODE_FILES),
    "swe-bench": HubDataset("princeton-nlp/SWE-bench_Lite", None, "test", _ISSUE),
    "mt-bench": HubDataset("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": HubDataset("tatsu-lab/alpaca", None, "train", _alpaca),
}


def load(name: str, count: int | None, seed: int) -> list[Session]:
    """The first `count` sessions of a dataset, in an order that depends only on `name` and `seed`; None for all.

    A hub dataset is shuffled with `seed`: a few sessions are a random sample of it, and the first ones of a larger
    sample. A file and the bundled prompts keep their order. There are never more sessions than the dataset has,
    because a repeated prompt would hit the prefix cache.

    Args:
        name: a key of HUB, the path of a .jsonl file, one of KINDS, or `tiny`.

    Raises:
        ValueError: the dataset is unknown, cannot be loaded here, or has wrong content. The message is one sentence.
    """
    flag, hub = f"--dataset-name {name}", HUB.get(name)
    if name.endswith(".jsonl"):
        return read_prompts(Path(name), "--dataset-name", count)
    if name in KINDS or name == "tiny":
        return bundled_prompts(None if name == "tiny" else name)[:count]
    if hub is None:
        names = ", ".join((*HUB, *KINDS, "tiny"))
        raise ValueError(f"{flag} is unknown; it must be one of {names}, or a file whose name ends in .jsonl.")
    try:
        rows = hub.rows()
    except Exception as error:  # two libraries, arrow and the network raise errors of no common class
        reason = f"{type(error).__name__}: {sentence(error, 200)}"
        raise ValueError(
            f"{flag}: {hub.repo} cannot be loaded ({reason}); fill the cache over a network with "
            f"`{hub.fetch_command}`, set HF_HOME to a cache that has it, or use a .jsonl file or a bundled dataset "
            "(arithmetic, code, chat, tiny)."
        ) from None
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)  # not random.sample: its first picks depend on the sample size
    try:
        return [Session.of_texts(f"{name}-{index}", hub.texts(rows[index])) for index in order[:count]]
    except KeyError as error:
        raise ValueError(f"{flag}: {hub.repo} has no column {error}; give the prompts as a .jsonl file.") from None


def agent_sessions(tasks: Sequence[Session], count: int, context: int) -> list[Session]:
    """Sessions of coding agents: tool results, requests, and a system message that every fourth session shares.

    Args:
        tasks: of a dataset. Those with several turns are played as they are. Single prompts become the tasks of our
            sessions; they are used again if there are fewer.
        context: tokens of a session at most.

    Raises:
        ValueError: a prompt has token ids or a text instead of messages.
    """
    if any(len(task.turns) > 1 for task in tasks):
        return list(tasks[:count])
    ours = AGENTS / ("32k.jsonl.gz" if context >= LONG_CONTEXT else "2k.jsonl")
    made = []
    for number, (session, task) in enumerate(zip(read_prompts(ours, "--workload agent", count), cycle(tasks))):
        asked = [message for message in task.turns[0].messages if message.role == "user"][-1:]
        if not asked:
            raise ValueError(f"--workload agent: session {task.id} has no user message to use as the agent's task.")
        first = Turn((session.turns[0].messages[0], *asked))
        made.append(Session(f"agent-{number}-{task.id}", (first, *session.turns[1:]), task.template))
    return made
