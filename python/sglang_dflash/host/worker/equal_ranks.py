"""All ranks compare what steers their collectives, at construction: ranks that differ in it would wait for ever."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from sglang_dflash import __version__

PREFIXES = ("SGLANG_DFLASH_", "SGLANG_SIMULATE_ACC_", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM")
OF_ONE_MACHINE = {  # paths, tools and instruction sets: they may differ, and change no collective
    "SGLANG_DFLASH_BUILD_NATIVE",
    "SGLANG_DFLASH_HUGE_PAGES",
    "SGLANG_DFLASH_ISA",
    "SGLANG_DFLASH_NATIVE_LIBRARY",
    "SGLANG_DFLASH_PYTHON",
    "SGLANG_DFLASH_TRACEBACK",
    "SGLANG_DFLASH_VENV",
}


def steering(draft_config: Any, kernels: Any) -> dict[str, str]:
    """What steers this rank's collectives: name -> value.

    Args:
        draft_config: the draft's `DraftConfig`; its text is compared by a digest.
        kernels: the `ops.Kernels` of this rank: native ops on one and torch's on another may choose different ids.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    found = {name: value for name, value in variables.items() if name not in OF_ONE_MACHINE}
    digest = hashlib.sha256(repr(draft_config).encode()).hexdigest()[:16]
    return found | {
        "sglang-dflash": __version__,
        "the draft's config": digest,
        "the bodies of ops": kernels.best_log_probs.__module__,
    }


def difference(found: Sequence[dict[str, str]]) -> str | None:
    """The first difference between ranks, in one sentence; None if they are alike. found: of each rank."""
    for name in sorted({name for one in found for name in one}):
        for rank, one in enumerate(found):
            first, here = (values.get(name, "unset") for values in (found[0], one))
            if here != first:
                return (
                    f"the ranks differ in {name}: rank 0 has {first}, rank {rank} has {here}; all nodes need the same "
                    "package, draft and variables."
                )
    return None


def require_equal(group: Any, draft_config: Any, kernels: Any) -> None:
    """To be called by every rank before the first collective of ours. group: SGLang's `GroupCoordinator` of the ranks.

    Raises:
        SystemExit: the sentence of `difference`, on every rank.
    """
    if group.world_size == 1:
        return
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, steering(draft_config, kernels), group=group.cpu_group)
    if sentence := difference(found):
        raise SystemExit(f"DFLASH cannot start: {sentence}")
