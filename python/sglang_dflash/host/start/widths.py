"""How many rows a server's steps verify, as its variable asks, and what its device allows."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_dflash.host.worker import simulated

logger = logging.getLogger(__name__)
WIDTH = "SGLANG_DFLASH_WIDTH"
TREE = "SGLANG_DFLASH_TREE"
AUTO, FULL = "auto", "full"
COPIES = "SGLANG_DFLASH_COPIES"
GONE = {
    "SGLANG_DFLASH_TURN_MS": "each decode step is a turn of the scheduler",
    "SGLANG_DFLASH_COPY": f"{COPIES}=1 copies repeated text on a CPU",
}
"""Variables that earlier versions read, and what holds now."""


def asked(device: str) -> str | int:
    """`auto`, `full`, or the number of rows of every request; without the variable, the device's default."""
    adapts = device == "cpu" and not simulated.simulates() and not tree_rows()
    value = os.environ.get(WIDTH) or (AUTO if adapts else FULL)
    if value == "adaptive":  # its name in earlier versions
        return AUTO
    return int(value) if value.isascii() and value.isdigit() else value


def tree_rows() -> int:
    """N, the rows of the trees that are asked for; 0: none are, or it is no number."""
    value = os.environ.get(TREE, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def copies() -> bool:
    """Whether repeated text is copied."""
    return os.environ.get(COPIES) == "1"


def on_graphs(device: str) -> bool:
    """Whether a step's forwards replay graphs, each of which is of one width."""
    return device == "cuda"


def check(device: str, block_size: int) -> None:
    """Raises ValueError if a variable has no allowed value."""
    for variable, now in GONE.items():
        if variable in os.environ:
            raise ValueError(f"{variable} is {os.environ[variable]!r}, but it is gone: {now}. Unset it.")
    value = asked(device)
    in_range = isinstance(value, int) and 1 <= value <= block_size
    if value not in (AUTO, FULL) and not in_range:
        raise ValueError(
            f"{WIDTH} is {os.environ[WIDTH]!r}; allowed: {AUTO}, {FULL}, or a number from 1 to {block_size}."
        )
    if os.environ.get(COPIES, "") not in ("", "0", "1"):
        raise ValueError(f"{COPIES} is {os.environ[COPIES]!r}; allowed: 0 or 1.")
    if os.environ.get(WIDTH) == "adaptive":
        logger.warning("%s=adaptive is called %s now.", WIDTH, AUTO)


def check_server(cfg: Any, target: Any) -> None:
    """Refuses other rows than whole blocks where the server cannot verify them.

    Args:
        cfg: SGLang's view of the server arguments, with the backends that it has chosen.
        target: SGLang's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the value, the variable and what is needed.
    """
    reason = _why_full(cfg, target)
    if asked(cfg.device) not in (FULL, cfg.speculative_num_draft_tokens) and reason is not None:
        raise ValueError(f"{WIDTH}={os.environ[WIDTH]} needs {reason}. Use {FULL}.")
    reason = _why_no_copies(cfg) if copies() else None
    if reason is not None:
        raise ValueError(f"{COPIES} is 1, which needs {reason}; allowed here: 0.")


def _why_no_copies(cfg: Any) -> str | None:
    if cfg.device != "cpu":
        return f"--device cpu, not {cfg.device}, because a step's host must know its text"
    if not cfg.disable_overlap_schedule:
        return "a server without overlap scheduling, because with it SGLang's text lags by a step"
    if cfg.tp_size > 1:
        return f"--tp-size 1, not {cfg.tp_size}, because ranks do not share copies"
    if asked(cfg.device) != AUTO:
        return f"{WIDTH}={AUTO}, not {asked(cfg.device)}, because only there rows are chosen by their chances"
    return None


def attention_backends(cfg: Any) -> set[str]:
    """Of the target's prefills, which also verify, and of its decodes, as SGLang has chosen them."""
    each = cfg.prefill_attention_backend, cfg.decode_attention_backend
    return {backend or cfg.attention_backend for backend in each}


WITH_GRAPHS = "CUDA graphs of decode steps, because each width has its own"


def _why_full(cfg: Any, target: Any) -> str | None:
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    if cfg.device == "cpu":
        return None
    if cfg.device != "cuda":
        return f"--device cuda or cpu, not {cfg.device}, because its graphs were never captured for other rows"
    if cfg.cuda_graph_config.decode.backend == Backend.DISABLED:
        return WITH_GRAPHS
    if cfg.enable_deterministic_inference:
        return "a server without --enable-deterministic-inference, because the two have never been run together"
    if cfg.enable_lora or cfg.lora_paths:
        return "a server without --enable-lora, because SGLang lays adapters out for whole blocks"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0, because it prepares whole blocks"
    if mambaish_config(target) is None:
        return None
    if hybrid_gdn_config(target) is None:
        return "a target whose recurrent layers, if any, are gated delta nets, because no others were ever run so"
    decode = cfg.linear_attn_decode_backend or cfg.linear_attn_backend
    others = {decode, cfg.linear_attn_verify_backend} - {None, "triton"}
    if others:
        return f"--linear-attn-backend triton, not {', '.join(sorted(others))}, because only there a test has run"
    return None
