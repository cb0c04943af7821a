"""The two entry points that SGLang calls; everything else happens in `host/`."""

from __future__ import annotations


def activate() -> None:
    """Entry point of group `sglang.srt.plugins`: installs our hooks, once in every SGLang process.

    SGLang's loader swallows `Exception` and goes on with the built-in worker; every failure here is
    therefore a `SystemExit`, which it does not swallow.
    """
    try:
        from sglang_dflash.host import hooks

        hooks.install()
    except Exception as error:
        raise SystemExit(f"sglang-dflash could not be loaded into SGLang: {error!r}.") from error


def activate_platform() -> str | None:
    """Entry point of group `sglang.srt.platforms`: our CPU platform, where no accelerator is present.

    Returns:
        The class to load, or None where SGLang's own platform serves.
    """
    from sglang_dflash.host.cpu.detect import cpu_platform_active

    return "sglang_dflash.host.cpu.platform.CpuPlatform" if cpu_platform_active() else None
