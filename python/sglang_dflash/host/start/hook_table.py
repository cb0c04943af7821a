"""Prints every hook into SGLang, on any machine: `python -m sglang_dflash.host.start.hook_table`."""

from __future__ import annotations

from sglang_cpu.hooking import Hook
from sglang_cpu.hooks import platform_hooks
from sglang_dflash.host.start import hooks


def describe(hook: Hook) -> str:
    """Where the hook is, what takes its place, when it is active, why, and until when."""
    module = hook.function.__module__.removeprefix("sglang_dflash.")
    if module.startswith("sglang_cpu."):
        active = "on our CPU platform, with either worker"
    else:
        active = "with either worker" if hook.always else "with our worker"
    return (
        f"{hook.target}\n"
        f"    {hook.kind} {module}.{hook.function.__name__}, {active}\n"
        f"    why: {hook.why}\n"
        f"    until: {hook.until}"
    )


def main() -> None:
    """The hooks of the worker, then those of the CPU platform."""
    print(*map(describe, [*hooks.worker_hooks(), *platform_hooks()]), sep="\n")


if __name__ == "__main__":
    main()
