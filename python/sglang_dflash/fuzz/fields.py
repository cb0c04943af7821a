"""Sends extreme values in every field that the server's own OpenAPI description names, and looks whether it survives.

A request may fail in any way that concerns itself alone. After every round of requests the server must live, answer
known prompts as before, and hold no KV slot. If it does not, halves of the round are sent again to new servers, until
the report can name the request.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from sglang_dflash.serving import Client, Server
from sglang_dflash.serving.client import CONNECTIONS

CONCURRENCY = 8
RAW_SHARE, FITTING_SHARE = 0.02, 0.75
ROUND = 200  # requests between two looks at the server
PATIENCE_S = 60.0  # for one request; a longer one counts as stuck
KNOWN_PROMPTS = ("1 + 1 =", "def add(a, b):\n    return", "Hello")
NEW_TOKENS = 8

_TEXT = "1 + 1 ="
_IDS = [37, 20, 11, 48, 5]
_GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
_SHORT = {"temperature": 0, "max_tokens": NEW_TOKENS, "model": "m"}
_MESSAGES = [{"role": "user", "content": "Hello"}]
_NOWHERE = "/nowhere"
# Path -> (how often it is drawn, requests that are right, or fail in a sentence).
PATHS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "/generate": (
        46,
        [
            {"text": _TEXT, "sampling_params": _GREEDY},
            {"input_ids": _IDS, "sampling_params": _GREEDY, "return_logprob": True},
            {"input_ids": _IDS, "sampling_params": _GREEDY, "return_logprob": True, "logprob_start_len": 0},
            {"text": _TEXT, "sampling_params": {"temperature": 1.0, "top_k": 20, "max_new_tokens": NEW_TOKENS}},
            {"text": [_TEXT, "Hello"], "sampling_params": _GREEDY},
            {"text": _TEXT, "sampling_params": _GREEDY, "stream": True},
        ],
    ),
    "/v1/completions": (
        14,
        [{"prompt": _TEXT, **_SHORT}, {"prompt": _TEXT, **_SHORT, "logprobs": 2, "echo": True}],
    ),
    "/v1/chat/completions": (
        14,
        [{"messages": _MESSAGES, **_SHORT}, {"messages": _MESSAGES, **_SHORT, "logprobs": True, "top_logprobs": 2}],
    ),
    "/abort_request": (4, [{"rid": "nobody"}, {"abort_all": True}]),
    "/open_session": (3, [{"capacity_of_str_len": 100}]),
    "/close_session": (3, [{"session_id": "nobody"}]),
    "/update_weights_from_disk": (2, [{"model_path": _NOWHERE}]),
    "/update_weights_from_tensor": (2, [{"serialized_named_tensors": []}]),
    "/update_weights_from_distributed": (2, [{"names": [], "dtypes": [], "shapes": []}]),
    "/begin_weight_update": (1, [{"selector": "nobody"}]),
    "/update_weight_version": (1, [{"new_version": "1"}]),
    "/get_weights_by_name": (2, [{"name": "nothing"}]),
    "/load_lora_adapter": (2, [{"lora_name": "a", "lora_path": _NOWHERE}]),
    "/load_lora_adapter_from_tensors": (1, [{"lora_name": "a", "config_dict": {}, "serialized_named_tensors": []}]),
    "/unload_lora_adapter": (1, [{"lora_name": "a"}]),
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
        *([[1, 2], [3]], ["a", 1, None], [0] * 3000, ["a" * 1000] * 100, [{"role": "user", "content": None}]),
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
    b"",
    b"{",
    b"\xff\xfe{}",
    b'{"text": "\xc3\x28"}',
    b"[" * 10_000,
    b"null",
    b"[]",
    b'"text"',
    b"1e999",
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


@dataclass(slots=True)
class Findings:
    """What became of the calls.

    Fields:
        statuses: "path status" -> calls; "none" where no answer came.
        complaints: a sentence for each thing that must not happen.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)


