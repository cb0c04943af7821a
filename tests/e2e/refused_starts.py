"""Resolves many wrong server argument lists as the launcher does; prints the error of each.

Standard input: `{"cases": {name: arguments}, "damages": {name: code}}`. The code of a name, which few cases have,
damages the host before the plugins are loaded.
"""

from __future__ import annotations

import json
import os
import sys

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def outcome(arguments: list[str], damage: str = "") -> str:
    try:
        exec(damage, {})
        load_plugins()  # once in a process
        sys.argv[1:] = arguments
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
    except SystemExit as refusal:
        return str(refusal)
    except Exception as error:
        return f"not refused by us: {error!r}"
    return f"accepted; quantisation of the draft: {resolving_view(server_args).speculative_draft_model_quantization}"


def forked(arguments: list[str], damage: str) -> str:
    """The outcome in a process of its own, where no plugin is loaded yet."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(write, "w") as answer:
            answer.write(outcome(arguments, damage))
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    cases, damages = asked["cases"], asked.get("damages", {})
    damaged = {name: forked(cases.pop(name), code) for name, code in damages.items()}
    print(json.dumps(damaged | {name: outcome(arguments) for name, arguments in cases.items()}))
