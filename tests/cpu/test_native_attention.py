"""The native attention against its torch reference, with fuzzed shapes and NaN in unowned KV slots.

A result is right if its error against float64 is at most twice the error of the reference in the same dtype, plus one
rounding of the result and one float32 rounding of the summed values. The roundings are allowed because, with few
results, the reference may be exact by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_cpu.ops import PagedTable, native, reference
from sglang_cpu.ops.attention import native_attention, native_write_and_attend

pytestmark = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
VIEWS = [(causal, window) for causal in (True, False) for window in (None, 0, 1, 3, 300)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call. Slots that no request owns are NaN; beyond a request's length its table names them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: PagedTable
    scaling: float = 0.2


def make(
    prefix_lens: list[int],
    row_lens: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """heads: numbers of query and KV heads; dims: sizes of a key and of a value."""
    random = torch.Generator().manual_seed(seed)
    kv_lens = [p + n for p, n in zip(prefix_lens, row_lens, strict=True)]
    batch, slots = len(kv_lens), sum(kv_lens) + 9
    order = torch.randperm(slots, generator=random).int()
    stale = order[sum(kv_lens) :]
    table = stale[torch.randint(len(stale), (batch + 2, max(kv_lens, default=0) + 5), generator=random)]
    requests = torch.randperm(batch + 2, generator=random)[:batch]
    for row, own in zip(requests.tolist(), order[: sum(kv_lens)].split(kv_lens), strict=True):
        table[row, : len(own)] = own
    k = torch.randn(slots, heads[1], dims[0], generator=random)
    v = torch.randn(slots, heads[1], dims[1], generator=random)
    k[stale.long()], v[stale.long()] = torch.nan, torch.nan
    q = torch.randn(sum(row_lens), heads[0], dims[0], generator=random).to(dtype)
    kv_dtype = kv_dtype or dtype
    rows = PagedTable.gather(table, requests, prefix_lens, row_lens)
    return Case(q, k.to(kv_dtype), v.to(kv_dtype), rows)


def run(case: Case, *view, **options) -> torch.Tensor:
    return native_attention(case.q, case.k_cache, case.v_cache, case.rows, case.scaling, *view, **options)


def refer(case: Case, causal: bool, window_left: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    r, view = case.rows, (causal, window_left, sinks)
    return reference.paged_attention(case.q, case.k_cache, case.v_cache, *r.fields, case.scaling, *view)


def exact(case: Case, causal: bool, window_left: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """[T, Hq, Dv] float64, from the definition."""
    r, out = case.rows, []
    groups = case.q.shape[1] // case.k_cache.shape[1]
    starts = r.row_starts.tolist()
    for b, prefix in enumerate(r.prefix_lens.tolist()):
        count = starts[b + 1] - starts[b]
        slots = r.req_to_token[r.req_pool_indices[b], : prefix + count].long()
        k = case.k_cache[slots].double().repeat_interleave(groups, 1)
        v = case.v_cache[slots].double().repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", case.q[starts[b] : starts[b + 1]].double(), k) * case.scaling
        i, j = torch.arange(prefix, prefix + count)[:, None], torch.arange(prefix + count)[None]
        visible = (j <= i) if causal else torch.ones(count, prefix + count, dtype=torch.bool)
        if window_left is not None:
            visible = visible & (i - j <= window_left)
        beside = torch.full((len(scores),), -torch.inf) if sinks is None else sinks
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = torch.cat((scores, beside.double()[:, None, None].expand(-1, count, 1)), -1).softmax(-1)
        out.append(torch.einsum("hts,shd->thd", weights[..., : prefix + count], v))
    return torch.cat(out) if out else torch.empty(0, case.q.shape[1], case.v_cache.shape[2], dtype=torch.float64)


def check(case: Case, causal: bool, window_left: int | None, **options: torch.Tensor) -> None:
    got = run(case, causal, window_left, **options)
    assert got.shape == (*case.q.shape[:2], case.v_cache.shape[2])
    assert got.dtype == case.q.dtype
    if not got.numel():
        return
    truth = exact(case, causal, window_left, **options)
    expected = refer(case, causal, window_left, **options)
    rounding = torch.finfo(case.q.dtype).eps * truth.abs().max()
    rounding += torch.finfo(torch.float32).eps * case.v_cache.nan_to_num().abs().max()
    allowed = 2 * (expected.double() - truth).abs().max() + rounding
    error = (got.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"  # false for NaN


@DTYPES
@pytest.mark.parametrize(("causal", "window_left"), VIEWS)
@pytest.mark.parametrize(
    ("prefix_lens", "row_lens"),
    [
        ([41], [1]),
        ([255, 256, 257, 0], [1, 1, 1, 1]),
        ([3, 600, 250], [8, 8, 8]),
        ([0, 0], [16, 16]),
        ([0, 7, 300], [5, 0, 40]),
        ([130], [200]),
    ],
    ids=["decode", "decode-at-chunks", "verify", "verify-no-prefix", "extend-ragged", "extend-long"],
)
def test_every_layout_and_view(prefix_lens, row_lens, causal, window_left, dtype):
    """Fails where a row sees a key it must not see, misses one, or reads a slot that is not its request's."""
    check(make(prefix_lens, row_lens, (4, 2), (24, 24), dtype), causal, window_left)


