"""The workloads: what is played, and what a load means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Fields:
        title: of a report.
        unit: of a load.
        least, per_load: number of sessions of a cell: `per_load` times the load, at least `least`. With so many, the
            cell's start and end hardly affect its numbers.
        rates: the loads by default, if they are rates.
        agent: the sessions are those of a coding agent; else the dataset's own.
    """

    title: str
    unit: str
    least: int
    per_load: int
    rates: str = ""
    agent: bool = False

    @property
    def open_loop(self) -> bool:
        """Whether sessions start at random times with a given rate; else a given number of them is in flight."""
        return bool(self.rates)

    def words(self, load: float) -> str:
        """For example `concurrency 4` or `0.5 requests/s`."""
        return f"concurrency {load:g}" if self.unit == "concurrency" else f"{load:g} {self.unit}"


WORKLOADS = {
    "closed": Workload(title="requests in flight", unit="concurrency", least=16, per_load=4),
    "open-loop": Workload(title="requests at given rates", unit="requests/s", least=32, per_load=16, rates="1,2,4"),
    "agent": Workload(title="agent sessions", unit="sessions", least=4, per_load=2, agent=True),
    "agent-open-loop": Workload(
        title="agent sessions at given rates",
        unit="sessions/s",
        least=8,
        per_load=16,
        rates="0.25,0.5,1",
        agent=True,
    ),
}
