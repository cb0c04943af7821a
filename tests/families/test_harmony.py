"""Harmony, the chat format of gpt-oss: channels, tool calls and their ends, the same with speculation on and off.

The published vocabulary was not at hand. A tiny tokenizer has Harmony's special tokens, a random target of the family
answers, and a logit processor makes it write channels; between their marks it writes what it likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from family_settings import FULL, POOL
from models import make_draft, make_target
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from equality import tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, Completion

pytestmark = [pytest.mark.server, pytest.mark.families]
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
FIRST_MARK, FIRST_SPECIAL = 1792, 1788
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
FREE = None  # a place at which the target writes what it likes, other than special tokens
PROCESSOR = f"""
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class Scripted(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            token = params["script"].get(str(len(params["__req__"].output_ids)))
            if token is None:
                logits[row, {FIRST_SPECIAL}:] = -float("inf")
            else:
                logits[row] = -float("inf")
                logits[row, token] = 0.0
        return logits

print(Scripted().to_str())
"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FLAGS = ["--enable-custom-logit-processor", "--reasoning-parser", "gpt-oss", "--tool-call-parser", "gpt-oss"]


@dataclass(frozen=True, slots=True)
class Case:
    """An answer that the target is made to write.

    Fields:
        parts: marks and words of the answer, and how many tokens are free.
        more: of the request.
        finish: the expected reason.
    """

    parts: tuple[str | int, ...]
    more: dict[str, Any]
    finish: str

    def script(self, tokenizer: PreTrainedTokenizerBase) -> list[int | None]:
        script: list[int | None] = []
        for part in self.parts:
            script += [FREE] * part if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False)
        return script


