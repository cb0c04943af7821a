"""`paged_attention` against exact attention of each request, over a KV pool with NaN in unowned slots.

A result is right if its error against float64 is at most twice the error of torch's SDPA in the same dtype, plus one
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from sglang_dflash.ops import PagedRows, attention, paged_attention
from sglang_dflash.ops.reference import attention_rows

CHUNK = 32  # rows per call of an extend in these tests, so that short extends have several chunks
EXTEND_ROWS = attention.EXTEND_ROWS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
VIEWS = pytest.mark.parametrize(
    ("causal", "window_left"),
    [(causal, window) for causal in (True, False) for window in (None, 0, 1, 3, 100_000)],
    ids=lambda value: {True: "causal", False: "bidirectional"}.get(value) if isinstance(value, bool) else str(value),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Prefixes and rows of the requests, and whether one SDPA call must serve them all."""

    prefix_lens: list[int]
    row_lens: list[int]
    batched: bool


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(attention, "EXTEND_ROWS", CHUNK)


LAYOUTS = {
    "decode-one": Layout([41], [1], True),
    "decode-equal": Layout([37, 37, 37], [1, 1, 1], True),
    "decode-ragged": Layout([30, 33, 41], [1, 1, 1], True),
    "decode-far-apart": Layout([3, 601, 0], [1, 1, 1], False),
    "verify-ragged": Layout([3, 5, 9], [8, 8, 8], True),
    "verify-no-prefix": Layout([0, 0], [8, 8], True),
    "verify-far-apart": Layout([0, 333], [8, 8], False),
    "extend-ragged": Layout([0, 7, 19], [5, 1, 13], False),
    "extend-largest-batched": Layout([3], [CHUNK], True),
    "extend-one-row-more": Layout([0, 9], [CHUNK + 1, CHUNK + 1], False),
    "extend-whole-chunks": Layout([1], [2 * CHUNK], False),
    "extend-long": Layout([13, 5], [2 * CHUNK + 7, 2], False),
}
GROUPED_LAYOUTS = ["decode-ragged", "decode-far-apart", "verify-ragged", "verify-far-apart", "extend-ragged"]


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool in which every slot that no request owns is NaN. The requests' slots are in random order."""

    k: torch.Tensor  # [slots, Hkv, D]
    v: torch.Tensor  # [slots, Hkv, Dv]
    req_to_token: torch.Tensor  # [R, C] int32, zero where no slot was assigned
    rows_of_batch: torch.Tensor  # [B] int64


