"""The two entry points that SGLang calls; everything else happens in `host/`."""

from __future__ import annotations


def activate() -> None:
    """Entry point of group `sglang.srt.plugins`: installs our hooks, once in every SGLang process.

    SGLang's loader catches `Exception` and continues with the built-in worker. So every failure here raises
    `SystemExit`, which the loader does not catch.
    """
    try:
        from sglang_dflash.host import hooks

        hooks.install()
    except Exception as error:
        raise SystemExit(f"sglang-dflash could not be loaded into SGLang: {error!r}.") from error


def activate_platform() -> str | None:
    """Entry point of group `sglang.srt.platforms`: our CPU platform if no accelerator is present.

    Returns:
        The class to load; None keeps SGLang's own platform.
    """
    from sglang_dflash.host.cpu.detect import cpu_platform_active

    return "sglang_dflash.host.cpu.platform.CpuPlatform" if cpu_platform_active() else None
