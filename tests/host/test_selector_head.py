"""DFlash2's parts of the host: SGLang's convolution and selector give what our ops and the reference give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models.dflash import CandidateSelector, DFlashGroupedConv
from stand_in_worker import BATCH, COLUMNS, decode_batch, worker_of
from stand_in_worker import HIDDEN as STAND_IN_HIDDEN
from stand_ins import Group, configured, one_rank, split_head

from sglang_dflash import ops
from sglang_dflash.core.draft_heads import Convolution, Selector
from sglang_dflash.host.patches import draft_layers
from sglang_dflash.host.worker import draft_heads
from sglang_dflash.host.worker.draft_heads import DraftHead, SelectorHead, head_of
from sglang_dflash.reference import CandidateSelector as ReferenceSelector
from sglang_dflash.reference.dflash2 import GroupedConvolution

HIDDEN, VOCAB, RANK, TOP_K, BLOCK = 12, 30, 5, 4, 4
EMBED = torch.nn.Identity()  # not used by these heads


def _randomize(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))


def _host_model(softcap: float | None = None, multiplier: float = 1.0, top_k: int = TOP_K) -> SimpleNamespace:
    """What our head reads of the host's `DFlash2DraftModel`."""
    selector = CandidateSelector(hidden_size=HIDDEN, vocab_size=VOCAB, state_rank=RANK, top_k=top_k)
    _randomize(selector)
    config = SimpleNamespace(output_multiplier=multiplier, final_logit_softcapping=softcap)
    return SimpleNamespace(candidate_selector=selector, draft_config=config, prefix_gru=None)


def _block(batch: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [B * K, H] and block ids [B, K]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (batch, BLOCK), generator=generator)
    return torch.randn(batch * BLOCK, HIDDEN, generator=generator), ids


@pytest.fixture
def alone(monkeypatch) -> None:
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_host_s_convolution(size: int) -> None:
    """Fails where our op, our hook's function or the reference's module differs from the host's, whose code is run as
    it is, uncompiled."""
    host = DFlashGroupedConv(HIDDEN, BLOCK, taps=3, group_size=2)
    host.block_size = size
    _randomize(host)
    ours = GroupedConvolution(HIDDEN, Convolution(taps=3, group_size=2))
    ours.load_state_dict(host.state_dict())
    x, behind = torch.randn(2, 12, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        prepared, delta = host.prepare(x)
        finished = host.finish(behind, delta)
    with torch.inference_mode():
        own_prepared, own_delta = ours.prepare(x[None], size)
        assert torch.equal(own_prepared[0], prepared)
        assert torch.equal(ours.finish(behind[None], own_delta, size)[0], finished)
        assert torch.equal(draft_layers.convolve(pytest.fail, host, behind, delta, 1), finished)


@pytest.mark.parametrize(("softcap", "multiplier"), [(None, 1.0), (3.0, 0.5)])
def test_the_host_s_greedy_walk(softcap: float | None, multiplier: float, alone: None) -> None:
    """Fails where our head or the reference drafts other ids than the host's own selector on greedy requests."""
    model = _host_model(softcap, multiplier)
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    hidden, block_ids = _block(batch=6)
    rows = hidden.view(-1, BLOCK, HIDDEN)[:, 1:]
    logits = rows @ weight.T
    values, ids = logits.topk(TOP_K)
    selector = model.candidate_selector
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        scores = selector.build_lattice(
            candidate_ids=ids,
            unary_logits=ops.candidate_logits(values, multiplier, softcap),
            hidden_states=rows,
            anchor_token_ids=block_ids[:, 0],
        )
        expected, _ = selector.sample_path(
            candidate_ids=ids,
            scores=scores,
            uniforms=torch.zeros(6, BLOCK - 1),
            temperatures=torch.ones(6),
            greedy_mask=torch.ones(6, dtype=torch.bool),
        )
    assert not torch.equal(expected, logits.argmax(-1)), "the selector changes nothing"
    reference = ReferenceSelector(HIDDEN, Selector(RANK, TOP_K, VOCAB, multiplier, softcap))
    reference.load_state_dict(selector.state_dict())
    head = head_of(model, SimpleNamespace(weight=weight, shard_indices=None), BLOCK, EMBED)
    assert isinstance(head, SelectorHead)
    with torch.inference_mode():
        assert torch.equal(head.draft_ids(hidden, block_ids), expected)
        assert torch.equal(reference.drafts(rows, logits, block_ids[:, 0]), expected)


def test_a_plain_draft_has_the_plain_head(alone: None) -> None:
    """Fails where a draft without a selector gets one."""
    model = SimpleNamespace(candidate_selector=None, prefix_gru=None)
    head = head_of(model, SimpleNamespace(weight=torch.eye(4), shard_indices=None), 2, EMBED)
    assert type(head) is DraftHead


@pytest.mark.parametrize(("ranks", "top_k"), [(2, 4), (3, 4), (2, 16)])
def test_every_rank_drafts_the_same(ranks: int, top_k: int, monkeypatch) -> None:
    """Fails where ranks choose among their own candidates, an offset is wrong, padding is a candidate, or a tie goes to
    a higher id; the last rank's span is short."""
    group = Group(ranks)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    model = _host_model(top_k=top_k)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randint(-1, 2, (VOCAB, HIDDEN), generator=generator).float()
    hidden, block_ids = _block(batch=3)
    hidden = hidden.round()  # so that logits tie, within a span and across spans
    heads = [SelectorHead(head, BLOCK, model) for head in split_head(weight, ranks, -(-VOCAB // ranks) + 1)]
    drafted = group.run(lambda rank: heads[rank].draft_ids(hidden, block_ids))
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    whole = SelectorHead(SimpleNamespace(weight=weight, shard_indices=None), BLOCK, model)
    with torch.inference_mode():
        expected = whole.draft_ids(hidden, block_ids)
    for ids in drafted:
        assert ids.dtype == torch.int64 and torch.equal(ids, expected)


def test_captured_ids(alone: None) -> None:
    """Fails where a graph's replay would not leave the drafts in their buffer, or takes masks for anchors."""
    head = head_of(_host_model(), SimpleNamespace(weight=torch.randn(VOCAB, HIDDEN), shard_indices=None), BLOCK, EMBED)
    hidden, block_ids = _block(batch=2)
    head.reserve(3)
    with torch.inference_mode():
        head(hidden, block_ids)
        assert torch.equal(head.captured_ids[:2], head.draft_ids(hidden, block_ids))


def test_the_model_is_told_the_width() -> None:
    """Fails where a step of fewer rows is convolved as if its blocks had as many as the step before."""
    with configured(), one_rank():
        table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
        worker = worker_of(table, ops.TORCH_KERNELS)
        draft, told = worker._draft, []
        draft.model = SimpleNamespace(block_size=8)

        def set_block_size(rows: int) -> None:
            told.append(rows)
            draft.model.block_size = rows

        draft.model.set_block_size = set_block_size
        for rows in (3, 3, 8, 2):
            hidden = torch.zeros(BATCH * rows, STAND_IN_HIDDEN)
            out = SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden))
            draft.runner.forward = lambda _, out=out: out
            batch = decode_batch()
            block = worker.step_rows.lay_out(batch, rows)
            kv_lens = batch.seq_lens_cpu + rows, batch.seq_lens_sum + rows * BATCH
            ids, _ = draft.propose(block, worker.step_rows.plan_kv(block, batch), kv_lens, False)
            assert ids.shape == (BATCH, rows - 1)
        assert told == [3, 8, 2]
