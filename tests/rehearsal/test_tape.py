"""A tape replays what a run's ops compute from the tensors of the moment, and refuses what no device could capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tape import Tape, TapeError

from sglang_dflash import ops

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def in_place(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(8)
    total.add_(x.sum(0))
    total[2:5].mul_(3.0)  # through a view
    return total


def out_variant(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape)
    return torch.mul(x, 2.0, out=result)


def views(x: torch.Tensor) -> torch.Tensor:
    return x.t().reshape(2, -1).unsqueeze(1)[:, 0].transpose(0, 1)


def several_results(x: torch.Tensor) -> torch.Tensor:
    values, indices = x.max(-1)
    first, second = (x + 1).chunk(2)
    return values + indices + first.sum() - second.sum()


def scatter(x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(8, 8)
    table[x.argmax(-1)] = x
    return table[torch.arange(7, -1, -1)]


def layer(x: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, WEIGHT)).softmax(-1)


def our_op(x: torch.Tensor) -> torch.Tensor:
    return ops.choose_kernels("cpu", x.dtype).row_argmax(x)


@pytest.mark.parametrize("run", [in_place, out_variant, views, several_results, scatter, layer, our_op])
@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_computes_what_the_run_computes(run: Callable[..., torch.Tensor], inference: bool) -> None:
    """Fails where a kind of op is not recorded, or is replayed on other tensors than it ran on."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 8, generator=generator)
    tape = Tape()
    with torch.inference_mode(inference):
        out = tape.record(lambda: run(x))
    for _ in range(3):
        x.copy_(torch.randn(8, 8, generator=generator))
        tape.replay()
        torch.testing.assert_close(out, run(x), rtol=0, atol=0)


def test_python_does_not_run_at_a_replay() -> None:
    """Fails where a replay calls the function, or sees a number that Python changed after the recording."""
    x, out, factors = torch.ones(2), torch.zeros(2), [2.0]
    tape = Tape()
    tape.record(lambda: out.copy_(x * factors.pop()))
    x.fill_(5.0)
    tape.replay()
    assert out.tolist() == [10.0, 10.0]


def test_what_no_op_computes_again_is_spoiled() -> None:
    """Fails where a value that reached a tensor past torch survives, although a device's graph would lose it."""
    x = torch.ones(2)
    tape = Tape()

    def run() -> torch.Tensor:
        scratch = torch.empty(2)
        scratch.numpy()[:] = 1.0
        return x + scratch

    out = tape.record(run)
    tape.replay()
    assert out.isnan().all()


def test_another_graph_may_overwrite_what_a_replay_returned() -> None:
    """Fails where `spoil` leaves a graph's result as it is, or touches a tensor from before the recording."""
    x, buffer = torch.ones(2), torch.zeros(2)
    tape = Tape()
    out = tape.record(lambda: (buffer.copy_(x), x + 1))
    tape.replay()
    tape.spoil(out)
    assert out[1].isnan().all() and buffer.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("inference", [False, True])
def test_a_rebound_tensor_is_found(inference: bool) -> None:
    """Fails where a replay reads a weight's new memory, which a device's graph would not know."""
    weight = torch.nn.Parameter(WEIGHT.clone(), requires_grad=False)
    x = torch.ones(1, 8)
    tape = Tape()
    with torch.inference_mode(inference):
        tape.record(lambda: F.linear(x, weight))
    tape.replay()
    weight.data = WEIGHT + 1
    with pytest.raises(TapeError, match=r"shape \[8, 8\] was rebound"):
        tape.replay()


def test_a_rebound_name_is_not_seen() -> None:
    """Fails where a tape follows a name to its new tensor: a graph writes the old one."""
    holder = {"out": torch.zeros(2)}
    x = torch.ones(2)
    tape = Tape()
    tape.record(lambda: holder["out"].copy_(x))
    holder["out"] = torch.zeros(2)
    tape.replay()
    assert holder["out"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.resize_(2),
        lambda x: bool((x > 0).all()),
    ],
    ids=["item", "mask", "nonzero", "resize", "bool"],
)
def test_what_no_graph_can_hold_is_refused(run: Callable[..., object]) -> None:
    """Fails where a run is recorded although a device could not capture it."""
    x = torch.ones(4)
    with pytest.raises(TapeError, match="during capture"):
        Tape().record(lambda: run(x))
