"""Measures, before the server is up, the memory that sampling takes on CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker.sampling import RowSampler

logger = logging.getLogger(__name__)


def measure_sampling(
    sampler: RowSampler,
    width: int,
    max_batch: int,
    vocab_size: int,
    seeded: bool,
    device: Any,
    everywhere: Callable[[bool], bool],
) -> SamplingPrewarmResult:
    """Samples the largest part of a batch once, and once more under measurement.

    If a rank lacks the memory, all ranks take half as many rows at a time from then on, and try again.

    Args:
        width: rows of a request; max_batch: most requests.
        seeded: whether requests have seeds; then the noise is drawn in float64.
        everywhere: whether what is true of this rank is true of all.
    """
    while True:
        rows = min(sampler.sampled_rows // width, max_batch) * width
        peak_bytes, failure = 0, None
        try:
            batch = rows // width
            peak_bytes = _peak_bytes(partial(rehearse, sampler, batch, width, vocab_size, seeded, device))
        except torch.OutOfMemoryError as error:
            failure = error
        if everywhere(failure is None):
            break
        if rows <= width:
            raise failure or torch.OutOfMemoryError("Another rank lacks the memory to sample one request's rows.")
        sampler.sampled_rows = max(width, rows // 2)
        logger.warning(
            "%d rows are too many to sample at once in the memory that is free; from now on %d. A lower "
            "--mem-fraction-static leaves more.",
            rows,
            sampler.sampled_rows,
        )
    logger.info("Sampling takes %.2f GB for %d rows at once.", peak_bytes / 1e9, rows)
    return SamplingPrewarmResult(rows * vocab_size * torch.float32.itemsize, peak_bytes)


def rehearse(sampler: RowSampler, batch: int, width: int, vocab_size: int, seeded: bool, device: Any) -> None:
    """Samples `batch` requests of `width` rows with logprobs and the filters that take the most memory."""
    ids = torch.zeros(batch * width, dtype=torch.int64, device=device)
    info = SamplingBatchInfo(
        temperatures=torch.ones((batch, 1), device=device),
        top_ps=torch.full((batch,), 0.95, device=device),
        top_ks=torch.full((batch,), TOP_K_ALL, dtype=torch.int32, device=device),
        min_ps=torch.full((batch,), 0.01, device=device),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_p_sampling=True,
        need_top_k_sampling=False,
        need_min_p_sampling=True,
        vocab_size=vocab_size,
        sampling_seed=torch.zeros(batch, dtype=torch.int64, device=device) if seeded else None,
        device=device,
    )
    asking = SimpleNamespace(
        reqs=[None] * batch,
        sampling_info=info,
        has_grammar=False,
        return_logprob=True,
        top_logprobs_nums=[0] * batch,
        token_ids_logprobs=[None] * batch,
    )
    logits = torch.zeros((batch * width, vocab_size), device=device)
    out = LogitsProcessorOutput(next_token_logits=logits)
    sampler.choose(asking, VerifyRows(ids, ids, ids, width), out, None, None)


def _peak_bytes(call: Callable[[], None]) -> int:
    """The most bytes that the second of two calls allocates; the first also allocates what kernels keep."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    peak: int = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    return peak - before
