"""Steps of our worker over SGLang's fa3 backend against attention by definition; run by `test_fa3_metadata.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.attention.trtllm_mha_page_table import build_trtllm_mha_page_table
from sglang.srt.layers.radix_attention import AttentionType

from rehearsal import fa3_rig
from rehearsal.fa3_models import BLOCK, CONTEXT, HEADS, KV_HEADS, REQUESTS, AttentionModel, Setup
from rehearsal.fa3_rig import Rig
from rehearsal.flash_attn_stub import KernelError
from sglang_dflash.host.patches import page_tables

LAST = CONTEXT - 4
"""The longest prefix of a request that has not ended; under overlap, one more block of it may be under way."""
NEAR_LIMIT = [LAST + BLOCK, LAST, LAST - 1, LAST + BLOCK - 1]


def prefix_lens(setup: Setup) -> list[int]:
    page = setup.page_size
    edges = {edge for pages in (1, 2) for edge in (pages * page - 1, pages * page, pages * page + 1)}
    lens = {1, BLOCK - 1, BLOCK, *edges, CONTEXT - BLOCK, CONTEXT - BLOCK + 1, LAST - 1, LAST}
    if not setup.knows_lens:
        lens |= {CONTEXT - 1, CONTEXT, CONTEXT + 1, LAST + BLOCK}
    return sorted(one for one in lens if one > 0)


def batches(setup: Setup) -> Iterator[tuple[list[int], list[int]]]:
    """Rows and prefix lengths: full and padded graphs in turn, rows in no order, short and long ones together."""
    lens = prefix_lens(setup)
    order = iter([lens[at] for at in torch.randperm(len(lens), generator=torch.Generator().manual_seed(4)).tolist()])
    generator = torch.Generator().manual_seed(5)
    sizes = [4, 3, 1, 4, 2, 3, 4]
    for size in sizes:
        if chosen := list(islice(order, size)):
            yield (torch.randperm(REQUESTS, generator=generator) + 1).tolist()[: len(chosen)], chosen


def expected(one: AttentionModel, index: int, row: int, prefix_len: int, first: int, rows: int = BLOCK) -> torch.Tensor:
    """[rows, HEADS, D] float64: the layer's attention by definition.

    first: position of the first token that the model sees at all.
    """
    layer, end = one.layers[index], prefix_len + rows
    keys, values = (kv[index, row, first:end].double() for kv in (one.keys, one.values))
    outputs = []
    for own in range(prefix_len, end):
        seen = [
            at - first
            for at in range(first, end)
            if (at <= own or not layer.causal) and (layer.left < 0 or abs(at - own) <= layer.left)
        ]
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            query = one.queries[index, row, own, head].double()
            weights = torch.softmax(keys[seen, group] @ query / query.numel() ** 0.5, 0)
            outputs.append(weights @ values[seen, group])
    return torch.stack(outputs).view(rows, HEADS, -1)


def largest_error(
    one: AttentionModel, rows: list[int], lens: list[int], window: int | None = None, counts: list[int] | None = None
) -> float:
    """Of the last forward; at most 1 where only the output was rounded, NaN where a row read a foreign slot.

    counts: rows of each request; None: whole blocks.
    """
    counts = counts or [BLOCK] * len(rows)
    outputs = one.outputs[:, : sum(counts)].double().split(counts, dim=1)
    errors = []
    for place, (row, length) in enumerate(zip(rows, lens, strict=True)):
        page = one.setup.page_size
        first = 0 if window is None else max(length - window, 0) // page * page
        for index in range(len(one.layers)):
            right = expected(one, index, row, length, first, counts[place])
            rounding = right.abs() * 2**-8 + 1e-4  # bfloat16 has 8 bits
            errors.append(((outputs[place][index] - right).abs() / rounding).max())
    return float(torch.stack(errors).max())


def check_step(rig: Rig, rows: list[int], lens: list[int]) -> None:
    rig.step(rows, lens)
    for name, one, window in (("target", rig.target, None), ("draft", rig.draft, rig.setup.draft_window)):
        assert largest_error(one, rows, lens, window) <= 1, (name, rows, lens)


PATHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
SETUPS = pytest.mark.parametrize(("page_size", "graphs"), [(1, True), (16, False), (64, True)])


@SETUPS
def test_steps(page_size, graphs):
    """Fails where a row of a verify, or of the draft's block, sees another set of keys than it must: at page
    boundaries, in padded batches, after other batches in the same graph, or up to a block past the context limit."""
    with fa3_rig.rig(Setup(page_size, graphs)) as rig:
        for rows, lens in batches(rig.setup):
            check_step(rig, rows, lens)


@PATHS
def test_steps_without_overlap(graphs):
    """Fails where lengths that the host knows make the tables too narrow, or the step reads others than it needs."""
    with fa3_rig.rig(Setup(16, graphs, knows_lens=True)) as rig:
        for rows, lens in batches(rig.setup):
            check_step(rig, rows, lens)


@SETUPS
@pytest.mark.parametrize("window", [5, 1000])
def test_draft_windows(page_size, window, graphs):
    """Fails where the draft's own table leads to other tokens than the latest ones and the block."""
    with fa3_rig.rig(Setup(page_size, graphs, draft_window=window)) as rig:
        for rows, lens in batches(rig.setup):
            check_step(rig, rows, lens)


