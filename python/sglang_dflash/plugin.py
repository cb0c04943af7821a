"""The entry point that SGLang calls; everything else happens in `host/`."""

from __future__ import annotations


def activate() -> None:
    """Entry point of group `sglang.srt.plugins`: installs our hooks, once in every SGLang process.

    SGLang's loader catches `Exception` and continues with the built-in worker. So every failure here raises
    `SystemExit`, which the loader does not catch.
    """
    try:
        from sglang_dflash.host.start import hooks

        hooks.install()
    except Exception as error:
        raise SystemExit(f"sglang-dflash could not be loaded into SGLang: {error!r}.") from error
