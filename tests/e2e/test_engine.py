"""`sgl.Engine(device="cpu")`, SGLang's offline API, in bfloat16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from arms import FULL, MAX_NEW_TOKENS
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, held_out_prompts

pytestmark = pytest.mark.server

SAMPLING = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PROGRAM = """
import json, sys
import sglang as sgl
if __name__ == "__main__":
    arguments, prompts, sampling = map(json.loads, sys.argv[1:])
    engine = sgl.Engine(device="cpu", dtype="bfloat16", max_total_tokens=8192, page_size=16, **arguments)
    print(json.dumps(engine.generate(prompts, sampling)))
    engine.shutdown()
"""


def test_engine_serves_bfloat16_on_the_cpu(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fails where the engine does not start without environment variables, or bfloat16 drafts are never accepted."""
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM)
    draft = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(TINY_DRAFT)}
    arguments = {"model_path": str(TINY_TARGET), **draft}
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in held_out_prompts()[::20]
    ]
    run = subprocess.run(
        [sys.executable, program, *map(json.dumps, (arguments, prompts, SAMPLING))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **FULL},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    metas = [answer["meta_info"] for answer in answers]
    accepted, steps = (sum(meta[key] for meta in metas) for key in ("spec_num_correct_drafts", "spec_verify_ct"))
    assert 1 + accepted / steps > 2.0
    # bfloat16 rounding depends on the batch's shape, so ties sometimes break differently, never at the first tokens.
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.bfloat16)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        expected = target.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        assert answer["output_ids"][: len(expected)] == expected.tolist()
