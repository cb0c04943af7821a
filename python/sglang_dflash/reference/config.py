"""`config.json` of a draft in transformers' form, which every engine of this folder reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import Qwen3Config

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.draft_folder import plain_name
from sglang_dflash.core.draft_formats import PLAIN_ARCHITECTURE


class DFlashConfig(Qwen3Config):
    """`config.json` of a DFlash draft; `draft` is the validated view of it."""

    def __post_init__(self, **kwargs: Any) -> None:
        if "architectures" not in kwargs and not getattr(self, "architectures", None):
            kwargs["architectures"] = [PLAIN_ARCHITECTURE]
        super().__post_init__(**kwargs)

    @property
    def draft(self) -> DraftConfig:
        """The validated view. Raises ValueError, in one sentence, if this is not a draft that we serve."""
        return DraftConfig.from_dict(self.to_dict())


def read_config(name: str, revision: str | None = None, **where: Any) -> tuple[str, DFlashConfig]:
    """A draft's folder or hub name in the plain layout, as `plain_name` makes it, and its config.

    Args:
        name: a folder, or a name of the hub.
        where: of `from_pretrained`: cache_dir, local_files_only, subfolder or token.

    Raises:
        ValueError: the checkpoint is not a draft that we serve, is quantised, or turns a part of each head.
    """
    name = plain_name(name, revision)
    config = DFlashConfig.from_pretrained(name, revision=revision, **where)
    if (getattr(config, "partial_rotary_factor", None) or 1.0) != 1.0:
        raise ValueError(
            f"The draft {name} turns a part of each head (partial_rotary_factor "
            f"{config.partial_rotary_factor}); here, only whole heads are turned."
        )
    described = config.draft.quantization
    if described is not None:
        method = described.get("quant_method") or described.get("quant_algo")
        raise ValueError(f"The draft {name} is quantised ({method}); here, only plain weights are read.")
    return name, config


def check_call(
    draft: DraftConfig, target: tuple[int, int, int], mask_token_id: int | None, max_new_tokens: int, width: int
) -> None:
    """Raises ValueError, in one sentence, if a draft does not fit a target, or an argument of a call is out of range.

    Args:
        target: its layers, hidden size and vocabulary.
        width: rows of a step.
    """
    if mask_token_id is None:
        raise ValueError(
            f"The draft's config gives its mask only as the text {draft.mask_token!r}: pass mask_token_id."
        )
    replace(draft, mask_token_id=mask_token_id).check_target(*target)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    if width < 2:
        raise ValueError(f"block_size is {width}; it must be at least 2.")
