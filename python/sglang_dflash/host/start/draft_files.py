"""The draft's files, before any weight is read: its layout, config, mask, weights' headers and context."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.environ import envs
from sglang.srt.utils.hf_transformers.common import get_context_length
from sglang.srt.utils.hf_transformers.config import get_config
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils.hub import cached_file

from sglang_dflash.core import draft_weights
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.draft_folder import plain_name
from sglang_dflash.core.draft_formats import NOT_PLAIN, read_published
from sglang_dflash.core.mask_embedding import MASK_EMBEDDING_FILE, read_mask_embedding

logger = logging.getLogger(__name__)
SAFETENSORS_FORMATS = ("auto", "safetensors")
NO_DRAFT = "--speculative-draft-model-path is missing: give the DFlash draft's folder or hub name."


def use_plain_layout(server_args: Any) -> None:
    """Has SGLang, too, read a draft of another layout than z-lab's, from a folder in the cache.

    Raises:
        ValueError: the folder cannot be made; one sentence.
    """
    cfg = resolving_view(server_args)
    path = cfg.speculative_draft_model_path
    try:
        plain = plain_name(path, cfg.speculative_draft_model_revision)
    except OSError as error:
        raise ValueError(f"the draft's folder cannot be made: {error}. XDG_CACHE_HOME names another place.") from None
    if plain != path:
        declare_resolution(
            server_args,
            "sglang_dflash.draft_layout",
            speculative_draft_model_path=plain,
            speculative_draft_model_revision=None,
        )


def read_draft_config(cfg: Any) -> DraftConfig:
    """The draft's config, with its mask token id resolved.

    Args:
        cfg: server arguments, or SGLang's view of them.

    Raises:
        ValueError: one sentence on what is wrong with the draft.
    """
    path = cfg.speculative_draft_model_path
    if path is None:
        raise ValueError(NO_DRAFT)
    if Path(path).is_file():
        raise ValueError(f"--speculative-draft-model-path is {path}, a file; give the draft's folder or hub name.")
    plain, layout = read_published(_config_dict(path, cfg.speculative_draft_model_revision))
    draft = replace(DraftConfig.from_dict(with_overrides(plain, cfg.json_model_override_args)), layout=layout)
    if draft.mask_token_id is None:
        draft = replace(draft, mask_token_id=_mask_token_id(cfg, draft.mask_token))
    return draft


def with_overrides(plain: dict[str, Any], overrides: str) -> dict[str, Any]:
    """A draft's plain config as SGLang overrides it: target and draft alike, key by key at the top level.

    Args:
        overrides: of --json-model-override-args.

    Raises:
        ValueError: SGLang would not see what the keys of another layout say; one sentence.
    """
    given = json.loads(overrides)
    config = plain | given
    if NOT_PLAIN.intersection(given) or read_published(config).config != config:
        raise ValueError(
            f"--json-model-override-args is {overrides}, which SGLang joins to the draft's config, too, and does not "
            "read there as this draft's trainer means it; allowed: the top-level keys of z-lab's layout, such as "
            '"is_causal" or "sliding_window". Write others into a copy of the draft\'s config.json.'
        )
    return config


def trained_mask_embedding(cfg: Any, draft: DraftConfig) -> torch.Tensor | None:
    """The result of `read_mask_embedding`; None if the draft has no such file.

    Raises:
        ValueError: one sentence on what is wrong with the file.
    """
    path = cached_file(
        cfg.speculative_draft_model_path,
        MASK_EMBEDDING_FILE,
        revision=cfg.speculative_draft_model_revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if path is None else read_mask_embedding(path, draft)


def check_weights(cfg: Any, draft: DraftConfig) -> None:
    """Judges the draft's weights before the target's are read; other formats than safetensors are not judged.

    Raises:
        ValueError: one sentence that names the file or the tensor.
    """
    if (cfg.speculative_draft_load_format or cfg.load_format) not in SAFETENSORS_FORMATS:
        return
    folder = weights_folder(cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision)
    if folder is None or not (Path(cfg.speculative_draft_model_path).is_dir() or any(folder.glob("*.safetensors"))):
        return  # the hub's may be in another format
    shapes = draft_weights.read_shapes(folder)
    unread = [] if shapes is None else draft_weights.check_weights(shapes, draft)
    if unread:
        logger.warning(
            "The draft's weights hold %s, which nothing reads: its config.json leaves them out, or they are of another "
            "kind of draft.",
            ", ".join(unread),
        )


def weights_folder(path: str, revision: str | None) -> Path | None:
    """Where the draft's weights lie; those of a hub name are fetched, as SGLang would do later. None: they cannot be
    fetched, which SGLang reports."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    except OSError:
        return None


def check_context(cfg: Any, context_len: int) -> None:
    """SGLang's own check ends in a traceback, after the target's weights are read.

    Raises:
        ValueError: the draft was made for shorter contexts; both numbers and the ways out.
    """
    if envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        return
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    config = get_config(
        path,
        trust_remote_code=cfg.trust_remote_code,
        revision=revision,
        model_override_args=json.loads(cfg.json_model_override_args),
    )
    own = get_context_length(config)
    if own < context_len:
        raise ValueError(
            f"the draft's context has {own} tokens (max_position_embeddings) and {context_len} are served: give "
            f"--context-length {own}, or set {envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.name}=1 if the draft is "
            "right beyond them."
        )


def _mask_token_id(cfg: Any, mask_token: str | None) -> int:
    path = cfg.tokenizer_path or cfg.model_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code, revision=cfg.revision)
    except OSError as error:
        raise ValueError(f"the tokenizer at {path!r} cannot be read: {str(error).splitlines()[0]}") from None
    vocabulary = tokenizer.get_vocab()
    if mask_token is None or mask_token not in vocabulary:
        raise ValueError(f"dflash_config.mask_token {mask_token!r} is not in the target's tokenizer.")
    return vocabulary[mask_token]


def _config_dict(path: str, revision: str | None) -> dict[str, Any]:
    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the draft's config.json at {path!r} cannot be read: {reason}") from None
    if not config:
        raise ValueError(f"there is no draft config.json at {path!r} (--speculative-draft-model-path).")
    return config
