"""Allowed options, the error message of all others, and the options that a resumed run must keep."""

from __future__ import annotations

import pytest

from sglang_dflash.training.options import default_gamma

REFUSED = [
    ({"layers": 0}, "--layers is 0; it must be at least 1."),
    ({"batch_size": 0}, "--batch-size is 0; it must be at least 1."),
    ({"accumulate": -1}, "--accumulate is -1; it must be at least 1."),
    ({"anchors": 0}, "--anchors is 0; it must be at least 1."),
    ({"epochs": 0}, "--epochs is 0; it must be at least 1."),
    ({"eval_every": 0}, "--eval-every is 0; it must be at least 1."),
    ({"save_every": 0}, "--save-every is 0; it must be at least 1."),
    ({"log_every": 0}, "--log-every is 0; it must be at least 1."),
    ({"held_out_limit": 0}, "--held-out-limit is 0; it must be at least 1."),
    ({"keep_checkpoints": 0}, "--keep-checkpoints is 0; it must be at least 1."),
    ({"block_size": 1}, "--block-size is 1; it must be at least 2."),
    ({"max_length": 3}, "--max-length is 3; it must be at least 4."),
    ({"learning_rate": 0.0}, "--learning-rate is 0.0; it must be above 0."),
    ({"warm_up": 1.0}, "--warm-up is 1.0; it must be a share of the steps"),
    ({"warm_up": -0.1}, "--warm-up is -0.1; it must be a share of the steps"),
    ({"dpace_alpha": 1.5}, "--dpace-alpha is 1.5; it must be from 0 to 1."),
    ({"held_out": 0.0}, "--held-out is 0.0; it must be a share between 0 and 1."),
    ({"held_out": 1.0}, "--held-out is 1.0; it must be a share between 0 and 1."),
    ({"clip": 0.0}, "--clip is 0.0; it must be above 0."),
    ({"gamma": 0.0}, "--gamma is 0.0; it must be above 0."),
    ({"max_steps": 0}, "--max-steps is 0; it must be at least 1."),
    ({"num_taps": 0}, "--num-taps is 0; it must be at least 1."),
    ({"sliding_window": 0}, "--sliding-window is 0; it must be positive."),
    ({"sliding_layers": 1}, "--sliding-layers is 1; it must be at least 1, and it needs --sliding-window."),
    ({"sliding_window": 8, "sliding_layers": 0}, "--sliding-layers is 0; it must be at least 1"),
    ({"sliding_window": 8, "sliding_layers": 3, "layers": 2}, "--sliding-layers is 3; it must be at most the"),
    ({"data": ()}, "--data is empty; it must be at least one JSONL file."),
    ({"data": ("/nowhere.jsonl",)}, "--data is /nowhere.jsonl; it must be an existing JSONL file."),
    ({"held_out_data": ("/nowhere.jsonl",)}, "--held-out-data is /nowhere.jsonl; it must be an existing JSONL file."),
    ({"held_out_data": ("/a/x.jsonl", "/b/x.jsonl")}, "--held-out-data is x, x; it must be files of different names."),
    ({"loss_ids": 8}, "--loss-ids is 8; it must be 0 (all) or at least 64."),
    ({"loss": "kl"}, "--loss is kl; it must be one of decay, dpace."),
    ({"attention": "sdpa"}, "--attention is sdpa; it must be one of auto, flex, split, dense."),
    ({"precision": "fp8"}, "--precision is fp8; it must be one of auto, bf16, float32."),
    ({"taps": (3, 1)}, "--taps is (3, 1); it must be layer numbers that rise"),
    ({"taps": (1, 1)}, "--taps is (1, 1); it must be layer numbers that rise"),
    ({"taps": (1, 2), "num_taps": 3}, "--num-taps is 3, but --taps names 2 layers; give one of them."),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[" ".join(map(str, case[0].items())) for case in REFUSED])
def test_refused(changes, said, options):
    """Fails if a wrong value is accepted, or the message lacks the flag, the value or the rule."""
    with pytest.raises(ValueError) as refused:
        options(**{"num_taps": None, **changes})
    sentence = str(refused.value)
    assert sentence.startswith(said)
    assert sentence.endswith(".") and "\n" not in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_up": 0.0},
        {"dpace_alpha": 0.0},
        {"dpace_alpha": 1.0},
        {"sliding_window": 1, "sliding_layers": 1},
        {"taps": (1, 2), "num_taps": 2},
        {"block_size": 2, "max_length": 4},
    ],
)
def test_the_last_allowed_values(changes, options):
    """Fails if a value at the limit is refused."""
    options(**changes)


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0), (4, 2.0), (13, 6.0), (22, 9.0)])
def test_gamma_follows_the_block(block_size, gamma):
    """Fails if gamma is not the paper's for its three block sizes, or not linear between and beyond them."""
    assert default_gamma(block_size) == pytest.approx(gamma)


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": 3}, [F, F, F]),
        ({"layers": 3, "sliding_window": 8}, [S, S, F]),
        ({"layers": 1, "sliding_window": 8}, [S]),
        ({"layers": 3, "sliding_window": 8, "sliding_layers": 1}, [S, F, F]),
        ({"layers": 3, "sliding_window": 8, "sliding_layers": 3}, [S, S, S]),
    ],
)
def test_layer_types(changes, expected, options):
    """Fails if other layers slide than requested (by default all but the last)."""
    assert options(**changes).layer_types == expected


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, []),
        ({"output": "/elsewhere", "resume": True, "eval_every": 1, "save_every": 1, "keep_checkpoints": 9}, []),
        ({"log_every": 7}, []),
        ({"seed": 1}, ["--seed"]),
        ({"learning_rate": 1e-3, "layers": 2}, ["--layers", "--learning-rate"]),
        ({"chat_template_kwargs": (("enable_thinking", False),)}, ["--chat-template-kwargs"]),
        ({"taps": (1, 2)}, ["--taps"]),
    ],
)
def test_difference_to_an_earlier_run(changes, flags, options):
    """Fails if a resumed run may change an option that decides the result, or may not change another option."""
    earlier = options()
    assert options(**changes).difference(earlier.fingerprint()) == flags


def test_a_run_agrees_with_itself(options):
    """Fails if tuples, which JSON turns into lists, count as a change."""
    same = {"taps": (1, 2), "chat_template_kwargs": (("a", [1]), ("b", None)), "num_taps": None}
    assert options(**same).difference(options(**same).fingerprint()) == []