@SETUPS
def test_a_pool_for_sliding_layers(page_size, graphs):
    """Fails where sliding layers of the target read or write their own pool at other slots than their tokens'."""
    with fa3_rig.rig(Setup(page_size, graphs, swa_pool=True)) as rig:
        for rows, lens in batches(rig.setup):
            check_step(rig, rows, lens)


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_tables_reach_past_the_context(page_size):
    """Fails where our worker leaves page tables as wide as the context: a full graph near the limit then reads behind
    the last row of the table. Shows also that the host's own tables are too narrow, which the mend is for."""
    rows = [3, 1, 6, 4]
    with fa3_rig.rig(Setup(page_size, graphs=True)) as rig:
        check_step(rig, rows, NEAR_LIMIT)
    with fa3_rig.rig(Setup(page_size, graphs=True), widen=False) as rig:
        with pytest.raises(KernelError, match=f"page table's row ends at {CONTEXT}"):
            rig.step(rows, NEAR_LIMIT)
        check_step(rig, rows, [CONTEXT - BLOCK] * 4)


def test_backends_for_prefill_and_decoding_are_both_widened():
    """Fails where one of two backends keeps its narrow tables, or a backend without page tables gets any."""
    table = torch.zeros(2, 151, dtype=torch.int32)
    with_tables = [SimpleNamespace(max_context_len=128, max_num_pages=8, page_size=16, req_to_token=table)] * 2
    with_tables = [SimpleNamespace(**vars(one)) for one in with_tables]
    without = SimpleNamespace(max_context_len=128)
    both = SimpleNamespace(prefill_backend=with_tables[0], decode_backend=without, max_context_len=128)
    page_tables.widen([both, with_tables[1], without])
    assert [one.max_num_pages for one in with_tables] == [10, 10]
    assert vars(without) == {"max_context_len": 128}


