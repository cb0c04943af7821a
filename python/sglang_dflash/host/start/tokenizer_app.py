"""SGLang's HTTP app as each of several tokenizer processes imports it: with the plugins, which SGLang leaves out."""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app
from sglang.srt.plugins import load_plugins

from sglang_dflash.host.start.hooks import require_hooks

__all__ = ["app"]

load_plugins()
require_hooks()