@DTYPES
@pytest.mark.parametrize(("causal", "window_left"), [(True, None), (True, 3), (False, None)])
def test_sinks(causal, window_left, dtype):
    """Fails where a head gets another head's sink, where a sink is scaled, and where it is left out of a row that is
    computed in chunks. The sinks are far below, among and far above the other scores."""
    sinks = torch.tensor([-60.0, -1.0, 2.5, 60.0, 0.0, 9.0])
    for prefixes, rows in (([0, 7, 600], [1, 1, 1]), ([3, 300], [8, 8]), ([0, 40], [37, 5])):
        check(make(prefixes, rows, (6, 2), (24, 40), dtype), causal, window_left, sinks=sinks)
    with pytest.raises(RuntimeError, match="sinks is Float\\[5\\]"):
        run(make([4], [1], (6, 2), (24, 24), dtype), True, None, sinks=sinks[:5])


@DTYPES
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 40])
@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (17, 9), (80, 80), (128, 128), (256, 256), (1, 3)])
def test_every_grouping_and_head_size(dims, groups, dtype):
    """Fails where a query head reads another KV head than its group's, or the end of a head is no whole vector."""
    check(make([270, 3], [8, 8], (2 * groups, 2), dims, dtype), True, None)
    check(make([30], [1], (groups, 1), dims, dtype), False, 5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_fuzzed_shapes(data):
    """Fails where any combination of lengths, heads, sizes and views gives a wrong result."""
    requests = data.draw(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40)), min_size=0, max_size=5))
    kv_heads, groups = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    dims = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
    dtype, kv_dtype = (data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in range(2))
    window = data.draw(st.one_of(st.none(), st.integers(0, 700)))
    prefix_lens, row_lens = [p for p, _ in requests], [n for _, n in requests]
    case = make(
        prefix_lens, row_lens, (kv_heads * groups, kv_heads), dims, dtype, kv_dtype, data.draw(st.integers(0, 9))
    )
    with threads(data.draw(st.sampled_from([1, 3]))):
        check(case, data.draw(st.booleans()), window)


@DTYPES
@pytest.mark.parametrize("row_lens", [[1, 1, 1], [8, 8, 8], [70, 3, 1]], ids=["decode", "verify", "extend"])
def test_threads_change_no_bit(row_lens, dtype):
    """Fails where the split of the work changes the sums."""
    case = make([1500, 3, 257], row_lens, (4, 2), (80, 80), dtype)
    results = []
    for count in (1, 2, 4):
        with threads(count):
            results.append(run(case, True, None))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@DTYPES
