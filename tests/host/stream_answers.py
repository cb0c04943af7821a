"""Answers with thoughts and tool calls as models write them, one or two for each of SGLang's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool

Call = tuple[str, dict[str, Any]]
_TYPES = {
    "count": {"type": "integer"},
    "deep": {"type": "boolean"},
    "options": {"type": "object", "properties": {"depth": {"type": "integer"}, "name": {"type": "string"}}},
    "names": {"type": "array", "items": {"type": "string"}},
    "note": {"type": "string"},
}
TOOLS = [
    Tool(type="function", function=Function(name=name, parameters={"type": "object", "properties": properties}))
    for name, properties in (("read_file", {"path": {}}), ("list_files", {"path": {}}), ("set_options", _TYPES))
]
CALLS: list[Call] = [("read_file", {"path": "src/a b.py"}), ("list_files", {"path": "文档/😀 my notes"})]
TYPED: Call = (
    "set_options",
    {
        "count": 3,
        "deep": True,
        "options": {"depth": 2, "name": "x y"},
        "names": ["a", "b c"],
        "note": 'say "hi" [1]\nif a < b: <b>{好}</b> 😀 it\'s',
    },
)
PLAIN: Call = (TYPED[0], {**TYPED[1], "note": "it is 好 😀 [1]\nnow"})  # where a tag ends a string
LOOK = "I will look.\n"
THOUGHT = "Let me think. 2 < 3, a<b, [1] 好😀 it's"


def called(answer: str) -> list[Call]:
    """The calls in an answer of `TOOL_ANSWERS`, in their order."""
    known = [*CALLS, PLAIN if PLAIN[1]["note"] in answer else TYPED]
    return sorted((call for call in known if call[0] in answer), key=lambda call: answer.index(call[0]))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    """A value as XML-like formats write it: a string without quotes, all else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _each(one: Callable[[str, dict[str, Any]], str], between: str = "") -> Callable[[list[Call]], str]:
    """A format that writes one call after the other."""
    return lambda calls: between.join(one(*call) for call in calls)


def _arguments(one: Callable[[str, Any], str], given: dict[str, Any], between: str = "") -> str:
    return between.join(one(key, value) for key, value in given.items())


def _named(name: str, given: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "arguments": {_json(given)}}}'


def _python(value: Any) -> str:
    return f"[{', '.join(map(repr, value))}]" if isinstance(value, list) else repr(value)


_pythonic = _each(lambda name, given: f"{name}({_arguments(lambda k, v: f'{k}={_python(v)}', given, ', ')})", ", ")
_tags = _each(lambda name, given: f"<tool_call>\n{_named(name, given)}\n</tool_call>", "\n")


def _listed(calls: list[Call]) -> str:
    return f"[{', '.join(_named(*call) for call in calls)}]"


def _glm(after_name: str, between: str, last: str) -> Callable[[list[Call]], str]:
    return _each(
        lambda name, given: (
            f"<tool_call>{name}{after_name}"
            + _arguments(lambda k, v: f"<arg_key>{k}</arg_key>{between}<arg_value>{_raw(v)}</arg_value>{last}", given)
            + "</tool_call>"
        ),
        "\n" if last else "",
    )


def _function_tags(start: str, end: str, gap: str = "\n") -> Callable[[list[Call]], str]:
    """Qwen3-Coder's."""
    return _each(
        lambda name, given: (
            f"{start}\n<function={name}>\n"
            + _arguments(lambda k, v: f"<parameter={k}>{gap}{_raw(v)}{gap}</parameter>\n", given)
            + f"</function>\n{end}"
        ),
        "\n",
    )


def _invoked(mark: str, quoted_types: bool, gap: str = "\n") -> Callable[[list[Call]], str]:
    """`<invoke name="x"><parameter name="y">`, with `mark` before each name."""

    def argument(key: str, value: Any) -> str:
        typed = f' string="{_json(isinstance(value, str))}"' if quoted_types else ""
        return f'<{mark}parameter name="{key}"{typed}>{_raw(value)}</{mark}parameter>{gap}'

    return _each(
        lambda name, given: f'<{mark}invoke name="{name}">{gap}{_arguments(argument, given)}</{mark}invoke>{gap}'
    )


