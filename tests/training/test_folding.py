"""Samples that begin others are folded into them: which ones, with which spans, and with the same loss and gradient."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from datasets import Dataset

from sglang_dflash.training.blocks import make_blocks
from sglang_dflash.training.conversations import collate
from sglang_dflash.training.folding import fold, holders
from sglang_dflash.training.trainer import Trainer


def _folded(*samples: tuple[list[int], list[list[int]]]) -> list[tuple[list[int], list[list[int]]]]:
    ids, spans = zip(*samples, strict=True)
    data = fold(Dataset.from_dict({"input_ids": ids, "spans": spans}))
    return [(row["input_ids"], row["spans"]) for row in data]


def test_a_session_with_a_line_per_request():
    """Fails if a beginning stays, its answers are lost or learned twice, or the order of the others changes."""
    long = ([1, 2, 3, 4, 5, 6, 7], [[5, 7]])
    other = ([9, 2, 3], [[1, 3]])
    assert _folded(([1, 2, 3], [[1, 3]]), other, long, ([1, 2, 3, 4, 5], [[3, 5]])) == [
        other,
        ([1, 2, 3, 4, 5, 6, 7], [[1, 3], [3, 5], [5, 7]]),
    ]


def test_branches_stay_apart():
    """Fails if one of two continuations is lost, or what they share goes into both."""
    one, two = ([1, 2, 3, 4], [[2, 4]]), ([1, 2, 5, 6], [[2, 4]])
    assert _folded(one, two) == [one, two]
    assert _folded(([1, 2], [[0, 2]]), one, two) in (
        [([1, 2, 3, 4], [[0, 2], [2, 4]]), two],
        [one, ([1, 2, 5, 6], [[0, 2], [2, 4]])],
    )


def test_what_follows_the_last_answer_does_not_matter():
    """Fails if the template's last line break, or a question without an answer, keeps samples apart."""
    assert _folded(([1, 2, 3, 8], [[1, 3]]), ([1, 2, 3, 4, 5, 9], [[3, 5]])) == [([1, 2, 3, 4, 5, 9], [[1, 3], [3, 5]])]


def test_equal_samples_are_one():
    """Fails if the first does not stay, or overlapping spans become two answers."""
    assert _folded(([1, 2, 3, 7], [[1, 3]]), ([1, 2, 3, 8], [[0, 2]])) == [([1, 2, 3, 7], [[0, 3]])]
    assert _folded(([1, 2, 3, 7], [[1, 3]]), ([1, 2, 3, 8], [[1, 3]])) == [([1, 2, 3, 7], [[1, 3]])]
    assert _folded(([1, 2, 3], [[1, 3]]), ([1, 2, 3], [[0, 2], [1, 3]])) == [([1, 2, 3], [[0, 3]])]


def test_nothing_to_fold_changes_nothing():
    """Fails if a resumed run of data without shared beginnings sees another order."""
    data = Dataset.from_dict({"input_ids": [[3, 1], [1, 2], [300, 1]], "spans": [[[0, 2]], [[0, 2]], [[0, 2]]]})
    assert fold(data) is data


def test_holders_are_those_of_every_pair():
    """Fails if a key that begins another, far away or through a third, is not found; compares with all pairs."""
    rng = random.Random(0)
    keys = [tuple(rng.choices(range(3), k=rng.randint(0, 5))) for _ in range(300)]
    found = holders(keys)
    for index, key in enumerate(keys):
        held = keys[found[index]]
        assert held[: len(key)] == key and keys.index(held) == found[index]
        longer = [other for other in keys if len(other) > len(held) and other[: len(held)] == held]
        assert not longer
    assert holders([bytes(key) for key in keys]) == found


@pytest.mark.parametrize("changes", [{}, {"layers": 2, "sliding_window": 8}, {"loss": "dpace"}], ids=str)
def test_a_folded_sample_has_the_loss_and_gradient_of_its_parts(changes: dict[str, Any], options):
    """Fails if a block of the shorter sample gets other features, context, labels or weights in the longer one."""
    trainer = Trainer(options(**changes))
    ids = torch.randint(1, 1700, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    short = {"input_ids": ids[:30], "spans": [[10, 28]]}
    long = {"input_ids": ids, "spans": [[35, 60]]}
    together = fold(Dataset.from_list([short, long]))
    assert len(together) == 1

    def gradient(samples: Any, anchors: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, learned = collate(list(samples), torch.device("cpu"))
        draft = trainer.draft
        blocks = make_blocks(tokens, learned, torch.tensor(anchors), draft.block_size, draft.mask_token_id)
        loss = trainer.loss(draft, tokens, trainer.features(samples, tokens), blocks)
        gradients = torch.autograd.grad(loss, list(draft.parameters()))
        return loss.detach(), torch.cat([one.flatten() for one in gradients])

    apart = gradient([short, long], [[10, 15, 26], [35, 44, 58]])
    one = gradient(together, [[10, 15, 26, 35, 44, 58]])
    torch.testing.assert_close(one[0], apart[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(one[1], apart[1], rtol=1e-4, atol=1e-6)


def test_a_run_says_what_it_folded(options, tmp_path, data_file):
    """Fails if the opening lines do not tell how many samples were folded, or tell it where none were."""
    assert "folded" not in Trainer(options())._opening()
    rows = [json.loads(line) for line in data_file.read_text().splitlines()]
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for row in rows:
            talk = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
            for messages in (talk, [*talk, {"role": "user", "content": "Again?"}, talk[1]]):
                file.write(json.dumps({"messages": messages}) + "\n")
    trainer = Trainer(options(data=(str(path),), max_length=3072))
    assert f"shared beginnings: {2 * len(rows)} samples folded into {len(rows)}" in trainer._opening()
    assert len(trainer.data.learned) + 4 == len(rows)
