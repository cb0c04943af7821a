"""Reads from a target what a draft needs: hidden states of the tapped layers, the text config, the end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from sglang_dflash.core.draft_formats import EMBEDDING


class FeatureTaps:
    """A context manager that records the residual-stream output of chosen target layers.

    Layer ids are 0-based; -1 is the embedding, what enters the first layer.
    The output of decoder layer `layer` is `hidden_states[layer + 1]` in transformers, without
    the final norm (z-lab/dflash, `extract_context_feature`).
    """

    def __init__(self, target: nn.Module, layer_ids: Sequence[int]) -> None:
        self._layers = decoder_layers(target)
        self._layer_ids = tuple(layer_ids)
        self._outputs: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for layer_id in set(self._layer_ids):
            if layer_id == EMBEDDING:
                hook = self._layers[0].register_forward_pre_hook(self._embedding_recorder, with_kwargs=True)
            else:
                hook = self._layers[layer_id].register_forward_hook(self._recorder(layer_id))
            self._handles.append(hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _recorder(self, layer_id: int) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return record

    def _embedding_recorder(self, module: nn.Module, inputs: Any, named: Any) -> None:
        self._outputs[EMBEDDING] = inputs[0] if inputs else named["hidden_states"]

    def take(self) -> torch.Tensor:
        """Returns and clears the features of the target's last forward, [B, T, taps * H]."""
        features = torch.cat([self._outputs[layer_id] for layer_id in self._layer_ids], dim=-1)
        self._outputs.clear()
        return features


def decoder_layers(target: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        ValueError: no list of `num_hidden_layers` modules is found.
    """
    count = text_config(target).num_hidden_layers
    for module in target.get_decoder().modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            return layers
    raise ValueError(f"{type(target).__name__} has no list of {count} decoder layers named 'layers'.")


def text_config(target: nn.Module) -> Any:
    """The config of the target's language model."""
    return target.config.get_text_config()


def end_token_ids(target: nn.Module) -> list[int]:
    """The ids at which the target's own generation ends: generation_config.json, else config.json."""
    for config in (getattr(target, "generation_config", None), text_config(target)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [ids]
    return []
