"""`sgl.Engine(device="cpu")`, SGLang's offline API, in bfloat16, with speculation off and on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from arms import FULL, MAX_NEW_TOKENS
from transformers import PreTrainedTokenizerBase

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, held_out_prompts

pytestmark = pytest.mark.server

SAMPLING = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PROGRAM = """
import json, sys
import sglang as sgl
if __name__ == "__main__":
    arms, prompts, sampling = map(json.loads, sys.argv[1:])
    answers = {}
    for arm, arguments in arms.items():
        engine = sgl.Engine(device="cpu", dtype="bfloat16", max_total_tokens=8192, **arguments)
        answers[arm] = engine.generate(prompts, sampling)
        engine.shutdown()
    print(json.dumps(answers))
"""


def test_engine_serves_bfloat16_on_the_cpu(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fails where the engine does not start without environment variables, or bfloat16 drafts are never accepted."""
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM)
    pair = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(TINY_DRAFT)}
    arms = {
        "off": {"model_path": str(TINY_TARGET)},
        "on": {"model_path": str(TINY_TARGET), "page_size": 16, **pair},
    }
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in held_out_prompts()[::20]
    ]
    run = subprocess.run(
        [sys.executable, program, *map(json.dumps, (arms, prompts, SAMPLING))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **FULL},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    metas = [answer["meta_info"] for answer in answers["on"]]
    accepted, steps = (sum(meta[key] for meta in metas) for key in ("spec_num_correct_drafts", "spec_verify_ct"))
    assert 1 + accepted / steps > 2.0
    # bfloat16 rounding depends on the batch's shape, so ties sometimes break differently, never at the first tokens.
    for on, off in zip(answers["on"], answers["off"], strict=True):
        assert on["output_ids"][:3] == off["output_ids"][:3]