def _deepseek(block: str, space: str = "") -> Callable[[list[Call]], str]:
    def wire(calls: list[Call]) -> str:
        inner = _invoked(f"｜DSML｜{space}", quoted_types=True)(calls)
        return f"\n\n<｜DSML｜{space}{block}>\n{inner}</｜DSML｜{space}{block}>"

    return wire


def _deepseek_v3(one: Callable[[str, dict[str, Any]], str], between: str) -> Callable[[list[Call]], str]:
    calls_of = _each(lambda name, given: f"<｜tool▁call▁begin｜>{one(name, given)}<｜tool▁call▁end｜>", between)
    return lambda calls: f"<｜tool▁calls▁begin｜>{calls_of(calls)}<｜tool▁calls▁end｜>"


def _harmony(calls: list[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_json(given)}<|call|>"
        for name, given in calls
    )


def _beam(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f'<rfl:parameter name="{key}">\n{_raw(value)}\n</rfl:parameter>'

    return "<|end|><|start|>assistant".join(
        f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{_arguments(argument, given)}"
        for name, given in calls
    )


def _kimi_k3(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kinds = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}
        opened = f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
        return f"{opened}{_raw(value)}<|close|>argument<|sep|>"

    inner = "".join(
        f'<|open|>call tool="{name}" index="{number}"<|sep|>{_arguments(argument, given)}<|close|>call<|sep|>'
        for number, (name, given) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|><|close|>message<|sep|>"


def _k2_horizon(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{_raw(value)}</ifm|arg_value>\n"

    inner = "".join(f"<ifm|tool_call>{name}\n{_arguments(argument, given)}</ifm|tool_call>\n" for name, given in calls)
    return f"<ifm|tool_calls>\n{inner}</ifm|tool_calls>"


def _minimax_m3(calls: list[Call]) -> str:
    mark = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        if isinstance(value, dict | list):
            members = value.items() if isinstance(value, dict) else (("item", member) for member in value)
            value = "".join(element(*member) for member in members) + mark
        else:
            value = _raw(value) + mark
        return f"{mark}<{key}>{value}</{key}>"

    inner = "".join(
        f'{mark}<invoke name="{name}">{_arguments(element, given)}{mark}</invoke>\n' for name, given in calls
    )
    return f"{mark}<tool_call>\n{inner}{mark}</tool_call>"


def _gemma4(calls: list[Call]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(member)}" for key, member in value.items()) + "}"
        return "[" + ",".join(map(written, value)) + "]" if isinstance(value, list) else _json(value)

    return "".join(f"<|tool_call>call:{name}{written(given)}<tool_call|>" for name, given in calls)


def _inkling(calls: list[Call]) -> str:
    return "".join(
        f"<|message_model|>{name}<|content_invoke_tool_json|>{_json({'name': name, 'args': given})}<|end_message|>"
        for name, given in calls
    )


def _cohere(calls: list[Call]) -> str:
    items = (
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {_json(given)}}}'
        for number, (name, given) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(items) + "\n]<|END_ACTION|>"


def _muse(calls: list[Call]) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{call[0]}<|message|><atem:function_calls>\n"
        f"{_invoked('atem:', quoted_types=False)([call])}</atem:function_calls><|eom|>"
        for call in calls
    )