def fields_of(client: Client) -> dict[str, dict[str, list[str]]]:
    """Path -> field -> JSON types, as the server's OpenAPI description has them; sampling parameters begin with a dot.

    Raises:
        KeyError: a path of PATHS is not there any more.
    """
    description = client.get("/openapi.json")
    schemas = description["components"]["schemas"]
    found = {}
    for path in PATHS:
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        found[path] = {name: sorted(_types(one, schemas)) for name, one in schema["properties"].items()}
    parameters = _sampling_parameters().items()
    found["/generate"] |= {f".{name}": _types_of_annotation(annotation) for name, annotation in parameters}
    return found


def _sampling_parameters() -> dict[str, str]:
    """Name -> annotation. A process of its own imports SGLang: this package only starts it, outside of `host`."""
    script = (
        "import json; from sglang.srt.sampling.sampling_params import SamplingParams as P\n"
        "print(json.dumps({name: str(kind) for name, kind in P.__annotations__.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _types(schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """JSON types that a schema allows; all of them where it does not say."""
    if "$ref" in schema:
        return _types(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return set().union(*(_types(one, schemas) for one in schema[key]))
    return {schema["type"]} if schema.get("type") in EXTREMES else set(EXTREMES)


def _types_of_annotation(annotation: str) -> list[str]:
    words = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "List": "array", "Set": "array"}
    found = [kind for word, kind in words.items() if word in annotation]
    return found + (["object"] if "Dict" in annotation or "Config" in annotation else []) + ["null"]


def draw_calls(fields: dict[str, dict[str, list[str]]], count: int, seed: int) -> list[Call]:
    """`count` calls, the same for the same seed: a base request with one or two fields at extremes.

    Three of four values have a type that the field allows: the others mostly end at the door.
    """
    rng = Random(seed)
    paths, weights = list(PATHS), [weight for weight, _ in PATHS.values()]
    return [_draw_call(rng, path, fields[path]) for path in rng.choices(paths, weights, k=count)]


def _draw_call(rng: Random, path: str, fields: dict[str, list[str]]) -> Call:
    if rng.random() < RAW_SHARE:
        return Call(path, rng.choice(RAW))
    body = copy.deepcopy(rng.choice(PATHS[path][1]))
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


def send(client: httpx.Client, call: Call) -> str:
    """The HTTP status, or why none came."""
    body = call.body
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    try:
        return str(client.post(call.path, content=body, headers={"Content-Type": "application/json"}).status_code)
    except httpx.TimeoutException:
        return "stuck"
    except httpx.HTTPError as error:
        return f"none ({type(error).__name__})"


def fuzz_fields(
    start: Callable[[], Server], count: int, seed: int, on_done: Callable[[], None] = lambda: None
) -> Findings:
    """Sends `count` calls of seed `number` to servers that `start` gives; a new one after each that did not survive."""
    findings = Findings()
    server = start()
    try:
        calls = draw_calls(fields_of(server.client()), count, seed)
        watched = _Watched(server)
        for round_of in _rounds(calls):
            trouble = watched.round(round_of, findings, on_done)
            if trouble:
                server.stop()
                findings.complaints += _find(start, round_of, trouble)
                server = start()
                watched = _Watched(server)
    finally:
        server.stop()
    return findings


def _rounds(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    for begin in range(0, len(calls), ROUND):
        yield calls[begin : begin + ROUND]


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
        self._expected = self._answers()
        self._slots = self._client.used_slots()

    def _answers(self) -> list[list[int]]:
        return [self._client.generate(prompt, max_new_tokens=32).ids for prompt in KNOWN_PROMPTS]

    def round(self, calls: Sequence[Call], findings: Findings, on_done: Callable[[], None]) -> str:
        """Sends the calls and looks at the server; returns what is wrong with it, or ""."""

        def one(call: Call) -> str:
            status = send(self._http, call)
            on_done()
            return status

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            statuses = list(pool.map(one, calls))
        for call, status in zip(calls, statuses, strict=True):
            findings.statuses[f"{call.path} {status}"] += 1
        if "stuck" in statuses:
            return f"no answer within {PATIENCE_S:.0f} s"
        try:
            if self._answers() != self._expected:
                return "known prompts are answered otherwise"
            left = self._client.used_slots()
        except (httpx.HTTPError, KeyError) as error:
            return f"the server is gone ({type(error).__name__}; last line: {self._server.last_words()[:200]})"
        return "" if left == self._slots else f"{left} KV slots stay in use"
