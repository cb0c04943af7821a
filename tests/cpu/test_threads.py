"""Compute threads: no more than the process may use."""

from __future__ import annotations

import os

import pytest

from sglang_cpu.threads import SHARE, SMALL_MATRIX, default_threads, usable_cores

LARGE = SMALL_MATRIX + 1


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_cgroups_quota_counts(monkeypatch, tmp_path, limit, expected):
    """Fails where a container's limit is ignored, or leaves no core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_without_a_cgroup_the_affinity_counts(monkeypatch, tmp_path):
    """Fails where a machine without cgroups cannot start."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5})
    assert usable_cores(tmp_path / "none") == 3


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(1, 1, 1), (2, 1, 2), (4, 1, 3), (16, 2, 7), (4, 8, 1)])
def test_ranks_share_what_is_left(cores, ranks, expected):
    """Fails where ranks together take more than all cores but one."""
    assert default_threads(cores, ranks, LARGE) == expected


@pytest.mark.parametrize(
    ("cores", "largest_matrix", "expected"),
    [(64, SHARE - 1, 1), (64, 4 * SHARE, 4), (4, 4 * SHARE, 3), (2, SMALL_MATRIX, 1), (2, SMALL_MATRIX + 1, 2)],
)
def test_a_small_model_takes_what_it_keeps_busy(cores, largest_matrix, expected):
    """Fails where a small model gets more threads than it keeps busy, or than there are free cores."""
    assert default_threads(cores, 1, largest_matrix) == expected
