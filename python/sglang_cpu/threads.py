"""Sets a rank's compute threads: no more than the process may use, and no more than its matrices keep busy."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_cpu.hooking import AROUND, hook

logger = logging.getLogger(__name__)
VARIABLE = "OMP_NUM_THREADS"
SHARE = 1 << 16  # elements of a layer's largest weight per thread; with fewer, a thread costs more than it saves
SMALL_MATRIX = 1 << 20  # elements; up to here, products are so short that a thread without its own core delays them


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores of this process's affinity, or of its cgroup's quota if that is lower."""
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
    # One core is left to the tokenizer, the detokenizer and HTTP; but a large model is faster with both of two cores.
    spare = 1 if cores > 2 or largest_matrix <= SMALL_MATRIX else 0
    return max(1, min((cores - spare) // ranks, largest_matrix // SHARE))


@hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    AROUND,
    why="torch takes every core for each rank, container or not",
    until="SGLang asks its platform",
)
def choose_threads(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets torch's threads once the target's weights are loaded.

    Torch would use all cores of the machine for each rank, even in a container with fewer. SGLang binds threads only
    where its AMX kernels run. This can go when it asks its platform.
    """
    loaded = original(runner, *args, **kwargs)
    if runner.is_draft_worker or os.environ.get(VARIABLE):
        return loaded
    parallel = get_parallel()
    ranks = parallel.tp_size * parallel.pp_size * parallel.dp_size // parallel.nnodes  # of this machine
    outside = ("embed", "wte", "wpe", "lm_head")  # lookups, and one product at the end
    matrices = [
        weight.numel()
        for name, weight in runner.model.named_parameters()
        if weight.dim() > 1 and not any(word in name for word in outside)
    ]
    # At most torch's own choice, which counts cores, not their hardware threads.
    threads = min(default_threads(usable_cores(), ranks, max(matrices, default=0)), torch.get_num_threads())
    torch.set_num_threads(threads)
    logger.info("%d compute threads on %d usable cores; %s=N sets another number.", threads, usable_cores(), VARIABLE)
    return loaded
