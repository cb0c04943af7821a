"""A setting that cannot work ends in one sentence before the server starts; one switch selects the built-in worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arms import PLAIN, POOL, SPECULATE
from changed_models import dressed_draft
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    GlmMoeDsaConfig,
    Lfm2Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, Server, ServerError, held_out_prompts

pytestmark = pytest.mark.server
HERE = Path(__file__).parent


def damaged_draft(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    shutil.copytree(TINY_DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def speculate(draft: str, *more: str) -> list[str]:
    return [*PLAIN, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft, *more]


def test_each_wrong_argument_is_one_sentence(tmp_path: Path) -> None:
    """Fails where a wrong checkpoint or flag is accepted, or a host that our plugin does not fit; or where the sentence
    lacks value, allowed values or key."""
    good = str(TINY_DRAFT)

    def draft(name: str, change: Callable[[dict[str, Any]], Any]) -> list[str]:
        return speculate(damaged_draft(tmp_path / name, change))

    def target(name: str, config: PretrainedConfig) -> str:
        """A folder with a config and no weights."""
        architectures = {
            "qwen3_5_text": "Qwen3_5ForCausalLM",
            "deepseek_v3": "DeepseekV3ForCausalLM",
            "falcon_h1": "FalconH1ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "glm_moe_dsa": "GlmMoeDsaForCausalLM",
            "lfm2": "Lfm2ForCausalLM",
        }
        config.architectures = [architectures[config.model_type]]
        config.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY_TARGET / file, tmp_path / name)
        return str(tmp_path / name)

    shape: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 1792}
    layers = ["linear_attention", "linear_attention", "full_attention"] * 2
    gated_delta = target("gated", Qwen3_5TextConfig(**shape, layer_types=layers, full_attention_interval=3))
    ring = ["--enable-linear-replayssm-spec"]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    packed = target("packed", Qwen3Config(**shape, quantization_config=fp8))
    experts = {"routed_experts_quant_method": "mxfp4"}
    mixed = target("mixed", Qwen3Config(**shape, quantization_config=fp8 | experts))
    latent = target("latent", DeepseekV3Config(**shape))
    mask_embedding = draft("e", lambda c: None)
    torch.save(torch.zeros(5), tmp_path / "e" / "mask_embedding.pt")

    def weights(name: str, change: Callable[[Path], Any]) -> list[str]:
        arguments = draft(name, lambda c: None)
        change(tmp_path / name / "model.safetensors")
        return arguments

    def without_fc(file: Path) -> None:
        save_file({key: one for key, one in load_file(file).items() if key != "fc.weight"}, file)

    cases: dict[str, tuple[list[str], list[str]]] = {
        "no fc": (weights("w1", without_fc), ["lack fc.weight"]),
        "cut": (weights("w2", lambda file: os.truncate(file, 5000)), ["model.safetensors", "cut"]),
        "none": (weights("w3", Path.unlink), ["no weights"]),
        "a layer more": (draft("w4", lambda c: c.update(num_hidden_layers=3, layer_types=None)), ["lack layers.2."]),
        "an inner size": (draft("w5", lambda c: c.update(intermediate_size=512)), ["[576, 256]", "[512, 256]"]),
        "a file": (speculate(str(TINY_DRAFT / "config.json")), ["config.json, a file", "folder or hub name"]),
        "dtype": (draft("w6", lambda c: c.update(dtype="auto")), ["dtype is 'auto'", "bfloat16"]),
        "context": (
            draft("w7", lambda c: c.update(max_position_embeddings=512)),
            ["512", "2048", "--context-length 512", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"],
        ),
        "a shorter context": (
            [*draft("w8", lambda c: c.update(max_position_embeddings=512)), "--context-length", "512"],
            ["accepted"],
        ),
        "unknown key": (draft("w9", lambda c: c["dflash_config"].update(causl=True)), ["causl=True", "causal_head"]),
        "fine": (speculate(good), ["accepted"]),
        "hidden size": (draft("h", lambda c: c.update(hidden_size=512)), ["hidden_size", "512", "256"]),
        "no mask": (draft("m", lambda c: c["dflash_config"].pop("mask_token_id")), ["mask_token_id"]),
        "mask outside": (draft("o", lambda c: c["dflash_config"].update(mask_token_id=10**6)), ["1000000"]),
        "taps": (draft("t", lambda c: c["dflash_config"].update(target_layer_ids=[1, 99])), ["99", "0 to 5"]),
        "taps order": (draft("r", lambda c: c["dflash_config"].update(target_layer_ids=[3, 1, 4])), ["must rise"]),
        "domino": (draft("d", lambda c: c["dflash_config"].update(projector_type="domino")), ["gru_hidden_dim=None"]),
        "dflash2": (draft("2", lambda c: c.update(architectures=["DFlash2DraftModel"])), ["selector_rank is 0"]),
        "selector": (draft("s", lambda c: c["dflash_config"].update(selector_rank=256)), ["selector_top_k is 0"]),
        "dspark": (draft("p", lambda c: c["dflash_config"].update(markov_rank=64)), ["--speculative-algorithm DSPARK"]),
        "block in context": (speculate(good, "--context-length", "8"), ["8", "--context-length"]),
        "block": (speculate(good, "--speculative-num-draft-tokens", "16"), ["16", "2 to 8"]),
        "grammars": (speculate(good, "--grammar-backend", "outlines"), ["is outlines", "xgrammar, llguidance"]),
        "no draft path": ([*PLAIN, "--speculative-algorithm", "DFLASH"], ["--speculative-draft-model-path"]),
        "no such draft": (speculate("/nowhere"), ["/nowhere", "draft"]),
        "lower case": ([*PLAIN, "--speculative-algorithm", "dflash"], ["--speculative-draft-model-path"]),
        "ranks": (
            speculate(good, "--tp-size", "3", "--max-total-tokens", "999"),
            ["--tp-size is 3", "_heads is 4"],
        ),
        "memory of ranks": (speculate(good, "--tp-size", "2"), ["2 ranks", "--max-total-tokens"]),
        "memory of replicas": (speculate(good, "--dp-size", "2"), ["2 ranks", "--max-total-tokens"]),
        "recurrent": (speculate(good, "--model-path", target("n", FalconH1Config(**shape))), ["no CPU implementation"]),
        "short convolutions": (
            speculate(good, "--model-path", target("lfm2", Lfm2Config(**shape))),
            ["Lfm2ForCausalLM", "no CPU implementation"],
        ),
        "an indexer": (
            speculate(good, "--model-path", target("dsa", GlmMoeDsaConfig(**shape))),
            ["GlmMoeDsaForCausalLM", "index_topk", "latent attention is served without one only"],
        ),
        "states": (
            speculate(good, "--model-path", gated_delta, "--max-running-requests", "400000"),
            ["--max-running-requests 400000", "GB", "would fit"],
        ),
        "sessions": (
            speculate(good, "--model-path", gated_delta, "--enable-streaming-session"),
            ["--enable-streaming-session", "leave it out"],
        ),
        "a ring for decodes": (
            speculate(good, "--model-path", gated_delta, "--enable-linear-replayssm"),
            ["--enable-linear-replayssm", "never been run together"],
        ),
        "a ring": (speculate(good, "--model-path", gated_delta, *ring, "--context-length", "999"), ["accepted"]),
        "a ring of any length": (
            speculate(good, "--model-path", gated_delta, *ring, "--linear-replayssm-cache-len", "24"),
            ["--linear-replayssm-cache-len is 24", "a power of two of at least 16"],
        ),
        "a long ring": (
            speculate(good, "--model-path", gated_delta, *ring, "--linear-replayssm-cache-len", "64"),
            ["--linear-replayssm-cache-len is 64", "--mamba-radix-cache-strategy no_buffer", "16 places at most"],
        ),
        "a ring without states": (speculate(good, *ring), ["Qwen3ForCausalLM", "leave it out"]),
        "quantised target": (speculate(good, "--quantization", "fp8"), ["accepted", "draft: None"]),
        "quantised draft": (
            speculate(good, "--speculative-draft-model-quantization", "fp8"),
            ["accepted", "draft: fp8"],
        ),
        "packed draft": (
            draft("quark", lambda c: c.update(quantization_config={"quant_method": "quark"})),
            ["the draft", "quark", "fp8, awq, gptq"],
        ),
        "target for accelerators": (speculate(good, "--quantization", "awq"), ["the target", "awq", "fp8"]),
        "experts of another kind": (
            speculate(good, "--model-path", mixed),
            ["the target", "fp8 with routed_experts_quant_method 'mxfp4'"],
        ),
        "experts of another kind, and a flag": (
            ["--model-path", mixed, "--device", "cpu", "--quantization", "mxfp4"],
            ["the target", "fp8 with routed_experts_quant_method 'mxfp4'"],
        ),
        "a flag against the checkpoint": (
            ["--model-path", packed, "--device", "cpu", "--quantization", "awq"],
            ["the target", "to be quantised by awq", "allows: fp8"],
        ),
        "a draft's flag against its checkpoint": (
            [
                *draft("flagged", lambda c: c.update(quantization_config={"quant_method": "fp8"})),
                "--speculative-draft-model-quantization",
                "awq",
            ],
            ["the draft", "to be quantised by awq", "allows: fp8"],
        ),
        "without speculation": ([*PLAIN, "--quantization", "awq"], ["the target", "awq", "fp8"]),
        "override": (speculate(good, "--json-model-override-args", '{"block_size": 0}'), ["block_size=0"]),
        "ray": (speculate(good, "--use-ray"), ["--use-ray"]),
        "lossy": (speculate(good, "--speculative-accept-threshold-single", "0.5"), ["0.5", "only 1.0"]),
        "draft window": (speculate(good, "--speculative-draft-window-size", "4"), ["draft-window-size", "4", "8"]),
        "no drafts": (speculate(good, "--speculative-num-draft-tokens", "0"), ["0", "2 to 8"]),
        "gemma norms": (draft("g", lambda c: c.update(use_gemma_norm="yes")), ["use_gemma_norm", "'yes'", "true"]),
        "sinks": (draft("k", lambda c: c.update(attention_sink_bias=True)), ["attention_sink_bias", "dflash_config"]),
        "sinks, deterministic": (
            speculate(str(dressed_draft(tmp_path / "dressed")), "--enable-deterministic-inference"),
            ["accepted"],
        ),
        "last layer": (
            speculate(
                damaged_draft(tmp_path / "last", lambda c: c["dflash_config"].update(target_layer_ids=[1, 5])),
                "--model-path",
                gated_delta,
            ),
            ["target_layer_ids has 5, the last layer", "Qwen3_5ForCausalLM"],
        ),
        "FP8 with MLA": (
            ["--model-path", latent, "--device", "cpu", "--quantization", "fp8"],
            ["DeepseekV3ForCausalLM", "latent attention (MLA)", "--quantization is fp8"],
        ),
        "kernels for host memory": (
            speculate(good, "--enable-hierarchical-cache", "--hicache-io-backend", "kernel"),
            ["--hicache-io-backend is kernel", "allowed on a CPU: direct"],
        ),
        "heads in host memory": (
            speculate(good, "--enable-hierarchical-cache", "--hicache-mem-layout", "page_head"),
            ["--hicache-mem-layout is page_head", "page_first_direct", "layer_first"],
        ),
        "host memory": (speculate(good, "--enable-hierarchical-cache"), ["accepted"]),
        "a share of one rank": (
            speculate(
                *[str(damaged_draft(tmp_path / "narrow", lambda c: None)), "--model-path", latent, "--tp-size", "2"],
                *["--max-total-tokens", "999", "--enable-hierarchical-cache", "--hicache-storage-backend", "nixl"],
            ),
            ["--hicache-storage-backend is nixl", "one rank's share", "--tp-size 2", "file, mooncake"],
        ),
        "another way for KV": (
            speculate(good, "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"),
            ["--disaggregation-transfer-backend is nixl", "mooncake_tcp"],
        ),
        "mask embedding": (mask_embedding, ["mask_embedding.pt", "[5]", "[256]"]),
        "torch_native": (speculate(good, "--attention-backend", "torch_native"), ["torch_native", "dflash_cpu"]),
        "device": (["--model-path", str(TINY_TARGET)], ["--device cpu"]),
        "device cuda": (["--model-path", str(TINY_TARGET), "--device", "cuda"], ["'cuda'", "--device cpu"]),
    }
    damaged = {name: (speculate(good), words) for name, (_, words) in DAMAGES.items()}
    damaged |= {name: (speculate(good, *flags), words) for name, (_, flags, words) in VARIABLES.items()}
    damages = {name: code for name, (code, _) in DAMAGES.items()}
    damages |= {name: f"import os; os.environ.update({own!r})" for name, (own, _, _) in VARIABLES.items()}
    asked = {name: arguments for name, (arguments, _) in (cases | damaged).items()}
    run = subprocess.run(
        [sys.executable, HERE / "refused_starts.py"],
        input=json.dumps({"cases": asked, "damages": damages}),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    outcomes = json.loads(run.stdout.splitlines()[-1])
    for name, (_, words) in (cases | damaged).items():
        sentence = outcomes[name]
        assert "\n" not in sentence and not sentence.startswith("not refused"), (name, sentence)
        assert all(word in sentence for word in words), (name, sentence)


def refusal(server: Server) -> str:
    """The error sentence of the launcher itself."""
    with pytest.raises(ServerError) as error:
        server.start(timeout_s=120)
    assert "Traceback" not in server.log.read_text()
    return str(error.value)


# Code that damages SGLang or our package before the plugin is loaded, and words of the sentence that must follow.
DAMAGES = {
    "wrong version": (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.5.22' if name == 'sglang' else real(name)\n",
        ["0.5.23", "0.5.22"],
    ),
    "our install fails": (
        "import sglang_dflash.host.start.hooks as h\n"
        "def broken():\n    raise ImportError('a moved symbol')\n"
        "h.install = broken\n",
        ["a moved symbol", "could not be loaded"],
    ),
    "hook target gone": (
        "import sglang.srt.speculative.spec_info as s\ndel s.SpeculativeAlgorithm.create_worker\n",
        ["create_worker"],
    ),
}

# Variables, flags, and words of what follows.
COPIES = {"SGLANG_DFLASH_COPIES": "1"}
VARIABLES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "copies": (COPIES, [], ["accepted"]),
    "copies, sometimes": ({"SGLANG_DFLASH_COPIES": "2"}, [], ["SGLANG_DFLASH_COPIES is '2'", "allowed: 0 or 1"]),
    "copies of old text": (
        COPIES | {"SGLANG_DFLASH_OVERLAP": "1"},
        [],
        ["SGLANG_DFLASH_COPIES is 1", "without overlap scheduling", "allowed here: 0"],
    ),
    "copies in whole blocks": (COPIES | {"SGLANG_DFLASH_WIDTH": "full"}, [], ["SGLANG_DFLASH_WIDTH=auto, not full"]),
    "copies on ranks": (COPIES, ["--tp-size", "2", "--max-total-tokens", "999"], ["--tp-size 1, not 2"]),
}


def test_a_damaged_host_is_no_silent_fall_back(tmp_path: Path) -> None:
    """Fails where the built-in worker serves, or the launcher goes on, because our plugin does not fit the host."""
    code, words = DAMAGES["hook target gone"]
    (tmp_path / "damaged_launch.py").write_text(
        f"{code}\nimport runpy, sys\nsys.argv[0] = 'launch_server'\n"
        "runpy.run_module('sglang.launch_server', run_name='__main__')\n"
    )
    run = subprocess.run(
        [sys.executable, tmp_path / "damaged_launch.py", *PLAIN, *SPECULATE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), run.stderr[-2000:]


def test_builtin_worker_is_one_switch_away(tmp_path: Path) -> None:
    """Fails where SGLANG_DFLASH_WORKER=builtin does not serve with SGLang's own worker."""
    environment = {"SGLANG_DFLASH_WORKER": "builtin"}
    with PreloadedServer([*PLAIN, *POOL, *SPECULATE], tmp_path / "server.log", environment) as server:
        answer = server.client().generate(held_out_prompts()[0].prompt, max_new_tokens=20)
        assert len(answer.ids) > 0
        log = server.log.read_text()
    assert "Initialized DFLASH draft runner" in log, "that line is the built-in worker's"
    assert "sglang-dflash 0" not in log


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SGLANG_DFLASH_WORKER", "bultin", "'bultin'"),
        ("SGLANG_DFLASH_DRAFT_VOCAB", "63", "is 63; allowed: auto, full, a number from 64 to 1792"),
    ],
)
def test_unknown_value_is_refused(variable: str, value: str, words: str, tmp_path: Path) -> None:
    """Fails where the server starts with a wrong value of a variable."""
    assert words in refusal(PreloadedServer([*PLAIN, *SPECULATE], tmp_path / "server.log", {variable: value}))
