"""Steps with trees of N rows on the made-up CUDA device of `test_fake_cuda.py`: nothing waits, devices do not mix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_worker import BATCH, BLOCK, COLUMNS, VOCAB, decode_batch, worker_of
from stand_ins import make_sampler
from test_fake_cuda import ASKED, Watch, run, table_of, watch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from sglang_dflash import ops
from sglang_dflash.host import fixed_trees
from sglang_dflash.host.worker import DFlashWorker

__all__ = ["watch"]  # a fixture
ROWS = BLOCK  # as many as the stand-in's forwards return


@pytest.fixture(autouse=True)
def _block_size(monkeypatch):
    monkeypatch.setattr(fixed_trees, "block_size", lambda: BLOCK)


def tree_worker(moved: list[Any], sampler: Any = None) -> DFlashWorker:
    """moved: gets the slots of each move of KV."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), sampler)
    one._target.sliding_window_size, one._target.model_config.context_len = None, COLUMNS
    one._target.max_running_requests = 4
    one._target.token_to_kv_pool = SimpleNamespace(move_kv_cache=lambda to, origin: moved.append((to, origin)))
    one.planned = fixed_trees.FixedTreeStep(ROWS, one._target, one._draft, one.lay_out)
    return one


def test_a_greedy_step(watch: Watch) -> None:
    """Fails where drafting, laying out, masking, accepting or moving trees waits for the device or mixes devices."""
    moved: list[Any] = []
    result = run(watch, tree_worker(moved), decode_batch("cuda"))
    assert not watch.waits
    assert result.next_token_ids.shape == (BATCH * ROWS,) and result.cap_lens.shape == (BATCH,)
    ((slots, sources),) = moved
    assert slots.shape == sources.shape == (BATCH * ROWS,) and slots.device.type == "cuda"


@pytest.mark.parametrize("asked", ["filters", "a bias"])
def test_a_sampled_step(asked: str, watch: Watch) -> None:
    """Fails where sampling the rows of trees waits for the device."""
    run(watch, tree_worker([], make_sampler()), decode_batch("cuda", **ASKED[asked]))
    assert not watch.waits


def test_growing_trees_can_be_captured(watch: Watch) -> None:
    """Fails where the draft's graph would hold a wait, or the step's buffers are not those that it fills."""
    head = tree_worker([])._draft._head
    head.reserve(4)
    hidden = torch.zeros(BATCH * BLOCK, head._lm_head.weight.shape[1], device="cuda")
    with watch:
        head(hidden, torch.zeros(BATCH * BLOCK, dtype=torch.int64, device="cuda"))
    assert not watch.waits
    assert head.captured_trees.ids.shape == (4, ROWS) and head.captured_trees.seen.shape == (4, ROWS, ROWS)


def test_the_move_of_kv_is_compiled_at_the_start(watch: Watch) -> None:
    """Fails where a number of moved rows is left to the first batch that has it."""
    moved: list[Any] = []
    tree_worker(moved).planned.warm_up()
    assert [len(to) for to, _ in moved] == list(range(1, 4 * ROWS + 1))


def test_the_watch_sees_a_read(watch: Watch) -> None:
    """Fails where this file could not fail: an acceptance that reads the rows' number from the device."""
    one = tree_worker([])
    accept = one._acceptor._kernels.accept_tree_greedy

    def reading(logits: Any, ids: Any, *rest: Any) -> Any:
        return accept(logits, ids[ids > VOCAB].nonzero(), *rest)

    one._acceptor._kernels = replace(one._acceptor._kernels, accept_tree_greedy=reading)
    with pytest.raises(DynamicOutputShapeException):
        run(watch, one, decode_batch("cuda"))