@pytest.mark.parametrize("window_left", [None, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_gets_the_same_bits_in_an_extend_a_block_and_alone(sinks, window_left, dtype):
    """Fails where a row's result depends on other rows: verified blocks would then differ from plain steps."""
    whole = make([500], [60], (4, 2), (80, 80), dtype)
    r = whole.rows
    options = {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])} if sinks else {}
    together = run(whole, True, window_left, **options)
    for width in (1, 7):
        for first in range(0, 60 - width, 11):
            rows = PagedTable.gather(r.req_to_token, r.req_pool_indices, [500 + first], [width])
            own = replace(whole, q=whole.q[first : first + width], rows=rows)
            assert torch.equal(run(own, True, window_left, **options), together[first : first + width])


def test_other_requests_change_no_bit():
    """Fails where a request's result depends on the batch."""
    case = make([700, 3, 257], [8, 8, 8], (4, 2), (32, 32), torch.float32)
    r, together = case.rows, run(case, True, None)
    for b in range(3):
        rows = PagedTable.gather(r.req_to_token, r.req_pool_indices[b : b + 1], [int(r.prefix_lens[b])], [8])
        alone = run(replace(case, q=case.q[8 * b : 8 * b + 8], rows=rows), True, None)
        assert torch.equal(alone, together[8 * b : 8 * b + 8])


@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_a_nan_stays_in_its_request(place):
    """Fails where a NaN reaches another request, or does not reach its own request's result."""
    case = make([40, 40], [8, 8], (4, 2), (32, 32), torch.float32)
    slot = int(case.rows.req_to_token[case.rows.req_pool_indices[0], 11])
    {"q": case.q[0], "k": case.k_cache[slot], "v": case.v_cache[slot]}[place].fill_(torch.nan)
    out = run(case, True, None)
    assert out[0].isnan().all()
    assert not out[8:].isnan().any()


def test_large_and_small_scores():
    """Fails where the exponential overflows, or scores far below the largest have a weight."""
    case = make([300], [4], (2, 1), (32, 32), torch.float32)
    for scaling in (1e-6, 30.0, 1e4):
        check(replace(case, scaling=scaling), True, None)


def test_empty_batch():
    """Fails where an idle step raises or returns rows."""
    assert run(make([], [], (4, 2), (16, 8), torch.float32), True, None).shape == (0, 4, 8)


