"""The data of a sweep: cells of requests, and the run of all cells."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.serving import AcceptanceStats
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.sessions import ToolCall
from sglang_dflash.workloads.kinds import WORKLOADS, Workload

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency limits of a good request, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def kept(self, record: Record) -> bool:
        if record.failure or record.ttft_s is None:
            return False
        slow_start = self.ttft_ms is not None and record.ttft_s * 1e3 > self.ttft_ms
        slow_tokens = self.tpot_ms is not None and (record.tpot_s or 0.0) * 1e3 > self.tpot_ms
        return not slow_start and not slow_tokens


@dataclass(frozen=True, slots=True)
class CellKey:
    """Identifies a cell of a sweep.

    Fields:
        arm: a name from `--arms` or from --base-url.
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
    """How many requests got the reference arm's tokens.

    Fields:
        reference: the arm compared with.
        same_engine: whether both arms must agree, because both are greedy and of one engine.
        compared, identical: numbers of requests.
        ties: requests whose first difference is between two tokens with equal logits, up to rounding.
        different: requests that differ for another reason.
        unjudged: requests with another prompt, because an earlier turn of their session differs, or because a server
            rendered the chat in another way.
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
        wall_s: seconds from the first request sent to the last token received.
        acceptance: total of its requests; None without speculation, or if the server does not report it.
        unasked: number of turns that were left out because the context was full.
        prefilled: prompt tokens whose draft KV our worker computed; None of another worker.
        failure: why the cell has no result, or ""; a failed cell's records may be incomplete.
        log_tail: the last lines of the server's log, if the cell failed.
    """

    key: CellKey
    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    acceptance: AcceptanceStats | None = None
    equality: Equality | None = None
    unasked: int = 0
    prefilled: int | None = None
    failure: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One sweep.

    Fields:
        command: the command line that started it.
        workload: a key of WORKLOADS.
        options: everything that affects the numbers; see `options.check_resumable`.
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
            if not isinstance(held, dict):
                raise ValueError("it is not a JSON object")
            if held.pop("schema") != SCHEMA:
                raise ValueError(f"it does not have schema {SCHEMA}")
            cells = [_cell(row) for row in held.pop("cells")]
            if held["workload"] not in WORKLOADS:
                raise ValueError(f"its workload is {held['workload']!r}")
            return cls(**held, cells=cells)
        except FileNotFoundError:
            raise ValueError(f"The results file {path} does not exist.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a results file of this benchmark: {error}.") from None


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(
        key=CellKey(**row["key"]),
        records=[_record(record) for record in row["records"]],
        wall_s=row["wall_s"],
        acceptance=AcceptanceStats(**row["acceptance"]) if row["acceptance"] else None,
        equality=Equality(**row["equality"]) if row["equality"] else None,
        unasked=row["unasked"],
        prefilled=row.get("prefilled"),
        failure=row["failure"],
        log_tail=row["log_tail"],
    )


def _record(row: dict[str, Any]) -> Record:
    return Record(**{**row, "calls": [ToolCall(*call) for call in row.get("calls", [])]})


def total_acceptance(records: Sequence[Record]) -> AcceptanceStats | None:
    """Total acceptance of the requests that report verify steps; None if none does."""
    total = AcceptanceStats.of(records)
    return total if total.steps else None
