"""What a run learns from and is measured on: the samples of --data, and held-out ones by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from sglang_dflash.training.conversations import check_ids, read
from sglang_dflash.training.folding import fold
from sglang_dflash.training.frozen import FrozenTarget
from sglang_dflash.training.options import TrainOptions

HELD_OUT = "held-out"
LEARNED = "learned text, nothing is held out"


@dataclass(frozen=True, slots=True)
class Data:
    """
    Fields:
        learned: the samples to train on.
        held_out: samples by kind: the files of --held-out-data by name, or `HELD_OUT`, a share of --data, or `LEARNED`,
            the only sample of --data.
        found: number of --data's samples before folding.
        folded: and after it.
    """

    learned: Dataset
    held_out: Mapping[str, Dataset]
    found: int
    folded: int

    @property
    def held_out_count(self) -> int:
        return sum(map(len, self.held_out.values()))

    def all(self) -> list[Dataset]:
        return [self.learned, *self.held_out.values()]


def read_data(options: TrainOptions, target: FrozenTarget) -> Data:
    """
    Raises:
        ValueError: a file holds no conversations, has ids outside the target's embedding, or nothing is left to learn.
    """

    def samples(paths: tuple[str, ...], flag: str) -> Dataset:
        template = dict(options.chat_template_kwargs)
        found = read(paths, target.tokenizer, target.end_ids, options.max_length, template)
        check_ids(found, target.config.vocab_size, flag)
        return found

    found = samples(options.data, "--data")
    learned = folded = fold(found)
    held_out = {Path(path).stem: fold(samples((path,), "--held-out-data")) for path in options.held_out_data}
    if not held_out and len(folded) == 1:
        held_out = {LEARNED: folded}
    elif not held_out:
        count = min(len(folded) - 1, max(1, round(len(folded) * options.held_out)))
        split = folded.train_test_split(test_size=count, seed=options.seed)
        learned, held_out = split["train"], {HELD_OUT: split["test"]}
    limit = options.held_out_limit
    limited = {kind: some.select(range(min(len(some), limit))) for kind, some in held_out.items()}
    return Data(learned, limited, len(found), len(folded))
