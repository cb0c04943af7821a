"""Resolves many wrong server argument lists in one process, as the launcher does; prints the error of each."""

from __future__ import annotations

import json
import sys

from sglang.srt.plugins import load_plugins


def outcome(arguments: list[str]) -> str:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
    except SystemExit as refusal:
        return str(refusal)
    except Exception as error:
        return f"not refused by us: {error!r}"
    return f"accepted; quantisation of the draft: {resolving_view(server_args).speculative_draft_model_quantization}"


if __name__ == "__main__":
    load_plugins()
    cases = json.loads(sys.stdin.read())
    print(json.dumps({name: outcome(arguments) for name, arguments in cases.items()}))
