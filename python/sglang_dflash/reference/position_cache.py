"""Keys and values of target and draft in `spec_generate`, addressed by position."""

from __future__ import annotations

from typing import Any

import torch


class PositionCache:
    """Keys and values of every layer, one entry per request and position, for target and draft alike.

    Rejected rows need no cropping: the next row at their position overwrites them. One more entry, after the last
    position, takes the padding of batches whose requests commit different numbers of tokens.
    """

    def __init__(self, requests: int, positions: int) -> None:
        self.padding = positions
        self._requests = requests
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._positions = torch.empty(0)
        self._visible = 0

    def at(self, positions: torch.Tensor, visible: int) -> PositionCache:
        """Sets the positions that the next forward writes, [B, T] int64, and how many positions its rows may see."""
        self._positions, self._visible = positions, visible
        return self

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [B, Hkv, T, D] and returns all visible positions, [B, Hkv, S, D]."""
        if layer_idx not in self._keys:
            shape = (self._requests, self.padding + 1)  # position before head: one index selects all heads
            self._keys[layer_idx] = keys.new_zeros((*shape, keys.shape[1], keys.shape[3]))
            self._values[layer_idx] = values.new_zeros((*shape, values.shape[1], values.shape[3]))
        requests = torch.arange(len(keys), device=keys.device)[:, None]
        for store, new in ((self._keys[layer_idx], keys), (self._values[layer_idx], values)):
            store[requests, self._positions] = new.transpose(1, 2)
        stores = (self._keys[layer_idx], self._values[layer_idx])
        return tuple(store[:, : self._visible].transpose(1, 2) for store in stores)  # type: ignore[return-value]

    def keep(self, requests: torch.Tensor) -> None:
        """Drops all requests but these."""
        self._requests = len(requests)
        for stores in (self._keys, self._values):
            for layer_idx, store in stores.items():
                stores[layer_idx] = store[requests]

    def commit(self, commit_lens: torch.Tensor) -> None:
        """Nothing to do: rejected rows are overwritten."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._visible
