"""The target's last hidden states for requests that ask for them, beside the tapped layers that the draft reads."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode


class ReturnedHiddenStates:
    """Hands the host what plain decoding returns: the states after the final norm.

    Where the target captures its tapped layers, the host returns those in their place (logits_processor.py:869).
    """

    def __init__(self, target_model: Any) -> None:
        """To be made before graphs are captured."""
        self._server_mode = get_server_return_hidden_states_mode()
        if self._server_mode.need_capture():
            for module in target_model.modules():
                if isinstance(module, LogitsProcessor):
                    module.keep_last_hidden_states = True

    def put(self, batch: Any, output: Any, rows_of_last_tokens: list[int] | None = None) -> None:
        """Puts them in the place of the tapped layers in `output`, a `LogitsProcessorOutput`; or nothing.

        Args:
            rows_of_last_tokens: of a prefill, whose rows the host may want one per request.
        """
        states: torch.Tensor | None = output.last_hidden_states
        output.hidden_states = output.last_hidden_states = None
        if not batch.return_hidden_states or states is None:
            return
        if rows_of_last_tokens is not None and not max(batch.return_hidden_states_mode, self._server_mode).is_full():
            states = states[rows_of_last_tokens]
        output.hidden_states = states
