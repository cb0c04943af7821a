"""`sglang-dflash regenerate` against a fake server: turns, samples, resumption and refusals."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from sglang_dflash.cli import regenerate as module
from sglang_dflash.cli import train as train_module
from sglang_dflash.cli.regenerate import Asking, RegenerateOptions, Regeneration, regenerate
from sglang_dflash.cli.train import AnswerOptions
from sglang_dflash.serving import TINY_TARGET, Completion, ServerError
from sglang_dflash.serving.lifetime import Stopped, stoppable
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.training import TrainOptions

END = "<|im_end|>"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_TARGET)


class FakeClient:
    """Answers "Answer N." to the N-th question of a conversation; `odd` may return another answer."""

    def __init__(self, tokenizer: Any, odd: Callable[[str], Completion | None] = lambda prompt: None) -> None:
        self.tokenizer, self.odd = tokenizer, odd
        self.prompts: list[str] = []
        self.sampling: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def generate(self, prompt: list[int], **sampling: Any) -> Completion:
        text = self.tokenizer.decode(prompt)
        with self._lock:
            self.prompts.append(text)
            self.sampling.append(sampling)
        return self.odd(text) or self.said(f"Answer {text.count('<|im_start|>user')}.")

    def said(self, text: str, finish_reason: str = "stop") -> Completion:
        ids = self.tokenizer(text + (END if finish_reason == "stop" else ""))["input_ids"]
        return Completion(ids, text, {"type": finish_reason})


class FakeServer:
    """Replaces `Server`; `made` is the last instance."""

    made: FakeServer | None = None
    client_of_next: FakeClient | None = None

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        FakeServer.made = self
        self.arguments, self.running = list(arguments), False

    def start(self, timeout_s: float, on_wait: Any) -> FakeServer:
        self.running = True
        return self

    def client(self, timeout_s: float) -> FakeClient:
        assert FakeServer.client_of_next is not None
        return FakeServer.client_of_next

    def stop(self) -> None:
        self.running = False

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.running = False


@pytest.fixture
def client(tokenizer, monkeypatch) -> FakeClient:
    """The client that the next fake server returns."""
    client = FakeClient(tokenizer)
    monkeypatch.setattr(FakeServer, "client_of_next", client)
    monkeypatch.setattr(FakeServer, "made", None)
    monkeypatch.setattr(module, "Server", FakeServer)
    return client


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(data: Path, output: Path, **changes: Any) -> None:
    given = {"target": str(TINY_TARGET), "max_new_tokens": 64, "concurrency": 4, **changes}
    regenerate(RegenerateOptions(data=data, output=output, **given))


def _samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def _spans(tokenizer: Any, sample: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(sample["input_ids"][start:end]) for start, end in sample["spans"]]


@pytest.fixture
def regeneration(tokenizer, tmp_path) -> Regeneration:
    data = _lines(tmp_path / "data.jsonl", {"prompt": "Hi"})
    return Regeneration(data, tmp_path / "out.jsonl", Asking(str(TINY_TARGET), "", 64, 0.0, "{}"))


TALK = [
    {"role": "system", "content": "Be brief."},
    _user("One?"),
    _assistant("What the data says."),
    _user("Two?"),
    _assistant("What else it says."),
    _user("Three?"),
]


def test_turns_are_answered_one_after_the_other(regeneration, tokenizer):
    """Fails if a question is sent with the data's answers before it instead of the target's own, if a last question
    stays unanswered, or if the turns of one conversation are not merged into one sample."""
    client = FakeClient(tokenizer)
    (sample,) = regeneration.answer(client, TALK)
    assert [prompt.count("<|im_start|>user") for prompt in client.prompts] == [1, 2, 3]
    assert not any("says" in prompt for prompt in client.prompts)
    assert "Answer 1." in client.prompts[1] and client.prompts[2].startswith(client.prompts[1] + "Answer 2." + END)
    assert client.sampling == [{"max_new_tokens": 64, "temperature": 0.0}] * 3
    assert _spans(tokenizer, sample) == [f"Answer {turn}.{END}" for turn in (1, 2, 3)]
    assert [turn["content"] for turn in sample["messages"] if turn["role"] == "assistant"] == [
        "Answer 1.",
        "Answer 2.",
        "Answer 3.",
    ]
    whole = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
    assert tokenizer.decode(sample["input_ids"]) + "\n" == whole


def test_a_prompt_that_does_not_extend_starts_a_sample(regeneration, tokenizer):
    """Fails if a sample joins ids that the target never saw in a row: here the template cuts earlier answers."""
    regeneration.renderer.tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message['content'] if loop.last or message['role'] != 'assistant' else 'cut')"
    )
    first, second = regeneration.answer(FakeClient(tokenizer), [_user("One?"), _assistant(""), _user("Two?")])
    assert _spans(tokenizer, first) == [f"Answer 1.{END}"]
    assert _spans(tokenizer, second) == [f"Answer 2.{END}"]
    assert "cut" in tokenizer.decode(second["input_ids"]) and len(first["messages"]) == 2


def test_an_answer_that_was_cut_ends_the_conversation(regeneration, tokenizer):
    """Fails if the conversation continues after half an answer, or that half is dropped."""
    client = FakeClient(tokenizer)
    client.odd = lambda prompt: client.said("Half an", "length") if "Two?" in prompt else None
    (sample,) = regeneration.answer(client, TALK)
    assert _spans(tokenizer, sample) == [f"Answer 1.{END}", "Half an"]
    assert len(client.prompts) == 2


def _refusing(status: int) -> Callable[[str], None]:
    def refuse(prompt: str) -> None:
        if "Two?" in prompt:
            request = httpx.Request("POST", "http://127.0.0.1/generate")
            raise httpx.HTTPStatusError("refused\nmore", request=request, response=httpx.Response(status))

    return refuse


def test_a_refused_request_keeps_the_turns_before(regeneration, tokenizer):
    """Fails if a conversation that grew too long stops the run, or loses its first answers."""
    (sample,) = regeneration.answer(FakeClient(tokenizer, _refusing(400)), TALK)
    assert _spans(tokenizer, sample) == [f"Answer 1.{END}"]
    assert regeneration.answer(FakeClient(tokenizer, _refusing(400)), [_user("Two?")]) == []


def test_the_output_stands_in_the_datas_order(client, tokenizer, tmp_path, capsys):
    """Fails if answers are written in the order of completion, a conversation is lost, or temporary files stay."""
    rows = [{"prompt": f"Question {number}?"} for number in range(20)] + [{"messages": TALK}]
    output = tmp_path / "made" / "out.jsonl"
    client.odd = _refusing(400)
    _run(_lines(tmp_path / "data.jsonl", *rows, {"prompt": "Two?"}), output, server_args="--mem-fraction-static 0.2")
    samples = _samples(output)
    assert [sample["messages"][0]["content"] for sample in samples[:20]] == [row["prompt"] for row in rows[:20]]
    assert len(samples) == 21 and samples[20]["messages"][0]["role"] == "system"
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "out.jsonl.asking.json"]
    assert FakeServer.made.arguments[:2] == ["--model-path", str(TINY_TARGET)]
    assert FakeServer.made.arguments[-2:] == ["--mem-fraction-static", "0.2"] and not FakeServer.made.running
    said = " ".join(capsys.readouterr().err.split())
    assert "21 samples of 22 conversations, 1 refused by the chat template or the server." in said


def _stopped(data: Path, output: Path, client: FakeClient, tokenizer: Any) -> None:
    """Runs a regeneration whose server dies after the first conversation."""

    def die(prompt: str) -> None:
        if "First" not in prompt:
            raise httpx.ConnectError("gone")

    client.odd = die
    with pytest.raises(ServerError, match=r"stopped answering \(gone\).*start again to go on"):
        _run(data, output, concurrency=1)
    client.odd = lambda prompt: None
    client.prompts.clear()


@pytest.fixture
def data(tmp_path) -> Path:
    return _lines(tmp_path / "data.jsonl", *({"prompt": f"{name}?"} for name in ("First", "Second", "Third")))


@pytest.mark.parametrize("cut", ["", '{"index": 1, "sam'], ids=["whole", "cut"])
def test_what_was_answered_is_not_asked_again(cut, client, data, tokenizer, tmp_path):
    """Fails if a stopped regeneration starts from the beginning, or if an incomplete line breaks it or is kept."""
    output = tmp_path / "out.jsonl"
    _stopped(data, output, client, tokenizer)
    partial = tmp_path / "out.jsonl.partial"
    assert not output.exists() and len(partial.read_text().splitlines()) == 2
    with partial.open("a") as file:
        file.write(cut)
    _run(data, output)
    assert len(client.prompts) == 2 and not any("First" in prompt for prompt in client.prompts)
    assert [sample["messages"][0]["content"] for sample in _samples(output)] == ["First?", "Second?", "Third?"]
    assert not partial.exists()


def test_answers_under_way_are_kept_when_another_fails(client, data, tmp_path):
    """Fails if an answer that came while another conversation failed is requested again."""
    failed = threading.Event()

    def die(prompt: str) -> None:
        if "Third" in prompt:
            failed.set()
            raise httpx.ReadError("")
        failed.wait(10)

    client.odd = die
    with pytest.raises(ServerError, match=r"stopped answering \(ReadError\)"):
        _run(data, tmp_path / "out.jsonl", concurrency=3)
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl.partial").read_text().splitlines()[1:]]
    assert sorted(row["index"] for row in kept) == [0, 1]


@pytest.mark.parametrize("left", ["", '{"target": '], ids=["empty", "cut"])
def test_stopped_before_the_first_line(left, client, data, tmp_path):
    """Fails if a regeneration that was stopped at once can never start again."""
    (tmp_path / "out.jsonl.partial").write_text(left)
    _run(data, tmp_path / "out.jsonl")
    assert len(_samples(tmp_path / "out.jsonl")) == 3


OTHER_DATA: dict[str, Any] = {}


@pytest.mark.parametrize(
    "changes", [{"max_new_tokens": 65}, {"temperature": 0.5}, {"chat_template_kwargs": '{"a": 1}'}, OTHER_DATA]
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_way_of_asking_is_refused(changes, finished, client, data, tokenizer, tmp_path):
    """Fails if one output can get answers made with two sets of options, or from two files."""
    output = tmp_path / "out.jsonl"
    if finished:
        _run(data, output)
    else:
        _stopped(data, output, client, tokenizer)
    if changes is OTHER_DATA:
        _lines(data, {"prompt": "First?"})
    with pytest.raises(ValueError, match=r"was made from other data or with other options"):
        _run(data, output, **changes)


def test_a_finished_output_is_left_alone(client, data, tmp_path, capsys):
    """Fails if a second start requests everything again."""
    _run(data, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    client.prompts.clear()
    _run(data, tmp_path / "out.jsonl", concurrency=1)
    assert client.prompts == [] and (tmp_path / "out.jsonl").read_bytes() == before
    assert "already exists" in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_not_ours_is_not_overwritten(client, data, tmp_path):
    """Fails if a foreign file of that name counts as a finished output."""
    (tmp_path / "out.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match="remove it or name another file"):
        _run(data, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"


def test_a_server_that_fails_is_told_in_a_sentence(client, data, tmp_path):
    """Fails if a server error for which httpx gives several lines ends in a traceback."""
    client.odd = lambda prompt: _refusing(500)(prompt + "Two?")
    with pytest.raises(ServerError, match=r"stopped answering \(refused\)"):
        _run(data, tmp_path / "out.jsonl")


def test_the_trainer_takes_the_ids_as_they_came(client, data, tokenizer, tmp_path):
    """Fails if the trainer tokenizes an answer again, and so learns other ids than the target gave."""
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*"Answer", END)]
    ids = [token for piece in pieces for token in piece]
    assert ids != tokenizer("Answer" + END, add_special_tokens=False)["input_ids"]
    client.odd = lambda prompt: Completion(ids, "Answer", {"type": "stop"})
    output = tmp_path / "out.jsonl"
    _run(data, output)
    from sglang_dflash.training.conversations import read

    for sample in read([str(output)], tokenizer, {ids[-1]}, 100, {}):
        ((start, end),) = sample["spans"]
        assert sample["input_ids"][start:end] == ids


def test_a_line_separator_within_a_text_ends_no_line(client, tmp_path):
    """Fails if a valid line is cut at a character that only `str.splitlines` treats as a line end."""
    data = tmp_path / "odd.jsonl"
    data.write_text(json.dumps({"prompt": "First\u2028\x85?"}, ensure_ascii=False) + "\n", encoding="utf-8")
    _run(data, tmp_path / "out.jsonl")
    ((sample,),) = [_samples(tmp_path / "out.jsonl")]
    assert sample["messages"][0]["content"] == "First\u2028\x85?"


def test_data_of_other_trainers_is_asked(client, tmp_path):
    """Fails where a form that `train` takes is refused here, or loses a turn."""
    rows = [
        {"id": "a", "conversations": [_user("One?"), _assistant("Says.")]},
        {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Says."}]},
    ]
    data = tmp_path / "data.json"
    data.write_text(json.dumps(rows, indent=2))
    _run(data, tmp_path / "out.jsonl")
    said = [sample["messages"] for sample in _samples(tmp_path / "out.jsonl")]
    assert said == [[_user("One?"), _assistant("Answer 1.")], [_user("Two?"), _assistant("Answer 1.")]]


def test_answers_to_gzip_are_named_as_the_text_that_they_are(monkeypatch, tmp_path):
    """Fails where `train --regenerate` writes text to a file that is named gzip."""
    data, asked = tmp_path / "x.jsonl.gz", []
    data.write_bytes(gzip.compress(b'{"prompt": "Hi"}'))
    monkeypatch.setattr(train_module, "regenerate", asked.append)
    options = TrainOptions(target=str(TINY_TARGET), data=(str(data),), output=str(tmp_path / "draft"))
    assert train_module._own_answers(str(data), options, AnswerOptions()) == str(asked[0].output)
    assert asked[0].output == tmp_path / "draft" / "answers-x.jsonl"


def test_half_a_character_is_refused_with_its_place(client, tmp_path):
    """Fails where a lone surrogate ends in a traceback, or the server is started before it is found."""
    data = _lines(tmp_path / "data.jsonl", {"prompt": "Hi"}, {"conversations": [_user("a \ud83d b")]})
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: conversations\[0\]\.content has half a character"):
        _run(data, tmp_path / "out.jsonl")
    assert FakeServer.made is None


def test_aborted_answers_are_not_kept(client, data, tokenizer, tmp_path):
    """Fails if the partial text of an aborted request is kept as an answer."""
    client.odd = lambda prompt: client.said("Half", "abort") if "Second" in prompt else None
    _run(data, tmp_path / "out.jsonl")
    assert [sample["messages"][0]["content"] for sample in _samples(tmp_path / "out.jsonl")] == ["First?", "Third?"]


def test_nothing_answered_is_an_error(client, data, tmp_path):
    """Fails if a server that refuses everything leaves an empty file, which would count as finished."""

    def refuse(prompt: str) -> None:
        request = httpx.Request("POST", "http://server")
        raise httpx.HTTPStatusError("400", request=request, response=httpx.Response(400, request=request))

    client.odd = refuse
    with pytest.raises(ValueError, match="All 3 conversations were refused"):
        _run(data, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_line_with_template_arguments_is_refused(client, tmp_path):
    """Fails if a line's own chat_template_kwargs are ignored."""
    data = tmp_path / "odd.jsonl"
    data.write_text(json.dumps({"prompt": "First?", "chat_template_kwargs": {"enable_thinking": False}}) + "\n")
    with pytest.raises(ValueError, match=r"DATA .*odd\.jsonl.*line 1.*--chat-template-kwargs"):
        _run(data, tmp_path / "out.jsonl")


CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.txt"}'}}
LOGGED = [
    _user("What is in a.txt?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "63"},
    _assistant("What the log says."),
    _user("Thanks?"),
]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
KNOWS_TOOLS = (
    "{%- for tool in tools or [] %}{{- 'tool ' + tool.function.name + '\n' }}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- 'call ' + call.function.arguments.path }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """A log with one line per request of a session; the target's chat template knows tools."""
    monkeypatch.setattr(module, "Renderer", lambda *given: _with_tools(Renderer(*given)))
    rows = [{"messages": LOGGED[:count], "tools": [READ]} for count in (1, 3, 5)]
    return _lines(tmp_path / "log.jsonl", *rows)


def _with_tools(renderer: Renderer) -> Renderer:
    renderer.tokenizer.chat_template = KNOWS_TOOLS
    return renderer


def test_a_log_is_asked_once_with_its_tools(log, client, tokenizer, tmp_path):
    """Fails if a turn is asked again for every later line of its session, if tools or results do not reach the target,
    or if a target that gives the logged call does not get one sample of the session."""
    client.odd = lambda prompt: client.said("call a.txt") if "<|im_start|>tool" not in prompt else None
    _run(log, tmp_path / "out.jsonl")
    (sample,) = _samples(tmp_path / "out.jsonl")
    assert len(client.prompts) == 3 and all(prompt.startswith("tool read\n") for prompt in client.prompts)
    assert "<|im_start|>tool\n63<|im_end|>" in client.prompts[1]
    assert not any("What the log says." in prompt for prompt in client.prompts)
    assert _spans(tokenizer, sample) == [f"call a.txt{END}", f"Answer 1.{END}", f"Answer 2.{END}"]
    assert [tool["function"]["name"] for tool in sample["tools"]] == ["read"]
    assert [turn["role"] for turn in sample["messages"]] == [turn["role"] for turn in LOGGED] + ["assistant"]


def test_a_result_stays_behind_the_call_that_it_answers(log, client, tokenizer, tmp_path):
    """Fails if another call of the target comes before the logged call's result, or is not learned."""
    client.odd = lambda prompt: client.said("call b.txt") if "<|im_start|>tool" not in prompt else None
    _run(log, tmp_path / "out.jsonl")
    first, second = _samples(tmp_path / "out.jsonl")
    assert _spans(tokenizer, first) == [f"call b.txt{END}"]
    assert _spans(tokenizer, second) == [f"Answer 1.{END}", f"Answer 2.{END}"]
    assert not any("b.txt" in prompt.partition("<|im_start|>tool")[0] for prompt in client.prompts[1:])
    assert "call a.txt" in client.prompts[1]


def test_a_call_that_is_too_long_ends_no_session(log, client, tokenizer, tmp_path):
    """Fails if the turns behind a logged call are lost where the target's own call is cut."""
    client.odd = lambda prompt: client.said("call b", "length") if "<|im_start|>tool" not in prompt else None
    _run(log, tmp_path / "out.jsonl")
    first, second = _samples(tmp_path / "out.jsonl")
    assert _spans(tokenizer, first) == ["call b"] and len(second["spans"]) == 2


def test_the_output_can_be_asked_again(log, client, tmp_path):
    """Fails if the written messages and tools are no input."""
    _run(log, tmp_path / "out.jsonl")
    _run(tmp_path / "out.jsonl", tmp_path / "again.jsonl")
    assert _samples(tmp_path / "again.jsonl")[-1]["messages"] == _samples(tmp_path / "out.jsonl")[-1]["messages"]


def test_equal_lines_are_all_asked(client, tmp_path):
    """Fails if a question that stands twice, to be answered twice at a temperature, is asked once."""
    _run(_lines(tmp_path / "twice.jsonl", {"prompt": "One?"}, {"prompt": "One?"}), tmp_path / "out.jsonl")
    assert len(_samples(tmp_path / "out.jsonl")) == len(client.prompts) == 2


def test_a_signal_keeps_finished_answers_alone(client, tmp_path):
    """Fails if an answer that the server's end cuts off counts as one, a finished one is lost, or more are asked."""
    data = _lines(tmp_path / "data.jsonl", *({"prompt": f"{word}?"} for word in ("One", "Two", "Three")))

    def odd(prompt: str) -> Completion | None:
        if "Two?" not in prompt:
            return None
        os.kill(os.getpid(), signal.SIGTERM)
        while FakeServer.made.running:
            time.sleep(0.01)
        return client.said("Cut", "abort")

    client.odd = odd
    with pytest.raises(Stopped), stoppable():
        _run(data, tmp_path / "out.jsonl", concurrency=1)
    assert len(client.prompts) == 2
    _, kept = _samples(tmp_path / "out.jsonl.partial")
    assert kept["index"] == 0 and len(kept["samples"]) == 1


def test_the_target_asks_and_answers(client, tmp_path):
    """Fails if the questions are not those of the target, are not answered, or a finished file is asked for again."""
    numbers = iter(range(100, 999))

    def odd(text: str) -> Completion | None:
        return None if text.endswith("assistant\n") else client.said(f"Compute {next(numbers)} * 7.")

    client.odd = odd
    data, output = tmp_path / "own.jsonl", tmp_path / "out.jsonl"
    _run(data, output, synthesize=3, seed=4, concurrency=1)
    questions = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    assert len(set(questions)) == 3 and all(question.startswith("Compute ") for question in questions)
    assert [row["messages"][0]["content"] for row in _samples(output)] == questions
    asked = len(client.prompts)
    _run(data, output, synthesize=3, seed=4)
    assert len(client.prompts) == asked
    with pytest.raises(ValueError, match=r"--synthesize is 4, but .*out\.jsonl has the answers to the 3 questions"):
        _run(data, output, synthesize=4, seed=4)


def test_questions_are_kept_when_the_server_fails(client, tmp_path):
    """Fails if a server that ends while it writes questions gives a traceback, or takes the questions along."""
    numbers = iter(range(100, 102))

    def odd(text: str) -> Completion:
        if (number := next(numbers, None)) is None:
            raise httpx.ConnectError("gone")
        return client.said(f"Compute {number} * 7.")

    client.odd = odd
    with pytest.raises(ServerError, match=r"stopped answering \(.*gone.*\); see .*own\.jsonl\.server\.log"):
        _run(tmp_path / "own.jsonl", tmp_path / "out.jsonl", synthesize=3, seed=4, concurrency=1)
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 2
    assert FakeServer.made is not None and "--random-seed" in FakeServer.made.arguments
    assert not FakeServer.made.running


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"synthesize": -1}, "--synthesize is -1"),
        ({"synthesize": 1, "seed": -1}, "--seed is -1"),
        ({"opening": "Write"}, "--opening is Write; it needs --synthesize"),
    ],
    ids=str,
)
def test_wrong_numbers_of_questions(changes, said, tmp_path):
    """Fails if a wrong value is found only by SGLang."""
    with pytest.raises(ValueError, match=said):
        RegenerateOptions(**{"data": tmp_path / "own", "output": tmp_path / "out", "target": "T", **changes})
