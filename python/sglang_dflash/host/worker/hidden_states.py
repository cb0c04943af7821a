"""Returns the target's last hidden states to requests that ask for them, while the draft reads the tapped layers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode

from sglang_dflash.host.worker.draft_input import upload
from sglang_dflash.host.worker.protocols import LogitsOutput, ScheduleBatch


class ReturnedHiddenStates:
    """Returns what plain decoding returns: the states after the final norm.

    When the target captures its tapped layers, SGLang would return those instead (logits_processor.py:869).
    """

    def __init__(self, target_model: Any) -> None:
        """To be constructed before graphs are captured."""
        self._server_mode = get_server_return_hidden_states_mode()
        if self._server_mode.need_capture():
            for module in target_model.modules():
                if isinstance(module, LogitsProcessor):
                    module.keep_last_hidden_states = True

    def put(
        self,
        batch: ScheduleBatch,
        output: LogitsOutput,
        rows_of_last_tokens: list[int] | None = None,
        row_of: torch.Tensor | None = None,
    ) -> None:
        """Replaces the tapped layers in `output`, a `LogitsProcessorOutput`, by the last states if a request asks for
        them, else by None.

        Args:
            rows_of_last_tokens: for a prefill, the row of each request's last token; SGLang may want only these.
            row_of: [B, W] int64; rows in whose order SGLang expects the states; None: as they are.
        """
        states: torch.Tensor | None = output.last_hidden_states
        output.hidden_states = output.last_hidden_states = None
        if not batch.return_hidden_states or states is None:
            return
        if rows_of_last_tokens is not None and not max(batch.return_hidden_states_mode, self._server_mode).is_full():
            states = states[upload(torch.tensor(rows_of_last_tokens), states.device)]
        elif row_of is not None:
            states = states[row_of.flatten()]
        elif states.is_cuda:
            states = states.clone()  # a graph's output: the next replay may overwrite it before SGLang has copied it
        output.hidden_states = states
