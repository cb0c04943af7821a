"""Reads JSONL conversations as token ids with the spans of the answers, and orders them into batches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute
import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from jinja2 import TemplateError

from sglang_dflash import __version__

_FROM = {"human": "user", "gpt": "assistant"}
# Number of batches that are sorted by length together: little padding, and still a shuffled order.
_SORTED_BATCHES = 32
# From this number of conversations on, several processes tokenize.
_MANY = 20_000
FORMS = (
    '"messages": [{"role", "content"}], "conversations": [{"from", "value"}], "prompt" and "response", or '
    '"input_ids" and "spans"'
)


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation of one JSONL object.

    Raises:
        ValueError: it has none of the known forms, no user turn, or a turn without role or content.
    """
    if row.get("messages"):
        pairs = [(turn.get("role"), turn.get("content")) for turn in _turns(row["messages"])]
    elif row.get("conversations"):
        turns = _turns(row["conversations"])
        pairs = [(_FROM.get(turn.get("from"), turn.get("from")), turn.get("value")) for turn in turns]
    elif row.get("prompt") is not None:
        pairs = [("user", row["prompt"])]
        pairs += [("assistant", row["response"])] if row.get("response") is not None else []
    else:
        raise ValueError(f"it has the keys {sorted(row)}; it must have {FORMS}.")
    if row.get("system"):
        pairs = [("system", row["system"]), *pairs]
    if not pairs or not all(isinstance(role, str) and isinstance(content, str) for role, content in pairs):
        raise ValueError("every turn must have a role and a content, both text.")
    first_user = next((i for i, (role, _) in enumerate(pairs) if role == "user"), len(pairs))
    # Assistant turns before the first user turn (ShareGPT has such rows) answer no question: they are dropped.
    kept = [turn for i, turn in enumerate(pairs) if i >= first_user or turn[0] != "assistant"]
    if first_user == len(pairs):
        raise ValueError("it has no user turn.")
    return [{"role": role, "content": content} for role, content in kept]


def _turns(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise ValueError("its turns must be a list of objects.")
    return value


def tokenize(
    tokenizer: Any, messages: list[dict[str, str]], end_ids: set[int], **template: Any
) -> list[dict[str, Any]]:
    """One sample with all assistant turns if the chat template only appends text, else one sample per assistant turn.

    Args:
        end_ids: the target's end tokens; a turn is learned up to and including the first of them.
        template: keyword arguments of the chat template.

    Returns:
        Samples with `input_ids` and `spans`; a span [start, end) holds the tokens of one answer.

    Raises:
        ValueError: the chat template refuses this conversation.
    """

    def text(turns: list[dict[str, str]], asks: bool) -> str:
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks, **template)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [(text(messages[:i], True), text(messages[: i + 1], False)) for i in turns]
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


def _encode(tokenizer: Any, text: str, spans: list[tuple[int, int]], end_ids: set[int]) -> dict[str, Any]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    learned = []
    for first, last in spans:
        inside = [i for i, (begin, end) in enumerate(offsets) if begin >= first and end <= last and end > begin]
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
        ValueError: a file is not JSONL, a line has no conversation, or nothing is left to learn.
    """

    def convert(rows: dict[str, list[Any]], indices: list[int], version: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [], "spans": []}
        for place, index in enumerate(indices):
            row = {key: values[place] for key, values in rows.items() if values[place] is not None}
            for sample in _samples(row, tokenizer, end_ids, template, f"{', '.join(paths)}, conversation {index + 1}"):
                if (kept := trim(sample, max_length)) is not None:
                    found["input_ids"].append(kept["input_ids"])
                    found["spans"].append(kept["spans"])
        return found

    try:
        raw = load_dataset("json", data_files=list(paths), split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{', '.join(paths)} cannot be read as JSONL: {_first_line(error)}") from None
    except StopIteration:  # the reader's error for an empty file
        raise ValueError(f"{', '.join(paths)} cannot be read as JSONL: there are no lines.") from None
    data = raw.map(
        convert,
        batched=True,
        with_indices=True,
        remove_columns=raw.column_names,
        num_proc=min(os.cpu_count() or 1, 16) if len(raw) >= _MANY else None,
        fn_kwargs={"version": __version__},  # part of the cache's key: another version tokenizes again
        desc="Tokenizing",
    )
    if not len(data):
        raise ValueError(f"{', '.join(paths)} holds nothing to learn: no assistant turn has two tokens or more.")
    return data


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


def _samples(
    row: dict[str, Any], tokenizer: Any, end_ids: set[int], template: Mapping[str, Any], where: str
) -> Iterable[Mapping[str, Any]]:
    try:
        if row.get("input_ids") and row.get("spans"):
            _check_spans(row["spans"], len(row["input_ids"]))
            return [row]
        return tokenize(tokenizer, messages_of(row), end_ids, **template)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_spans(spans: Sequence[Sequence[int]], length: int) -> None:
    if not all(len(span) == 2 and 0 <= span[0] <= span[1] <= length for span in spans):
        raise ValueError(f"its spans are {spans}; each must be [start, end] within its {length} input_ids.")


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]


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
