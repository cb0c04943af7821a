"""The off arm's answers to all requests: recorded once, saved to a file, and compared with any number of times."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.checking.arms import ServerInfo
from sglang_dflash.checking.asking import Outcome, Request, ask, greedy_body, with_best
from sglang_dflash.checking.cases import PLAIN, Asked, Case
from sglang_dflash.checking.prompts import Prompt
from sglang_dflash.serving import Client

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its outcome, alone, with speculation off."""

    request: Request
    outcome: Outcome


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
        rows = [{"request": asdict(e.request), "outcome": e.outcome.to_json()} for e in self.exchanges]
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
            exchanges = [
                Exchange(Request(**row["request"]), Outcome.from_json(row["outcome"])) for row in content["exchanges"]
            ]
            return cls(ServerInfo(**content["server"]), content["seed"], exchanges)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--off-from {path} cannot be read as a file of --save-off: {error}.") from None


def tokenize(client: Client, prompts: Sequence[Prompt], max_len: int) -> list[tuple[str, list[int]]]:
    """Id and token ids of every prompt, by the server's tokenizer.

    Raises:
        ValueError: the server refuses a prompt, or the prompt is longer than the server's context.
    """
    tokenized = []
    for prompt in prompts:
        ids = prompt.token_ids(client)
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
        outcome = ask(client, with_best(request.body))
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


def summary(recording: Recording) -> dict[str, Any]:
    tokens = sum(len(exchange.outcome.ids) for exchange in recording.exchanges)
    return {"requests": len(recording.exchanges), "tokens": tokens, "server": recording.server.to_json()}
