"""What the first commands of a new user tell their servers, with and without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from sglang_dflash.cli import check, quickstart, shown_pairs
from sglang_dflash.cli.benchmark_options import Options
from sglang_dflash.cli.benchmark_plan import make_plan
from sglang_dflash.cli.check import CheckOptions
from sglang_dflash.serving import PAIRS
from sglang_dflash.serving.device import device_flags


@pytest.fixture(params=[True, False], ids=["cuda", "cpu"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """Flag -> its last value, as SGLang reads them."""
    words = list(arguments)
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {one: "" if other.startswith("--") else other for one, other in pairs if one.startswith("--")}


STARTED: dict[str, Callable[[], Sequence[Sequence[str]]]] = {
    "quickstart": lambda: [words for pair in PAIRS for words in shown_pairs.embedded(pair).arms()],
    "check": lambda: [arm.arguments for arm in check.arms_of(CheckOptions())],
    "bench": lambda: [arm.arguments for arm in make_plan(Options()).arms],
}


@pytest.mark.parametrize("name", STARTED)
def test_flags_of_the_embedded_pair(name: str, cuda: bool) -> None:
    """Fails where a command asks for the CPU on a machine with a GPU, on which our CPU platform does not load, for
    float32 there, which SGLang does not take on CUDA, or for anything else on a CPU."""
    started = list(map(flags, STARTED[name]()))
    assert len(started) >= 2 and any("--speculative-algorithm" in given for given in started)
    for given in started:
        assert given.get("--device") == (None if cuda else "cpu")
        assert given["--dtype"] == ("bfloat16" if cuda else "float32")
        assert int(given["--max-total-tokens"]) == 65536 if cuda else int(given["--max-total-tokens"]) < 65536
        assert "--attention-backend" not in given


def test_what_a_user_gives_wins(cuda: bool) -> None:
    """Fails where a device or dtype that the user names is overruled, or another model gets the pair's flags."""
    given = CheckOptions(server_flags=("--device", "xpu", "--dtype", "float16"))
    named = replace(given, model_path="t", draft="d", server_flags=("--device", "xpu"))
    for arm in check.arms_of(given):
        assert (flags(arm.arguments)["--device"], flags(arm.arguments)["--dtype"]) == ("xpu", "float16")
    for arm in check.arms_of(named):
        assert arm.arguments.count("--device") == 1 and "--dtype" not in arm.arguments
        assert "--max-total-tokens" not in arm.arguments
    for arm in make_plan(Options(dtype="float16", server_flags="--device xpu")).arms:
        assert arm.arguments.count("--dtype") == arm.arguments.count("--device") == 1
        assert (flags(arm.arguments)["--device"], flags(arm.arguments)["--dtype"]) == ("xpu", "float16")
    assert device_flags() == ([] if cuda else ["--device", "cpu"])


@pytest.mark.parametrize("same", [True, False])
def test_quickstart_explains_texts_that_part_by_rounding(same: bool, cuda: bool, capsys: pytest.CaptureFixture) -> None:
    """Fails where a tie in bfloat16 looks like an error, or a difference in float32 like a tie."""
    on = quickstart.Result("a b", 2, 1.0, 1, 1)
    off = replace(on, text="a b" if same else "a c", steps=0, accepted=0)
    quickstart.summarise([shown_pairs.Question("sum", "Compute 1 + 1.")], [on], [off])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{int(same)} of 1 texts identical" in said
    assert ("two tokens may tie up to rounding" in said) == (cuda and not same)
