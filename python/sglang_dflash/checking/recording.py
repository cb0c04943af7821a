"""The off arm's answers to all requests: recorded once, saved to a file, and compared with any number of times."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.checking.cases import PLAIN, Asked, Case
from sglang_dflash.checking.compare import Request
from sglang_dflash.serving import Client, Completion, ServerInfo, greedy_body, with_best
from sglang_dflash.serving.sessions import Session

FORMAT = 1
# Key of a recorded answer -> the completion's field.
_FIELDS = {name: name for name in ("ids", "text", "finish", "logprobs", "best", "cached_tokens")}
_FIELDS |= {"histogram": "accept_histogram", "adapts": "adapts", "refusal": "refusal", "failure": "failure"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its outcome, alone, with speculation off."""

    request: Request
    outcome: Completion

    def to_json(self) -> dict[str, Any]:
        """Leaves out empty fields of the answer."""
        held = {key: getattr(self.outcome, name) for key, name in _FIELDS.items()}
        return {"request": asdict(self.request), "outcome": {key: value for key, value in held.items() if value}}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Exchange:
        held = {_FIELDS[key]: value for key, value in row["outcome"].items()}
        held["best"] = [[(token, value) for token, value in rows] for rows in held.get("best", [])]
        return cls(Request(**row["request"]), Completion(**held, steps=sum(held.get("accept_histogram", []))))


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of the off arm.

    Fields:
        server: the off arm that answered.
        seed: of the random parameters.
    """

    server: ServerInfo
    seed: int
    exchanges: list[Exchange]

    def of_case(self, case: str) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.request.case == case]

    def cases(self) -> list[str]:
        """Names of the cases, in the order in which they were sent."""
        return list(dict.fromkeys(exchange.request.case for exchange in self.exchanges))

    def only(self, cases: Collection[str] | None, num_prompts: int) -> Recording:
        """The exchanges of these cases (None: of all) for the first `num_prompts` prompts."""
        prompts = list(dict.fromkeys(e.request.prompt_id for e in self.of_case(PLAIN)))[:num_prompts]
        kept = [
            exchange
            for exchange in self.exchanges
            if exchange.request.prompt_id in prompts and (cases is None or exchange.request.case in cases)
        ]
        return replace(self, exchanges=kept)

    def save(self, path: Path) -> None:
        rows = [exchange.to_json() for exchange in self.exchanges]
        head = {"format": FORMAT, "server": self.server.to_json(), "seed": self.seed}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**head, "exchanges": rows}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """
        Raises:
            ValueError: the file does not exist or is not a recording of this version.
        """
        if not path.is_file():
            raise ValueError(f"--off-from is {path}; it must be an existing file that --save-off wrote.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}; this version reads {FORMAT}")
            exchanges = [Exchange.from_json(row) for row in content["exchanges"]]
            return cls(ServerInfo(**content["server"]), content["seed"], exchanges)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--off-from {path} cannot be read as a file of --save-off: {error}.") from None


def _token_ids(client: Client, prompt: Session) -> list[int]:
    """Token ids of a session's first prompt; later turns are not asked."""
    if prompt.input_ids:
        return list(prompt.input_ids)
    try:
        return client.tokenize(prompt.text or prompt.turns[0].messages, prompt.template)
    except ValueError as error:
        raise ValueError(f"The server cannot tokenize prompt {prompt.id}: {error}") from None


def tokenize(client: Client, prompts: Sequence[Session], max_len: int) -> list[tuple[str, list[int]]]:
    """Id and token ids of every prompt, by the server's tokenizer.

    Raises:
        ValueError: the server refuses a prompt, or the prompt is longer than the server's context.
    """
    tokenized = []
    for prompt in prompts:
        ids = _token_ids(client, prompt)
        if max_len and len(ids) >= max_len:
            raise ValueError(f"Prompt {prompt.id} has {len(ids)} tokens; the server takes up to {max_len - 1}.")
        tokenized.append((prompt.id, ids))
    return tokenized


def record(
    client: Client,
    server: ServerInfo,
    prompts: Sequence[tuple[str, list[int]]],
    cases: Sequence[Case],
    limit: int,
    seed: int,
    on_done: Callable[[], None],
) -> Recording:
    """Sends every request of the matrix to the off arm, one at a time.

    Args:
        prompts: id and token ids of each prompt.
        limit: `max_new_tokens`.
        on_done: called after each answer.

    Raises:
        ValueError: the off arm answers no plain request.
    """

    def answered(request: Request) -> Exchange:
        outcome = client.ask(with_best(request.body))
        on_done()
        return Exchange(request, outcome)

    plain = [answered(Request(PLAIN, name, greedy_body(ids, max_new_tokens=limit))) for name, ids in prompts]
    asked = [
        Asked(exchange.request.prompt_id, exchange.request.body["input_ids"], exchange.outcome, limit)
        for exchange in plain
        if exchange.outcome.answered
    ]
    if not asked:
        outcome = plain[0].outcome
        raise ValueError(f"The server without speculation answers no prompt: {outcome.refusal or outcome.failure}")
    exchanges = plain
    for case in cases:
        if case.name != PLAIN:
            exchanges += [answered(case.request(one, seed)) for one in asked]
    return Recording(server, seed, exchanges)


def count_requests(cases: Sequence[Case], num_prompts: int) -> int:
    """Number of requests that `record` sends."""
    return len({PLAIN, *(case.name for case in cases)}) * num_prompts
