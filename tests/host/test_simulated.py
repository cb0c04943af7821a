"""Simulated acceptance: what it commits, and which settings it refuses."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.environ import envs

from sglang_dflash.host.worker import simulated

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
TARGET_IDS = torch.tensor([[20, 21, 22, 23], [24, 25, 26, 27]])


@pytest.mark.parametrize("mean", [1.0, 3.0, 4.0])
def test_a_whole_mean_commits_it_in_every_row(mean):
    """Fails where commit lengths count the accepted drafts alone, or rows differ."""
    with envs.SGLANG_SIMULATE_ACC_LEN.override(mean), envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.override("real-draft-token"):
        assert simulated.simulates()
        accepted = simulated.accept(TARGET_IDS, IDS)
    count = int(mean)
    assert accepted.commit_lens.tolist() == [count, count]
    for row in range(2):
        bonus = int(TARGET_IDS[row, count - 1])
        committed = [*IDS[row, 1:count].tolist(), bonus]
        assert accepted.out_ids[row].tolist() == committed + [0] * (4 - count)
        assert int(accepted.bonus_ids[row]) == bonus
    assert accepted.commit_lens.dtype == torch.int32 and accepted.out_ids.dtype == torch.int64


def test_a_fractional_mean_is_the_mean_of_what_is_drawn():
    """Fails where the mean is rounded."""
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.5):
        drawn = [int(simulated.accept(TARGET_IDS, IDS).commit_lens[0]) for _ in range(600)]
    assert set(drawn) == {2, 3}
    assert abs(sum(drawn) / len(drawn) - 2.5) < 0.15


def test_ranks_would_draw_each_their_own():
    """Fails where two ranks may commit different lengths, and then wait for each other forever."""
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.0), pytest.raises(ValueError, match="--tp-size is 2"):
        simulated.check(4, tp_size=2)


def test_off_by_default():
    """Fails where a server simulates by default."""
    assert not simulated.simulates()


@pytest.mark.parametrize("mean", [0.5, 4.5])
def test_a_mean_outside_the_block_is_refused(mean):
    """Fails where the host silently clamps the mean to another one."""
    with envs.SGLANG_SIMULATE_ACC_LEN.override(mean), pytest.raises(ValueError, match="mean commit_len"):
        simulated.check(4)


def test_an_unknown_mode_is_refused():
    """Fails where a misspelt mode is taken for another one."""
    with (
        envs.SGLANG_SIMULATE_ACC_LEN.override(2.0),
        envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.override("real"),
        pytest.raises(ValueError, match="real-draft-token"),
    ):
        simulated.check(4)


def test_the_warning_says_that_answers_are_not_the_targets():
    """Fails where the start-up line does not say so."""
    with envs.SGLANG_SIMULATE_ACC_LEN.override(4.0):
        assert "NOT THE TARGET'S" in simulated.warning()
