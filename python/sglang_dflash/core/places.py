"""Rows of a table for the names that were used last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Places:
    """Each name has a row of its own until `count` other names have been used since."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[str, int] = {}  # the newest stand last
        self._uses = 0
        self._used = [0] * count  # of each row: how many uses there were before its latest

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, name: str) -> int | None:
        return self._rows.get(name)

    def of(self, names: Sequence[str]) -> list[int]:
        """Their rows; -1: the name has none."""
        return [self._rows.get(name, -1) for name in names]

    def use(self, name: str) -> tuple[int, bool]:
        """The name's row, and whether it is new to it: then the row may hold what another name left."""
        row = self._rows.pop(name, None)
        new = row is None
        if row is None:
            full = len(self._rows) == self._count
            row = self._rows.pop(next(iter(self._rows))) if full else len(self._rows)
        self._rows[name] = row
        self._used[row] = self._uses
        self._uses += 1
        return row, new

    def newest_first(self) -> Iterator[int]:
        """The rows in use."""
        return reversed(self._rows.values())

    def last_used(self, name: str) -> int:
        """How many uses of any name there were before the name's latest; -1: it has no row."""
        row = self._rows.get(name)
        return -1 if row is None else self._used[row]
