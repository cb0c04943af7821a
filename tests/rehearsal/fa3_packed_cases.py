"""Some rows of each block over SGLang's fa3 backend, with a pool of their own for sliding layers and without; run by
`test_fa3_metadata.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan

from rehearsal import fa3_rig
from rehearsal.fa3_cases import batches, largest_error
from rehearsal.fa3_models import BLOCK, AttentionModel, Setup
from rehearsal.fa3_rig import Rig
from rehearsal.flash_attn_stub import KernelError
from sglang_dflash.core.policy import Drafting

SETUPS = pytest.mark.parametrize(("page_size", "graphs"), [(1, True), (16, False), (64, True)])
POOLS = pytest.mark.parametrize("swa_pool", [False, True], ids=["one-pool", "sliding-pool"])


def draftings(requests: int) -> Iterator[Drafting]:
    """Steps of few rows, of many, of whole blocks, and without drafts."""
    everybody = list(range(requests))
    yield from (Drafting(BLOCK, everybody, rows) for rows in range(requests + 2, requests * BLOCK, 7))
    yield Drafting(BLOCK, everybody, requests * BLOCK)
    yield Drafting(1, [], requests)


def steps(rig: Rig) -> Iterator[tuple[list[int], list[int]]]:
    """Steps of any rows, each after it has run: the requests' rows of the table, and their prefix lengths."""
    generator = torch.Generator().manual_seed(6)
    for rows, lens in batches(rig.setup):
        for drafting in draftings(len(rows)):
            rig.policy.drafting = drafting
            log_probs = rig.worker._draft._head.captured_log_probs
            log_probs.copy_(torch.rand(log_probs.shape, generator=generator).log() / 4)
            rig.step(rows, lens)
            yield rows, lens


def writes_its_own(one: AttentionModel, rig: Rig, rows: list[int], lens: list[int]) -> bool:
    """Whether a step has written its rows alone, and what pads its graph to the slots that nobody reads."""
    slots = [rig.slots[row, : length + count] for row, length, count in zip(rows, lens, rig.counts, strict=True)]
    for index in range(len(one.layers)):
        own = one.slots_of(index, torch.cat(slots))
        for buffer in one.buffers(index):
            held = ~buffer.isnan().flatten(1).any(1)
            held[: rig.setup.page_size] = False
            expected = torch.zeros_like(held)
            expected[own] = True
            expected[: rig.setup.page_size] = False
            if not torch.equal(held, expected):
                return False
    return True


@contextmanager
def packed(page_size: int, graphs: bool, swa_pool: bool) -> Iterator[Rig]:
    with fa3_rig.rig(Setup(page_size, graphs, swa_pool=swa_pool, packed=True)) as rig:
        yield rig


@SETUPS
@POOLS
def test_steps_of_some_rows(page_size, graphs, swa_pool):
    """Fails where a row sees another set of keys than in a whole block, or where a row's KV, or that of the rows that
    fill a graph, is written to another slot: in either pool, at page boundaries, in padded graphs."""
    seen = set()
    with packed(page_size, graphs, swa_pool) as rig:
        for rows, lens in steps(rig):
            assert largest_error(rig.target, rows, lens, counts=rig.counts) <= 1, (rows, lens, rig.counts)
            assert writes_its_own(rig.target, rig, rows, lens), (rows, lens, rig.counts)
            seen.update(rig.counts)
        assert seen == (set(range(1, BLOCK + 1)) if graphs else {1, BLOCK}), seen


class TestPlantedBugs:
    """Errors that the steps above must find."""

    def found(self, rig: Rig) -> bool:
        try:
            for rows, lens in steps(rig):
                error = largest_error(rig.target, rows, lens, counts=rig.counts)
                if not error <= 1 or not writes_its_own(rig.target, rig, rows, lens):
                    return True
        except KernelError:
            return True
        return False

    def test_none_without_a_bug(self):
        """Fails where the rig itself errs."""
        with packed(16, True, True) as rig:
            assert not self.found(rig)

    def test_rows_of_the_capture(self, monkeypatch):
        """Fails where rows that are laid out for other requests stay unseen."""
        with packed(16, True, True) as rig:
            backend, fill = rig.target.backend, rig.target.backend.init_forward_metadata_out_graph

            def fill_with_old_rows(batch, **rest):
                old = backend.target_verify_metadata[batch.batch_size].cu_seqlens_q.clone()
                fill(batch, **rest)
                backend.forward_metadata.cu_seqlens_q.copy_(old)

            monkeypatch.setattr(backend, "init_forward_metadata_out_graph", fill_with_old_rows)
            assert self.found(rig)

    @pytest.mark.parametrize("kind", ["FULL", "SLIDING_WINDOW"])
    def test_slots_of_whole_blocks(self, monkeypatch, kind):
        """Fails where rows that are written to the first slots of all blocks, in one pool alone, stay unseen."""
        with packed(16, True, True) as rig:
            write_ids = KVLocPlan.write_ids

            def first_ids(plan, reader, *, kind=IdSpaceKind.FULL, cols=None):
                wrong = cols is not None and kind is IdSpaceKind[planted]
                return write_ids(plan, reader, kind=kind, cols=torch.arange(len(cols)) if wrong else cols)

            planted = kind
            monkeypatch.setattr(KVLocPlan, "write_ids", first_ids)
            assert self.found(rig)

    def test_a_window_of_one_more(self):
        """Fails where a packed row that sees one key more than its window stays unseen."""
        with packed(1, True, True) as rig:
            rig.target.modules[1].sliding_window_size += 1
            assert self.found(rig)
