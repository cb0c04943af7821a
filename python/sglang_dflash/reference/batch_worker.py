"""The process of the transformers arm: reads batches from standard input and answers them with `spec_generate`.

Messages are JSON objects, one per line. Input: `prompts` (lists of token ids), `max_new_tokens`, `temperature`, `seed`,
`ignore_eos`. Output: first `{"ready": true}`; then, per batch, `ids` and `commit_lens` (a list per prompt),
`block_size`, `prefill_s` and `decode_s`, or `error`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.reference import DFlashDraftModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int)
    options = parser.parse_args()
    models = [
        model.from_pretrained(name, dtype=options.dtype).to(options.device).eval()
        for model, name in ((AutoModelForCausalLM, options.target), (DFlashDraftModel, options.draft))
    ]
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(answer(*models, json.loads(line), options.block_size))
        except (ValueError, RuntimeError) as error:
            say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


@torch.inference_mode()
def answer(target: Any, draft: Any, request: dict[str, Any], block_size: int | None) -> dict[str, Any]:
    """Answers one batch, padded on the left."""
    prompts = request["prompts"]
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    generator = torch.Generator(target.device).manual_seed(request["seed"] or 0)
    done = draft.spec_generate(
        target=target,
        input_ids=torch.tensor(padded, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        max_new_tokens=request["max_new_tokens"],
        stop_token_ids=[] if request["ignore_eos"] else None,
        temperature=request["temperature"],
        block_size=block_size,
        generator=generator,
        return_stats=True,
    )
    return {
        "ids": [done.new_ids(index) for index in range(len(prompts))],
        "commit_lens": done.commit_lens,
        "block_size": draft.block_size if block_size is None else block_size,
        "prefill_s": done.prefill_s,
        "decode_s": done.decode_s,
    }


if __name__ == "__main__":
    main()
