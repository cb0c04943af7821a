"""Verified logits that stay on their ranks: every rank ends with what the whole vocabulary gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from stand_ins import Group, configured

from sglang_dflash import ops
from sglang_dflash.host.worker import sharded_logits
from sglang_dflash.host.worker.sharded_logits import ShardedLogits

KERNELS = ops.choose_kernels("cpu", torch.float32)

SPAN = 5


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


def processor_of(vocab_size: int) -> SimpleNamespace:
    """A stand-in of the host's `LogitsProcessor`; its logits say whether they would be gathered."""
    one = SimpleNamespace(vocab_size=vocab_size, do_tensor_parallel_all_gather=True)
    one._get_logits = lambda *_: "whole" if one.do_tensor_parallel_all_gather else "shard"
    return one


def rank_of(rank: int, vocab_size: int, group: Group, processor: SimpleNamespace) -> ShardedLogits:
    own = min(SPAN, vocab_size - rank * SPAN)
    shard = SimpleNamespace(num_org_elements=own, org_vocab_start_index=rank * SPAN)
    return ShardedLogits(processor, SimpleNamespace(shard_indices=shard, weight=torch.zeros(SPAN, 4)), KERNELS)


@pytest.mark.parametrize("special", [None, float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize(("rows", "ranks"), [(1, 2), (7, 2), (3, 4)])
def test_every_rank_chooses_the_same(rows, ranks, special, monkeypatch):
    """Fails where a rank's span has a wrong offset, its padding wins, a tie goes to a higher id, or gathering changes a
    logit."""
    vocab_size = ranks * SPAN - 2
    group = Group(ranks)
    monkeypatch.setattr(sharded_logits, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    logits = torch.randint(-2, 3, (rows, vocab_size), generator=torch.Generator().manual_seed(ranks)).float()
    if special is not None:
        logits[:, [3, vocab_size - 1]] = special
    padded = torch.cat((logits, torch.full((rows, 2), 1e4)), dim=1)
    sharded = [rank_of(rank, vocab_size, group, processor_of(vocab_size)) for rank in range(ranks)]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = padded[:, rank * SPAN : (rank + 1) * SPAN].contiguous()
        return sharded[rank].argmax(own), sharded[rank].gather(own)

    for ids, whole in group.run(run):
        assert ids.dtype == torch.int64 and torch.equal(ids, logits.argmax(-1))
        assert torch.equal(whole.nan_to_num(7), logits.nan_to_num(7))


def test_only_verify_forwards_stay_sharded(monkeypatch):
    """Fails where a prefill's logits stay sharded, a verify forward's are gathered, or an error leaves the processor
    changed."""
    monkeypatch.setattr(sharded_logits, "get_parallel", lambda: SimpleNamespace(tp_group=Group(2)))
    processor = processor_of(8)
    rank_of(0, 8, Group(2), processor)
    for mode, expected in ((ForwardMode.EXTEND, "whole"), (ForwardMode.TARGET_VERIFY, "shard")):
        metadata = SimpleNamespace(forward_mode=mode, next_token_logits_buffer=None)
        assert processor._get_logits(torch.zeros(2, 4), None, metadata) == expected
        assert processor.do_tensor_parallel_all_gather


def test_all_graphs_share_one_buffer(monkeypatch):
    """Fails where the real processor gives a verify's logits memory of their own, which each captured graph would keep;
    or where a shard's logits are wrong."""
    monkeypatch.setattr(sharded_logits, "get_parallel", lambda: SimpleNamespace(tp_group=Group(2)))
    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.vocab_size, processor.final_logit_softcapping, processor.logit_scale = 2 * SPAN - 2, None, None
    processor.do_tensor_parallel_all_gather = True
    processor.do_tensor_parallel_all_gather_dp_attn = processor.use_attn_tp_group = False
    processor.use_fp32_lm_head = processor.use_fp32_lm_head_output = processor.defer_verify_gather = False
    processor.rl_on_policy_target = None
    rank_of(0, 2 * SPAN - 2, Group(2), processor)
    head = SimpleNamespace(weight=torch.randn(SPAN, 4).bfloat16())
    shared = torch.zeros(24, 2 * SPAN - 2)
    for rows in (24, 3, 8):
        hidden = torch.randn(rows, 4).bfloat16()
        buffer = shared[:rows]
        metadata = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, next_token_logits_buffer=buffer)
        logits = processor._get_logits(hidden, head, metadata)
        assert logits.shape == (rows, SPAN) and logits.data_ptr() == shared.data_ptr()
        assert torch.equal(logits, torch.matmul(hidden, head.weight.T).float())


def test_one_rank_has_nothing_to_exchange(monkeypatch):
    """Fails where a server of one rank, or with logits gathered in another way, changes how they are computed."""
    monkeypatch.setattr(sharded_logits, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    head = SimpleNamespace(shard_indices=object())
    assert ShardedLogits.of(SimpleNamespace(modules=lambda: []), head, KERNELS) is None
    monkeypatch.setattr(sharded_logits, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    assert ShardedLogits.of(SimpleNamespace(modules=lambda: []), head, KERNELS) is None
