"""The target as the trainer needs it: features of clean text, embedding and head, all frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.reference import FeatureTaps, end_token_ids, text_config
from sglang_dflash.serving.rendering import special_ids
from sglang_dflash.training.layout import new_config
from sglang_dflash.training.options import OF_TARGET, TrainOptions

_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# Number of values of each weight that tell one checkpoint from another.
_DIGESTED = 256
# Config keys by which a target scales embeddings or logits.
_SCALINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier", "lm_head_multiplier")


class FrozenTarget:
    """A Hugging Face causal language model that is read and never changed."""

    def __init__(self, name: str, dtype: str, device: torch.device) -> None:
        """
        Args:
            dtype: "auto" means the checkpoint's dtype; on a CPU it means float32, which is faster there.

        Raises:
            ValueError: the target cannot be loaded, or its head is not one matrix without bias.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"--target-dtype is {dtype}; it must be one of {', '.join(_DTYPES)}.")
        chosen = _DTYPES[dtype] or ("auto" if device.type != "cpu" else torch.float32)
        try:
            place = {} if device.type == "cpu" else {"device_map": {"": device}}  # never whole in CPU memory
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype=chosen, **place).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"The target {name} cannot be loaded: {str(error).splitlines()[0]}") from None
        self.model.requires_grad_(False)
        self.config = text_config(self.model)
        self.end_ids = set(end_token_ids(self.model))
        self._decoder = self.model.get_decoder()
        head = self.model.get_output_embeddings()
        if getattr(head, "weight", None) is None or getattr(head, "bias", None) is not None:
            raise ValueError(
                f"The output head of the target {name} is not one matrix without bias; a draft cannot share it."
            )
        self._head_weight = head.weight

    def digest(self, taps: tuple[int, ...]) -> str:
        """Names the features of these taps: equal for equal weights, config and dtype."""
        found = hashlib.sha256(f"{self.config.to_json_string()} {taps} {self._head_weight.dtype}".encode())
        for weight in self.model.parameters():
            some = weight.detach().flatten()[:: weight.numel() // _DIGESTED + 1]
            found.update(some.float().cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def _exact(self) -> torch.autocast:
        """Turns autocast off: the target runs in its own dtype, whatever the draft's precision is."""
        return torch.autocast(self._head_weight.device.type, enabled=False)

    @torch.no_grad()
    def features(self, ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """Context features [B, T, taps * H] of clean ids [B, T] int64, padded on the right."""
        # Attention is causal and padding comes last, so the clean positions need no mask.
        with self._exact(), FeatureTaps(self.model, taps) as recorded:
            self._decoder(input_ids=ids, use_cache=False)
            return recorded.take()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] of ids [...], the draft's input for its block."""
        with self._exact():
            return self.model.get_input_embeddings()(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits: [N, H] -> [N, V]; gradients flow to `hidden` only."""
        return self._logits(hidden, self._head_weight)

    def head_of(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Like `head`, of `ids` [M] int64 alone: [N, H] -> [N, M]."""
        weight = self._head_weight[ids]
        return lambda hidden: self._logits(hidden, weight)

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with self._exact():
            return F.linear(hidden.to(weight.dtype), weight)


def check_target(options: TrainOptions) -> None:
    """Checks the options against the target's config and tokenizer, before any weight is read.

    Raises:
        ValueError: the target is not supported, or taps, mask token or shape do not fit it.
    """
    try:
        config = AutoConfig.from_pretrained(options.target).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(options.target)
    except (OSError, ValueError) as error:
        raise ValueError(f"The target {options.target} cannot be read: {str(error).splitlines()[0]}") from None
    layers = config.num_hidden_layers
    outside = [tap for tap in options.taps or () if not 0 <= tap < layers - 1]
    if outside:
        raise ValueError(f"--taps has {outside}; a draft can read layers 0 to {layers - 2} of the target's {layers}.")
    scaled = [key for key in _SCALINGS if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(
            f"The target {options.target} scales embeddings or logits ({', '.join(scaled)}); "
            "the trainer does not support that."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"The target {options.target} has no fast tokenizer; the trainer needs its offsets to locate the answers."
        )
    if options.init in (None, OF_TARGET):
        new_config(config, options, mask_token_id(tokenizer, config.vocab_size, options.mask_token_id))


def mask_token_id(tokenizer: Any, rows: int, chosen: int | str | None, seen: Iterable[int] = ()) -> int:
    """The mask token's id: as given, else the tokenizer's mask token, else the id after the tokenizer's last one.

    Args:
        rows: number of rows of the target's embedding.
        chosen: --mask-token-id; "auto" falls back to a special token that is not `seen`.
        seen: the ids of the data, and those that end the target's answers.

    Raises:
        ValueError: there is no such id, or it is outside the embedding.
    """
    found = tokenizer.mask_token_id if chosen in (None, "auto") else chosen
    if found is None:
        found = max(tokenizer.get_vocab().values()) + 1
        if found >= rows:
            unused = _unused(tokenizer, seen)
            if chosen is None or not unused:
                may = f"; {_runs(unused)} may do: auto takes the first that the data does not have" if unused else ""
                raise ValueError(
                    f"The target's tokenizer uses all {rows} rows of the embedding and has no mask token; "
                    f"give --mask-token-id, a token that occurs in no text{may}."
                )
            found = unused[0]
    if not 0 <= int(found) < rows:
        raise ValueError(f"--mask-token-id is {found}; it must be a row of the target's embedding, 0 to {rows - 1}.")
    return int(found)


def _unused(tokenizer: Any, seen: Iterable[int]) -> list[int]:
    """The special tokens that are not `seen`, have no role of their own and do not stand in the chat template."""
    roles = ("bos", "eos", "pad", "unk", "sep", "cls")
    used = {*seen, *(getattr(tokenizer, f"{role}_token_id", None) for role in roles)}
    template = str(tokenizer.chat_template or "")
    unused = special_ids(tokenizer) - used
    return sorted(one for one in unused if tokenizer.added_tokens_decoder[one].content not in template)


def _runs(numbers: list[int]) -> str:
    """Rising numbers as words: 3 to 16, 20."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
