"""The capture of tapped hidden states in targets whose SGLang class lacks a part of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import Any, ClassVar

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.core.draft_formats import EMBEDDING

# Classes whose last layer a draft may read: SGLang captures it, or `_LastTap` does.
LAST_TAP_BY_SGLANG = {
    "Gemma4ForConditionalGeneration",
    "GptOssForCausalLM",
    "KimiLinearForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "NemotronHForCausalLM",
}
LAST_TAP_ADDED = {
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}

EMBEDDING_TAPPED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose loop over the layers was seen to capture what enters the first one."""

EMBEDDING_ADDED = frozenset({"ExaoneMoEForCausalLM", "Qwen2MoeForCausalLM"})
"""Classes that do not hand out their embedding."""

GEMMA_3_WRAPPER = "Gemma3ForConditionalGeneration"


def embedding_of(model: Any) -> Any:
    """The target's embedding, which the draft reads, too."""
    return model.model.embed_tokens if type(model).__name__ in EMBEDDING_ADDED else model.get_input_embeddings()


def lm_head_of(model: Any) -> Any:
    """The target's output head, which the draft shares."""
    return model.language_model.lm_head if type(model).__name__ == GEMMA_3_WRAPPER else model.lm_head


def check_taps(architectures: list[str], num_layers: int, layer_ids: tuple[int, ...]) -> None:
    """Raises ValueError, in one sentence, if the draft reads the last layer, or the embedding, of a target that cannot
    give it."""
    if EMBEDDING in layer_ids and not EMBEDDING_TAPPED.intersection(architectures):
        raise ValueError(
            f"dflash_config.target_layer_ids has {EMBEDDING}, the embedding of the target {', '.join(architectures)}; "
            f"it is served for {', '.join(sorted(EMBEDDING_TAPPED))}."
        )
    known = LAST_TAP_BY_SGLANG | LAST_TAP_ADDED
    if num_layers - 1 in layer_ids and not known.intersection(architectures):
        raise ValueError(
            f"dflash_config.target_layer_ids has {num_layers - 1}, the last layer of the target "
            f"{', '.join(architectures)}, whose output SGLang does not capture there; it is served for "
            f"{', '.join(sorted(known))}."
        )


@hook(
    "sglang.srt.speculative.dflash_utils.DFlashDraftConfig.resolve_target_layer_ids",
    AROUND,
    why="refuses -1, the tap of the embedding",
    until="SGLang takes it",
)
def resolve_target_layer_ids(original: Any, config: Any, **sizes: Any) -> list[int]:
    ids = list(config.target_layer_ids or ())
    if ids[:1] != [EMBEDDING]:
        layer_ids: list[int] = original(config, **sizes)
        return layer_ids
    return [EMBEDDING, *(original(replace(config, target_layer_ids=ids[1:]), **sizes) if ids[1:] else [])]


@hook(
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture",
    AROUND,
    why="many classes have EAGLE3's setter of taps alone, Kimi-Linear DSPARK's, GLM-4 none; Qwen3-VL's "
    "language model lacks the one that its wrapper calls; Gemma 4 and Gemma 3's wrapper change positions "
    "in place; Gemma 3 captures taps without their residual",
    until="SGLang has them",
)
def configure_capture(
    original: Any, *, model: Any, dflash_use_aux_hidden_state: bool, dflash_target_layer_ids: Any, **settings: Any
) -> None:
    """Before SGLang sets the taps: completes the target's class. Each part can go when SGLang has it.

    - Most classes that EAGLE3 can use have its setter alone. It takes the same layer numbers. GLM-4 has none.
    - Kimi-Linear has DSpark's setter alone, with the same meaning.
    - Qwen3-VL's wrapper calls a setter that its language model lacks; what the model captures is `layers_to_capture`.
    - Gemma 4 and Gemma 3's wrapper add 1 to a forward's positions in place, and we write the draft's KV for the same
      positions after it.
    - Gemma 3's loop captures what enters a layer without its residual, once the taps are set: see `_add_residuals`.
    - In most classes, the loop over the layers does not reach the last layer's output: see `_LastTap`.
    """
    if dflash_use_aux_hidden_state and not settings["is_dspark"]:
        kind = type(model).__name__
        if not hasattr(model, "set_dflash_layers_to_capture") and hasattr(model, "set_eagle3_layers_to_capture"):
            model.set_dflash_layers_to_capture = model.set_eagle3_layers_to_capture
        if kind == "Glm4ForCausalLM":
            model.set_dflash_layers_to_capture = partial(_set_taps, model)
        if kind == "KimiLinearForCausalLM":
            model.set_dflash_layers_to_capture = model.set_dspark_layers_to_capture
        if kind == "Qwen3VLForConditionalGeneration":
            model.model.set_dflash_layers_to_capture = partial(setattr, model.model, "layers_to_capture")
        if kind.startswith("Gemma4"):
            envs.SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION.set(True)
        if kind == GEMMA_3_WRAPPER:
            _keep_positions(model)
        if kind in LAST_TAP_ADDED and max(dflash_target_layer_ids) == len(model.model.layers) - 1:
            _LastTap.install(model.model, len(dflash_target_layer_ids))
    original(
        model=model,
        dflash_use_aux_hidden_state=dflash_use_aux_hidden_state,
        dflash_target_layer_ids=dflash_target_layer_ids,
        **settings,
    )
    if dflash_use_aux_hidden_state and type(model).__name__ in ("Gemma3ForCausalLM", GEMMA_3_WRAPPER):
        _add_residuals(getattr(model, "language_model", model).model)