def _pool(layout: Layout, heads: int, dim: int, v_dim: int, dtype: torch.dtype, shared: int = 0) -> Pool:
    """Random slots; all requests share the slots of their first `shared` positions. Slot 0 is zero, as in the host."""
    kv_lens = [p + n for p, n in zip(layout.prefix_lens, layout.row_lens, strict=True)]
    batch, slots = len(kv_lens), 2 * sum(kv_lens) + 20
    free = (torch.randperm(slots - 1) + 1).tolist()
    common = [free.pop() for _ in range(shared)]
    req_to_token = torch.zeros(batch + 3, max(kv_lens, default=0) + 9, dtype=torch.int32)
    rows_of_batch = torch.randperm(batch + 3)[:batch]
    k, v = torch.full((slots, heads, dim), torch.nan), torch.full((slots, heads, v_dim), torch.nan)
    k[0], v[0] = 0, 0
    for row, length in zip(rows_of_batch.tolist(), kv_lens, strict=True):
        owned = torch.tensor(common + [free.pop() for _ in range(length - shared)])
        req_to_token[row, :length] = owned.int()
        k[owned], v[owned] = torch.randn(length, heads, dim), torch.randn(length, heads, v_dim)
    return Pool(k.to(dtype), v.to(dtype), req_to_token, rows_of_batch)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scaling: float) -> torch.Tensor:
    """[T, Hq, Dv] in float64, one query head after the other."""
    groups = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // groups].double().T * scaling
        scores[~visible] = -torch.inf
        heads.append(scores.softmax(-1) @ v[:, head // groups].double())
    return torch.stack(heads, dim=1)


def _visible(prefix: int, rows: int, causal: bool, window_left: int | None) -> torch.Tensor:
    """[rows, prefix + rows] bool from the definition: whether the row at position i sees key j."""
    i, j = torch.arange(prefix, prefix + rows)[:, None], torch.arange(prefix + rows)[None]
    visible = torch.ones(rows, prefix + rows, dtype=torch.bool)
    if causal:
        visible &= j <= i
    if window_left is not None:
        visible &= i - window_left <= j
    return visible


def _check(
    layout: Layout,
    query_heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    causal: bool,
    window_left: int | None,
    dtype: torch.dtype,
    shared: int = 0,
) -> None:
    torch.manual_seed(len(layout.prefix_lens) + sum(layout.row_lens))
    dim, v_dim = dims
    pool = _pool(layout, kv_heads, dim, v_dim, dtype, shared)
    q = torch.randn(sum(layout.row_lens), query_heads, dim).to(dtype)
    scaling = 0.7 * dim**-0.5
    rows = PagedRows.gather(pool.req_to_token, pool.rows_of_batch, layout.prefix_lens, layout.row_lens)
    assert rows.batched == layout.batched, "this layout is meant to test the other path"
    out = paged_attention(q, pool.k, pool.v, rows, scaling, causal, window_left)
    assert out.shape == (len(q), query_heads, v_dim)
    assert out.dtype == dtype

    ours, same_dtype, reference, exact = out.split(layout.row_lens), [], [], []
    requests = zip(
        pool.rows_of_batch.tolist(), layout.prefix_lens, layout.row_lens, q.split(layout.row_lens), strict=True
    )
    for row, prefix, count, own_q in requests:
        slots = pool.req_to_token[row, : prefix + count].long()
        k, v = pool.k[slots], pool.v[slots]
        visible = _visible(prefix, count, causal, window_left)
        exact.append(_exact(own_q, k, v, visible, scaling))
        reference.append(attention_rows(own_q, k, v, prefix, scaling, causal, window_left))
        heads_first = (x.transpose(0, 1)[None] for x in (own_q, k, v))
        sdpa = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=scaling, enable_gqa=True)
        same_dtype.append(sdpa[0].transpose(0, 1))

    for index, truth in enumerate(exact):
        # The exact result, rounded once, is always right.
        rounding = torch.finfo(dtype).eps * truth.abs().max()
        allowed = 2 * (same_dtype[index].double() - truth).abs().max() + rounding
        for name, got in (("paged_attention", ours[index]), ("attention_rows", reference[index])):
            error = (got.double() - truth).abs().max()
            assert error <= allowed, f"{name}, request {index}: error {error:.3g}, allowed {allowed:.3g}"


@DTYPES
@VIEWS
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_view(name, causal, window_left, dtype):
    """Fails where a row sees a key it must not see, misses one, or reads a slot that is not its request's."""
    _check(LAYOUTS[name], 4, 2, (24, 24), causal, window_left, dtype)


@DTYPES
@pytest.mark.parametrize(("causal", "window_left"), [(True, None), (True, 5), (False, None)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sinks(name, causal, window_left, dtype):
    """Fails where a head gets another head's sink, in a decode, a verified block or a prompt."""
    layout = LAYOUTS[name]
    torch.manual_seed(5)
    pool = _pool(layout, 2, 24, 24, dtype, 0)
    q = torch.randn(sum(layout.row_lens), 4, 24).to(dtype)
    sinks = torch.tensor([-3.0, 0.0, 1.5, 4.0]).to(dtype)
    rows = PagedRows.gather(pool.req_to_token, pool.rows_of_batch, layout.prefix_lens, layout.row_lens)
    out = paged_attention(q, pool.k, pool.v, rows, 0.2, causal, window_left, sinks=sinks).split(layout.row_lens)
    requests = zip(pool.rows_of_batch.tolist(), layout.prefix_lens, layout.row_lens, strict=True)
    for (row, prefix, count), own, got in zip(requests, q.split(layout.row_lens), out, strict=True):
        slots = pool.req_to_token[row, : prefix + count].long()
        expected = attention_rows(own, pool.k[slots], pool.v[slots], prefix, 0.2, causal, window_left, sinks=sinks)
        allowed = 1e-5 if dtype == torch.float32 else 0.03
        assert torch.allclose(got.float(), expected.float(), atol=allowed), (got - expected).abs().max()


@pytest.mark.parametrize(("causal", "window_left"), [(True, None), (False, 700)])
def test_a_long_extend_in_chunks_of_the_real_size(monkeypatch, causal, window_left):
    """Fails where chunks of the size used outside these tests give another result."""
    monkeypatch.setattr(attention, "EXTEND_ROWS", EXTEND_ROWS)
    layout = Layout([13], [EXTEND_ROWS + 100], False)
    _check(layout, 2, 1, (16, 16), causal, window_left, torch.float32)


@DTYPES
@pytest.mark.parametrize(("causal", "window_left"), [(True, None), (False, None), (False, 5)])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (3, 3), (2, 1), (6, 3), (4, 1), (12, 3)])
@pytest.mark.parametrize("name", GROUPED_LAYOUTS)
def test_every_grouping(name, query_heads, kv_heads, causal, window_left, dtype):
    """Fails where a query head reads another KV head than its group's. Head sizes are odd; values have another size."""
    _check(LAYOUTS[name], query_heads, kv_heads, (17, 9), causal, window_left, dtype)


@pytest.mark.parametrize(("causal", "window_left"), [(True, None), (False, 3)])
@pytest.mark.parametrize(
    "layout",
    [Layout([32, 32], [8, 8], True), Layout([32, 48], [1, 30], False), Layout([33, 700], [4, 4], False)],
    ids=["verify", "extend", "far-apart"],
)
def test_requests_may_share_the_slots_of_a_prefix(layout, causal, window_left):
    """Fails where a prefix hit, so two requests over the same slots, changes either result."""
    _check(layout, 4, 2, (16, 16), causal, window_left, torch.float32, shared=32)


def test_empty_batch():
    """Fails where an idle step raises or returns rows."""
    pool = _pool(LAYOUTS["decode-one"], 2, 16, 8, torch.float32)
    rows = PagedRows.gather(pool.req_to_token, torch.empty(0, dtype=torch.int64), [], [])
    assert paged_attention(torch.empty(0, 4, 16), pool.k, pool.v, rows, 1.0, True).shape == (0, 4, 8)


@pytest.mark.parametrize("name", ["verify-ragged", "verify-far-apart"])
def test_a_narrower_cache_is_read_in_the_querys_dtype(name):
    """Fails where a KV cache of another dtype than the queries' is refused, or products are computed in its dtype."""
    torch.manual_seed(0)
    layout = LAYOUTS[name]
    pool = _pool(layout, 2, 16, 16, torch.bfloat16)
    q = torch.randn(sum(layout.row_lens), 4, 16)
    rows = PagedRows.gather(pool.req_to_token, pool.rows_of_batch, layout.prefix_lens, layout.row_lens)
    out = paged_attention(q, pool.k, pool.v, rows, 0.25, True)
    assert out.dtype == torch.float32
    assert torch.equal(out, paged_attention(q, pool.k.float(), pool.v.float(), rows, 0.25, True))


@pytest.mark.parametrize("name", ["verify-ragged", "verify-far-apart", "extend-ragged"])
def test_one_value_serves_every_layer_of_a_forward(name):
    """Fails where a mask that is kept between layers is used for another kind of layer."""
    torch.manual_seed(0)
    layout = LAYOUTS[name]
    views = [(True, None), (False, None), (False, 2), (True, 2), (True, None)]

    def gather(pool: Pool) -> PagedRows:
        return PagedRows.gather(pool.req_to_token, pool.rows_of_batch, layout.prefix_lens, layout.row_lens)

    shared: dict[int, PagedRows] = {}
    pool = _pool(layout, 2, 16, 16, torch.float32)
    shared[0] = gather(pool)
    for causal, window_left in views:
        for query_heads in (2, 4):
            q = torch.randn(sum(layout.row_lens), query_heads, 16)
            got = paged_attention(q, pool.k, pool.v, shared[0], 0.25, causal, window_left)
            assert torch.equal(got, paged_attention(q, pool.k, pool.v, gather(pool), 0.25, causal, window_left))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gather_reads_the_requests_slots(index_dtype):
    """Fails where a request's slots come from another row, or do not include its own rows."""
    req_to_token = torch.arange(1, 41, dtype=torch.int32).view(4, 10)
    rows = PagedRows.gather(req_to_token, torch.tensor([2, 0], dtype=index_dtype), [5, 1], [2, 3])
    assert rows.kv_lens == [7, 4]
    assert rows.slots.dtype == torch.int64
    assert rows.slots.shape == (2, 7)
    assert rows.slots[0].tolist() == [21, 22, 23, 24, 25, 26, 27]
    assert rows.slots[1, :4].tolist() == [1, 2, 3, 4]


def _run(layout: Layout, pool: Pool, req_to_token: torch.Tensor) -> torch.Tensor:
    rows = PagedRows.gather(req_to_token, pool.rows_of_batch, layout.prefix_lens, layout.row_lens)
    assert rows.batched and len(set(rows.kv_lens)) > 1, "without padding this tests nothing"
    q = torch.randn(sum(layout.row_lens), 4, 16, generator=torch.Generator().manual_seed(1))
    return paged_attention(q, pool.k, pool.v, rows, 0.25, True)


@pytest.mark.parametrize("name", ["decode-ragged", "verify-ragged"])
def test_stale_entries_of_a_row_are_not_read(name):
    """Fails where another request's KV, here NaN, reaches a result through stale slots in `req_to_token`: the host does
    not clear the row of a finished request."""
    torch.manual_seed(0)
    pool = _pool(LAYOUTS[name], 2, 16, 16, torch.float32)
    broken = int(pool.k.isnan().flatten(1).any(1).nonzero()[0])
    stale = torch.where(pool.req_to_token == 0, broken, pool.req_to_token)
    difference = (_run(LAYOUTS[name], pool, stale) - _run(LAYOUTS[name], pool, pool.req_to_token)).abs().max()
    assert difference.item() == 0.0


@pytest.mark.parametrize("name", ["decode-ragged", "verify-ragged"])
@pytest.mark.parametrize("garbage", [1.0, -1e4, 1e30])
def test_the_padding_slot_may_hold_any_finite_value(name, garbage):
    """Fails where the content of slot 0, into which the host writes the outputs of padding rows, changes any bit."""
    torch.manual_seed(0)
    pool = _pool(LAYOUTS[name], 2, 16, 16, torch.float32)
    clean = _run(LAYOUTS[name], pool, pool.req_to_token)
    pool.k[0], pool.v[0] = garbage, -garbage
    difference = (_run(LAYOUTS[name], pool, pool.req_to_token) - clean).abs().max()
    assert difference.item() == 0.0
