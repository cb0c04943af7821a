"""The width policy on simulated machines and drafts, which set the time and the committed tokens of every step."""

from __future__ import annotations

import random

import pytest

from sglang_dflash.core.width import TUNING, Acceptance, AdaptiveWidth, FullWidth, StepTimes

K = 8
GAP_S = 1e-3  # from one step of the machines below to the next


class Machine:
    """A step takes `fixed_s`, plus `draft_s` if it drafts, plus `row_s` for each row after the first `free` rows."""

    def __init__(self, row_s: float, draft_s: float = 2e-3, fixed_s: float = 4e-3, free: int = 0, noise: float = 0.0):
        self.row_s, self.draft_s, self.fixed_s, self.free, self.noise = row_s, draft_s, fixed_s, free, noise
        self.now = 100.0
        self.chance = random.Random(0)

    def seconds(self, requests: int, width: int) -> float:
        rows = max(0, requests * width - self.free)
        return self.fixed_s + (self.draft_s if width > 1 else 0.0) + self.row_s * rows

    def run(self, policy: AdaptiveWidth, requests: int, accepts: float, steps: int) -> list[int]:
        """Widths of `steps` steps. A draft is accepted with probability `accepts` if all drafts before it are."""
        widths, self.tokens, begin = [], 0, self.now
        for _ in range(steps):
            width = policy.begin(requests)
            self.now += self.seconds(requests, width) * (1 + self.noise * (self.chance.random() - 0.5))
            lens = [self.commit(width, accepts) for _ in range(requests)]
            policy.end(lens)
            self.now += GAP_S
            widths.append(width)
            self.tokens += sum(lens)
        self.rate = self.tokens / (self.now - begin)
        return widths

    def commit(self, width: int, accepts: float) -> int:
        length = 1
        while length < width and self.chance.random() < accepts:
            length += 1
        return length

    def rates(self, requests: int, accepts: float, block_size: int = K) -> list[float]:
        """Tokens per second at each fixed width."""
        lens = [sum(accepts**k for k in range(width)) for width in range(1, block_size + 1)]
        return [
            requests * length / (self.seconds(requests, width) + GAP_S) for width, length in enumerate(lens, start=1)
        ]

    def best(self, requests: int, accepts: float) -> int:
        rates = self.rates(requests, accepts)
        return 1 + rates.index(max(rates))


def usual(widths: list[int]) -> int:
    return max(set(widths), key=widths.count)


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize(
    ("block_size", "requests", "accepts", "machine"),
    [
        (8, 1, 0.95, {"row_s": 1e-4}),
        (8, 1, 0.7, {"row_s": 1e-3}),
        (8, 8, 0.95, {"row_s": 1e-4}),
        (8, 8, 0.6, {"row_s": 1e-4}),
        (8, 8, 0.6, {"row_s": 5e-4}),
        (8, 8, 0.1, {"row_s": 5e-4}),
        (8, 1, 0.02, {"row_s": 0.0}),
        (8, 32, 0.8, {"row_s": 2e-4}),
        (16, 32, 0.1, {"row_s": 5e-4}),
        (16, 1, 0.9, {"row_s": 1e-4, "free": 8}),
        (8, 8, 0.6, {"row_s": 2e-4, "draft_s": 8e-3}),
        (8, 1, 0.8, {"row_s": 1e-4, "draft_s": 4e-2}),  # drafting costs more than the target
        (2, 4, 0.9, {"row_s": 1e-4}),
    ],
)
def test_as_fast_as_the_best_fixed_width(block_size, requests, accepts, machine, noise):
    """Fails where the time or the tokens of a row are misjudged, plain decoding is never tried, probes cost more than
    a few percent, or noise leads to a wrong width."""
    machine = Machine(**machine, noise=noise)
    policy = AdaptiveWidth(block_size, lambda: machine.now)
    machine.run(policy, requests, accepts, 1000)
    machine.run(policy, requests, accepts, 2000)
    best = max(machine.rates(requests, accepts, block_size))
    assert machine.rate >= 0.93 * best, (machine.rate, machine.rates(requests, accepts, block_size))


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
def test_whole_blocks_before_anything_is_measured(block_size):
    """Fails where a server starts with narrow steps, before it has measured anything."""
    machine = Machine(1e-4)
    policy = AdaptiveWidth(block_size, lambda: machine.now)
    assert set(machine.run(policy, 8, 1.0, TUNING.probe_interval_steps)) == {block_size}


