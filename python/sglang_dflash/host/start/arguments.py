"""Checks of the server's arguments, in the main process, before any child exists or any weight is read."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view, use_mla_backend
from sglang.srt.environ import envs

from sglang_cpu.detect import ATTENTION_BACKEND, cpu_platform_in_use
from sglang_cpu.hooks import check_draft_weights
from sglang_dflash import __version__
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.host.patches import capture, disaggregation, stored_kv
from sglang_dflash.host.start import draft_files, tokenizers, widths
from sglang_dflash.host.start.features import refuse_features
from sglang_dflash.host.start.version import WORKER_VARIABLE, builtin_worker_requested
from sglang_dflash.host.worker import recurrent_state, sampling, short_head, simulated, state_ring, trees

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
    """Runs before all of SGLang's checks, because some of them would end in a traceback before our sentence.

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
    """SGLang gives the draft the target's --quantization where the user gave it none. A checkpoint that says in its
    config how it is quantised is read as it says, either way."""
    if resolving_view(server_args).speculative_draft_model_quantization is None:
        declare_resolution(
            server_args, "sglang_dflash.draft_quantization", speculative_draft_model_quantization="unquant"
        )


def check(server_args: Any, previous: Any) -> None:
    """Checks what DFLASH needs, then runs SGLang's own speculative checks. For another algorithm only SGLang's run.

    Raises:
        SystemExit: one sentence that names the value that came, what is allowed, and the flag.
    """
    if not asks_for_dflash(server_args) or builtin_worker_requested():
        previous(server_args)
        return
    cfg = resolving_view(server_args)
    try:
        _refuse_unserved(cfg)
        draft = draft_files.read_draft_config(cfg)
        draft_files.use_plain_layout(server_args)
        cfg = resolving_view(server_args)
        target = model_config_of(server_args)
        _check_target(target, draft)
        draft.check_ranks(cfg.tp_size)
        _check_quantization(cfg, draft)
        draft_files.trained_mask_embedding(cfg, draft)
        block_size = _block_size(cfg, draft, target.context_len)
        if simulated.simulates():
            simulated.check(block_size, cfg.tp_size)
        widths.check(cfg.device, block_size)
        short_head.asked(target.vocab_size)
        sampling.draws_asked()
        recurrent_state.check(cfg, target, block_size, cpu_platform_in_use())
        declare_resolution(server_args, "sglang_dflash.block_size", speculative_num_draft_tokens=block_size)
        disaggregation.allowing_prefixes(server_args, previous)
        _check_sinks(cfg, draft)
        disaggregation.check(resolving_view(server_args), target)
        stored_kv.check(resolving_view(server_args), use_mla_backend(server_args), draft.num_layers, target)
        widths.check_server(resolving_view(server_args), target)
        state_ring.check(resolving_view(server_args), target, block_size)
        trees.check(resolving_view(server_args), target, draft, block_size)
        draft_files.check_weights(cfg, draft)
        draft_files.check_context(cfg, target.context_len)
    except ValueError as error:
        raise SystemExit(f"{CANNOT_START}{error}") from None
    cfg = resolving_view(server_args)
    tokenizers.load_our_plugin(cfg)
    logger.info(
        "sglang-dflash %s serves DFLASH: %d rows a step (%d at most), attention %s, draft attention %s; "
        "%s=builtin gives SGLang's own worker.",
        __version__,
        block_size,
        draft.most_rows,
        cfg.attention_backend or f"{cfg.prefill_attention_backend}/{cfg.decode_attention_backend}",
        cfg.speculative_draft_attention_backend,
        WORKER_VARIABLE,
    )
    logger.info("The draft, in the layout of %s: %s.", draft.layout, draft.summary(block_size))
    if cfg.quantization and cfg.speculative_draft_model_quantization is None and draft.quantization is None:
        logger.info(
            "The draft stays unquantised: --quantization %s is for the target, --speculative-draft-model-quantization "
            "for the draft.",
            cfg.quantization,
        )
    if simulated.simulates():
        logger.warning(simulated.warning())


def _check_target(target: Any, draft: DraftConfig) -> None:
    """target: SGLang's `ModelConfig`."""
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
    """cfg: with the attention backends that SGLang has chosen."""
    if draft.attention_sinks and cfg.speculative_draft_attention_backend == "flashinfer":
        raise ValueError(
            "the draft has attention sinks (dflash_config.attention_sink_bias), and "
            "--speculative-draft-attention-backend is flashinfer, which takes none; allowed: fa3, triton, trtllm_mha."
        )


def _check_quantization(cfg: Any, draft: DraftConfig) -> None:
    """On an accelerator, SGLang knows what it can serve."""
    if cpu_platform_in_use():
        whose = "the draft (quantization_config, --speculative-draft-model-quantization)"
        load_format = cfg.speculative_draft_load_format or cfg.load_format
        check_draft_weights(draft.quantization, cfg.speculative_draft_model_quantization, load_format, whose)


def _block_size(cfg: Any, draft: DraftConfig, context_len: int) -> int:
    flags = (cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size)
    asked = next((value for value in flags if value is not None), draft.most_rows)
    if not 2 <= asked <= draft.most_rows:
        rows = "the block size that this draft was trained with"
        if draft.anchor_first:
            rows = f"the rows of a step: this draft gives {draft.block_size} drafts behind the anchor"
        raise ValueError(f"--speculative-num-draft-tokens is {asked}; allowed: 2 to {draft.most_rows}, {rows}.")
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
    tokenizers.check(cfg)
    if cpu_platform_in_use():
        backends = {cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend} - {None}
        if backends != {ATTENTION_BACKEND}:
            raise ValueError(
                f"--attention-backend is {', '.join(sorted(backends))}; on the CPU only {ATTENTION_BACKEND}, "
                "the default, verifies blocks."
            )