def test_strided_queries_and_caches():
    """Fails where rows of a wider tensor are read as if they were dense."""
    case = make([40, 3], [8, 8], (4, 2), (16, 16), torch.float32)
    wide_q = torch.cat((case.q.flatten(1), torch.full((16, 50), torch.nan)), 1)[:, :64].unflatten(1, (4, 16))
    both = torch.stack((case.k_cache, case.v_cache), 1)
    strided = replace(case, q=wide_q, k_cache=both[:, 0], v_cache=both[:, 1])
    assert torch.equal(run(strided, True, None), run(case, True, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, q=c.q.half()), "allowed: float32, bfloat16"),
        (lambda c: replace(c, k_cache=c.k_cache.bfloat16()), "k_cache is"),
        (lambda c: replace(c, q=c.q[:, :3]), "shapes of q"),
        (lambda c: replace(c, k_cache=c.k_cache[:5], v_cache=c.v_cache[:5]), "a slot outside the cache"),
        (
            lambda c: replace(c, rows=replace(c.rows, prefix_lens=c.rows.prefix_lens + 1000)),
            "a row of req_to_token has",
        ),
        (lambda c: replace(c, rows=replace(c.rows, row_starts=c.rows.row_starts + 1)), "row_starts"),
        (lambda c: replace(c, rows=replace(c.rows, req_pool_indices=c.rows.req_pool_indices + 90)), "req_pool_indices"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    """Fails where a wrong call reads foreign memory instead of raising."""
    with pytest.raises(RuntimeError, match=message):
        run(change(make([40, 3], [8, 8], (4, 2), (16, 16), torch.float32)), True, None)


def test_torch_can_trace_through_it():
    """Fails where the op's fake tensors or its schema do not match what it does."""
    case = make([40, 3], [8, 8], (4, 2), (16, 16), torch.float32)
    view, compiled = (*case.rows.fields, 0.2, True, -1), torch.ops.sglang_cpu
    own = (torch.randn(16, 64), torch.randn(16, 32), torch.randn(16, 32), torch.arange(16))
    calls = {
        compiled.paged_attention: (case.q, case.k_cache, case.v_cache, *view),
        compiled.write_and_attend: (*own, case.k_cache.clone(), case.v_cache.clone(), *view),
    }
    for call, arguments in calls.items():
        torch.library.opcheck(call.default, arguments, test_utils=("test_schema", "test_faketensor"))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dims=st.sampled_from([(64, 64), (17, 5)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    causal=st.booleans(),
    window=st.sampled_from([None, 3]),
    apart=st.booleans(),
    seed=st.integers(0, 99),
)
def test_write_and_attend(lens, heads, dims, dtype, causal, window, apart, seed):
    """Fails where a row is not written to its slot, another slot changes, or attention runs before the write."""
    case = make([p for p, _ in lens], [n for _, n in lens], heads, dims, dtype, seed=seed)
    r, rows = case.rows, len(case.q)
    spans = [(row, p + i) for row, (p, n) in zip(r.req_pool_indices.tolist(), lens, strict=True) for i in range(n)]
    slots = torch.tensor([int(r.req_to_token[row, position]) for row, position in spans], dtype=torch.int64)
    # A row's queries, keys and values are adjacent, as in the result of one fused product.
    sizes = [heads[0] * dims[0], heads[1] * dims[0], heads[1] * dims[1]]
    q, k, v = torch.randn(rows, sum(sizes)).to(dtype).split(sizes, 1)
    if not apart:
        q, k, v = q.contiguous(), k.unflatten(1, (heads[1], -1)).contiguous(), v.contiguous()
    caches = [[case.k_cache.clone(), case.v_cache.clone()] for _ in range(2)]
    view = (case.scaling, causal, window)
    expected = reference.write_and_attend(q, k, v, slots, *caches[0], *r.fields, *view)
    got = native_write_and_attend(q, k, v, slots, *caches[1], r, *view)
    for ours, theirs in zip(caches[1], caches[0], strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))  # including the NaN of other slots
    assert got.shape == expected.shape == (rows, heads[0] * dims[1])
    written = replace(case, q=q.reshape(rows, heads[0], dims[0]), k_cache=caches[1][0], v_cache=caches[1][1])
    assert torch.equal(got, run(written, causal, window).flatten(1))
    assert torch.equal(expected, refer(written, causal, window).flatten(1))


def test_write_and_attend_refuses():
    """Fails where a write outside the cache, or rows of another dtype than the cache, are accepted."""
    case = make([3], [2], (4, 2), (8, 8), torch.float32)
    k = torch.randn(2, 16)
    arguments = (case.k_cache, case.v_cache, case.rows, case.scaling, True)
    for slots in ([0, len(case.k_cache)], [-1, 0], [0]):
        with pytest.raises(RuntimeError, match="slots"):
            native_write_and_attend(case.q, k, k, torch.tensor(slots), *arguments)
    with pytest.raises(RuntimeError, match="BFloat16"):
        native_write_and_attend(case.q, k.bfloat16(), k, torch.tensor([0, 1]), *arguments)


def test_uniform_rows_are_laid_out_as_lists_are():
    """Fails where `uniform`, for requests with equally many rows, differs from `gather`."""
    table, requests = torch.arange(40, dtype=torch.int32).view(4, 10), torch.tensor([3, 1])
    for width in (1, 4):
        short = PagedTable.uniform(table, requests, torch.tensor([2, 5]), width)
        long = PagedTable.gather(table, requests, [2, 5], [width, width])
        for name in ("req_to_token", "req_pool_indices", "prefix_lens", "row_starts"):
            assert torch.equal(getattr(short, name), getattr(long, name))
            assert getattr(short, name).dtype == getattr(long, name).dtype
