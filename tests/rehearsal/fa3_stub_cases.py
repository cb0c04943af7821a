"""The stub of the fa3 kernels: what rows see, and what it refuses; run by `test_fa3_metadata.py`."""

from __future__ import annotations

import pytest
import torch

from rehearsal.flash_attn_stub import KernelError, flash_attn_varlen_func, flash_attn_with_kvcache

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 6, 4, 2, 8


def arguments(rows: int, keys: int) -> dict:
    """One request; `page_table` has room for 16 keys."""
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    cache = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, generator=generator).bfloat16()
    return {
        "q": torch.randn(rows, HEADS, DIM, generator=generator).bfloat16(),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "page_table": torch.tensor([[5, 1, 4, 2]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([keys], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, rows], dtype=torch.int32),
        "max_seqlen_q": rows,
    }


def seen_by_rows(rows: int, keys: int, **options: object) -> list[str]:
    """For each row, a 1 for each key whose change changes the row's output."""
    given = arguments(rows, keys) | options
    before = flash_attn_with_kvcache(**given)
    seen = []
    for key in range(keys):
        page, offset = given["page_table"][0, key // PAGE], key % PAGE
        changed = given["v_cache"].clone()
        changed[page, offset] += 8
        after = flash_attn_with_kvcache(**(given | {"v_cache": changed}))
        seen.append((after != before).flatten(1).any(1))
    return ["".join(str(int(one)) for one in row) for row in torch.stack(seen, 1)]


@pytest.mark.parametrize(
    ("rows", "keys", "options", "seen"),
    [
        (2, 5, {"causal": True}, ["11110", "11111"]),
        (5, 2, {"causal": True}, ["00", "00", "00", "10", "11"]),
        (2, 5, {}, ["11111", "11111"]),
        (3, 6, {"causal": True, "window_size": (2, 0)}, ["011100", "001110", "000111"]),
        (3, 6, {"window_size": (1, 1)}, ["001110", "000111", "000011"]),
        (3, 6, {"window_size": (1, -1)}, ["001111", "000111", "000011"]),
    ],
)
def test_what_rows_see(rows, keys, options, seen):
    """Fails where masks are not those that FlashAttention documents: aligned to the last row and the last key."""
    assert seen_by_rows(rows, keys, **options) == seen


def test_rows_that_see_nothing_are_zero_and_rows_of_nobody_nan():
    """Fails where a row without keys is not zero, or a row behind the last request has a value."""
    given = arguments(5, 2) | {"causal": True}
    given["q"] = torch.cat((given["q"], given["q"][:1]))
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert (out[:3] == 0).all() and out[5].isnan().all() and lse[:, 5].isnan().all()
    assert (lse[:, :3] == -torch.inf).all() and lse[:, 3:5].isfinite().all()


def test_scores():
    """Fails where scale, softcap, descales, sinks or the order of heads differ from their definition."""
    given = arguments(1, 3) | {"softmax_scale": 0.5, "softcap": 2.0, "sinks": torch.ones(HEADS).bfloat16()}
    given["k_descale"], given["v_descale"] = torch.full((1, KV_HEADS), 3.0), torch.full((1, KV_HEADS), 5.0)
    out = flash_attn_with_kvcache(**given)
    for head in range(HEADS):
        query, kv_head = given["q"][0, head].float(), head // 2
        key, value = (given[name][5, :3, kv_head].float() for name in ("k_cache", "v_cache"))
        scores = 2 * torch.tanh(3 * (key @ query) * 0.5 / 2)
        weights = torch.softmax(torch.cat((scores, torch.ones(1))), 0)[:3]
        assert torch.allclose(out[0, head].float(), 5 * weights @ value, rtol=1e-2, atol=1e-3)


def test_packed_keys_as_paged_ones():
    """Fails where the kernel for packed keys differs from the one for paged keys."""
    given = arguments(3, 11) | {"causal": True, "window_size": (4, 0)}
    paged = flash_attn_with_kvcache(**given)
    keys, values = (given[name][[5, 1, 4]].flatten(0, 1)[:11] for name in ("k_cache", "v_cache"))
    ends = torch.tensor([0, 11], dtype=torch.int32)
    packed = flash_attn_varlen_func(
        given["q"], keys, values, given["cu_seqlens_q"], ends, 3, 11, causal=True, window_size=(4, 0)
    )
    assert torch.equal(packed, paged)


WRONG = {
    "row ends at 16": {"cache_seqlens": torch.tensor([17], dtype=torch.int32)},
    "pages .6. are not": {"page_table": torch.tensor([[5, 6, 0, 0]], dtype=torch.int32)},
    "pages .-1. are not": {"page_table": torch.tensor([[-1, 1, 0, 0]], dtype=torch.int32)},
    "page table of torch.int64": {"page_table": torch.tensor([[5, 1, 4, 2]])},
    "last dimension is not contiguous": {"page_table": torch.zeros(4, 2, dtype=torch.int32).t()[:1]},
    "cache_seqlens of torch.int64": {"cache_seqlens": torch.tensor([8])},
    "cache_seqlens has shape": {"cache_seqlens": torch.tensor([8, 8], dtype=torch.int32)},
    "cache_seqlens of torch.int32, or not": {"cache_seqlens": torch.tensor([8, 8], dtype=torch.int32)[::2].expand(3)},
    "cache_seqlens is -1": {"cache_seqlens": torch.tensor([-1], dtype=torch.int32)},
    "cu_seqlens_q ends at 5 of 3": {"cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32), "max_seqlen_q": 5},
    "does not ascend": {"cu_seqlens_q": torch.tensor([1, 3], dtype=torch.int32)},
    "more than max_seqlen_q": {"max_seqlen_q": 2},
    "running sum": {"cu_seqlens_k_new": torch.tensor([0, 7], dtype=torch.int32)},
    "rows of torch.float32": {"q": torch.zeros(3, HEADS, DIM)},
    "rows of torch.float16 over": {"q": torch.zeros(3, HEADS, DIM).half()},
    "heads of 12": {"q": torch.zeros(3, HEADS, 12).bfloat16()},
    "3 heads over 2": {"q": torch.zeros(3, 3, DIM).bfloat16()},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "descale": {"k_descale": torch.zeros(1)},
}


@pytest.mark.parametrize("why", WRONG)
def test_refusals(why):
    """Fails where the stub accepts what the kernel refuses, or reads out of bounds."""
    with pytest.raises(KernelError, match=why):
        flash_attn_with_kvcache(**(arguments(3, 8) | WRONG[why]))


@pytest.mark.parametrize("name", ["k", "rotary_cos", "cache_leftpad", "scheduler_metadata", "attention_chunk", "newer"])
def test_unknown_arguments(name):
    """Fails where an argument that the stub does not honour is ignored."""
    with pytest.raises(NotImplementedError, match="does not know"):
        flash_attn_with_kvcache(**arguments(3, 8), **{name: 1})
