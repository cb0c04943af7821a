"""Taps of targets whose SGLang class lacks a part of the capture: the setter, and the last layer's output."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList

from sglang_dflash.host.patches.capture import (
    LAST_TAP_ADDED,
    check_taps,
    configure_capture,
    embedding_of,
    final_norm,
    lm_head_of,
)
from sglang_source import SGLANG


class Layers(torch.nn.Module):
    """Three layers that add 1, and a final norm that multiplies by 10: as SGLang's classes, it cannot tap the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
        self.norm = torch.nn.Identity()
        self.layers_to_capture: list[int] = []

    def forward(self, hidden: torch.Tensor) -> Any:
        tapped = AuxHiddenStateList()
        for place in range(len(self.layers)):
            if place in self.layers_to_capture:
                tapped.capture(hidden)
            hidden = hidden + 1
        out = final_norm(self._norm, hidden, None, self.norm)
        return (out, tapped) if tapped else out

    @staticmethod
    def _norm(hidden: torch.Tensor, batch: Any, norm: Any, capture: Any = None) -> torch.Tensor:
        if capture is not None:
            capture(hidden)
        out = hidden * 10
        hidden.zero_()  # borrowed storage, which the host uses again
        return out


class Qwen2ForCausalLM:
    """A class with the setter of EAGLE3 alone, whose last layer `_LastTap` captures."""

    def __init__(self) -> None:
        self.model = Layers()

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


def configure(model: Any, taps: list[int]) -> None:
    def original(*, model: Any, dflash_target_layer_ids: list[int], **rest: Any) -> None:
        model.set_dflash_layers_to_capture(dflash_target_layer_ids)

    configure_capture(
        original, model=model, dflash_use_aux_hidden_state=True, dflash_target_layer_ids=taps, is_dspark=False
    )


@pytest.mark.parametrize("taps", [[0, 1], [0, 2], [2], [0, 1, 2]], ids=str)
def test_taps(taps):
    """Fails where a setter is missing, a tap is of another layer, or the last one is normed or not copied."""
    model = Qwen2ForCausalLM()
    configure(model, taps)
    for start in (0.0, 5.0):
        out, tapped = model.model.forward(torch.full((4, 2), start))
        assert torch.equal(out, torch.full((4, 2), (start + 3) * 10))
        assert [float(state[0, 0]) for state in tapped] == [start + layer + 1 for layer in taps]


def test_qwen2_moe_hands_out_its_embedding():
    """Fails where the start ends in an AttributeError of ours, after the weights were read."""
    model = type("Qwen2MoeForCausalLM", (Qwen2ForCausalLM,), {})()
    model.model.embed_tokens = torch.nn.Embedding(3, 2)
    assert embedding_of(model) is model.model.embed_tokens
    model = SimpleNamespace(get_input_embeddings=lambda: "its own")
    assert embedding_of(model) == "its own"


class Gemma3Layer(torch.nn.Module):
    """Adds 1 to its residual, before its norm: what enters the next layer is 0, and a residual."""

    def forward(self, *, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        total = hidden_states if residual is None else hidden_states + residual
        return torch.full_like(total, 0.25), total + 0.75


class Gemma3Layers(torch.nn.Module):
    """As SGLang's loop: a tap is what enters a layer, without the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Gemma3Layer() for _ in range(3))
        self.layers_to_capture: list[int] = []

    def forward(self, hidden: torch.Tensor) -> Any:
        tapped, residual = [], None
        for place, layer in enumerate(self.layers):
            if place in self.layers_to_capture:
                tapped.append(hidden)
            hidden, residual = layer(hidden_states=hidden, residual=residual)
        return hidden + residual, tapped


def test_gemma_3s_taps_have_their_residual():
    """Fails where the draft reads what a layer adds in the place of what leaves it, or a forward's taps stay for the
    next."""
    model = type("Gemma3ForCausalLM", (Qwen2ForCausalLM,), {})()
    model.model = Gemma3Layers()
    configure(model, [0, 1])
    for start in (0.0, 5.0):
        out, tapped = model.model.forward(torch.full((4, 2), start))
        assert [float(state[0, 0]) for state in [*tapped, out]] == [start + 1, start + 2, start + 3]


class Gemma3ForConditionalGeneration(Qwen2ForCausalLM):
    """As SGLang's wrapper: it has no head of its own, and adds 1 to positions in place."""

    def __init__(self) -> None:
        inner = Qwen2ForCausalLM()
        inner.model, inner.lm_head = Gemma3Layers(), "the text model's head"
        self.language_model = inner

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(layer_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        positions += 1
        return positions, self.language_model.model.forward(input_ids)


def test_gemma_3s_wrapper_is_tapped_and_leaves_positions():
    """Fails where the wrapper's text model keeps taps without their residual, the draft has no head, or its KV is
    written at the positions that the target has changed."""
    model = Gemma3ForConditionalGeneration()
    assert lm_head_of(model) == "the text model's head"
    before = inspect.signature(model.forward)
    configure(model, [0, 1])
    positions = torch.arange(4)
    for _ in range(2):
        seen, (out, tapped) = model.forward(torch.full((4, 2), 5.0), positions, forward_batch=None)
        assert torch.equal(positions, torch.arange(4)) and torch.equal(seen, torch.arange(1, 5))
        assert [float(state[0, 0]) for state in [*tapped, out]] == [6, 7, 8]
    assert inspect.signature(model.forward) == before


def test_parameters_keep_their_names():
    """Fails where SGLang's graph runner or a captured forward no longer finds the input embeddings by name."""
    model = Qwen2ForCausalLM()
    before = inspect.signature(model.model.forward)
    configure(model, [2])
    assert inspect.signature(model.model.forward) == before


@pytest.mark.parametrize("name", sorted(LAST_TAP_ADDED))
def test_classes_whose_last_layer_we_capture(name):
    """Fails where a class's layers are elsewhere, its taps are in another form, or it captures the last one itself."""
    sources = [file.read_text() for file in (SGLANG / "srt" / "models").glob("*.py")]
    (source,) = [text for text in sources if re.search(rf"^class {name}\b", text, re.M)]
    assert "self.model = " in source
    assert "AuxHiddenStateList()" in source and "AuxHiddenStatePacker(" not in source
    assert "num_hidden_layers in self.layers_to_capture" not in source and "end_layer in self.layers" not in source


def test_last_layers_that_nobody_captures_are_refused():
    """Fails where the start would end in a traceback of the host, after the weights were read."""
    check_taps(["Qwen3NextForCausalLM"], 48, (1, 46))
    check_taps(["MiniMaxM2ForCausalLM"], 62, (1, 61))
    with pytest.raises(ValueError, match=r"target_layer_ids has 47, the last layer .*Qwen3NextForCausalLM.* GptOss"):
        check_taps(["Qwen3NextForCausalLM"], 48, (1, 47))


def test_without_a_draft_nothing_changes():
    """Fails where another algorithm's target is changed."""
    model = SimpleNamespace(set_eagle3_layers_to_capture=None)
    calls = []
    configure_capture(
        lambda **settings: calls.append(settings),
        model=model,
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    assert len(calls) == 1 and not hasattr(model, "set_dflash_layers_to_capture")
