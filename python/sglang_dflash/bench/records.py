"""What a sweep keeps: requests as the client saw them, the cells they belong to, and the run around them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds after its cell began.

    Fields:
        session, turn: which of the dataset's sessions, and which of its turns, 0 first.
        start_s, first_s, end_s: sent; first token here; last token here. `first_s` is None where none came.
        tokens: generated, as the server counts them.
        ids: the generated token ids; empty where the server does not tell them.
        text: the generated text.
        finish: the server's reason; "" where the request failed.
        cached_tokens: prompt tokens from the prefix cache; None where the server does not say.
        steps: verify steps; 0 without speculation, or where the server does not say.
        drafted: draft tokens that were verified in those steps.
        accept_histogram: steps by accept_len, 0 first.
        failure: why there is no answer; "" where there is one.
    """

    session: str
    turn: int
    start_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int
    tokens: int
    ids: list[int]
    text: str
    finish: str
    cached_tokens: int | None = None
    steps: int = 0
    drafted: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    failure: str = ""

    @property
    def id(self) -> str:
        return f"{self.session}/{self.turn}"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None where there is only one, or all came at once."""
        if self.first_s is None or self.tokens < 2 or self.end_s == self.first_s:
            return None
        return (self.end_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts fared in a cell.

    Fields:
        steps: verify steps.
        drafted, accepted: draft tokens.
        by_position: for draft 1, 2, ..., the steps that accepted it.
    """

    steps: int
    drafted: int
    accepted: int
    by_position: list[int]

    @property
    def tau(self) -> float:
        """Mean commit_len: accepted drafts and the target's own token, per step."""
        return 1 + self.accepted / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which cell of a sweep.

    Fields:
        arm: off, dflash, builtin, eagle3, standalone, ngram, transformers, vllm, vllm-off, or a server's given name.
        backend: attention backend; "" for the server's own choice.
        radix: whether the prefix cache is on.
        load: requests (or sessions) in flight; requests per second where the workload is open-loop.
        repeat: 0 first.
    """

    arm: str
    backend: str
    radix: bool
    dataset: str
    load: float
    repeat: int


@dataclass(frozen=True, slots=True)
class Equality:
    """How many requests got the reference arm's tokens.

    Fields:
        reference: the arm compared with.
        same_engine: whether both arms must agree, greedy arms of one engine as they are.
        compared, identical: requests.
        ties: parted where the target's two best logits are equal up to rounding.
        different: parted elsewhere.
        unjudged: parted behind an earlier difference of their session, which changed what they were asked.
        examples: a sentence for each of the first few that differ.
    """

    reference: str
    same_engine: bool
    compared: int
    identical: int
    ties: int = 0
    different: int = 0
    unjudged: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def withheld(self) -> bool:
        """Whether speeds must not be printed beside these tokens."""
        return self.same_engine and self.different > 0


@dataclass(slots=True)
class Cell:
    """What one cell gave.

    Fields:
        wall_s: from the first request sent to the last token here.
        acceptance: of all its requests; None where there is no speculation or the server does not say.
        unasked: turns of sessions that were left out because the context was full.
        failure: why the cell has no result; its records may be incomplete then.
        log_tail: the last lines of the server's log, where it failed.
    """

    key: CellKey
    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    acceptance: Acceptance | None = None
    equality: Equality | None = None
    unasked: int = 0
    failure: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One sweep.

    Fields:
        command: the words that started it.
        workload: closed (N requests in flight), open-loop or agent.
        options: everything that decides what is measured; a resumed run must have the same.
        versions, machine: of software and hardware.
        servers: what was started for each arm: command, environment, seconds to start.
        notes: sentences a reader must know.
    """

    command: str
    workload: str
    options: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def done(self) -> set[CellKey]:
        """Keys of the cells that need not be run again."""
        return {cell.key for cell in self.cells if not cell.failure}

    def save(self, path: Path) -> None:
        """Whole or not at all: a run that is killed leaves the former file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """
        Raises:
            ValueError: the file is not one of ours; the sentence names it.
        """
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(held, dict):
                raise ValueError("it is not a JSON object")
            if held.pop("schema") != SCHEMA:
                raise ValueError(f"it is not of schema {SCHEMA}")
            cells = [_cell(row) for row in held.pop("cells")]
            return cls(**held, cells=cells)
        except FileNotFoundError:
            raise ValueError(f"There is no results file {path}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of this benchmark: {error}.") from None


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(
        key=CellKey(**row["key"]),
        records=[Record(**record) for record in row["records"]],
        wall_s=row["wall_s"],
        acceptance=Acceptance(**row["acceptance"]) if row["acceptance"] else None,
        equality=Equality(**row["equality"]) if row["equality"] else None,
        unasked=row["unasked"],
        failure=row["failure"],
        log_tail=row["log_tail"],
    )


def total_acceptance(records: Sequence[Record]) -> Acceptance | None:
    """Of all requests that tell their verify steps; None where none does."""
    steps = sum(record.steps for record in records)
    if not steps:
        return None
    longest = max(len(record.accept_histogram) for record in records)
    histogram = [0] * longest
    for record in records:
        for accept_len, count in enumerate(record.accept_histogram):
            histogram[accept_len] += count
    return Acceptance(
        steps=steps,
        drafted=sum(record.drafted for record in records),
        accepted=sum(accept_len * count for accept_len, count in enumerate(histogram)),
        by_position=[sum(histogram[position:]) for position in range(1, longest)],
    )