def _keep_positions(model: Any) -> None:
    """Has the model's forward change a copy of the positions that it is given."""
    original = model.forward

    @wraps(original)
    def forward(input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(input_ids, positions.clone(), *args, **kwargs)

    model.forward = forward


def _add_residuals(inner: Any) -> None:
    """Completes what Gemma 3's loop captures by the residual, which the next layer's norm adds.

    inner: the module that runs the layers.
    """
    entered: list[torch.Tensor] = []  # of one forward; [T, H] each

    def note(layer: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        entered.append(named["hidden_states"] + named["residual"])

    for layer in inner.layers_to_capture:
        inner.layers[layer].register_forward_pre_hook(note, with_kwargs=True)
    original = inner.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            hidden, captured = original(*args, **kwargs)
            assert len(captured) == len(entered), (len(captured), len(entered))
            return hidden, list(entered)
        finally:
            entered.clear()  # nothing may hold a prompt's taps for longer

    inner.forward = forward


def _set_taps(model: Any, layer_ids: list[int]) -> None:
    model.capture_aux_hidden_states = True
    model.model.layers_to_capture = [layer + 1 for layer in layer_ids]  # what enters a layer is the one before's output


class _LastTap:
    """Captures the last layer's output, which exists only where the final norm reads it, as the last tap."""

    by_norm: ClassVar[dict[torch.nn.Module, _LastTap]] = {}

    def __init__(self) -> None:
        self._output: torch.Tensor | None = None

    @classmethod
    def install(cls, inner: Any, taps: int) -> None:
        """inner: the module that runs the layers; its forward returns hidden states, or those and a list of taps."""
        cls.by_norm[inner.norm] = tap = cls()
        original = inner.forward

        @wraps(original)  # SGLang and our captured forwards read the parameters' names
        def forward(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            hidden, tapped = out if isinstance(out, tuple) else (out, AuxHiddenStateList())
            assert len(tapped) == taps - 1 and tap._output is not None, (len(tapped), taps)
            tapped.append(tap._output)
            tap._output = None
            return hidden, tapped

        inner.forward = forward

    def capture(self, hidden: torch.Tensor) -> None:
        """hidden: [T, H], borrowed."""
        self._output = hidden.clone()


@hook(
    "sglang.srt.layers.layer_boundary.residual.batch.final_norm",
    AROUND,
    why="in most classes the loop over the layers does not capture the last one's output",
    until="SGLang does",
)
def final_norm(original: Any, hidden: Any, forward_batch: Any, norm: Any, capture: Any = None, **settings: Any) -> Any:
    """Gives the residual that the final norm reads to the norm's `_LastTap`."""
    tap = _LastTap.by_norm.get(norm)
    if tap is not None and capture is None:
        capture = tap.capture
    return original(hidden, forward_batch, norm, capture, **settings)


@hook(
    "sglang.srt.models.minimax_m2.MiniMaxM2ForCausalLM.get_input_embeddings",
    AROUND,
    why="looks ids up, where other classes return the embedding",
    until="SGLang's class does",
)
def get_input_embeddings(original: Any, model: Any, input_ids: torch.Tensor | None = None) -> Any:
    """MiniMax-M2's method only looks ids up. Without ids, as the classes of other models take it, this one returns the
    embedding itself."""
    return model.model.embed_tokens if input_ids is None else original(model, input_ids)
