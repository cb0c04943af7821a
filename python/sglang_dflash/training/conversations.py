"""Reads conversations as token ids with the spans of the answers, and orders them into batches."""

from __future__ import annotations

import os
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.compute
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError

from sglang_dflash import __version__
from sglang_dflash.serving.errors import first_line
from sglang_dflash.serving.messages import messages_of, render, tools_of
from sglang_dflash.serving.rows import object_of, rows_of

# Number of batches that are sorted by length together: little padding, and still a shuffled order.
_SORTED_BATCHES = 32
# From this number of conversations on, several processes tokenize.
_MANY = 20_000
_TEXTS = Features({"place": Value("string"), "text": Value("string")})
_FEATURES = Features({"input_ids": List(Value("int64")), "spans": List(List(Value("int64")))})


def tokenize(
    tokenizer: Any, messages: list[dict[str, Any]], end_ids: set[int], **template: Any
) -> list[dict[str, Any]]:
    """One sample with all assistant turns if the chat template only appends text, else one sample per assistant turn.

    Args:
        end_ids: the target's end tokens; a turn is learned up to and including the first of them.
        template: keyword arguments of the chat template, `tools` among them.

    Returns:
        Samples with `input_ids` and `spans`; a span [start, end) holds the tokens of one answer.

    Raises:
        ValueError: the chat template refuses this conversation, or does not write a tool call where it was made.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [
        (render(tokenizer, messages[:i], True, **template), render(tokenizer, messages[: i + 1], False, **template))
        for i in turns
    ]
    for i, (prompt, full) in zip(turns, texts, strict=True):
        _check_calls(messages[i], prompt, full)
    whole = texts[-1][1] if texts else ""
    if all(whole.startswith(full) and full.startswith(prompt) for prompt, full in texts):
        samples = [(whole, [(len(prompt), len(full)) for prompt, full in texts])]
    else:
        # The template rewrites earlier turns (it cuts out thinking): each answer gets a sample with its own prompt.
        end = tokenizer.eos_token or ""
        samples = [
            (full if full.startswith(prompt) else prompt + messages[i]["content"] + end, [(len(prompt), 1 << 60)])
            for i, (prompt, full) in zip(turns, texts, strict=True)
        ]
    return [sample for text, spans in samples if (sample := _encode(tokenizer, text, spans, end_ids))["spans"]]


def _check_calls(message: Mapping[str, Any], prompt: str, full: str) -> None:
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        if not full.startswith(prompt) or name not in full[len(prompt) :]:
            raise ValueError(
                f"the chat template does not write the call of {name} behind its prompt, so it cannot be learned; "
                "`sglang-dflash regenerate` makes data that can."
            )


def _encode(tokenizer: Any, text: str, spans: list[tuple[int, int]], end_ids: set[int]) -> dict[str, Any]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    begins = [begin for begin, _ in offsets]
    learned = []
    for first, last in spans:
        places = range(bisect_left(begins, first), bisect_left(begins, last))
        inside = [i for i in places if begins[i] < offsets[i][1] <= last]
        if inside:
            stop = next((i for i in inside if ids[i] in end_ids), inside[-1])
            learned.append([inside[0], stop + 1])
    return {"input_ids": ids, "spans": learned}


def trim(sample: Mapping[str, Any], max_length: int) -> dict[str, Any] | None:
    """The sample cut to `max_length` tokens; None if no span keeps at least two tokens."""
    spans = [[start, min(end, max_length)] for start, end in sample["spans"]]
    spans = [[start, end] for start, end in spans if end - start >= 2]
    return {"input_ids": list(sample["input_ids"][:max_length]), "spans": spans} if spans else None


def read(
    paths: Sequence[str], tokenizer: Any, end_ids: set[int], max_length: int, template: Mapping[str, Any]
) -> Dataset:
    """All samples of the files. `datasets` caches the tokenized samples for the next start.

    Raises:
        ValueError: a file is none that `rows_of` reads, a row has no conversation, or nothing is left to learn. The
            message names file, line and field.
    """
    arguments = (tokenizer, end_ids, max_length, template)
    data = concatenate_datasets([_read_file(path, *arguments) for path in paths])
    if not len(data):
        raise ValueError(f"{', '.join(paths)} holds nothing to learn: no assistant turn has two tokens or more.")
    return data


def _read_file(path: str, tokenizer: Any, end_ids: set[int], max_length: int, template: Mapping[str, Any]) -> Dataset:
    def convert(rows: dict[str, list[str]], version: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [], "spans": []}
        for place, text in zip(rows["place"], rows["text"], strict=True):
            for sample in _samples(text, tokenizer, end_ids, template, f"{path}, {place}"):
                if (kept := trim(sample, max_length)) is not None:
                    found["input_ids"].append(kept["input_ids"])
                    found["spans"].append(kept["spans"])
        return found

    if next(rows_of(Path(path), path), None) is None:
        raise ValueError(f"{path} holds no conversation: there are no lines.")
    stat = os.stat(path)
    # `datasets` keeps the rows under these arguments: another version, or a changed file, is read again.
    reading = {"path": path, "size": stat.st_size, "changed_ns": stat.st_mtime_ns, "version": __version__}
    try:
        raw = Dataset.from_generator(_rows, features=_TEXTS, gen_kwargs=reading)
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        said = str(cause) if isinstance(cause, ValueError) else f"{path} cannot be read: {first_line(cause)}."
        raise ValueError(said) from None
    return raw.map(
        convert,
        batched=True,
        remove_columns=raw.column_names,
        features=_FEATURES,
        num_proc=min(os.cpu_count() or 1, 16) if len(raw) >= _MANY else None,
        fn_kwargs={"version": __version__},  # part of the cache's key: another version tokenizes again
        desc="Tokenizing",
    )


def _rows(path: str, **reading: Any) -> Iterator[dict[str, str]]:
    # As text: read as JSON, the objects of all rows would get the keys of all others, with null as value.
    for row in rows_of(Path(path), path):
        yield {"place": row.place, "text": row.text}


def lengths(data: Dataset) -> list[int]:
    """Number of tokens of every sample."""
    table = data.select_columns("input_ids").with_format("arrow")[:]
    return pyarrow.compute.list_value_length(table["input_ids"]).to_pylist()


def check_ids(data: Dataset, vocab_size: int, where: str) -> None:
    """Raises ValueError if a sample has a token id outside the target's embedding."""
    ids = pyarrow.compute.min_max(pyarrow.compute.list_flatten(data.data.column("input_ids"))).as_py()
    if ids["min"] < 0 or ids["max"] >= vocab_size:
        raise ValueError(
            f"{where} has token ids from {ids['min']} to {ids['max']}; they must be from 0 to {vocab_size - 1}."
        )


