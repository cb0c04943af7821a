"""Simulated acceptance, SGLang's benchmark switch: commit lengths are drawn, so the answers are not the target's."""

from __future__ import annotations

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.dflash_utils import apply_dflash_simulated_acceptance

from sglang_dflash.ops.reference import GreedyAcceptance

VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_MODES = ("fixed", "real-draft-token")
METHODS = ("match-expected", "multinomial")


def simulates() -> bool:
    """Whether this process draws commit lengths instead of comparing tokens."""
    return envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


def check(block_size: int, tp_size: int = 1) -> None:
    """Raises ValueError if SGLang's variables are out of range, or if several ranks would each draw lengths."""
    if tp_size > 1:
        raise ValueError(f"{VARIABLE} is set and --tp-size is {tp_size}: acceptance is simulated on one rank only.")
    mean = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if not 1 <= mean <= block_size:
        raise ValueError(f"{VARIABLE} is {mean}; allowed: a mean commit_len of 1 to {block_size}, the block size.")
    for name, value, allowed in (
        ("SGLANG_SIMULATE_ACC_METHOD", envs.SGLANG_SIMULATE_ACC_METHOD.get(), METHODS),
        ("SGLANG_SIMULATE_ACC_TOKEN_MODE", envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(), TOKEN_MODES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.")


def warning() -> str:
    """The log line of a server that simulates."""
    return (
        f"{VARIABLE}={envs.SGLANG_SIMULATE_ACC_LEN.get()}: acceptance is SIMULATED. Speeds may be measured; "
        "THE ANSWERS ARE NOT THE TARGET'S. Unset it to serve."
    )


def accept(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """Replaces `reference.accept_chain`: SGLang draws one commit_len for all requests. Both forwards still run.

    Args:
        target_ids, ids: [B, W] int64, as in `reference.accept_chain`.
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
