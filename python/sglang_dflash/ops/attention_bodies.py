"""The bodies of paged attention, and how each wants the rows of a forward laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sglang_dflash.ops.attention import PagedRows, paged_attention


@dataclass(frozen=True, slots=True)
class PagedTable:
    """The positions of a batch's query rows and the slots of their KV, as `reference.paged_attention` takes them.

    Fields:
        req_to_token: [R, C] int32; slot of each position of each request row.
        req_pool_indices: [B] int64; the batch's rows.
        prefix_lens: [B] int64; per request, the tokens before its first query row.
        row_starts: [B + 1] int64; request b has the rows `row_starts[b] : row_starts[b + 1]` of the query tensor.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    row_starts: torch.Tensor

    @classmethod
    def gather(
        cls,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        prefix_lens: list[int],
        row_lens: list[int],
    ) -> PagedTable:
        row_starts = torch.tensor([0, *row_lens]).cumsum(0)
        prefixes = torch.tensor(prefix_lens, dtype=torch.int64)
        return cls(req_to_token, req_pool_indices.long(), prefixes, row_starts)

    @classmethod
    def uniform(
        cls, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
    ) -> PagedTable:
        """`gather` for `width` rows of every request; prefix_lens: [B] int."""
        row_starts = _uniform_starts(len(prefix_lens), width)
        return cls(req_to_token, req_pool_indices.long(), prefix_lens.long(), row_starts)

    @property
    def fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of the native ops' arguments."""
        return self.req_to_token, self.req_pool_indices, self.prefix_lens, self.row_starts


@lru_cache(maxsize=64)
def _uniform_starts(batch: int, width: int) -> torch.Tensor:
    return torch.arange(batch + 1) * width


def native_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedTable,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.paged_attention` in one native call that reads the pages in place.

    A row's result depends only on its query and the keys and values it sees, bit for bit: not on threads, other
    requests or other rows.
    """
    out: torch.Tensor = torch.ops.sglang_dflash.paged_attention(
        q,
        k_cache,
        v_cache,
        *rows.fields,
        scaling,
        causal,
        -1 if window_left is None else window_left,
        None if sinks is None else sinks.float(),
    )
    return out


def native_write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedTable,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.write_and_attend` in one native call."""
    out: torch.Tensor = torch.ops.sglang_dflash.write_and_attend.default(
        q,
        k,
        v,
        slots,
        k_cache,
        v_cache,
        *rows.fields,
        scaling,
        causal,
        -1 if window_left is None else window_left,
        None if sinks is None else sinks.float(),
    )
    return out


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention body and how to lay out the rows of a forward for it.

    Fields:
        lay_out: called once per forward with (req_to_token, req_pool_indices, prefix_lens, row_lens), the last two
            lists. Returns `rows`.
        lay_out_uniform: the same if all requests have `width` rows: (..., prefix_lens [B] int, width).
        attend: called per layer with (q, k_cache, v_cache, rows, scaling, causal, window_left), and `sinks` by name.
        write_and_attend: `reference.write_and_attend` with `rows` in place of its tables; None if attention has no
            such body, and the caller writes and attends in two calls.
    """

    lay_out: Callable[..., Any]
    lay_out_uniform: Callable[..., Any]
    attend: Callable[..., torch.Tensor]
    write_and_attend: Callable[..., torch.Tensor] | None = None


TORCH_ATTENTION = Attention(PagedRows.gather, PagedRows.uniform, paged_attention)
NATIVE_ATTENTION = Attention(PagedTable.gather, PagedTable.uniform, native_attention, native_write_and_attend)