def seen_ids(*data: Dataset) -> set[int]:
    """All token ids of the samples."""
    found: set[int] = set()
    for one in data:
        found.update(pyarrow.compute.unique(pyarrow.compute.list_flatten(one.data.column("input_ids"))).to_pylist())
    return found


def learned_counts(data: Dataset, vocab_size: int) -> torch.Tensor:
    """[V] int64; how often each id stands in an answer."""
    answers = [torch.tensor(sample["input_ids"][start:end]) for sample in data for start, end in sample["spans"]]
    return torch.bincount(torch.cat(answers), minlength=vocab_size)


def _samples(
    text: str, tokenizer: Any, end_ids: set[int], template: Mapping[str, Any], where: str
) -> Iterable[Mapping[str, Any]]:
    try:
        row = object_of(text)
        for key in ("spans", "loss_mask"):
            if row.get("input_ids") and row.get(key):
                _check_ids(row["input_ids"])
                spans = row[key] if key == "spans" else _spans(row[key], len(row["input_ids"]))
                _check_spans(spans, len(row["input_ids"]))
                return [{"input_ids": row["input_ids"], "spans": spans}]
        if isinstance(row.get("prompt"), str) and row.get("completion") and not row.get("response"):
            # For some trainers it goes on in the prompt's text, for others it is the answer of a chat.
            raise ValueError("it has `prompt` and `completion`; if this is a chat's answer, name it `response`.")
        return tokenize(tokenizer, messages_of(row), end_ids, **{**template, **tools_of(row)})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _spans(loss_mask: Any, length: int) -> list[list[int]]:
    """The runs of 1 in a mask, as speculators writes it beside the ids."""
    valid = isinstance(loss_mask, list) and len(loss_mask) == length
    if not valid or not all(isinstance(one, int) and one in (0, 1) for one in loss_mask):
        raise ValueError(f"its loss_mask must be a list of 0 and 1, one for each of its {length} input_ids.")
    edges = [place for place, (before, one) in enumerate(pairwise([0, *loss_mask, 0])) if one != before]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, list) or not all(type(token) is int and abs(token) < 1 << 31 for token in ids):
        raise ValueError("its input_ids must be a list of token ids.")


def _check_spans(spans: Any, length: int) -> None:
    def within(span: Any) -> bool:
        pair = isinstance(span, list) and len(span) == 2 and all(type(place) is int for place in span)
        return pair and 0 <= span[0] <= span[1] <= length

    if not isinstance(spans, list) or not all(map(within, spans)):
        raise ValueError(f"its spans are {spans}; each must be [start, end] within its {length} input_ids.")


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of similar length that hold every index once; the order depends only on seed and epoch."""
    rng = random.Random(f"{seed}-{epoch}")
    order = rng.sample(range(len(lengths)), len(lengths))
    group = batch_size * _SORTED_BATCHES
    batches = []
    for start in range(0, len(order), group):
        alike = sorted(order[start : start + group], key=lambda index: lengths[index])
        batches += [alike[i : i + batch_size] for i in range(0, len(alike), batch_size)]
    rng.shuffle(batches)
    return batches


def micro_batches(
    lengths: Sequence[int], batch_size: int, seed: int, rank: int, ranks: int, start: int
) -> Iterator[list[int]]:
    """This rank's micro-batches from number `start` on, over endless epochs.

    All ranks get the same number of micro-batches per epoch.
    """
    epoch = 0
    while True:
        batches = epoch_batches(lengths, batch_size, seed, epoch)
        mine = batches[rank::ranks][: max(1, len(batches) // ranks)] or [batches[rank % len(batches)]]
        if start >= len(mine):
            start -= len(mine)
        else:
            yield from mine[start:]
            start = 0
        epoch += 1


def collate(
    samples: Sequence[Mapping[str, Any]], device: torch.device, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] int64, padded on the right with 0, and the learned positions [B, T] bool; `multiple` divides T."""
    width = max(len(sample["input_ids"]) for sample in samples)
    width += -width % multiple
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    learned = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        for start, end in sample["spans"]:
            learned[row, start:end] = True
    return ids.to(device), learned.to(device)
