"""Every feature combined with DFLASH is either refused before the server is up, or served and tested."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.host.start.features import FEATURES, Feature
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

TESTS = Path(__file__).parents[1]
START = [
    *["--device", "cpu", "--model-path", str(TINY_TARGET), "--speculative-algorithm", "DFLASH"],
    *["--speculative-draft-model-path", str(TINY_DRAFT)],
]
# A refused flag that needs a value -> one that asks for the feature.
VALUES = {
    "pp_size": "2",
    "attn_dp_size": "2",
    "attn_cp_size": "2",
    "dcp_size": "2",
    "dwdp_size": "2",
    "elastic_ep_backend": "mooncake",
    "moe_a2a_backend": "deepep",
    "weight_cache_mode": "daemon",
    "cpu_offload_gb": "1",
    "offload_group_size": "2",
    "startup_weight_load_mode": "overlap",
    "return_aux_hidden_state_layer_ids": "1",
    "decrypted_draft_config_file": "other.json",
    "dllm_algorithm": "LowConfidence",
    "speculative_accept_threshold_single": "0.5",
    "speculative_accept_threshold_acc": "0.9",
}
REFUSED = [(feature, flag) for feature in FEATURES if feature.refusal for flag in feature.flags]
# Flags -> whether they are accepted: flags of other algorithms, and flags of DFLASH at harmless values.
FOREIGN = {
    "--speculative-eagle-topk 4": False,
    "--speculative-num-steps 3": False,
    "--speculative-eagle-topk 1 --speculative-num-steps 1": True,
    "--speculative-token-map map.pt": False,
    "--speculative-use-rejection-sampling": False,
    "--speculative-adaptive": False,
    "--speculative-attention-mode decode": False,
    "--speculative-draft-sink-size 4": False,
    "--speculative-ngram-capacity 100": False,
    "--enable-multi-layer-eagle": False,
    "--speculative-dflash-block-size 4": True,
    "--speculative-accept-threshold-single 1.0": True,
}


def arguments_of(flag: str) -> list[str]:
    return [f"--{flag.replace('_', '-')}", *([VALUES[flag]] if flag in VALUES else [])]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """How a start ends with each refused flag and each of `FOREIGN`."""
    cases = {flag: [*START, *arguments_of(flag)] for _, flag in REFUSED}
    cases |= {flags: [*START, *flags.split()] for flags in FOREIGN}
    run = subprocess.run(
        [sys.executable, TESTS / "e2e" / "refused_starts.py"],
        input=json.dumps({"cases": cases}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("feature", "flag"), REFUSED, ids=[flag for _, flag in REFUSED])
def test_refused_in_one_sentence(feature: Feature, flag: str, outcomes: dict[str, str]) -> None:
    """Fails where the flag is accepted, or its sentence lacks flag, value, feature or reason."""
    sentence = outcomes[flag]
    spelled = f"--{flag.replace('_', '-')}"
    words = [spelled, VALUES.get(flag, ""), feature.name, feature.refusal]
    assert sentence.startswith("DFLASH cannot start: ") and "\n" not in sentence, sentence
    assert all(word in sentence for word in words), (sentence, words)
    assert ("SGLANG_DFLASH_WORKER=builtin" in sentence) == feature.builtin


@pytest.mark.parametrize("flags", FOREIGN)
def test_flags_of_other_algorithms(flags: str, outcomes: dict[str, str]) -> None:
    """Fails where a flag without an effect on DFLASH is silently accepted, or a harmless one is refused."""
    if FOREIGN[flags]:
        assert outcomes[flags].startswith("accepted")
    else:
        assert flags in outcomes[flags] and "other algorithms" in outcomes[flags]


def test_served_features_are_tested() -> None:
    """Fails where a served feature names no test, or a test that does not exist."""
    existing = {
        node.name
        for path in (TESTS / "e2e").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for feature in FEATURES:
        assert bool(feature.tests) == (feature.refusal is None), feature
        assert set(feature.tests) <= existing, feature
