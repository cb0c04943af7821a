"""The recurrent state of a target (gated delta rule) in `spec_generate`: rolled back to the accepted row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.reference.position_cache import PositionCache

Rows = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LayerState:
    """One layer's state under the names by which transformers reads it."""

    record_past = False

    def __init__(self) -> None:
        self.conv_states: dict[int, torch.Tensor] = {}  # 0 -> [B, C, N], the last inputs
        self.recurrent_states: dict[int, torch.Tensor] = {}  # 0 -> [B, H, K, V]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.conv_states.values(), *self.recurrent_states.values()]


class RecurrentCache(PositionCache):
    """A `PositionCache` with recurrent states, which know no positions: they are kept after each row of a block."""

    def __init__(self, requests: int, positions: int, layers: int) -> None:
        super().__init__(requests, positions)
        self.layers = [LayerState() for _ in range(layers)]
        self._kept: list[list[torch.Tensor]] = []  # after each row of the last block

    # What transformers' layers call.

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return state_idx in self.layers[layer_idx].conv_states

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Appends inputs [B, C, T] and returns all that the convolution may read; keeps the last ones."""
        states = self.layers[layer_idx].conv_states
        inputs = torch.cat((states[0], conv_states), dim=-1) if 0 in states else conv_states
        states[0] = F.pad(inputs, (max(0, conv_kernel_size - inputs.shape[-1]), 0))[..., -conv_kernel_size:].clone()
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        self.layers[layer_idx].recurrent_states[0] = recurrent_states
        return recurrent_states

    # What `spec_generate` calls.

    def keep(self, requests: torch.Tensor) -> None:
        super().keep(requests)
        for layer in self.layers:
            for states in (layer.conv_states, layer.recurrent_states):
                for index, state in states.items():
                    states[index] = state[requests]

    def run(
        self, forward: Rows, ids: torch.Tensor, positions: torch.Tensor, lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows so that the states can be rolled back: see `_Loop.run_target`, whose arguments these are.

        Args:
            lens: [B] rows of each request that are not padding; these change its states. None: a block, for which the
                states after each row are kept until `commit`.
        """
        rows = ids.shape[1]
        self._kept = []
        # A prompt's rows that every request has are run together. The others change the states of some requests only.
        together = 0 if lens is None else max(0, min(rows, int(lens.min())))
        spans = [(0, together)] if together else []
        spans += [(row, row + 1) for row in range(together, rows)]
        outputs = []
        for first, last in spans:
            before = self._copies()
            outputs.append(forward(ids[:, first:last], positions[:, first:last]))
            if lens is None:
                self._kept.append(self._copies())
            elif last > together:
                self._write([before, self._copies()], (lens > first).long())
        hidden, features = zip(*outputs, strict=True)
        return torch.cat(hidden, dim=1), torch.cat(features, dim=1)

    def commit(self, commit_lens: torch.Tensor) -> None:
        """Goes back to the states after the last committed row of the last block."""
        self._write(self._kept, commit_lens - 1)
        self._kept = []

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors()]

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._tensors()]

    def _write(self, choices: list[list[torch.Tensor]], chosen: torch.Tensor) -> None:
        """Gives each request the states of the choice with its number, [B] int64."""
        for index, tensor in enumerate(self._tensors()):
            for number, choice in enumerate(choices):
                mine = chosen == number
                tensor[mine] = choice[index][mine]
