"""Checks of the server's arguments, in the main process, before any child exists or any weight is read."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.environ import envs
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils.hub import cached_file

from sglang_dflash import __version__, ops
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.mask_embedding import MASK_EMBEDDING_FILE, read_mask_embedding
from sglang_dflash.host import capture, recurrent_state, short_head, simulated, widths
from sglang_dflash.host.cpu.detect import ATTENTION_BACKEND, cpu_platform_in_use
from sglang_dflash.host.features import refuse_features
from sglang_dflash.host.version import WORKER_VARIABLE, builtin_worker_requested

logger = logging.getLogger(__name__)
CANNOT_START = "DFLASH cannot start: "
GRAMMAR_BACKENDS = ("xgrammar", "llguidance", "none")
# Targets that read images, too, and that our tests have run.
VISION_TARGETS = {
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
}


def asks_for_dflash(server_args: Any) -> bool:
    """Whether the user chose `--speculative-algorithm DFLASH`, ours or the built-in one."""
    return (resolving_view(server_args).speculative_algorithm or "").upper() == "DFLASH"


def check_features(server_args: Any, previous: Any) -> None:
    """Runs before all of the host's checks, because some of them would end in a traceback before our sentence.

    Raises:
        SystemExit: the sentence of `refuse_features`.
    """
    if asks_for_dflash(server_args) and not builtin_worker_requested():
        try:
            refuse_features(server_args._raw_input)
        except ValueError as error:
            raise SystemExit(f"{CANNOT_START}{error}") from None
        _keep_draft_unquantised(server_args)
    previous(server_args)


def _keep_draft_unquantised(server_args: Any) -> None:
    """The host gives the draft the target's --quantization where the user gave it none. A checkpoint that says in its
    config how it is quantised is read as it says, either way."""
    if resolving_view(server_args).speculative_draft_model_quantization is None:
        declare_resolution(
            server_args, "sglang_dflash.draft_quantization", speculative_draft_model_quantization="unquant"
        )


def check(server_args: Any, previous: Any) -> None:
    """Checks what DFLASH needs, then runs the host's own speculative checks. For another algorithm only the host's run.

    Raises:
        SystemExit: one sentence that names the value that came, what is allowed, and the flag.
    """
    if not asks_for_dflash(server_args) or builtin_worker_requested():
        previous(server_args)
        return
    cfg = resolving_view(server_args)
    try:
        _refuse_unserved(cfg)
        draft = read_draft_config(cfg)
        target = model_config_of(server_args)
        _check_target(target, draft)
        draft.check_ranks(cfg.tp_size)
        _check_quantization(cfg, draft)
        trained_mask_embedding(cfg, draft)
        block_size = _block_size(cfg, draft, target.context_len)
        if simulated.simulates():
            simulated.check(block_size, cfg.tp_size)
        widths.check(cfg.device, block_size)
        short_head.asked(target.vocab_size)
        recurrent_state.check(cfg, target, block_size, cpu_platform_in_use())
        declare_resolution(server_args, "sglang_dflash.block_size", speculative_num_draft_tokens=block_size)
        previous(server_args)
        _check_sinks(cfg, draft)
        widths.check_server(resolving_view(server_args), target)
    except ValueError as error:
        raise SystemExit(f"{CANNOT_START}{error}") from None
    cfg = resolving_view(server_args)
    logger.info(
        "sglang-dflash %s serves DFLASH: block size %d (trained with %d), attention %s, draft attention %s; "
        "%s; %s=builtin gives SGLang's own worker.",
        __version__,
        block_size,
        draft.block_size,
        cfg.attention_backend or f"{cfg.prefill_attention_backend}/{cfg.decode_attention_backend}",
        cfg.speculative_draft_attention_backend,
        ops.bodies("cpu" if cpu_platform_in_use() else "cuda"),
        WORKER_VARIABLE,
    )
    if simulated.simulates():
        logger.warning(simulated.warning())


def read_draft_config(cfg: Any) -> DraftConfig:
    """The draft's config, with its mask token id resolved.

    Args:
        cfg: server arguments, or the host's view of them.

    Raises:
        ValueError: one sentence on what is wrong with the draft.
    """
    path = cfg.speculative_draft_model_path
    if path is None:
        raise ValueError("--speculative-draft-model-path is missing: give the DFlash draft's folder or hub name.")
    config = _config_dict(path, cfg.speculative_draft_model_revision)
    config.update(json.loads(cfg.json_model_override_args))  # the host overrides target and draft alike
    draft = DraftConfig.from_dict(config)
    if draft.mask_token_id is None:
        draft = replace(draft, mask_token_id=_mask_token_id(cfg, draft.mask_token))
    return draft


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


def _check_target(target: Any, draft: DraftConfig) -> None:
    """target: the host's `ModelConfig`."""
    if target.is_multimodal and not VISION_TARGETS.intersection(target.hf_config.architectures):
        logger.warning(
            "The target %s reads more than text; of such targets, our tests have run only %s. Run `sglang-dflash "
            "check` on it before you serve it.",
            ", ".join(target.hf_config.architectures),
            ", ".join(sorted(VISION_TARGETS)),
        )
    draft.check_target(target.num_hidden_layers, target.hidden_size, target.vocab_size)
    capture.check_taps(target.hf_config.architectures, target.num_hidden_layers, draft.target_layer_ids)


def _check_sinks(cfg: Any, draft: DraftConfig) -> None:
    """cfg: with the attention backends that the host has chosen."""
    if draft.attention_sinks and cfg.speculative_draft_attention_backend == "flashinfer":
        raise ValueError(
            "the draft has attention sinks (dflash_config.attention_sink_bias), and "
            "--speculative-draft-attention-backend is flashinfer, which takes none; allowed: fa3, triton, trtllm_mha."
        )


def _check_quantization(cfg: Any, draft: DraftConfig) -> None:
    """On an accelerator, SGLang knows what it can serve."""
    if cpu_platform_in_use():
        from sglang_dflash.host.cpu import quantization

        whose = "the draft (quantization_config, --speculative-draft-model-quantization)"
        load_format = cfg.speculative_draft_load_format or cfg.load_format
        quantization.check(draft.quantization, (), cfg.speculative_draft_model_quantization, load_format, whose)


def _block_size(cfg: Any, draft: DraftConfig, context_len: int) -> int:
    flags = (cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size)
    asked = next((value for value in flags if value is not None), draft.block_size)
    if not 2 <= asked <= draft.block_size:
        raise ValueError(
            f"--speculative-num-draft-tokens is {asked}; allowed: 2 to {draft.block_size}, the block size that this "
            "draft was trained with."
        )
    if asked >= context_len:
        raise ValueError(
            f"--speculative-num-draft-tokens is {asked} and the context {context_len} tokens (--context-length): "
            "a block must be shorter than the context."
        )
    return asked


def _refuse_unserved(cfg: Any) -> None:
    if envs.SGLANG_RUST_SERVER.get():
        raise ValueError("SGLANG_RUST_SERVER is 1; allowed: 0, because its server bypasses the checks of requests.")
    if cfg.grammar_backend not in (None, *GRAMMAR_BACKENDS):
        raise ValueError(
            f"--grammar-backend is {cfg.grammar_backend}; allowed: {', '.join(GRAMMAR_BACKENDS)}, because a grammar "
            "must be able to take back a token."
        )
    if cpu_platform_in_use():
        backends = {cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend} - {None}
        if backends != {ATTENTION_BACKEND}:
            raise ValueError(
                f"--attention-backend is {', '.join(sorted(backends))}; on the CPU only {ATTENTION_BACKEND}, "
                "the default, verifies blocks."
            )