@pytest.mark.parametrize("widened", [False, True])
def test_trtllm_mha_fills_tables_by_length_alone(widened):
    """Fails where the kernel that fills trtllm_mha's tables without graphs writes past a row of our width. Shows also
    that it writes past the host's own width, which is why that backend is widened too."""
    backend = SimpleNamespace(max_context_len=CONTEXT, max_num_pages=CONTEXT // 16, page_size=16)
    backend.req_to_token = torch.arange(159, dtype=torch.int32)[None]
    if widened:
        page_tables.widen([backend])
    tables = torch.full((2, backend.max_num_pages), -7, dtype=torch.int32)
    build_trtllm_mha_page_table(
        backend.req_to_token, torch.zeros(1).int(), torch.tensor([LAST + 2 * BLOCK]).int(), tables[:1], 16
    )
    assert tables[0, :8].tolist() == list(range(8))
    assert bool((tables[1] == -7).all()) == widened


class TestPlantedBugs:
    """Errors of metadata that the steps above must find; each would pass where nobody compares keys."""

    ROWS, LENS = (2, 5, 1), (17, 40, 33)

    def wrong(self, rig: Rig) -> dict[str, bool]:
        """Which of the models' outputs are not what they must be."""
        rig.step(self.ROWS, self.LENS)
        both = {"target": (rig.target, None), "draft": (rig.draft, rig.setup.draft_window)}
        errors = {name: largest_error(one, self.ROWS, self.LENS, window) for name, (one, window) in both.items()}
        return {name: not error <= 1 for name, error in errors.items()}

    @PATHS
    def test_none_without_a_bug(self, graphs):
        """Fails where the rig itself errs."""
        with fa3_rig.rig(Setup(16, graphs)) as rig:
            assert self.wrong(rig) == {"target": False, "draft": False}

    @PATHS
    @pytest.mark.parametrize("by", [-1, 1])
    def test_lengths_off_by_one(self, graphs, by):
        """Fails where one key too few or too many stays unseen by the comparison."""
        with fa3_rig.rig(Setup(16, graphs)) as rig:
            attend = rig.target.attend

            def attend_with_other_lens(batch):
                metadata = rig.target.backend.forward_metadata
                metadata.cache_seqlens_int32 += by
                metadata.cu_seqlens_k[1:].copy_(metadata.cache_seqlens_int32.cumsum(0))
                attend(batch)

            rig.target.attend = attend_with_other_lens
            assert self.wrong(rig) == {"target": True, "draft": False}

    def test_a_stale_page_table(self, monkeypatch):
        """Fails where a graph that replays with the tables of the batch before stays unseen."""
        with fa3_rig.rig(Setup(16, graphs=True)) as rig:
            check_step(rig, [4, 3, 6], list(self.LENS))  # the same lengths in other rows
            monkeypatch.setattr(rig.draft.backend, "init_forward_metadata_out_graph", lambda batch: None)
            assert self.wrong(rig) == {"target": False, "draft": True}

    def test_a_table_that_the_graph_does_not_hold(self):
        """Fails where tensors that are made anew between capture and replay, so that a graph reads the old ones, stay
        unseen."""
        with fa3_rig.rig(Setup(1, graphs=True)) as rig:
            check_step(rig, [4, 3, 6], [7, 8, 9])
            metadata = rig.target.backend.target_verify_metadata[4]
            metadata.page_table = metadata.page_table.clone()
            assert self.wrong(rig) == {"target": True, "draft": False}

    @PATHS
    def test_a_causal_draft(self, graphs):
        """Fails where a draft whose rows must see the whole block sees only what lies before them."""
        with fa3_rig.rig(Setup(16, graphs)) as rig:
            rig.draft.modules[0].attn_type = AttentionType.DECODER
            assert self.wrong(rig) == {"target": False, "draft": True}

    @PATHS
    def test_a_target_that_sees_the_future(self, graphs):
        """Fails where a verify row that sees the drafts behind it stays unseen."""
        with fa3_rig.rig(Setup(16, graphs)) as rig:
            rig.target.modules[0].attn_type = AttentionType.ENCODER_ONLY
            assert self.wrong(rig) == {"target": True, "draft": False}

    @PATHS
    def test_a_window_of_one_more(self, graphs):
        """Fails where a sliding layer that sees one key more than its window stays unseen."""
        with fa3_rig.rig(Setup(1, graphs)) as rig:
            rig.draft.modules[1].sliding_window_size += 1
            assert self.wrong(rig) == {"target": False, "draft": True}

    @PATHS
    def test_a_window_table_that_starts_a_page_late(self, graphs, monkeypatch):
        """Fails where a draft's table that leaves out its window's first page stays unseen."""
        with fa3_rig.rig(Setup(16, graphs, draft_window=20)) as rig:
            lay_out = rig.worker._draft._window.lay_out

            def lay_out_late(block):
                seen = lay_out(block)
                table, rows = rig.draft.table_pool.req_to_token, block.req_pool_indices
                table[rows] = table[rows].roll(-16, 1)
                return seen - 16

            monkeypatch.setattr(rig.worker._draft._window, "lay_out", lay_out_late)
            assert self.wrong(rig) == {"target": False, "draft": True}
