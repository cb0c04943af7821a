"""A draft for a Llama-architecture target, from the command line to the server: regeneration, training, serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from arms import FULL, ON_CPU, POOL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_TARGET, Client, held_out_prompts

pytestmark = pytest.mark.server
BLOCK_SIZE, NEW_TOKENS = 6, 24
SERVED = [*ON_CPU, *POOL]


def make_llama(folder: Path) -> Path:
    """Random weights with tied embeddings: greedy answers repeat themselves, so a draft learns them quickly."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def draft(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of `sglang-dflash train --regenerate`."""
    folder = tmp_path_factory.mktemp("draft")
    asked = folder / "asked.jsonl"
    rows = [{"messages": [{"role": "user", "content": prompt.prompt}]} for prompt in held_out_prompts("code")[:120]]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "sglang_dflash.cli", "train", "--target", str(llama), "--data", str(asked)]
    command += ["--output", str(folder / "run"), "--regenerate", "--max-new-tokens", str(NEW_TOKENS)]
    command += ["--server-args", "--dtype float32 --max-total-tokens 16384", "--concurrency", "8"]
    command += ["--layers", "2", "--block-size", str(BLOCK_SIZE), "--batch-size", "8", "--max-steps", "200"]
    command += ["--learning-rate", "3e-3", "--held-out", "0.1", "--epochs", "99"]
    done = subprocess.run(command, env={**os.environ, **TINY_ENVIRONMENT}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "run"


@pytest.fixture(scope="module")
def client(llama: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    log = tmp_path_factory.mktemp("served") / "server.log"
    environment = TINY_ENVIRONMENT | FULL | {"SGLANG_DFLASH_COMPILE": ""}  # compiled by default, as Llama is
    with PreloadedServer(["--model-path", str(llama), *SERVED, *speculate], log, environment) as server:
        assert "The target's forward is captured" in log.read_text()
        yield server.client()


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(llama)


def test_answers_are_the_targets_own(llama: Path, draft: Path) -> None:
    """Fails where regeneration writes anything but the target's greedy ids after each prompt."""
    target = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (draft / "answers-asked.jsonl").read_text().splitlines()]
    assert len(rows) == 120
    for row in rows:
        ids, [[start, end]] = row["input_ids"], row["spans"]
        with torch.inference_mode():
            logits = target(torch.tensor([ids[:-1]])).logits[0, start - 1 :]
        assert end == len(ids) and logits.argmax(-1).tolist() == ids[start:]


def test_served_llama_is_lossless_and_drafted(
    client: Client, llama: Path, draft: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Fails where the trained draft does not load, changes an answer, or is not accepted for this architecture."""
    assert load_file(draft / "model.safetensors")["fc.weight"].shape == (64, 2 * 64)
    target = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    steps = tokens = 0
    for prompt in held_out_prompts("code")[120:132]:
        messages = [{"role": "user", "content": prompt.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = client.generate(ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        with torch.inference_mode():
            logits = target(torch.tensor([ids + answer.ids[:-1]])).logits[0, len(ids) - 1 :]
        assert logits.argmax(-1).tolist() == answer.ids
        steps, tokens = steps + answer.steps, tokens + len(answer.ids) - 1
    assert tokens / steps > 1.5, (tokens, steps)
