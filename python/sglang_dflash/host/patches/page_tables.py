"""Makes the page tables of attention backends wide enough for a block that ends behind the context limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def widen(backends: Iterable[Any]) -> None:
    """Makes page tables as wide as a request's row of slots. To be called before graphs are captured.

    What SGLang does: fa3, fa4 and trtllm_mha make tables for the context alone (flashattention_backend.py:196,
    trtllm_mha_backend.py:351), but a step's keys are those of prefix and block. Why it is mended: near the context
    limit a block ends behind it, by up to two blocks under overlap. The kernel then takes the next request's pages for
    the last keys, and behind the table's last row whatever stands there; trtllm_mha without graphs also writes there.
    A request's row of slots is long enough (`hooks._row_headroom`). This can go when SGLang's tables are as wide.

    Args:
        backends: SGLang's attention backends, each alone or one for prefill and one for decoding. Those without page
            tables stay as they are.
    """
    for backend in backends:
        backend = getattr(backend, "full_attn_backend", backend)  # beside layers with recurrent state
        for part in (getattr(backend, "prefill_backend", backend), getattr(backend, "decode_backend", backend)):
            if hasattr(part, "max_num_pages"):
                part.max_context_len = part.req_to_token.shape[1]
                part.max_num_pages = -(-part.max_context_len // part.page_size)