ANALYSIS = ("<|channel|>", "analysis", "<|message|>")
FINAL = ("<|start|>", "assistant", "<|channel|>", "final", "<|message|>")
CALL = ("<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"n": 12}', "<|call|>")
# SGLang leaves the end of a call in the text if its id is that of the published vocabulary; ours is another.
CALLS = {"tools": [TOOL], "no_stop_trim": True}
CASES = {
    "thought and answer": Case((*ANALYSIS, 9, "<|end|>", *FINAL, 14, "<|return|>"), {}, "stop"),
    "answer alone": Case(("<|channel|>", "final", "<|message|>", 21, "<|return|>"), {}, "stop"),
    "a call": Case((*ANALYSIS, 6, "<|end|>", "<|start|>", "assistant", *CALL), CALLS, "tool_calls"),
    "cut in the thought": Case((*ANALYSIS, 60), {"max_tokens": 19}, "length"),
    "a stop in the answer": Case((*ANALYSIS, 5, "<|end|>", *FINAL, 7, " Halt", 20), {"stop": ["Halt"]}, "stop"),
}


def make_harmony_target(folder: Path) -> Path:
    """A gpt-oss target whose tokenizer, template and ends are Harmony's."""
    make_target("gpt-oss", folder, vocab_size=1856)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == list(range(FIRST_MARK, FIRST_MARK + len(MARKS)))
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": ends}))
    return folder


def messages_of(name: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You answer."}, {"role": "user", "content": f"Write {name} now."}]


def _chat(client: Client, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a client sees, without ids and times: whole, or a stream's pieces put together."""
    url, more = "/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.post(url, body).raise_for_status().json()
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    seen = {
        "thought": message.get("reasoning_content") or "",
        "answer": message.get("content") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "finish": choice["finish_reason"],
        "usage": whole["usage"],
    }
    streamed: dict[str, Any] = {"thought": "", "answer": "", "name": "", "arguments": "", "finish": None}
    for line in client.post(url, body | more).raise_for_status().text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            streamed["thought"] += delta.get("reasoning_content") or ""
            streamed["answer"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                streamed["name"] += call["function"].get("name") or ""
                streamed["arguments"] += call["function"].get("arguments") or ""
            streamed["finish"] = choice["finish_reason"] or streamed["finish"]
        streamed["usage"] = chunk.get("usage") or streamed.get("usage")
    return {"case": name, "whole": seen, "streamed": streamed}


def _ask_all(
    client: Client, bodies: dict[str, Any], prompts: dict[str, list[int]]
) -> tuple[Any, dict[str, Completion]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        chats = list(pool.map(lambda item: _chat(client, *item), bodies.items()))

    def generate(name: str) -> Completion:
        params = {"custom_params": bodies[name]["custom_params"], "temperature": 0.0, "max_new_tokens": 64}
        body = {"input_ids": prompts[name], "sampling_params": params}
        body["custom_logit_processor"] = bodies[name]["custom_logit_processor"]
        return Completion.from_generate(200, client.post("/generate", body).raise_for_status().json())

    with ThreadPoolExecutor(len(bodies)) as pool:
        return chats, dict(zip(bodies, pool.map(generate, bodies), strict=True))


def test_channels_calls_and_ends(tmp_path: Path) -> None:
    """Fails where a channel's mark or an end in the middle of a block is passed over: then a thought runs into the
    answer, a call is text, tokens follow `<|return|>`, or counts of tokens differ."""
    target = make_harmony_target(tmp_path / "target")
    draft = make_draft("gpt-oss", target, tmp_path / "draft")
    tokenizer = AutoTokenizer.from_pretrained(target)
    made = subprocess.run([sys.executable, "-c", PROCESSOR], capture_output=True, text=True, check=True)
    bodies, prompts, scripts = {}, {}, {}
    for name, case in CASES.items():
        scripts[name] = case.script(tokenizer)
        script = {str(place): token for place, token in enumerate(scripts[name]) if token is not None}
        bodies[name] = {
            "messages": messages_of(name),
            "temperature": 0.0,
            "max_tokens": 64,
            "custom_logit_processor": made.stdout.strip().splitlines()[-1],
            "custom_params": {"script": script},
            **case.more,
        }
        prompts[name] = tokenizer.apply_chat_template(messages_of(name), add_generation_prompt=True, return_dict=False)
    plain = ["--device", "cpu", "--model-path", str(target), "--dtype", "float32", *POOL, *FLAGS]
    with PreloadedServer([*plain, "--disable-overlap-schedule"], tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        expected, off = _ask_all(server.client(), bodies, prompts)
    answers = tmp_path / "answers.json"
    known = [(prompts[name], answer.ids) for name, answer in off.items()]
    answers.write_text(json.dumps({"image_token": -1, "answers": known}))
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    environment = TINY_OVERLAPPING | FULL | {"REPLAYED_ANSWERS": str(answers), "REPLAYED_TAPS": str(tmp_path / "taps")}
    with PreloadedServer([*plain, *speculate], tmp_path / "on.log", environment) as server:
        got, on = _ask_all(server.client(), bodies, prompts)
    assert got == expected
    assert {name: answer.ids for name, answer in on.items()} == {name: answer.ids for name, answer in off.items()}
    assert tau(list(on.values())) > 2.0
    for chat in expected:
        _check(chat, CASES[chat["case"]], scripts[chat["case"]], off[chat["case"]].ids, tokenizer)


def _check(chat: dict[str, Any], case: Case, script: list[int | None], ids: list[int], tokenizer: Any) -> None:
    """The channels are those of the script, and say what the target wrote at its free places."""
    whole, streamed = chat["whole"], chat["streamed"]
    assert whole["finish"] == streamed["finish"] == case.finish, chat
    assert (whole["thought"], whole["answer"]) == (streamed["thought"], streamed["answer"]), chat
    assert "<|" not in whole["thought"] + whole["answer"], chat
    pieces = [
        list(group) for is_free, group in groupby(range(len(script)), lambda place: script[place] is FREE) if is_free
    ]
    runs = [tokenizer.decode([ids[place] for place in piece if place < len(ids)]) for piece in pieces]
    thinks = "analysis" in case.parts
    if "max_tokens" in case.more:
        assert runs[0].startswith(whole["thought"]) and whole["thought"] and not whole["answer"], chat
    elif "stop" in case.more:
        assert (whole["thought"], whole["answer"]) == (runs[0], f"{runs[1]} "), (chat, runs)
    else:
        assert whole["thought"] == (runs[0] if thinks else ""), (chat, runs)
        assert whole["answer"] == ("" if "tools" in case.more else runs[1 if thinks else 0]), (chat, runs)
    if "tools" in case.more:
        assert whole["calls"] == [("f", '{"n": 12}')] and streamed["name"] == "f", chat
        assert json.loads(streamed["arguments"]) == {"n": 12}, chat
