"""Several tokenizer processes (`--tokenizer-worker-num`): SGLang loads no plugins in them, our app does."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

APP = "sglang_dflash.host.start.tokenizer_app:app"


def check(cfg: Any) -> None:
    """cfg: the resolved server arguments.

    Raises:
        ValueError: a key would not be asked for, or the processes would import another app than ours.
    """
    if cfg.tokenizer_worker_num == 1:
        return
    several = f"--tokenizer-worker-num is {cfg.tokenizer_worker_num}"
    for flag in ("api_key", "admin_api_key"):
        if getattr(cfg, flag):
            name = "--" + flag.replace("_", "-")
            raise ValueError(f"{several} and {name} is set: SGLang then asks for no key; leave one of them out.")
    app = envs.SGLANG_HTTP_SERVER_APP_PATH
    if app.get() not in (app.default, APP):
        raise ValueError(f"SGLANG_HTTP_SERVER_APP_PATH is {app.get()} and {several}; allowed then: unset.")


def load_our_plugin(cfg: Any) -> None:
    """To be called in the main process, before the tokenizer processes exist."""
    if cfg.tokenizer_worker_num > 1:
        envs.SGLANG_HTTP_SERVER_APP_PATH.set(APP)
