"""How many compute threads a rank takes: no more than the process may use, and than its matrices keep busy."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger(__name__)
VARIABLE = "OMP_NUM_THREADS"
SHARE = 1 << 16  # elements of a layer's largest weight below which waiting for another thread costs more
SMALL_MATRIX = 1 << 20  # up to here a product is so short that a thread without a core of its own is waited for


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores of this process's affinity, or as many as its cgroup's quota is worth where that is fewer."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def default_threads(cores: int, ranks: int, largest_matrix: int) -> int:
    """Compute threads of one rank.

    Args:
        ranks: of this machine; each has a scheduler that computes.
        largest_matrix: elements of the largest weight within a layer.
    """
    # One for the tokenizer, the detokenizer and HTTP; of two cores a large model is better served by both.
    spare = 1 if cores > 2 or largest_matrix <= SMALL_MATRIX else 0
    return max(1, min((cores - spare) // ranks, largest_matrix // SHARE))


def choose_threads(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Once the target's weights are there. Torch would take every core of the machine for each rank, containers
    notwithstanding; the host binds threads only where its AMX kernels run. This can go when it asks its platform."""
    loaded = original(runner, *args, **kwargs)
    if runner.is_draft_worker or os.environ.get(VARIABLE):
        return loaded
    parallel = get_parallel()
    ranks = parallel.tp_size * parallel.pp_size * parallel.dp_size
    outside = ("embed", "wte", "wpe", "lm_head")  # a lookup, and one product at the end
    matrices = [
        weight.numel()
        for name, weight in runner.model.named_parameters()
        if weight.dim() > 1 and not any(word in name for word in outside)
    ]
    # Not more than torch's own choice, which counts cores and not their threads.
    threads = min(default_threads(usable_cores(), ranks, max(matrices, default=0)), torch.get_num_threads())
    torch.set_num_threads(threads)
    logger.info(
        "%d compute threads of %d usable cores; %s=N chooses another number.", threads, usable_cores(), VARIABLE
    )
    return loaded


HOOKS: dict[str, tuple[Any, HookType]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (choose_threads, HookType.AROUND),
}
"""Hook target -> (our function, how it is applied)."""
