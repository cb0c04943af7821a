"""What the host computes from the rows of a verification, when each request has its own number of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.lora import utils as lora_utils
from sglang.srt.lora.backend import torch_backend
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash import ops
from sglang_dflash.host import tree_verify
from sglang_dflash.host.cpu.shims import leave_unpinned
from sglang_dflash.host.planned_step import TreeVerifyInput

KERNELS = ops.choose_kernels("cpu", torch.float32)

PREFIX_LENS = torch.tensor([7, 20, 4])
ORIGINAL_POSITIONS = ForwardBatch.compute_spec_mrope_positions


def rows_of(*depths: Sequence[int]) -> ops.PlannedRows:
    """The depths of each request's rows. Parents do not matter here."""
    width = max(map(len, depths))
    padded = torch.tensor([[*own, *[0] * (width - len(own))] for own in depths], dtype=torch.int32)
    trees = ops.Trees(padded - 1, padded, torch.where(padded > 0, 0, -1).int(), padded.float())
    return KERNELS.plans.take_rows(trees, list(range(len(depths))), [len(own) for own in depths], len(depths))


def verify_input(rows: ops.PlannedRows, with_trees: bool = True) -> TreeVerifyInput:
    positions = PREFIX_LENS[rows.requests] + rows.depths
    return TreeVerifyInput(torch.zeros_like(positions), positions, rows.width, trees=rows if with_trees else None)


def forward_batch(spec_info: TreeVerifyInput | None, mode: ForwardMode = ForwardMode.TARGET_VERIFY) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(PREFIX_LENS),
        input_ids=nothing,
        req_pool_indices=nothing,
        seq_lens=PREFIX_LENS,
        out_cache_loc=nothing,
        seq_lens_sum=int(PREFIX_LENS.sum()),
        spec_info=spec_info,
    )


def section_positions(spec_info: TreeVerifyInput, deltas: Sequence[int | None]) -> torch.Tensor:
    """[3, T], through our hook. deltas: of each request's image; None: it has none."""
    inputs = [
        None if delta is None else SimpleNamespace(mrope_position_delta=torch.tensor([[delta]])) for delta in deltas
    ]
    made, batch = forward_batch(spec_info), SimpleNamespace(spec_info=spec_info, multimodal_inputs=inputs)
    tree_verify.positions_of_sections(ORIGINAL_POSITIONS, made, SimpleNamespace(device="cpu"), batch)
    return made.mrope_positions


@pytest.mark.parametrize("deltas", [(None, None, None), (-5, None, 3), (-1, -2, -3)])
def test_positions_of_sections(deltas):
    """Fails where a row of a request with an image does not have its own request's shift, or a row without one has."""
    rows = rows_of([0], [0, 1, 1, 2, 3], [0, 1, 2])
    positions = section_positions(verify_input(rows), deltas)
    shifts = [0 if delta is None else delta for delta in deltas]
    expected = [7 + shifts[0]] + [20 + shifts[1] + d for d in (0, 1, 1, 2, 3)] + [4 + shifts[2] + d for d in (0, 1, 2)]
    assert positions.dtype == torch.int64 and positions.tolist() == [expected] * 3


@pytest.mark.parametrize("deltas", [(None, None, None), (-5, None, 3)])
def test_positions_of_whole_blocks_are_the_hosts(deltas):
    """Fails where equally many rows get other positions than from the host, or blocks without trees do not reach it."""
    rows = rows_of(*[[0, 1, 2, 3]] * 3)
    ours, hosts = (section_positions(verify_input(rows, with_trees), deltas) for with_trees in (True, False))
    assert ours.dtype == hosts.dtype and torch.equal(ours, hosts)


def test_positions_that_are_given_are_the_hosts():
    """Fails where the hook replaces positions that a caller gives."""
    called = []
    batch = SimpleNamespace(spec_info=verify_input(rows_of([0], [0, 1], [0])))
    tree_verify.positions_of_sections(lambda *given: called.append(given), 1, 2, batch, PREFIX_LENS)
    assert called == [(1, 2, batch, PREFIX_LENS)]


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_other_forwards_keep_the_hosts_lens(mode):
    """Fails where a forward that verifies nothing is laid out by trees left from a step before."""
    made = forward_batch(verify_input(rows_of([0], [0, 1], [0])), mode)
    counts, lens = lora_utils.get_batch_token_counts, lora_utils.generate_sequence_lengths
    assert tree_verify.lora_token_counts(counts, made) == counts(made)
    assert torch.equal(tree_verify.lora_lens(lens, made, "cpu"), lens(made, "cpu"))


def test_lens_of_whole_blocks_are_the_hosts():
    """Fails where blocks without trees, or a draft's, which has no trees at all, are not laid out by the host."""
    counts, lens = lora_utils.get_batch_token_counts, lora_utils.generate_sequence_lengths
    rows = rows_of(*[[0, 1, 2, 3]] * 3)
    for spec_info in (verify_input(rows), verify_input(rows, False), SimpleNamespace(draft_token_num=4)):
        made = forward_batch(spec_info)
        assert tree_verify.lora_token_counts(counts, made) == (12, 4) == counts(made)
        ours, hosts = tree_verify.lora_lens(lens, made, "cpu"), lens(made, "cpu")
        assert ours.dtype == hosts.dtype and torch.equal(ours, hosts)


@pytest.mark.parametrize("adapters", [[0, 1, 0], [1, 1, 0], [2, 2, 2]])
def test_each_row_gets_its_requests_adapter(adapters, monkeypatch):
    """Fails where a row of a tree is multiplied with the adapter of another request."""
    rows = rows_of([0], [0, 1, 1, 2, 3], [0, 1, 2])
    made = forward_batch(verify_input(rows))
    assert tree_verify.lora_token_counts(lora_utils.get_batch_token_counts, made) == (9, 5)
    hooked = partial(tree_verify.lora_lens, torch_backend.generate_sequence_lengths)
    monkeypatch.setattr(torch_backend, "generate_sequence_lengths", hooked)
    backend = TorchNativeLoRABackend(3, torch.device("cpu"))
    leave_unpinned(backend.prepare_lora_batch, made, adapters, [4, 4, 4], [1.0, 1.0, 1.0], use_cuda_graph=False)
    info = backend.batch_info
    segments = info.weight_indices[: info.num_segments].repeat_interleave(info.seg_lens[: info.num_segments])
    assert segments.tolist() == [adapters[request] for request in rows.requests.tolist()]