def test_better_drafts_are_noticed():
    """Fails where a policy stays with plain decoding or a small width after drafts have become good."""
    for before in (0.02, 0.5):
        machine = Machine(5e-4)
        policy = AdaptiveWidth(K, lambda machine=machine: machine.now)
        assert usual(machine.run(policy, 4, before, 500)[-100:]) < 4
        assert usual(machine.run(policy, 4, 0.97, 1500)[-100:]) == machine.best(4, 0.97) > 5


def test_plain_steps_that_were_disturbed_are_forgotten():
    """Fails where the only plain steps seen were disturbed and slow, and the policy then avoids plain decoding."""
    machine = Machine(5e-4)
    policy = AdaptiveWidth(K, lambda: machine.now)
    for _ in range(4):
        policy._plain.observe(8, 30 * machine.seconds(8, 1))
    machine.run(policy, 8, 0.1, 500)
    assert usual(machine.run(policy, 8, 0.1, 200)) == 1


def test_a_pause_is_no_step():
    """Fails where the time of a prefill, or of waiting for requests, counts as step time."""
    policies = []
    for pauses in (False, True):
        machine = Machine(1e-4)
        policy = AdaptiveWidth(K, lambda machine=machine: machine.now)
        widths = []
        for step in range(300):
            widths += machine.run(policy, 8, 0.8, 1)
            if pauses and step % 2:
                policy.interrupt()
                machine.now += 10.0
        policies.append(usual(widths[-100:]))
    assert policies[0] == policies[1]


def test_one_disturbed_step_does_not_count_much():
    """Fails where one step of a second changes the expected time of the next steps by more than 10 %."""
    times = StepTimes()
    for step in range(100):
        times.observe(8 + step % 8, 0.01)
    before = times.expected(16)
    times.observe(16, 1.0)
    assert times.expected(16) == pytest.approx(before, rel=0.1)


def test_times_are_a_line_over_rows():
    """Fails where the regression is wrong: noiseless steps of two sizes must give the line through them."""
    times = StepTimes()
    for _ in range(4000):
        for rows in (8, 64):
            times.observe(rows, 4e-3 + 1e-4 * rows)
    for rows in (8, 24, 64):
        assert times.expected(rows) == pytest.approx(4e-3 + 1e-4 * rows, rel=0.02)


def test_rows_never_gain_time():
    """Fails where wide steps are expected to be faster than narrow ones because some narrow steps were slow."""
    times = StepTimes()
    for rows, seconds in [(8, 0.02), (64, 0.01)] * 50:
        times.observe(rows, seconds)
    assert times.expected(64) >= times.expected(8) > 0


def test_acceptance_is_conditional():
    """Fails where a draft after a rejected one counts as rejected, or a draft beyond the width counts at all."""
    acceptance = Acceptance(4)
    for _ in range(2000):
        acceptance.observe([1, 3], 3)  # accepts the first draft half the time, then always the second
    first, second, third, fourth = acceptance.expected()
    assert (first, second - first) == (1.0, pytest.approx(0.5, abs=0.02))
    assert third - second == pytest.approx(0.5, abs=0.03)
    assert fourth - third == pytest.approx(third - second, abs=0.05)  # never tried: the rate of the position before it


def test_full_width_is_the_block():
    """Fails where a fixed width changes: an accelerator's graphs are captured for one size."""
    policy = FullWidth(K)
    assert not policy.adapts
    assert [policy.begin(requests) for requests in (1, 8, 64)] == [K] * 3
