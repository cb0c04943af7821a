"""Says at the start whether each step waits for the device, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)


def announce(backends: Iterable[Any], device: str) -> None:
    """Warns of attention backends that take lengths on the CPU: every step then waits for the one before.

    SGLang's FutureMap copies the newest lengths back for such backends (overlap_utils.py:587), flashinfer among them,
    which SGLang chooses on many cards.

    Args:
        backends: SGLang's attention backends of target and draft.
    """
    waits = [name for name, one in zip(("target", "draft"), backends, strict=True) if one.needs_cpu_seq_lens]
    if device != "cuda" or not waits:
        return
    logger.warning(
        "Each step waits for the device, because the attention backend of the %s takes lengths on the CPU. fa3 (SM "
        "8.x without MLA, and SM 9.x), trtllm_mha (SM 10.x) and triton do not: --attention-backend, "
        "--speculative-draft-attention-backend.",
        " and of the ".join(waits),
    )
