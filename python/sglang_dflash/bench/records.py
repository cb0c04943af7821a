"""The data of a sweep: cells of requests, and the run of all cells."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.serving import AcceptanceStats
from sglang_dflash.serving.records import Record

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played: `title` of a report, `unit` of a load, and how many sessions a cell has: `per_load` times the
    load, at least `least`. With so many, the cell's start and end hardly affect its numbers."""

    title: str
    unit: str
    least: int
    per_load: int

    def words(self, load: float) -> str:
        """For example `concurrency 4` or `0.5 requests/s`."""
        return f"concurrency {load:g}" if self.unit == "concurrency" else f"{load:g} {self.unit}"


WORKLOADS = {
    "closed": Workload("requests in flight", "concurrency", 16, 4),
    "open-loop": Workload("requests at given rates", "requests/s", 32, 16),
    "agent": Workload("agent sessions", "sessions", 4, 2),
}


@dataclass(frozen=True, slots=True)
class CellKey:
    """Identifies a cell of a sweep.

    Fields:
        backend: attention backend; "" for the server's own choice.
        radix: whether the prefix cache is on.
        load: requests (or sessions) in flight; in an open loop, those that start per second.
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
    """How many requests got the tokens of the arm `reference`.

    Fields:
        same_engine: whether both arms must agree, because both are greedy and of one engine.
        compared, identical: numbers of requests.
        ties: requests whose first difference is between two tokens with equal logits, up to rounding.
        different: requests that differ for another reason.
        unjudged: requests with another prompt, because an earlier turn of their session differs.
        examples: a sentence for each of the first few different requests.
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
        """Whether speeds must not be shown, because tokens differ."""
        return self.same_engine and self.different > 0


@dataclass(slots=True)
class Cell:
    """The result of one cell.

    Fields:
        records: the timed requests. SGLang's client reports neither ids nor starts: those are 0.
        wall_s: seconds from the first request sent to the last answer received.
        answers: of a pass before them, with ids; empty if the arm has answered these prompts at this load before, or
            the timed requests have ids.
        acceptance: total of the answers; no steps without speculation, or if the server does not report them.
        prefilled: prompt tokens of the answers whose draft KV our worker computed; None of another worker.
        unasked: number of turns that were left out because the context was full.
        failure: why the cell has no result, or ""; a failed cell's records may be incomplete.
        log_tail: the last lines of the server's log, if the cell failed.
    """

    key: CellKey
    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    answers: list[Record] = field(default_factory=list)
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    equality: Equality | None = None
    unasked: int = 0
    prefilled: int | None = None
    failure: str = ""
    log_tail: list[str] = field(default_factory=list)

    @property
    def comparable(self) -> list[Record]:
        """The answers whose tokens are known."""
        return self.answers or [record for record in self.records if record.ids or record.text]


@dataclass(slots=True)
class Run:
    """One sweep.

    Fields:
        command: the command line that started it.
        workload: a key of WORKLOADS.
        options: everything that affects the numbers; a resumed run must have the same.
        versions, machine: software and hardware.
        servers: command, environment, URL and seconds to start of each server.
        notes: sentences that the reader of a report must know.
    """

    command: str
    workload: str
    options: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> Workload:
        return WORKLOADS[self.workload]

    def done(self) -> set[CellKey]:
        """Keys of the cells that need not be run again."""
        return {cell.key for cell in self.cells if not cell.failure}

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        """Replaces the file atomically: a killed run leaves the previous file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """
        Raises:
            ValueError: the file does not exist or is not a results file. The message names it.
        """
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(held, dict) or held.pop("schema", None) != SCHEMA:
                raise ValueError(f"it is no JSON object of schema {SCHEMA}")
            return cls(**{**held, "cells": [_cell(row) for row in held["cells"]]})
        except FileNotFoundError:
            raise ValueError(f"The results file {path} does not exist.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a results file of this benchmark: {error}.") from None


def _cell(row: dict[str, Any]) -> Cell:
    held = {name: [Record(**record) for record in row[name]] for name in ("records", "answers")}
    for name, kind in (("key", CellKey), ("acceptance", AcceptanceStats), ("equality", Equality)):
        held[name] = kind(**row[name]) if row[name] else None
    return Cell(**{**row, **held})
