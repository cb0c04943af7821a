"""Simulated acceptance, a switch of the host's for benchmarks alone: commit lengths are drawn, answers are nobody's."""

from __future__ import annotations

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.dflash_utils import apply_dflash_simulated_acceptance

from sglang_dflash.ops.reference import GreedyAcceptance

VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_MODES = ("fixed", "real-draft-token")
METHODS = ("match-expected", "multinomial")


def simulates() -> bool:
    """Whether this process was asked to draw commit lengths instead of comparing tokens."""
    return envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


def check(block_size: int, tp_size: int = 1) -> None:
    """Raises ValueError where the host's variables ask for what it cannot draw, or ranks would each draw their own."""
    if tp_size > 1:
        raise ValueError(f"{VARIABLE} is set and --tp-size is {tp_size}: acceptance is simulated on one rank only.")
    mean = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if not 1 <= mean <= block_size:
        raise ValueError(f"{VARIABLE} is {mean}: the mean commit_len to simulate is 1 to {block_size}, the block size.")
    for name, value, allowed in (
        ("SGLANG_SIMULATE_ACC_METHOD", envs.SGLANG_SIMULATE_ACC_METHOD.get(), METHODS),
        ("SGLANG_SIMULATE_ACC_TOKEN_MODE", envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(), TOKEN_MODES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; the host knows {' and '.join(allowed)}.")


def warning() -> str:
    """What the log must say while it is on."""
    return (
        f"{VARIABLE}={envs.SGLANG_SIMULATE_ACC_LEN.get()}: acceptance is SIMULATED. Speeds may be measured; "
        "THE ANSWERS ARE NOT THE TARGET'S. Unset it to serve."
    )


def accept(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """In the place of `ops.accept_chain`, after the same forwards: one commit_len, drawn by the host, for all requests.

    Args:
        target_ids, ids: [B, W] int64, as in `ops.accept_chain`.
    """
    accept_lens = ids.new_empty(len(ids), dtype=torch.int32)
    simulated = GreedyAcceptance(torch.empty_like(ids), accept_lens.clone(), ids.new_empty(len(ids)))
    apply_dflash_simulated_acceptance(
        candidates=ids,
        target_predict=target_ids,
        accept_len=accept_lens,
        commit_lens=simulated.commit_lens,
        bonus=simulated.bonus_ids,
        out_tokens=simulated.out_ids,
        simulate_acc_len=envs.SGLANG_SIMULATE_ACC_LEN.get(),
        simulate_acc_method=envs.SGLANG_SIMULATE_ACC_METHOD.get(),
        simulate_acc_token_mode=envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(),
    )
    return simulated