def _kimi_k2(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _hunyuan(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"

    inner = "".join(
        f"<tool_call>{name}<tool_sep>\n{_arguments(argument, given)}</tool_call>\n" for name, given in calls
    )
    return f"<tool_calls>\n{inner}</tool_calls>"


def _step3(calls: list[Call]) -> str:
    inner = "".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{_invoked('steptml:', quoted_types=False)([call]).strip()}"
        "<｜tool_call_end｜>\n"
        for call in calls
    )
    return f"<｜tool_calls_begin｜>\n{inner}<｜tool_calls_end｜>"


def _gigachat35(calls: list[Call]) -> str:
    inner = _invoked("｜GCML｜", quoted_types=True)(calls)
    return f"<｜GCML｜tool_calls>\n{inner}</｜GCML｜tool_calls>"


def _minicpm5(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        text = f"<![CDATA[{value}]]>" if isinstance(value, str) and "\n" in value else _raw(value)
        return f'<param name="{key}">{text}</param>'

    return "\n".join(f'<function name="{name}">{_arguments(argument, given)}</function>' for name, given in calls)


def _apertus(calls: list[Call]) -> str:
    return f"<|tools_prefix|>[{', '.join(_json({name: given}) for name, given in calls)}]<|tools_suffix|>"


def _interns1(calls: list[Call]) -> str:
    return "".join(
        f'<|action_start|> <|plugin|>\n{{"name": "{name}", "parameters": {_json(given)}}}<|action_end|>'
        for name, given in calls
    )


def _spark25(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key><arg_value>{_raw(value)}</arg_value>\n"

    return "\n".join(f"<tool_call>{name}\n{_arguments(argument, given)}</tool_call>" for name, given in calls)


def _iquest(calls: list[Call]) -> str:
    return _glm("", "", "")(calls).replace("tool_call>", "iquest_tool_call>")


_v3 = _deepseek_v3(lambda name, given: f"function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```", "\n")
_v31 = _deepseek_v3(lambda name, given: f"{name}<｜tool▁sep｜>{_json(given)}", "")
_coder = _function_tags("<tool_call>", "</tool_call>")
_QWEN = [LOOK + _tags(CALLS), LOOK + _tags([TYPED, CALLS[0]]) + "\nDone."]
_GLM45 = [LOOK + _glm("\n", "\n", "\n")(CALLS), "\n" + _glm("\n", "\n", "\n")([TYPED])]
_CODER = [LOOK + _coder(CALLS), LOOK + _coder([TYPED, CALLS[0]]) + "\nDone."]

TOOL_ANSWERS: dict[str, list[str]] = {
    "apertus2509": [LOOK + _apertus(CALLS) + "\nDone.", _apertus([TYPED, CALLS[0]])],
    "beam": [_beam(CALLS) + "<|call|>", _beam([TYPED]) + "<|call|>"],
    "cohere_command4": [LOOK + _cohere(CALLS), _cohere([TYPED, CALLS[0]])],
    "deepseekv3": [LOOK + _v3(CALLS), _v3([TYPED])],
    "deepseekv31": [LOOK + _v31(CALLS), _v31([TYPED, CALLS[0]])],
    "deepseekv32": [LOOK + _deepseek("function_calls")(CALLS), LOOK + _deepseek("function_calls")([TYPED, CALLS[0]])],
    "deepseekv4": [LOOK + _deepseek("tool_calls")(CALLS), LOOK + _deepseek("tool_calls")([TYPED, CALLS[0]])],
    "deepseekv41": [LOOK + _deepseek("calls", " ")(CALLS), LOOK + _deepseek("calls", " ")([TYPED, CALLS[0]])],
    "dots": [
        f"{LOOK}<dots_function_call>\n{_invoked('', quoted_types=False)(CALLS)}</dots_function_call>\nDone.",
        f"{LOOK}<dots_function_call>{_named(*TYPED)}</dots_function_call>",
        f"<dots_function_call>\n{_invoked('', quoted_types=False)([TYPED])}</dots_function_call>",
    ],
    "glm": _GLM45,
    "glm45": _GLM45,
    "glm47": [LOOK + _glm("", "", "")(CALLS), _glm("", "", "")([TYPED, CALLS[0]])],
    "gpt-oss": [
        f"<|channel|>commentary<|message|>{LOOK}<|end|>{_harmony(CALLS[:1])}",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{_harmony([TYPED, CALLS[0]])}",
    ],
    "k2_horizon": [f"\n{LOOK}{_k2_horizon(CALLS)}", _k2_horizon([TYPED, CALLS[0]]) + "\nDone."],
    "kimi_k2": [LOOK + _kimi_k2(CALLS), _kimi_k2([TYPED, CALLS[0]])],
    "kimi_k3": [
        f"<|open|>response<|sep|>{LOOK}<|close|>response<|sep|>{_kimi_k3(CALLS)}",
        _kimi_k3([TYPED, CALLS[0]]),
    ],
    "lfm2": [
        f"{LOOK}<|tool_call_start|>[{_pythonic(CALLS)}]<|tool_call_end|>Done.",
        f"<|tool_call_start|>[{_pythonic([TYPED, CALLS[0]])}]<|tool_call_end|>",
        f"{LOOK}<|tool_call_start|>{_listed(CALLS)}<|tool_call_end|>",
    ],
    "ling3": [LOOK + _glm("\n", "\n", "\n")(CALLS), _glm("", "", "")([TYPED, CALLS[0]])],
    "llama3": [
        LOOK + "<|python_tag|>" + ";".join(_named(*call) for call in CALLS),
        _named(*TYPED),
        f'{{"name": "read_file", "parameters": {_json(CALLS[0][1])}}}',
    ],
    "mimo": [
        LOOK + _function_tags("<tool_call>", "</tool_call>", "")(CALLS),
        _function_tags("<tool_call>", "</tool_call>", "")([TYPED, CALLS[0]]),
    ],
    "minicpm5": [LOOK + _minicpm5(CALLS), _minicpm5([TYPED, CALLS[0]]) + "\nDone."],
    "mistral": [
        f"{LOOK}[TOOL_CALLS] {_listed(CALLS)}",
        LOOK + _each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{_json(given)}")([TYPED, CALLS[0]]),
        f"[TOOL_CALLS] {_listed([TYPED])}",
    ],
    "muse": [
        f" to=user<|message|>{LOOK}<|eom|>{_muse(CALLS)}",
        _muse([TYPED]).removeprefix("<|start|>assistant").replace("<|eom|>", "<|eot|>"),
    ],
    "poolside_v1": [LOOK + _glm("\n", "\n", "\n")(CALLS), _glm("\n", "\n", "\n")([TYPED, CALLS[0]]) + "\nDone."],
    "pythonic": [
        f"{LOOK}[{_pythonic(CALLS)}]",
        f"<|python_start|>[{_pythonic([TYPED, CALLS[0]])}]<|python_end|>",
    ],
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "qwen3_coder": _CODER,
    "spark25": [LOOK + _spark25(CALLS), _spark25([TYPED, CALLS[0]]) + "\nDone."],
    "step3": [LOOK + _step3(CALLS) + "\nDone.", _step3([PLAIN, CALLS[0]])],
    "step3p5": _CODER,
    "minimax-m2": [
        f"{LOOK}<minimax:tool_call>\n{_invoked('', quoted_types=False)(CALLS)}</minimax:tool_call>",
        f"<minimax:tool_call>\n{_invoked('', quoted_types=False)([TYPED, CALLS[0]])}</minimax:tool_call>\nDone.",
    ],
    "minimax-m3": [LOOK + _minimax_m3(CALLS), _minimax_m3([TYPED, CALLS[0]]) + "\nDone."],
    "nanbeige": _CODER,
    "trinity": [*_QWEN, f"<think>{THOUGHT}</think>{_tags(CALLS)}"],
    "interns1": [LOOK + _interns1(CALLS), _interns1([TYPED])],
    "hermes": [*_QWEN, LOOK + _tags(CALLS).replace("\n", "")],
    "hunyuan": [LOOK + _hunyuan(CALLS), _hunyuan([TYPED, CALLS[0]]) + "\nDone."],
    "gigachat3": [
        f"{LOOK}<|message_sep|>\n\nfunction call<|role_sep|>\n{_named(*CALLS[0])}",
        f"{LOOK}<|function_call|>{_named(*TYPED)}",
    ],
    "gigachat35": [LOOK + _gigachat35(CALLS), _gigachat35([TYPED, CALLS[0]])],
    "gemma4": [LOOK + _gemma4(CALLS), _gemma4([TYPED, CALLS[0]]) + "Done."],
    "inkling": [
        f"<|message_model|><|content_text|>{LOOK}<|end_message|>{_inkling(CALLS)}<|content_model_end_sampling|>",
        _inkling([TYPED, CALLS[0]]),
    ],
    "iquest_q1": [LOOK + _iquest(CALLS) + "\nDone.", _iquest([TYPED, CALLS[0]])],
    "response_template": _QWEN,
}

# A checkpoint brings its own template: this one is for Qwen's format.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
TOKENIZERS: dict[str, Any] = {"response_template": SimpleNamespace(response_template=RESPONSE_TEMPLATE)}
"""What stands in for the tokenizer, where a parser takes its format from it."""


def _plain(start: str, end: str, interrupted: str = "") -> list[str]:
    """Answers of a format that has a thought between two marks, or one that a tool call ends."""
    answers = [f"{start}\n{THOUGHT}\n{end}\n\nThe answer is 4 好.", f"{THOUGHT}{end}The answer <b>is</b> 4."]
    return answers + [f"{start}{THOUGHT}\n{interrupted}"] * bool(interrupted)


_THINK = _plain("<think>", "</think>", _tags(CALLS))
_K2_THOUGHT = f"{THOUGHT}</ifm|think>\n"
_ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"

REASONING_ANSWERS: dict[str, list[str]] = {
    "apertus2509": [
        f"{LOOK}<|inner_prefix|>{THOUGHT}<|inner_suffix|>The answer is 4.<|inner_prefix|>Hm.<|inner_suffix|>Yes.",
        f"<|inner_prefix|>{THOUGHT} {_apertus(CALLS)} So it is.<|inner_suffix|>The answer is 4.",
    ],
    "beam": [
        f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>The answer is 4.<|return|>",
        f"{_ANALYSIS}<|start|>assistant{_beam(CALLS)}<|call|>",
    ],
    "cohere_command4": [
        f"{THOUGHT}<|END_THINKING|><|START_TEXT|>The answer is 4 好.<|END_TEXT|>",
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>{_cohere(CALLS)}",
        "<|START_TEXT|>The answer is 4.<|END_TEXT|>",
    ],
    "deepseek-r1": _THINK[:2],
    "deepseek-v3": _THINK,
    "deepseek-v4": [f"{THOUGHT}</think>{LOOK}{_deepseek('tool_calls')(CALLS)}", *_THINK[:2]],
    "deepseek-v41": [f"{THOUGHT}</think>{LOOK}{_deepseek('calls', ' ')(CALLS)}", *_THINK[:2]],
    "dots": _THINK,
    "glm45": _plain("<think>", "</think>", _GLM45[0]),
    "ling3": _plain("<think>", "</think>", _GLM45[0]),
    "hunyuan": _plain("<think>", "</think>", _hunyuan(CALLS)),
    "gpt-oss": [
        f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>The answer is 4, a<b.<|return|>",
        f"{_ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>{LOOK}<|end|>{_harmony(CALLS[:1])}",
        f"{_ANALYSIS}{_harmony([TYPED])}",
    ],
    "k2_horizon": [f"{_K2_THOUGHT}The answer is 4.", f"{_K2_THOUGHT}{LOOK}{_k2_horizon(CALLS)}", _k2_horizon(CALLS)],
    "kimi": _plain("◁think▷", "◁/think▷"),
    "kimi_k2": _plain("<think>", "</think>", _kimi_k2(CALLS)),
    "kimi_k3": [
        f"{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>The answer is 4.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        f"{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>{LOOK}<|close|>response<|sep|>{_kimi_k3(CALLS)}",
        f"<|open|>think<|sep|>{THOUGHT}{_kimi_k3([TYPED])}",
    ],
    "mimo": _THINK,
    "muse": [
        f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>The answer is 4.<|eot|>",
        f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{LOOK}<|eom|>{_muse(CALLS)}",
    ],
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK,
    "minimax": _THINK,
    "minimax-append-think": _THINK[:2],
    "minimax-m3": [
        f"<mm:think>{THOUGHT}</mm:think>The answer is 4.",
        f"\n</mm:think>{LOOK}{_minimax_m3(CALLS)}",
        f"<mm:think>{THOUGHT}</mm:think>{_minimax_m3([TYPED])}",
    ],
    "nanbeige": _THINK,
    "step3": _THINK[:2],
    "step3p5": _THINK[:2],
    "mistral": [*_plain("[THINK]", "[/THINK]"), f"[THINK]{THOUGHT}[/THINK]{LOOK}[TOOL_CALLS] {_listed(CALLS)}"],
    "nemotron_3": _THINK,
    "granite_thinking_parser": _THINK,
    "interns1": _THINK,
    "gemma4": [
        f"<|channel>thought\n{THOUGHT}<channel|>The answer is 4.",
        f"<|channel>thought\n{THOUGHT}<channel|>{LOOK}{_gemma4(CALLS)}",
    ],
    "gigachat35": [f"<think>{THOUGHT}</think>\n{LOOK}{_gigachat35(CALLS)}", *_THINK[:2]],
    "inkling": [
        f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|>"
        "<|message_model|><|content_text|>The answer is 4.<|end_message|><|content_model_end_sampling|>",
        f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|>"
        f"<|message_model|><|content_text|>{LOOK}<|end_message|>{_inkling(CALLS)}<|content_model_end_sampling|>",
    ],
    "iquest_q1": [*_THINK[:2], f"<think>{THOUGHT}</think>{_iquest(CALLS)}"],
    "response_template": _THINK,
}
