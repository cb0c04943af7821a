"""The target: its shape, its training on prompts with answers and library text, and how it is saved."""

import copy
import json
import random
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .optim import learning_rate, make_optimizers, take_step
from .progress import Progress
from .tokenizer import END_OF_TEXT, TURN_END, prompt_ids
from .wording import Example

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 6, 4, 2, 64, 576
MAX_POSITIONS, ROPE_THETA, RMS_EPS = 2048, 10000.0, 1e-6
_LIBRARY_ROW = 192
_IGNORED = -100
_SAVE_EVERY = 500


def target_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Qwen3 in miniature, with tied embeddings."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=RMS_EPS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )


def answer_rows(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> list[tuple[list[int], int]]:
    """(ids of the whole turn pair, length of the prompt part) of each example."""
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    rows = []
    for example in examples:
        head = prompt_ids(tokenizer, example.prompt)
        rows.append((head + tokenizer.encode(example.answer, add_special_tokens=False) + [end], len(head)))
    return rows


def library_rows(tokenizer: PreTrainedTokenizerFast, sources: list[str]) -> list[tuple[list[int], int]]:
    """Rows of `_LIBRARY_ROW` ids that are learned from their second token on."""
    ids: list[int] = []
    for source in sources:
        ids += tokenizer.encode(source, add_special_tokens=False, verbose=False)
    return [(ids[i : i + _LIBRARY_ROW], 1) for i in range(0, len(ids) - _LIBRARY_ROW, _LIBRARY_ROW)]


def batches(rows: list[tuple[list[int], int]], tokens: int, seed: int) -> list[list[tuple[list[int], int]]]:
    """Batches of rows of like length, each of at most `tokens` padded ids, in a seeded order."""
    rng = random.Random(seed)
    order = sorted(rng.sample(rows, len(rows)), key=lambda row: len(row[0]))
    done: list[list[tuple[list[int], int]]] = [[]]
    for row in order:
        if len(row[0]) * (len(done[-1]) + 1) > tokens:
            done.append([])
        done[-1].append(row)
    rng.shuffle(done)
    return done


def _tensors(batch: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)  # [N, T] int64, padded on the right
    labels = torch.full((len(batch), width), _IGNORED)  # [N, T] int64, already shifted
    for i, (row, learned_from) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, learned_from - 1 : len(row) - 1] = torch.tensor(row[learned_from:])
    return ids, labels


def _loss(model: Qwen3ForCausalLM, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    # Padding stands on the right and attention is causal, so no mask is needed: the labels skip it.
    ids, labels = _tensors(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [N, T, HIDDEN]
        wanted = labels != _IGNORED
        logits = F.linear(hidden[wanted], model.lm_head.weight)  # [labels, vocab]
    return F.cross_entropy(logits.float(), labels[wanted])


def train_target(
    config: Qwen3Config,
    rows: list[tuple[list[int], int]],
    folder: Path,
    *,
    steps: int,
    batch_tokens: int,
    peak: float,
    seed: int,
) -> None:
    """Train a target for `steps` batches, saving it into `folder` now and then and at the end.

    Passes over `rows` repeat in fresh orders as needed.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    optimizers = make_optimizers(model, peak)
    progress = Progress("target", steps)
    queue: list[list[tuple[list[int], int]]] = []
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


def save_target(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write bfloat16 weights, config.json and generation_config.json beside the tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner only
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = ROPE_THETA  # readers older than rope_parameters look here
    _write_json(path, config)
    stop = [model.config.eos_token_id, model.config.pad_token_id]
    _write_json(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": stop[1]})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_target(folder: Path) -> Qwen3ForCausalLM:
    """The saved target as it is served: bfloat16-rounded weights in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
