"""Questions that the target writes itself: it completes the opening of a user turn of its chat template."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dflash.serving import Client, Completion, Progress
from sglang_dflash.serving.messages import render
from sglang_dflash.serving.rendering import Renderer, special_ids

_MARK = "THE-QUESTION"
_SHORTEST = 4  # tokens: "Hello!" teaches nothing
_LONGEST = 384  # tokens: a question without an end is none
_DISTINCT = 0.4  # share of distinct tokens; below it a text repeats itself
_TRIES = 20  # sampled texts per question that is wanted, at most
_SAMPLING = {"temperature": 0.9, "max_new_tokens": _LONGEST}  # top_p sorts all logits: half the speed on a CPU


@dataclass(frozen=True, slots=True)
class Synthesis:
    """What decides which questions are written; a file that is gone on with must have the same."""

    target: str
    chat_template_kwargs: str
    seed: int
    opening: str = ""  # the first words of every question


class Questions:
    """A JSONL file of the target's own questions (Magpie, arXiv 2406.08464); each is written as soon as it is there."""

    def __init__(self, path: Path, synthesis: Synthesis, renderer: Renderer) -> None:
        """
        Raises:
            ValueError: the file was not written by a run with the same settings, or the chat template has no place for
                a question.
        """
        self.path, self.synthesis, self.tokenizer = path, synthesis, renderer.tokenizer
        self.opening, self.end_id = _around(renderer, synthesis.opening)
        self.special = special_ids(self.tokenizer)
        if path.exists() and not path.is_file():
            raise ValueError(f"DATA is {path}; with --synthesize it must be a file to write the questions to.")
        self.keys = {_key(question) for question in self._recover()}

    def _recover(self) -> list[str]:
        side = self.path.with_name(self.path.name + ".synthesis.json")
        begun = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else None
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            side.write_text(json.dumps(asdict(self.synthesis)), encoding="utf-8")
            return []
        if begun != asdict(self.synthesis):
            raise ValueError(
                f"DATA is {self.path}, which exists and was not written by --synthesize with this target, seed, "
                "template and opening; name a file to write the questions to."
            )
        written = self.path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):  # the process stopped while it wrote the last line
            os.truncate(self.path, len(whole))
        return [json.loads(line)["prompt"] for line in whole.decode().splitlines()]

    @property
    def random_seed(self) -> int:
        """For SGLang's --random-seed: a run that goes on must not sample the same questions."""
        place = f"{self.synthesis.seed}-{len(self.keys)}"
        return int(hashlib.sha256(place.encode()).hexdigest()[:7], 16)

    def write(self, client: Client, count: int, concurrency: int, progress: Progress) -> None:
        """Asks until the file has `count` questions.

        Raises:
            ValueError: too few of the sampled texts are questions.
            httpx.HTTPError: the server does not answer.
        """
        before = len(self.keys)
        missing = count - before
        tries = _TRIES * missing + 8 * concurrency
        pool = ThreadPoolExecutor(concurrency)
        try:
            with self.path.open("a", encoding="utf-8") as file, progress.phase("Writing questions", missing) as advance:
                for answer in _as_they_come(pool, lambda: self._sample(client), tries, concurrency):
                    if (question := self._accepted(answer)) is not None:
                        file.write(json.dumps({"prompt": question}) + "\n")
                        file.flush()
                        advance()
                    if len(self.keys) >= count:
                        return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        raise ValueError(
            f"--synthesize is {count}, but of {tries:,} sampled texts only {len(self.keys) - before} are questions "
            f"that were not there before; {self.path} has {len(self.keys)}."
        )

    def _sample(self, client: Client) -> Completion:
        return client.generate(self.opening, stop_token_ids=[self.end_id], **_SAMPLING)

    def _accepted(self, answer: Completion) -> str | None:
        """The question, if the text ends as a user turn ends, does not repeat itself and is a new one."""
        ids = [one for one in answer.ids if one not in (self.end_id, self.tokenizer.eos_token_id)]
        looped = len(set(ids)) < _DISTINCT * len(ids)
        if answer.finish_reason != "stop" or len(ids) < _SHORTEST or looped:
            return None
        if not self.special.isdisjoint(ids):
            return None
        question = (self.synthesis.opening + str(self.tokenizer.decode(ids))).strip()
        key = _key(question)
        if not key or key in self.keys or "\ufffd" in question:
            return None
        self.keys.add(key)
        return question


def _around(renderer: Renderer, first_words: str) -> tuple[list[int], int]:
    """The token ids before the question of a chat, its first words included, and the first one behind it."""
    text = render(renderer.tokenizer, [{"role": "user", "content": _MARK}], True, **renderer.template)
    opening, mark, closing = text.partition(_MARK)

    def ids(part: str) -> list[int]:
        return list(renderer.tokenizer(part, add_special_tokens=False)["input_ids"])

    end_id = (ids(closing.lstrip()) or [-1])[0]
    if not mark or not opening or end_id not in special_ids(renderer.tokenizer):  # others stand in questions, too
        raise ValueError(
            "--synthesize: the target's chat template must open a user turn, and end it with a special token."
        )
    return ids(opening + first_words), end_id


def _key(question: str) -> str:
    """Equal for questions that differ in case, spaces and punctuation only."""
    return "".join(filter(str.isalnum, question.casefold()))


def _as_they_come(
    pool: ThreadPoolExecutor, sample: Callable[[], Completion], count: int, concurrency: int
) -> Iterator[Completion]:
    """`count` results of `sample`, with twice as many of them waiting as run at once."""
    waiting: set[Future[Completion]] = set()
    while count or waiting:
        while count and len(waiting) < 2 * concurrency:
            waiting.add(pool.submit(sample))
            count -= 1
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda one: one.exception() is not None):  # no answer is lost with a failed one
            yield future.result()
