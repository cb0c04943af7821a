"""The bodies of paged attention, and the table of a forward's rows that both take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sglang_cpu.ops import reference


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


def rows_as_requests(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row as a request of its own, whose slots are those of the prefix and of the rows that it sees.

    Args:
        req_to_token: [R, S] int32.
        req_pool_indices: [B] int; prefix_lens: [B] int64.
        seen: [B, N, N] bool.

    Returns:
        A slot table, [B * N, S'] int32; its rows, [B * N] int64; and the slots before a row's own, [B * N] int64.
    """
    batch, rows = seen.shape[:2]
    own = req_to_token[req_pool_indices.long(), : int(prefix_lens.max()) + rows]
    at = prefix_lens[:, None, None] + torch.arange(rows)  # [B, 1, N]
    order = (~seen).int().argsort(dim=2, stable=True)  # the rows that are seen first, as they stand
    path = own.gather(1, (prefix_lens[:, None, None] + order).flatten(1)).view(batch * rows, rows)
    table = own.repeat_interleave(rows, 0).scatter(1, at.expand(-1, rows, -1).reshape(batch * rows, rows), path)
    return table, torch.arange(batch * rows), (prefix_lens[:, None] + seen.sum(2) - 1).flatten()


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
    out: torch.Tensor = torch.ops.sglang_cpu.paged_attention(
        q, k_cache, v_cache, *rows.fields, scaling, causal, *_options(window_left, sinks)
    )
    return out


def _options(window_left: int | None, sinks: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
    """As the native ops take them."""
    return -1 if window_left is None else window_left, None if sinks is None else sinks.float()


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
    out: torch.Tensor = torch.ops.sglang_cpu.write_and_attend.default(
        q, k, v, slots, k_cache, v_cache, *rows.fields, scaling, causal, *_options(window_left, sinks)
    )
    return out


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention body.

    Fields:
        attend: `reference.paged_attention` with a `PagedTable` in place of its four fields.
        write_and_attend: `reference.write_and_attend`, likewise.
    """

    attend: Callable[..., torch.Tensor]
    write_and_attend: Callable[..., torch.Tensor]


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: PagedTable, *view: Any, **sinks: Any
) -> torch.Tensor:
    return reference.paged_attention(q, k_cache, v_cache, *rows.fields, *view, **sinks)


def _write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedTable,
    *view: Any,
    **sinks: Any,
) -> torch.Tensor:
    return reference.write_and_attend(q, k, v, slots, k_cache, v_cache, *rows.fields, *view, **sinks)


REFERENCE_ATTENTION = Attention(_attend, _write_and_attend)
NATIVE_ATTENTION = Attention(native_attention, native_write_and_attend)
