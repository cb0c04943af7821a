"""What servers did for a cell, from counters of their own."""

from __future__ import annotations

import json

import pytest

from sglang_dflash.serving.counters import WorkerCounts, acceptance_between, worker_counts_between


def page(steps: int, drafted: int, accepted: int, positions: list[int]) -> str:
    lines = []
    for name, value in (("num_drafts", steps), ("num_draft_tokens", drafted), ("num_accepted_tokens", accepted)):
        lines += [
            f"# TYPE vllm:spec_decode_{name}_total counter",
            f'vllm:spec_decode_{name}_total{{engine="0"}} {value}.0',
        ]
        lines.append(f'vllm:spec_decode_{name}_created{{engine="0"}} 1.7e9')
    lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter")
    for index, value in enumerate(positions):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{index}"}} {value}.0')
    return "\n".join([*lines, ""])


def test_the_difference_of_two_readings():
    """Fails where counts from before the cell are included, or positions are mixed up."""
    found = acceptance_between(page(10, 70, 30, [9, 8, 7]), page(14, 98, 42, [13, 11, 9]))
    assert (found.steps, found.drafted, found.accepted, found.by_position) == (4, 28, 12, [4, 3, 2])
    assert found.tau == 4.0


def test_nothing_drafted_is_no_acceptance():
    """Fails where an arm without speculation gets a tau, or a server without metrics raises."""
    assert acceptance_between(page(3, 21, 9, [3]), page(3, 21, 9, [3])) is None
    assert acceptance_between("", "") is None
    assert acceptance_between("", page(2, 14, 4, [2, 2])).steps == 2


def info(*states: dict) -> str:
    return json.dumps({"version": "0", "internal_states": list(states)})


def state(prefilled: int, rows: int = 0, accepted: int = 0) -> dict:
    return {"dflash_prefilled": prefilled, "dflash_plan": {"copied_rows": rows, "copied_accepted": accepted}}


def test_the_workers_part_of_a_cell():
    """Fails where counts from before the cell are included, replicas are left out, or whole blocks have no counts."""
    before, after = info(state(100, 7, 6), state(40)), info(state(150, 12, 8), state(41, 2, 1))
    assert worker_counts_between(before, after) == WorkerCounts(51, 7, 3)
    whole_blocks = [info({"dflash_prefilled": count}) for count in (10, 30)]
    assert worker_counts_between(*whole_blocks) == WorkerCounts(20, 0, 0)


@pytest.mark.parametrize("page", ["", "no json", info(), info({"speculative": 1})])
def test_other_workers_have_no_counts(page):
    """Fails where a server without our worker gets counts, or one that died raises."""
    assert worker_counts_between(page, page) is None
    assert worker_counts_between(info(state(1)), page) is None
