"""Sends extreme values in every field that the server's own OpenAPI description names, and looks whether it survives.

A request may fail in any way that concerns itself alone. After every round of requests the server must live, answer
known prompts as before, and hold no KV slot. If it does not, halves of the round are sent again to new servers, until
the report can name the request.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from sglang_dflash.serving import TINY_DRAFT, TINY_OVERLAPPING, TINY_TARGET, Progress, Server
from sglang_dflash.serving.client import CONNECTIONS, Client

BASE = [
    *["--device", "cpu", "--dtype", "float32", "--model-path", str(TINY_TARGET)],
    *["--max-total-tokens", "16384", "--max-running-requests", "16", "--log-level", "warning"],
]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(TINY_DRAFT)]
CONCURRENCY = 8
RAW_SHARE, FITTING_SHARE = 0.02, 0.75
ROUND = 200  # requests between two looks at the server
PATIENCE_S = 60.0  # for one request; a longer one counts as stuck
KNOWN_PROMPTS = ("1 + 1 =", "def add(a, b):\n    return", "Hello")

PARAMETERS = (
    "import json; from sglang.srt.sampling.sampling_params import SamplingParams as P\n"
    "print(json.dumps({name: str(kind) for name, kind in P.__annotations__.items()}))"
)

_GREEDY = {"temperature": 0, "max_new_tokens": 8}
_TEXT = {"text": "1 + 1 =", "sampling_params": _GREEDY}
_IDS = {"input_ids": [37, 20, 11, 48, 5], "sampling_params": _GREEDY, "return_logprob": True}
_SAMPLED = {"text": "1 + 1 =", "sampling_params": {"temperature": 1.0, "top_k": 20, "max_new_tokens": 8}}
_SHORT = {"temperature": 0, "max_tokens": 8, "model": "m"}
_PROMPT = {"prompt": "1 + 1 =", **_SHORT}
_CHAT = {"messages": [{"role": "user", "content": "Hello"}], **_SHORT}
# How often it is drawn, path, and a request that is right, or fails in a sentence.
BODIES: list[tuple[int, str, dict[str, Any]]] = [
    *((8, "/generate", body) for body in (_TEXT, _IDS, _IDS | {"logprob_start_len": 0}, _SAMPLED)),
    *((7, "/generate", _TEXT | more) for more in ({"text": ["1 + 1 =", "Hello"]}, {"stream": True})),
    *((7, "/v1/completions", body) for body in (_PROMPT, {**_PROMPT, "logprobs": 2, "echo": True})),
    *((7, "/v1/chat/completions", body) for body in (_CHAT, {**_CHAT, "logprobs": True, "top_logprobs": 2})),
    (4, "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "temperature": 0}),
    (4, "/v1/messages", {"messages": _CHAT["messages"], "max_tokens": 8, "model": "m"}),
    *(
        (2, "/api/generate", {"prompt": "Hello", "options": {"num_predict": 8}, "model": "m", "stream": stream})
        for stream in (True, False)
    ),
    *(
        (2, "/api/chat", {"messages": _CHAT["messages"], "options": {"num_predict": 8}, "model": "m", "stream": stream})
        for stream in (True, False)
    ),
    *((2, "/abort_request", body) for body in ({"rid": "nobody"}, {"abort_all": True})),
    (3, "/open_session", {"capacity_of_str_len": 100}),
    (3, "/close_session", {"session_id": "nobody"}),
    (2, "/update_weights_from_disk", {"model_path": "/nowhere"}),
    (2, "/update_weights_from_tensor", {"serialized_named_tensors": []}),
    (2, "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
    (1, "/begin_weight_update", {"selector": "nobody"}),
    (1, "/update_weight_version", {"new_version": "1"}),
    (2, "/get_weights_by_name", {"name": "nothing"}),
    (2, "/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    (1, "/load_lora_adapter_from_tensors", {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": []}),
    (1, "/unload_lora_adapter", {"lora_name": "a"}),
]

# Path -> the fields that hold its prompt. One of some hundred fields and one of some sixty values are seldom drawn
# together, so every extreme of a prompt is sent before any is drawn: an empty text ended SGLang 0.5.23, and 600 draws
# missed it.
PROMPTS = {
    "/generate": ("text", "input_ids"),
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages",),
    "/api/generate": ("prompt",),
    "/api/chat": ("messages",),
}


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


# JSON type -> extremes of it.
EXTREMES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "integer": [
        *(0, 1, -1, -2, -7, 3, 7, 100, 1000, 1791, 1792, 2048, 10**6, 2**31 - 1, 2**31, -(2**31)),
        *(2**63 - 1, 2**63, -(2**63), 2**64, 10**30, -(10**30)),
    ],
    "number": [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 1e-300, 1e-7, 1e308, -1e308, math.nan, math.inf, -math.inf],
    "string": [
        *("", "a", " ", "\x00", "\ud800", "\u202e\U0001f600", "0", "-1", "true", "null", "../../etc/passwd", "{", "{}"),
        *("(", "(a*)*b", "[a-z]{1,1000000}", "a" * 100_000, "(" * 500, "root ::= root", 'root ::= "a"', "full", "json"),
        *('{"type": "object"}', '{"$ref": "#"}', '{"type": "array", "minItems": 1000000}', "gASVAAAA", "UklGRg=="),
    ],
    "array": [
        *([], [None], [[]], [{}], [0], [-1], [1, 2], [10**6], [2**63], [1.5], ["a"], ["a", "b"], [math.nan], [True]),
        *(
            [[1, 2], [3]],
            [[1, 2], []],
            ["a", ""],
            ["a", 1, None],
            [0] * 3000,
            ["a" * 1000] * 100,
            [{"role": "user", "content": None}],
        ),
        _nested(200, lambda value: [value]),
    ],
    "object": [
        *({}, {"a": 1}, {"": None}, {"1": 1e308}, {"-1": 1}, {"1": "a"}, {"1792": 1}, {"a": {"b": [1]}}, {"id": None}),
        *({"id": "nobody", "offset": -1}, {"type": "object"}, {"type": "json_object"}, {"type": "json_schema"}),
        *({"enabled": True}, {"include_usage": True}, {"$ref": "#"}, {"__req__": 1}, {"n": -1}),
        _nested(200, lambda value: {"a": value}),
    ],
}
RAW = (
    *(b"", b"{", b"\xff\xfe{}", b'{"text": "\xc3\x28"}', b"[" * 10_000, b"null", b"[]", b'"text"', b"1e999"),
    b'{"text": 1}{',
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `body` is sent as JSON, bytes as they are."""

    path: str
    body: Any

    def __str__(self) -> str:
        text = repr(self.body) if isinstance(self.body, bytes) else json.dumps(self.body)
        return f"POST {self.path} {text if len(text) < 600 else text[:400] + ' ... ' + text[-150:]}"

    def send(self, client: httpx.Client) -> str:
        """The HTTP status, or why none came."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        try:
            return str(client.post(self.path, content=body, headers={"Content-Type": "application/json"}).status_code)
        except httpx.TimeoutException:
            return "stuck"
        except httpx.HTTPError as error:
            return f"none ({type(error).__name__})"


@dataclass(slots=True)
class Findings:
    """`statuses`: "path status" -> calls. `complaints`: a sentence for each thing that must not happen."""

    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)


def fields_of(client: Client) -> dict[str, dict[str, list[str]]]:
    """Path -> field -> JSON types, as the server's OpenAPI description has them; sampling parameters begin with a dot.

    Raises:
        KeyError: a path of BODIES is not there any more.
    """
    description = client.get("/openapi.json")
    found = {}
    for path in dict.fromkeys(path for _, path, _ in BODIES):
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = description["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        found[path] = {name: _kinds(r'"type": "(\w+)"', json.dumps(one)) for name, one in schema["properties"].items()}
    # A process of its own: SGLang takes seconds to import.
    printed = subprocess.run([sys.executable, "-c", PARAMETERS], stdout=subprocess.PIPE, text=True, check=True).stdout
    for name, annotation in json.loads(printed.splitlines()[-1]).items():
        found["/generate"][f".{name}"] = [*_kinds(r"\b(int|float|str|bool|List|Set|Dict)\b", annotation), "null"]
    return found


def _kinds(pattern: str, text: str) -> list[str]:
    """The JSON types that a schema or an annotation names; all where it names none, as a reference does."""
    words = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "Dict": "object"}
    words |= {"List": "array", "Set": "array", **{kind: kind for kind in EXTREMES}}
    return sorted({words[word] for word in re.findall(pattern, text)} or EXTREMES)


def draw_calls(fields: dict[str, dict[str, list[str]]], count: int, seed: int) -> list[Call]:
    """`count` calls, the same for the same seed: every extreme prompt, then BODIES with one or two fields at extremes.

    Three of four values have a type that the field allows: the others mostly end at the door.
    """
    rng = Random(seed)
    prompts = _prompts()[:count]
    drawn = rng.choices(BODIES, [weight for weight, *_ in BODIES], k=count - len(prompts))
    return prompts + [_draw_call(rng, path, copy.deepcopy(body), fields[path]) for _, path, body in drawn]


def _prompts() -> list[Call]:
    """Each extreme text and list in each field of PROMPTS, in the first of BODIES that has the field."""
    calls = []
    for path, names in PROMPTS.items():
        for name in names:
            body = next(body for _, at, body in BODIES if at == path and name in body)
            calls += [Call(path, {**body, name: value}) for kind in ("string", "array") for value in EXTREMES[kind]]
    return calls


def _draw_call(rng: Random, path: str, body: dict[str, Any], fields: dict[str, list[str]]) -> Call:
    if rng.random() < RAW_SHARE:
        return Call(path, rng.choice(RAW))
    sampling = body.get("sampling_params")
    for name in rng.sample(sorted(fields), rng.choice((1, 2))):
        kind = rng.choice(fields[name] if rng.random() < FITTING_SHARE else list(EXTREMES))
        # Mostly one of the list, else a number that nobody thought of.
        value = rng.choice(EXTREMES[kind])
        if kind == "integer" and rng.random() < 0.2:
            value = rng.randint(-100, 3000)
        if name in ("n", ".n") and kind == "integer" and 7 < value <= 4096:
            value = 7  # as many answers are honest work, and take minutes
        (sampling if name[0] == "." else body)[name.removeprefix(".")] = value
    return Call(path, body)


def fuzz_fields(
    start: Callable[[], Server], count: int, seed: int, on_done: Callable[[], None] = lambda: None
) -> Findings:
    """Sends `count` calls of seed `seed` to servers that `start` gives; a new one after each that did not survive."""
    findings = Findings()
    server = start()
    try:
        calls = draw_calls(fields_of(server.client()), count, seed)
        watched = _Watched(server)
        for begin in range(0, count, ROUND):
            round_of = calls[begin : begin + ROUND]
            if trouble := watched.round(round_of, findings, on_done):
                server.stop()
                findings.complaints += _find(start, round_of, trouble)
                server = start()
                watched = _Watched(server)
    finally:
        server.stop()
    return findings


def _find(start: Callable[[], Server], calls: Sequence[Call], trouble: str) -> list[str]:
    """A sentence for each call that does harm alone, by halving; for all of them together where none does."""
    if len(calls) == 1:
        return [f"{trouble}: {calls[0]}"]
    middle, culprits = len(calls) // 2, []
    for half in (calls[:middle], calls[middle:]):
        with start() as server:
            again = _Watched(server).round(half, Findings(), lambda: None)
        if again:
            culprits += _find(start, half, again)
    return culprits or [f"{trouble}; no half of these {len(calls)} does it: {'; '.join(map(str, calls))[:2000]}"]


class _Watched:
    """A server, and what it answered before anybody asked for anything odd."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = server.client(PATIENCE_S)
        self._http = httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=CONNECTIONS)
        self._expected, self._slots = self._answers(), self._client.used_slots()

    def _answers(self) -> list[list[int]]:
        return [self._client.generate(prompt, max_new_tokens=32).ids for prompt in KNOWN_PROMPTS]

    def round(self, calls: Sequence[Call], findings: Findings, on_done: Callable[[], None]) -> str:
        """Sends the calls and looks at the server; returns what is wrong with it, or ""."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            statuses = []
            for call, status in zip(calls, pool.map(lambda call: call.send(self._http), calls), strict=True):
                statuses.append(status)
                findings.statuses[f"{call.path} {status}"] += 1
                on_done()
        if "stuck" in statuses:
            return f"no answer within {PATIENCE_S:.0f} s"
        try:
            if self._answers() != self._expected:
                return "known prompts are answered otherwise"
            left = self._client.used_slots()
        except (httpx.HTTPError, KeyError) as error:
            return f"the server is gone ({type(error).__name__}; last line: {self._server.last_words()[:200]})"
        return "" if left == self._slots else f"{left} KV slots stay in use"


def fuzz_extremes(count: int, seed: int, logs: Path, progress: Progress) -> dict[str, Any]:
    """Extremes in every field, on servers of its own.

    Raises:
        ServerError: a server does not start.
    """
    numbers = itertools.count(1)
    environment = {**TINY_OVERLAPPING, "HF_HUB_OFFLINE": "1"}  # names of models that do not exist are answered at once

    def start() -> Server:
        return Server([*BASE, *DFLASH], logs / f"on-{next(numbers)}.log", environment).start()

    with progress.phase("Requests", count) as advance:
        findings = fuzz_fields(start, count, seed, advance)
    return {"statuses": dict(sorted(findings.statuses.items())), "complaints": findings.complaints}
