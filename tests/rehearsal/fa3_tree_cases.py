"""Trees over SGLang's fa3 backend, its cascade for EAGLE, against attention by definition; run by
`test_fa3_metadata.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from host.stand_ins import configured, one_rank
from rehearsal.fa3_models import BLOCK, CONTEXT, DIM, HEADS, KV_HEADS, REQUESTS, AttentionModel, Graphs, Layer, Setup
from sglang_dflash import ops
from sglang_dflash.host.patches.ragged import RaggedVerifyInput

WIDTH = CONTEXT + 2 * BLOCK
BATCHES = [([3, 1, 6, 4], [7, 120, 1, 33]), ([2, 5, 1], [64, 2, 90]), ([4], [16])]


class TreeRig:
    """One model whose verifications are trees of BLOCK rows. Row i of a request has the KV of position prefix + i."""

    def __init__(self, graphs: bool) -> None:
        setup = Setup(1, graphs)
        self.model = AttentionModel(setup, [Layer(), Layer()], ReqToTokenPool(REQUESTS, WIDTH, "cpu", False), 1, False)
        slots = torch.randperm(REQUESTS * WIDTH, generator=torch.Generator().manual_seed(3)) + 1
        self.slots = torch.cat((torch.zeros(1, WIDTH, dtype=torch.int64), slots.view(REQUESTS, WIDTH)))
        self.model.table_pool.req_to_token.copy_(self.slots)
        if graphs:
            self.model.runner.decode_cuda_graph_runner = Graphs(self.model)

    def step(self, rows: list[int], lens: list[int], seed: int, mask_seed: int | None = None) -> torch.Tensor:
        """Runs trees; mask_seed: of other trees, whose mask is taken. [B, BLOCK, BLOCK] bool: what each row sees."""
        requests, prefix_lens = torch.tensor(rows), torch.tensor(lens)
        at = prefix_lens[:, None] + torch.arange(BLOCK)
        seen, shown = (trees(len(rows), one) for one in (seed, seed if mask_seed is None else mask_seed))
        self.model.hold(self.slots, requests, prefix_lens)
        mask = ops.attention_mask(shown, prefix_lens, BLOCK * int((prefix_lens + BLOCK).sum()) + 5)
        verify_input = RaggedVerifyInput(
            draft_token=None, positions=at.flatten(), draft_token_num=BLOCK, custom_mask=mask
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(rows),
            input_ids=torch.zeros(at.numel(), dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=prefix_lens.clone(),
            seq_lens_cpu=None,
            seq_lens_sum=None,
            out_cache_loc=self.slots[requests[:, None], at].flatten(),
            positions=at.flatten(),
            spec_info=verify_input,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
        )
        self.model.runner.kv_index_translator.bind_runner_slots(batch)
        self.model.forward(batch)
        return seen

    def largest_error(self, rows: list[int], lens: list[int], seen: torch.Tensor) -> float:
        """At most 1 where only outputs were rounded."""
        errors = []
        for place, (row, prefix) in enumerate(zip(rows, lens, strict=True)):
            for index in range(len(self.model.layers)):
                right = self._expected(index, row, prefix, seen[place])
                rounding = right.abs() * 2**-7 + 5e-3  # both halves of the cascade are rounded, then merged
                outputs = self.model.outputs[index].view(-1, BLOCK, HEADS, DIM)[place].double()
                errors.append(((outputs - right).abs() / rounding).max())
        return float(torch.stack(errors).max())

    def _expected(self, index: int, row: int, prefix: int, seen: torch.Tensor) -> torch.Tensor:
        """[BLOCK, HEADS, D] float64, by definition."""
        model, outputs = self.model, []
        for own in range(BLOCK):
            keys_at = [*range(prefix), *(prefix + seen[own].nonzero()[:, 0]).tolist()]
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                query = model.queries[index, row, prefix + own, head].double()
                keys, values = (kv[index, row, keys_at, group].double() for kv in (model.keys, model.values))
                outputs.append(torch.softmax(keys @ query / query.numel() ** 0.5, 0) @ values)
        return torch.stack(outputs).view(BLOCK, HEADS, -1)


def trees(batch: int, seed: int) -> torch.Tensor:
    """[batch, BLOCK, BLOCK] bool."""
    log_probs = torch.rand(batch, 4, 3, generator=torch.Generator().manual_seed(seed)).log().sort(descending=True)
    grown = ops.grow_trees(ops.Drafts(log_probs.indices, log_probs.values), BLOCK)
    return ops.seen_rows(grown.parents, 5)


@contextmanager
def rig(graphs: bool) -> Iterator[TreeRig]:
    config = {"page_size": 1, "speculative_num_draft_tokens": BLOCK, "speculative_eagle_topk": 2}
    with configured(**config), one_rank(), torch.no_grad():
        yield TreeRig(graphs)


PATHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


@PATHS
def test_steps_of_trees(graphs):
    """Fails where a row sees another branch, misses a row of its own or a token of the prefix: in full and padded
    graphs, after other batches in the same graph."""
    with rig(graphs) as one:
        for seed, (rows, lens) in enumerate(BATCHES):
            seen = one.step(rows, lens, seed)
            assert not seen.equal(torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril().expand_as(seen))
            assert one.largest_error(rows, lens, seen) <= 1, (rows, lens)


@PATHS
def test_another_mask_is_seen(graphs):
    """Fails where the comparison above would pass with the mask of other trees."""
    with rig(graphs) as one:
        rows, lens = BATCHES[0]
        seen = one.step(rows, lens, 0, mask_seed=7)
        assert not one.largest_error(rows, lens, seen) <= 1
