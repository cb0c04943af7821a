"""What servers did for requests: from counters of their own, and from the replies."""

from __future__ import annotations

import json

import pytest

from sglang_dflash.serving import AcceptanceStats, Completion
from sglang_dflash.serving.completion import drafted
from sglang_dflash.serving.counters import acceptance_between, prefilled_between


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


def info(*counts: int) -> str:
    return json.dumps({"version": "0", "internal_states": [{"dflash_prefilled": count} for count in counts]})


def test_the_workers_part_of_a_cell():
    """Fails where a count from before the cell is included, or replicas are left out."""
    assert prefilled_between(info(100, 40), info(150, 41)) == 51


@pytest.mark.parametrize("page", ["", "no json", info(), json.dumps({"internal_states": [{"speculative": 1}]})])
def test_other_workers_have_no_count(page):
    """Fails where a server without our worker gets a count, or one that died raises."""
    assert prefilled_between(page, page) is None
    assert prefilled_between(info(1), page) is None


def test_acceptance_of_unequal_histograms():
    """Fails where shorter histograms are cut or misaligned, or replies without steps count."""
    long = Completion(steps=6, drafted=18, accept_histogram=[1, 2, 0, 3])
    found = AcceptanceStats.of([long, Completion(steps=3, drafted=9, accept_histogram=[2, 1]), Completion()])
    assert (found.steps, found.drafted, found.accepted, found.by_position) == (9, 27, 12, [6, 3, 3])
    assert found.tau == pytest.approx(1 + 12 / 9)
    assert AcceptanceStats.of([Completion()]).tau == 0


def test_drafts_of_steps_with_widths_of_their_own():
    """Fails where drafts beyond a step's width are counted, as SGLang does for steps narrower than a block."""
    whole = {"spec_num_proposed_drafts": 35}
    assert drafted(whole) == 35
    assert drafted(whole | {"spec_cap_lens_histogram": [0, 2, 0, 0, 1, 0, 0, 0, 2]}) == 0 * 2 + 3 + 7 * 2
    assert drafted({}) == 0
