"""Questions that a target writes itself, against a fake server: what is kept and left out, and how a run goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sglang_dflash.cli.synthesis import Questions, Synthesis
from sglang_dflash.serving import TINY_TARGET, Completion, Progress
from sglang_dflash.serving.rendering import Renderer

END = "<|im_end|>"
SYNTHESIS = Synthesis(str(TINY_TARGET), "{}", 3)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(TINY_TARGET), {}, "--target")


class Writer:
    """A server that samples: `text` gives the next text and its finish reason."""

    def __init__(self, tokenizer: Any, text: Callable[[], tuple[str, str]]) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def generate(self, prompt: list[int], **sampling: Any) -> Completion:
        self.asked.append((self.tokenizer.decode(prompt), sampling))
        text, reason = self.text()
        return Completion(self.tokenizer(text)["input_ids"], text, {"type": reason})


def _write(questions: Questions, text: Callable[[], tuple[str, str]], count: int) -> Writer:
    writer = Writer(questions.tokenizer, text)
    questions.write(writer, count, 1, Progress(Console(quiet=True)))  # type: ignore[arg-type]
    return writer


def _kept(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_only_new_whole_questions_are_kept(renderer, tmp_path):
    """Fails if a text is kept that was cut, repeats itself, is short, is an old question or has another role's mark."""
    path = tmp_path / "folder" / "questions.jsonl"
    texts = iter(
        [
            ("Compute 12 * 7 now." + END, "stop"),
            ("compute 12 * 7, now" + END, "stop"),  # the same
            ("Compute 5 + 4 and then", "length"),
            ("a" + END, "stop"),
            ("7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 + 7 +" + END, "stop"),
            ("Compute 3. <|im_start|>user Compute 4." + END, "stop"),
            ("Compute 5 + 4 and add 3." + END, "stop"),
        ]
    )
    writer = _write(Questions(path, SYNTHESIS, renderer), lambda: next(texts, ("", "stop")), 2)
    assert _kept(path) == ["Compute 12 * 7 now.", "Compute 5 + 4 and add 3."]
    opening, sampling = writer.asked[0]
    assert opening.endswith("<|im_start|>user\n") and "assistant" not in opening
    assert sampling["stop_token_ids"] == renderer.tokenizer(END)["input_ids"]
    assert sampling["temperature"] > 0


def test_every_question_begins_with_the_opening(renderer, tmp_path):
    """Fails if the target is not asked behind the opening, or the question that is kept lacks it."""
    path = tmp_path / "questions.jsonl"
    opened = replace(SYNTHESIS, opening="Write a Python")
    writer = _write(Questions(path, opened, renderer), lambda: (" function that adds." + END, "stop"), 1)
    assert _kept(path) == ["Write a Python function that adds."]
    assert writer.asked[0][0].endswith("<|im_start|>user\nWrite a Python")
    with pytest.raises(ValueError, match="exists and was not written by --synthesize with this target"):
        Questions(path, SYNTHESIS, renderer)


def _numbers(seed: int) -> Callable[[], tuple[str, str]]:
    drawn = random.Random(seed)
    return lambda: (f"Compute {drawn.randrange(10**6)} + {drawn.randrange(10**6)}." + END, "stop")


def test_a_stopped_run_goes_on(renderer, tmp_path):
    """Fails if questions get lost, come twice, or a run that goes on samples with the seed that it began with."""
    path = tmp_path / "questions.jsonl"
    first = Questions(path, SYNTHESIS, renderer)
    seed = first.random_seed
    _write(first, _numbers(0), 3)
    with path.open("a") as file:
        file.write('{"prompt": "half wri')
    again = Questions(path, SYNTHESIS, renderer)
    assert len(again.keys) == 3
    assert again.random_seed not in (seed, Questions(tmp_path / "other", SYNTHESIS, renderer).random_seed)
    _write(again, _numbers(0), 5)  # the same texts come again
    kept = _kept(path)
    assert len(kept) == len(set(kept)) == 5
    assert len(Questions(path, SYNTHESIS, renderer).keys) == 5


@pytest.mark.parametrize("other", [Synthesis("other", "{}", 3), Synthesis(str(TINY_TARGET), "{}", 4)], ids=str)
def test_a_file_of_another_run_is_not_overwritten(other, renderer, tmp_path):
    """Fails if somebody's own data, or questions of another target or seed, are added to."""
    path = tmp_path / "questions.jsonl"
    _write(Questions(path, SYNTHESIS, renderer), _numbers(0), 1)
    for made, wanted in ((path, other), (tmp_path / "own.jsonl", SYNTHESIS)):
        before = path.read_text()
        made.write_text(before)
        with pytest.raises(ValueError, match="exists and was not written by --synthesize with this target"):
            Questions(made, wanted, renderer)
        assert made.read_text() == before


def test_a_target_that_asks_nothing_ends_the_run(renderer, tmp_path):
    """Fails if a target that writes the same text for ever keeps the command running."""
    questions = Questions(tmp_path / "questions.jsonl", SYNTHESIS, renderer)
    with pytest.raises(ValueError, match=r"--synthesize is 2, but of 48 sampled texts only 1 are questions that were"):
        _write(questions, lambda: ("Compute 12 * 7 now." + END, "stop"), 2)


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}", "USER: {{ messages[0]['content'] }} ASSISTANT:"])
def test_a_template_without_marks_is_refused(template, renderer, tmp_path):
    """Fails if the target is asked to go on with nothing, or a question ends at a word that questions have, too."""
    bare = Renderer(str(TINY_TARGET), {}, "--target")
    bare.tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    bare.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="must open a user turn, and end it with a special token"):
        Questions(tmp_path / "questions.jsonl", SYNTHESIS, bare)


def test_a_folder_is_no_file(renderer, tmp_path):
    """Fails if a folder as DATA ends in a traceback after the server has started."""
    with pytest.raises(ValueError, match="must be a file to write the questions to"):
        Questions(tmp_path, SYNTHESIS, renderer)
