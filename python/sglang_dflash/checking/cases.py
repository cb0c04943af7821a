"""The matrix of sampling parameters with which a check sends every prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sglang_dflash.checking.compare import Request
from sglang_dflash.serving import Completion, greedy_body

PLAIN, LOGPROBS_CASE, WHOLE_BLOCKS_CASE = "plain", "logprobs", "plain, whole blocks"
REGEX = r"(yes|no|maybe)( [a-z]{1,10}){4,24}\."
JSON_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "count", "tags"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and its plain answer. Cases choose parameters from that answer, so that they change something.

    Fields:
        limit: `max_new_tokens` of every request.
    """

    prompt_id: str
    input_ids: list[int]
    plain: Completion
    limit: int

    @property
    def middle(self) -> int:
        """Index of a token in the middle of the plain answer."""
        return len(self.plain.ids) // 2


Build = Callable[[Asked, Random], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the matrix.

    Fields:
        sampling: the parameters for one prompt.
        extra: further fields of the request.
        continues: the first half of the plain answer belongs to the prompt. Behind the plain case, the prefix cache
            holds what verified blocks wrote of it: KV, and recurrent state.
        deterministic: the answer is reproducible only with --enable-deterministic-inference.
    """

    name: str
    sampling: Build
    extra: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    deterministic: bool = False

    def request(self, asked: Asked, seed: int) -> Request:
        rng = Random(f"{seed} {self.name} {asked.prompt_id}")
        given = asked.middle if self.continues else 0
        body = greedy_body([*asked.input_ids, *asked.plain.ids[:given]], max_new_tokens=asked.limit - given)
        body["sampling_params"] |= self.sampling(asked, rng)
        return Request(self.name, asked.prompt_id, {**body, **self.extra})


def min_new_tokens(asked: Asked, rng: Random) -> dict[str, Any]:
    """More tokens than the plain answer has, so that the end token is really suppressed."""
    return {"min_new_tokens": min(asked.limit, len(asked.plain.ids) + rng.randint(2, 10))}


def logit_bias(asked: Asked, rng: Random) -> dict[str, Any]:
    """Biases against the plain answer's most common tokens, and for one of its other tokens."""
    common = [token for token, _ in Counter(asked.plain.ids).most_common(3)]
    biases = {str(token): -rng.choice((1.5, 4.0, 100.0)) for token in common}
    others = [token for token in asked.plain.ids if token not in common]
    return {"logit_bias": biases | ({str(rng.choice(others)): 1.25} if others else {})}


def stop_string(asked: Asked, rng: Random) -> dict[str, Any]:
    """Three characters from within the plain answer; they rarely end where a token ends."""
    text = asked.plain.text
    start = rng.randint(len(text) // 3, max(len(text) // 3, len(text) - 4))
    return {"stop": [text[start : start + 3] or "\n"]}


def stop_token_ids(asked: Asked, rng: Random) -> dict[str, Any]:
    return {"stop_token_ids": [asked.plain.ids[asked.middle]]}


def penalties(asked: Asked, rng: Random) -> dict[str, Any]:
    """All three penalties; some values are negative or below 1, which rewards repetition."""
    ranges = (("frequency_penalty", -0.3, 1.2), ("presence_penalty", -0.3, 1.2), ("repetition_penalty", 0.95, 1.4))
    return {name: value for each in ranges for name, value in drawn(*each)(asked, rng).items()}


def drawn(name: str, low: float, high: float) -> Build:
    """The parameter with a random value, drawn for each request."""
    return lambda asked, rng: {name: round(rng.uniform(low, high), 2)}


def constant(**sampling: Any) -> Build:
    return lambda asked, rng: dict(sampling)


def all_of(*builds: Build) -> Build:
    return lambda asked, rng: {name: value for build in builds for name, value in build(asked, rng).items()}


def random_sampling(asked: Asked, rng: Random) -> dict[str, Any]:
    """A random valid combination of greedy parameters, drawn for each request."""
    chosen: list[Build] = []
    for name, values in (
        ("frequency_penalty", (-0.4, 1.5)),
        ("presence_penalty", (-0.4, 1.5)),
        ("repetition_penalty", (0.9, 1.5)),
    ):
        if rng.random() < 0.3:
            chosen.append(drawn(name, *values))
    for build in (logit_bias, stop_string, stop_token_ids):
        if rng.random() < 0.25:
            chosen.append(build)
    if rng.random() < 0.2:
        chosen.append(constant(ignore_eos=True))
    # Not both: a finished grammar allows only the end token, and the minimum forbids it. A row without any allowed
    # token crashes SGLang 0.5.23 if the batch also holds a sampled request.
    if rng.random() < 0.3:
        chosen.append(rng.choice((constant(regex=REGEX), constant(json_schema=JSON_SCHEMA))))
    elif rng.random() < 0.3:
        chosen.append(min_new_tokens)
    limit = rng.randint(1, asked.limit)
    sampling = {"max_new_tokens": limit, **all_of(*chosen)(asked, rng)}
    if "min_new_tokens" in sampling:
        sampling["min_new_tokens"] = min(limit, sampling["min_new_tokens"])
    return sampling


def seeded_sampling(asked: Asked, rng: Random) -> dict[str, Any]:
    return {
        "temperature": round(rng.uniform(0.4, 1.2), 2),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((-1, 20)),
        "min_p": rng.choice((0.0, 0.05)),
        "sampling_seed": rng.randrange(2**31),
    }


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
CASES = [
    Case(PLAIN, constant()),
    Case("continued", constant(), continues=True),
    Case("frequency_penalty", drawn("frequency_penalty", 0.8, 2.0)),
    Case("presence_penalty", drawn("presence_penalty", 1.0, 2.0)),
    Case("repetition_penalty", drawn("repetition_penalty", 1.2, 1.8)),
    Case("min_new_tokens", min_new_tokens),
    Case("logit_bias", logit_bias),
    Case("stop", stop_string),
    Case("stop_token_ids", stop_token_ids),
    Case("ignore_eos", constant(ignore_eos=True)),
    Case("regex", constant(regex=REGEX)),
    Case("json_schema", constant(json_schema=JSON_SCHEMA)),
    Case(LOGPROBS_CASE, constant(), LOGPROBS),
    Case("penalties", all_of(penalties, min_new_tokens)),
    Case("penalties + stop + logit_bias", all_of(penalties, stop_string, logit_bias)),
    Case("penalties + regex + logprobs", all_of(penalties, constant(regex=REGEX)), LOGPROBS),
    Case("json_schema + ignore_eos + presence_penalty", constant(json_schema=JSON_SCHEMA, presence_penalty=0.5)),
    Case("ignore_eos + repetition_penalty + logprobs", constant(ignore_eos=True, repetition_penalty=1.3), LOGPROBS),
    Case("mixed", random_sampling),
    Case("seeded sampling", seeded_sampling, deterministic=True),
    Case("seeded sampling + penalties", all_of(seeded_sampling, penalties), deterministic=True),
]


def select(names: str | None) -> list[Case]:
    """The cases that `--cases` names, and always `plain`; all cases if `names` is None.

    Raises:
        ValueError: there is no case of that name.
    """
    if names is None:
        return CASES
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [case.name for case in CASES]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--cases has {name!r}; it must name some of {', '.join(known)}.")
    return [case for case in CASES if case.name in (PLAIN, *wanted)]
