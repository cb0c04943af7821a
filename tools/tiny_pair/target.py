"""The target: its training on conversations and library text, and how it is saved."""

import copy
import json
import random
from array import array
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from tools.tiny_pair.conversations import Conversation
from tools.tiny_pair.optim import learning_rate, make_optimizers, take_step
from tools.tiny_pair.progress import Progress
from tools.tiny_pair.shapes import MAX_POSITIONS, ROPE_THETA
from tools.tiny_pair.tokenizer import TURN_END, TURN_START

_LIBRARY_ROW = 192
_IGNORED = -100
_SAVE_EVERY = 300
_ENCODED_AT_ONCE = 20_000

Row = tuple[array, list[tuple[int, int]]]  # 16-bit ids, and the spans of them that are labels


def conversation_rows(tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> list[Row]:
    """Rows in the chat template's format; the labels are the assistant's messages and their <|im_end|>."""
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in (TURN_START, TURN_END))
    roles = {message["role"] for conversation in conversations for message in conversation.messages}
    heads = {role: [start, *tokenizer.encode(f"{role}\n", add_special_tokens=False)] for role in roles}
    tail = [end, *tokenizer.encode("\n", add_special_tokens=False)]
    rows = []
    for first in range(0, len(conversations), _ENCODED_AT_ONCE):
        part = conversations[first : first + _ENCODED_AT_ONCE]
        texts = [message["content"] for conversation in part for message in conversation.messages]
        contents = iter(tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])
        for conversation in part:
            ids: list[int] = []
            spans: list[tuple[int, int]] = []
            for message in conversation.messages:
                ids += heads[message["role"]]
                content = next(contents)
                if message["role"] == "assistant":
                    spans.append((len(ids), len(ids) + len(content) + 1))
                ids += content + tail
            ends = [(first, min(last, MAX_POSITIONS)) for first, last in spans if first < MAX_POSITIONS]
            rows.append((array("H", ids[:MAX_POSITIONS]), ends))
    return rows


def library_rows(tokenizer: PreTrainedTokenizerFast, sources: list[str]) -> list[Row]:
    """Rows of `_LIBRARY_ROW` ids; the labels begin at the second id."""
    ids: list[int] = []
    for source in sources:
        ids += tokenizer.encode(source, add_special_tokens=False, verbose=False)
    starts = range(0, len(ids) - _LIBRARY_ROW, _LIBRARY_ROW)
    return [(array("H", ids[i : i + _LIBRARY_ROW]), [(1, _LIBRARY_ROW)]) for i in starts]


def batches(rows: list[Row], tokens: int, seed: int) -> list[list[Row]]:
    """Batches of rows of similar length, each of at most `tokens` padded ids, in a seeded order."""
    rng = random.Random(seed)
    order = sorted(rng.sample(rows, len(rows)), key=lambda row: len(row[0]))
    done: list[list[Row]] = [[]]
    for row in order:
        if done[-1] and len(row[0]) * (len(done[-1]) + 1) > tokens:
            done.append([])
        done[-1].append(row)
    rng.shuffle(done)
    return done


def _tensors(batch: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)  # [N, T] int64, padded on the right
    labels = torch.full((len(batch), width), _IGNORED)  # [N, T] int64, already shifted
    for i, (row, spans) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row.tolist())
        for first, last in spans:
            labels[i, first - 1 : last - 1] = ids[i, first:last]
    return ids, labels


def _loss(model: PreTrainedModel, batch: list[Row]) -> torch.Tensor:
    # No mask is needed: padding is on the right, attention is causal, and the labels skip the padding.
    # float32 throughout: without bfloat16 units (AVX2 and plain AVX-512), bfloat16 is several times slower.
    ids, labels = _tensors(batch)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [N, T, H]
    wanted = labels != _IGNORED
    logits = F.linear(hidden[wanted], model.lm_head.weight)  # [labels, vocab]
    return F.cross_entropy(logits, labels[wanted])


def train_target(
    model: PreTrainedModel,
    rows: list[Row],
    folder: Path,
    *,
    steps: int,
    batch_tokens: int,
    peak: float,
    seed: int,
) -> None:
    """Trains `model` (float32) for `steps` batches; saves it to `folder` every _SAVE_EVERY steps and at the end.

    Passes over `rows` repeat in new orders as needed.
    """
    optimizers = make_optimizers(model, peak)
    progress = Progress("target", steps)
    queue: list[list[Row]] = []
    turn = 0
    for step in range(steps):
        if not queue:
            queue = batches(rows, batch_tokens, seed + turn)
            turn += 1
        batch = queue.pop()
        loss = _loss(model, batch)
        loss.backward()
        take_step(model, optimizers, learning_rate(step, steps, peak))
        progress.add(loss.item(), sum(len(ids) for ids, _ in batch))
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == steps:
            save_target(model, folder)


def new_target(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A target with random weights, float32."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).float()


def save_target(model: PreTrainedModel, folder: Path) -> None:
    """Writes bfloat16 weights, config.json and generation_config.json to the tokenizer's folder."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # save_pretrained makes it readable by its owner only
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = ROPE_THETA  # for readers that do not know rope_parameters
    _write_json(path, config)
    stop = [model.config.eos_token_id, model.config.pad_token_id]
    _write_json(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": stop[1]})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_target(folder: Path) -> PreTrainedModel:
    """Loads the saved target as it is served: bfloat16-rounded weights in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
