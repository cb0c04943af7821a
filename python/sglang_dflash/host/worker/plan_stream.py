"""A stream for work beside the draft's forward (SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.model_executor import input_buffers


class PlanStream:
    """A stream for work that needs the block's rows but not the drafts: batch and attention metadata of the verify.

    Memory that the work allocates may be freed while the verify still reads it. The next step's work may then get it,
    but writes it only after that step's block, so after the verify. This holds as long as nobody else uses the stream.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.get_device_module(device)
        # CUDA draws streams from a pool for each priority; SGLang's own are of the default one.
        self._stream = self._device.Stream(priority=-1)
        self._laid_out = self._device.Event()

    @staticmethod
    def wanted(device: torch.device | str) -> bool:
        """Whether SGLang's variable asks for it, on a device with streams."""
        return torch.device(device).type == "cuda" and envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()

    def mark(self) -> None:
        """To be called on the forward stream when the block is laid out: the work waits for this point."""
        self._laid_out.record()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launches of this block run on the stream, beside what the forward stream launches after `mark`.

        The tensors that they read must live until `join`.
        """
        with self._device.stream(self._stream):
            self._stream.wait_event(self._laid_out)
            yield

    def join(self) -> None:
        """The forward stream waits for the work; to be called before it reads or writes what the work does."""
        self._device.current_stream().wait_stream(self._stream)


@contextmanager
def own_input_buffers(wanted: bool) -> Iterator[None]:
    """Graph runners that are made within this block share no input buffers with those made before.

    SGLang lets all runners of a process share them, because forwards run one after the other. On a plan stream the
    target's are filled while the draft's graph still reads its own.
    """
    shared: dict[Any, torch.Tensor] = input_buffers._forward_input_buffer_pool
    input_buffers._forward_input_buffer_pool = {} if wanted else shared
    try:
        yield
    finally:
        input_buffers._forward_input_buffer_pool = shared
