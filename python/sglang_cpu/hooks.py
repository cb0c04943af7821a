"""The hooks of the CPU platform into SGLang, and what it registers there.

The worker's package imports this module, `detect` and `hooking`, and nothing else of this package.
"""

from __future__ import annotations

from typing import Any

from sglang_cpu.hooking import Hook, hooks_of


def platform_hooks() -> list[Hook]:
    """In place wherever SGLang's platform is ours, whatever it serves."""
    from sglang_cpu import (
        compiled,
        deterministic,
        experts,
        gated_layers,
        host_pools,
        mla,
        model_kernels,
        quantization,
        recurrent,
        shims,
        state_ring,
        threads,
        transfers,
    )

    modules = [shims, deterministic, compiled, threads, quantization, gated_layers, model_kernels, experts]
    modules += [recurrent, state_ring, mla, host_pools, transfers]
    return [ours for module in modules for ours in hooks_of(module).values()]


def install() -> None:
    """Registers the attention backend, the layers' forwards, defaults and checks of arguments; once in each process."""
    from sglang_cpu import deterministic, host_pools, layers, mla, quantization, shims, transfers

    shims.install()
    quantization.install()
    deterministic.install()
    layers.install()
    mla.install()
    host_pools.install()
    transfers.install()


def check() -> None:
    """Raises SystemExit, a sentence, if a variable has no allowed value. Runs before any weight is read."""
    from sglang_cpu import compiled

    compiled.check()


def check_draft_weights(described: Any, flag: str | None, load_format: str, whose: str) -> None:
    """Raises ValueError if the draft's quantised weights are not served; see `quantization.check`."""
    from sglang_cpu import quantization

    quantization.check(described, (), flag, load_format, whose)


def refusal_of_state(target: Any) -> str | None:
    """Why the recurrent state of a target (SGLang's `ModelConfig`) is not served; None if it is."""
    from sglang_cpu import recurrent

    return recurrent.refusal(target)
