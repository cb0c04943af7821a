"""The capture of tapped hidden states in targets whose SGLang class lacks a part of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def configure_capture(original: Any, *, model: Any, **settings: Any) -> None:
    """Before the host sets the taps: gives the language model of a Qwen3-VL target the setter that its wrapper calls.
    The model captures what `layers_to_capture` lists. SGLang forgot the setter, so its own worker ends here.
    Kimi-Linear has a setter for another algorithm only, with the same meaning: outputs of the layers of these numbers.
    This can go when SGLang has both.
    """
    if type(model).__name__ == "KimiLinearForCausalLM":
        model.set_dflash_layers_to_capture = model.set_dspark_layers_to_capture
    if type(model).__name__ == "Qwen3VLForConditionalGeneration":
        model.model.set_dflash_layers_to_capture = partial(setattr, model.model, "layers_to_capture")
    original(model=model, **settings)


HOOKS: dict[str, tuple[Any, HookType]] = {
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture": (
        configure_capture,
        HookType.AROUND,
    ),
}
"""Hook target -> (our function, how it is applied)."""
