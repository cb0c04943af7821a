"""The slots reserved before a decode, against the host's own arithmetic, request by request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens

from sglang_dflash.host.worker import draft_input
from sglang_dflash.host.worker.draft_input import DraftInput, reserve_lens


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("reserve", [4, 16, 32])
def test_reserve_is_the_hosts(page_size, reserve):
    """Fails where a request's reservation differs from the host's: slots would leak or be missing."""
    generator = torch.Generator().manual_seed(page_size + reserve)
    committed = torch.randint(0, 300, (500,), generator=generator)
    # Some requests already own more (fewer tokens than reserved were committed), others own less.
    owned = committed + torch.randint(-40, 120, (500,), generator=generator)
    allocated = (owned.clamp(min=0) + page_size - 1) // page_size * page_size
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=c, kv_allocated_len=a))
        for c, a in zip(committed.tolist(), allocated.tolist(), strict=True)
    ]
    current, following, needed = page_aligned_decode_alloc_lens(reqs, reserve=reserve, page_size=page_size)
    ours = reserve_lens(committed.tolist(), current, reserve, page_size)
    assert ours == following
    assert sum(ours) - sum(current) == needed
    assert allocated.tolist() == current
    more = [mine > owned for mine, owned in zip(ours, current, strict=True)]
    assert any(more) and not all(more), "the cases are one-sided"


@pytest.mark.parametrize(
    ("committed", "allocated", "page_size", "expected"),
    [
        (0, 0, 1, 8),
        (10, 10, 1, 18),
        (10, 30, 1, 30),
        (8, 16, 16, 16),
        (9, 16, 16, 32),
        (24, 32, 16, 32),
        (25, 32, 16, 48),
    ],
)
def test_reserve_by_hand(committed, allocated, page_size, expected):
    """Fails where a boundary is off by one: a reserve of 8 after the committed tokens, in whole pages."""
    assert reserve_lens([committed], [allocated], 8, page_size) == [expected]


def test_reserve_of_no_request():
    """Fails where an empty batch raises."""
    assert reserve_lens([], [], 8, 16) == []


@pytest.mark.parametrize("batch", [0, 3])
def test_state_relays_the_bonus_and_the_prefix(batch):
    """Fails where the next step gets another token or length, or a dtype that the host's relay would cast."""
    bonus_ids, prefix_lens = torch.arange(batch) + 7, torch.arange(batch).int() + 40
    state = DraftInput.create(bonus_ids, prefix_lens)
    assert state.bonus_tokens.dtype == state.new_seq_lens.dtype == torch.int64
    assert state.bonus_tokens.tolist() == [7 + b for b in range(batch)]
    assert state.new_seq_lens.tolist() == [40 + b for b in range(batch)]
    for name in ("topk_p", "topk_index", "hidden_states"):
        assert getattr(state, name).shape == (batch, 0)


def test_filtering_keeps_the_bonus_with_its_request():
    """Fails where a request gets another one's bonus from the host's filter, which runs when a request ends."""
    state = DraftInput.create(torch.tensor([5, 6, 7]), torch.tensor([10, 20, 30]))
    state.filter_batch(torch.tensor([2, 0]))
    assert state.bonus_tokens.tolist() == [7, 5]
    assert isinstance(state, DraftInput), "the next step would run the host's own preparation"


def test_merging_appends_the_other_batch():
    """Fails where a request that joins after its prefill loses its bonus."""
    state = DraftInput.create(torch.tensor([5, 6]), torch.tensor([10, 20]))
    state.merge_batch(DraftInput.create(torch.tensor([8]), torch.tensor([3])))
    assert state.bonus_tokens.tolist() == [5, 6, 8]


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_ahead(page_size, monkeypatch):
    """Fails where most steps allocate although there is room, a step lacks slots, a row overflows, or the last slots of
    a small pool are taken for tokens that no step needs yet."""
    reserve, width = 16, 256
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: reserve)
    taken: list[int] = []

    def allocate(self, batch, allocated, reserved):
        taken.append(sum(reserved) - sum(allocated))
        batch.token_to_kv_pool_allocator.free -= taken[-1]
        for req, owned in zip(batch.reqs, reserved, strict=True):
            req.kv.kv_allocated_len = owned

    monkeypatch.setattr(DraftInput, "_allocate", allocate)

    def run(free: int) -> list[int]:
        pool = SimpleNamespace(page_size=page_size, free=free)
        pool.available_size = lambda: pool.free
        reqs = [
            SimpleNamespace(
                kv=SimpleNamespace(kv_committed_len=first, kv_allocated_len=-(-first // page_size) * page_size)
            )
            for first in (5, 40, 70)
        ]
        for req in reqs:
            req.decode_batch_idx = 0
        table = SimpleNamespace(req_to_token=torch.zeros(4, width))
        batch = SimpleNamespace(
            reqs=reqs, token_to_kv_pool_allocator=pool, req_to_token_pool=table, maybe_evict_swa=lambda: None
        )
        taken.clear()
        state, steps = DraftInput.create(torch.zeros(3), torch.zeros(3)), 0
        while max(req.kv.kv_committed_len for req in reqs) + reserve < width - page_size:
            state.prepare_for_decode(batch)
            assert batch.seq_lens_cpu.tolist() == [req.kv.kv_committed_len for req in reqs]
            for req in reqs:
                assert req.kv.kv_committed_len + reserve <= req.kv.kv_allocated_len <= width
                req.kv.kv_committed_len += 1
            steps += 1
        return [steps, len(taken), sum(taken)]

    steps, often, most = run(100_000)
    assert often <= steps / 10
    assert run(most)[1] > often, "the pool's last slots were taken ahead"
