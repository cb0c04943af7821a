"""Rows of a table for the names that were used last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Places:
    """Each name has a row of its own until `count` other names have been used since."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[str, int] = {}  # the newest stand last

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
        return row, new

    def newest_first(self) -> Iterator[int]:
        """The rows in use."""
        return reversed(self._rows.values())

    def ages(self) -> dict[str, int]:
        """The place of each name in the order of their latest use, oldest first."""
        return {name: place for place, name in enumerate(self._rows)}
