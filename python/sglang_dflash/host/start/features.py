"""SGLang's features that can be combined with DFLASH: their flags, and whether this worker serves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.server_args import ServerArgs

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.core.draft_config import USE_BUILTIN

UNTESTED = "the two have never been run together"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that a user may ask for together with `--speculative-algorithm DFLASH`.

    Fields:
        name: its name in a refusal.
        flags: server arguments that ask for it if they differ from their defaults.
        refusal: why it is refused; None if it is served.
        builtin: whether SGLang's own worker may serve it if we refuse it.
        tests: the end-to-end tests of a served feature.
    """

    name: str
    flags: tuple[str, ...]
    refusal: str | None = None
    builtin: bool = True
    tests: tuple[str, ...] = ()


def _served(name: str, flags: tuple[str, ...], *tests: str) -> Feature:
    return Feature(name, flags, tests=tests)


def _refused(name: str, flags: tuple[str, ...], why: str, builtin: bool = True) -> Feature:
    return Feature(name, flags, refusal=why, builtin=builtin)


FEATURES = (
    _served("tensor parallelism", ("tp_size",), "test_tensor_parallel"),
    _served("several nodes", ("nnodes", "node_rank", "dist_init_addr"), "test_two_nodes"),
    _served("expert parallelism", ("ep_size",), "test_experts_on_ranks"),
    _served("data-parallel replicas", ("dp_size", "load_balance_method"), "test_replicas"),
    _served(
        "LoRA of the target",
        ("enable_lora", "lora_paths", "max_lora_rank", "lora_backend"),
        "test_lora_and_kv_in_fewer_bits",
    ),
    _served("quantised KV", ("kv_cache_dtype", "speculative_draft_kv_cache_dtype"), "test_lora_and_kv_in_fewer_bits"),
    _served("mixed chunks", ("enable_mixed_chunk",), "test_mixed_chunks"),
    _served(
        "priorities and preemption",
        ("enable_priority_scheduling", "priority_scheduling_preemption_threshold", "disable_priority_preemption"),
        "test_preemption",
    ),
    _served("no radix cache", ("disable_radix_cache",), "test_mixed_chunks", "test_preemption"),
    _served("chunked prefill", ("chunked_prefill_size",), "test_prompt_in_chunks", "test_mixed_chunks"),
    _served("a limit of running requests", ("max_running_requests",), "test_preemption"),
    _served("schedule policies", ("schedule_policy",), "test_sliding_draft"),
    _served("streaming intervals", ("stream_interval",), "test_replicas"),
    _served("metrics", ("enable_metrics",), "test_counters_say_what_answers_say"),
    _served("strict thinking", ("enable_strict_thinking",), "test_strict_thinking"),
    _served("several tokenizer processes", ("tokenizer_worker_num",), "test_tokenizer_processes"),
    _served("gRPC beside HTTP", ("grpc_port",), "test_grpc"),
    _served("a language server without an encoder of images", ("language_only",), "test_language_only"),
    _served("sessions", ("enable_streaming_session",), "test_sessions"),
    _served(
        "deterministic inference",
        ("enable_deterministic_inference",),
        "test_drawn_combinations_of_seeded_requests",
    ),
    _served(
        "hidden states and logit processors",
        ("enable_return_hidden_states", "enable_custom_logit_processor"),
        "test_each_parameter_of_a_greedy_request",
    ),
    _served("pausing", (), "test_pause_and_continue"),
    _served("aborts", (), "test_aborted_requests_free_their_slots"),
    _served("weight updates", (), "test_target_weights_change", "test_draft_weights_change"),
    _served("a window for the draft", ("speculative_draft_window_size",), "test_mixed_chunks"),
    _served("sliding-window drafts", (), "test_sliding_draft"),
    _served("DFlash2 and Domino drafts", (), "test_the_steps_of_the_reference", "test_heads_on_ranks"),
    _served("page sizes", ("page_size",), "test_tokens_equal_speculation_off"),
    _served("scheduling without overlap", ("disable_overlap_schedule",), "test_tokens_equal_speculation_off"),
    _served("a shorter context", ("context_length",), "test_context_limit_and_retraction"),
    _served(
        "KV in host memory and in a store",
        ("enable_hierarchical_cache", "hicache_storage_backend"),
        "test_hits_in_host_memory",
        "test_hits_in_a_store",
    ),
    _served("prefill and decode on two servers", ("disaggregation_mode",), "test_prefill_and_decode_on_two_servers"),
    _served("a shorter block", ("speculative_num_draft_tokens",), "test_tokens_equal_with_a_shorter_block"),
    _served(
        "a ring of updates in place of recurrent states",
        ("enable_linear_replayssm_spec", "linear_replayssm_cache_len"),
        "test_a_ring_of_updates",
    ),
    _refused("Ray", ("use_ray",), "its actors load no plugins"),
    _refused("pipeline parallelism", ("pp_size",), "the draft reads layers of other stages", builtin=False),
    _refused(
        "attention data parallelism",
        ("enable_dp_attention", "attn_dp_size"),
        f"{UNTESTED}, and SGLang's own worker needs CUDA or an NPU and --enable-dp-lm-head for it",
    ),
    _refused("context parallelism", ("attn_cp_size", "dcp_size", "enable_prefill_cp"), UNTESTED),
    _refused("distributed weights", ("dwdp_size",), "SGLang serves them without speculation alone", builtin=False),
    _refused("experts that move, or are sent for", ("enable_eplb", "elastic_ep_backend", "moe_a2a_backend"), UNTESTED),
    _refused("an encoder of images alone", ("encoder_only",), "it generates no tokens", builtin=False),
    _refused(
        "storing KV on a decode server",
        ("disaggregation_decode_enable_offload_kvcache",),
        "it stores the target's KV alone, which is no hit with DFLASH",
        builtin=False,
    ),
    _refused("swapping sparse KV", ("enable_hisparse",), "the draft reads KV that is not sparse"),
    _refused(
        "KV in another program",
        ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
        "the draft's KV would not be transferred",
        builtin=False,
    ),
    _refused(
        "another layout of the KV pool",
        ("enable_unified_memory", "enable_page_major_kv_layout"),
        UNTESTED,
    ),
    _refused("sharded KV", ("enable_kv_cache_sharding",), "SGLang shards it without DFLASH alone", builtin=False),
    _refused("prefill without a KV cache", ("prefill_only_disable_kv_cache",), "the draft needs one", builtin=False),
    _refused(
        "recurrent state in other forms",
        ("enable_linear_replayssm", "enable_int8_mamba_checkpoint"),
        UNTESTED,
    ),
    _refused(
        "rounding recurrent state at random",
        ("enable_mamba_cache_stochastic_rounding",),
        "a verified row would not get the state of a decoded one",
        builtin=False,
    ),
    _refused("releasing memory", ("enable_memory_saver",), UNTESTED),
    _refused("weights of a daemon", ("weight_cache_mode",), "the daemon holds no draft's weights", builtin=False),
    _refused("weights outside the device", ("cpu_offload_gb", "offload_group_size"), UNTESTED),
    _refused(
        "loading weights late",
        ("startup_weight_load_mode",),
        "SGLang loads them late without speculation alone",
        builtin=False,
    ),
    _refused(
        "overlapping two batches",
        ("enable_two_batch_overlap",),
        "SGLang splits a batch by fields that a DFLASH verification lacks",
        builtin=False,
    ),
    _refused("overlapping within a batch", ("enable_single_batch_overlap",), UNTESTED),
    _refused("prefill-decode multiplexing", ("enable_pdmux",), UNTESTED),
    _refused(
        "returning layers' outputs",
        ("enable_return_aux_hidden_states", "return_aux_hidden_state_layer_ids"),
        "SGLang captures them without a draft alone",
        builtin=False,
    ),
    _refused("another config for the draft", ("decrypted_draft_config_file",), "only its config.json is checked"),
    _refused("gRPC front ends", ("grpc_mode", "smg_grpc_mode"), "they bypass the checks of requests"),
    _refused("multi-item scoring", ("enable_mis",), UNTESTED),
    _refused("diffusion targets", ("dllm_algorithm",), "they have no next token to verify", builtin=False),
    _refused("embedding models", ("is_embedding",), "they generate no tokens", builtin=False),
    _refused(
        "accepting tokens that are not the target's",
        ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        "it changes the answers; only 1.0 keeps them",
    ),
    _refused("block verification", ("speculative_use_block_verification",), "drafts are proposed greedily"),
)
"""Every feature; checks that need more than one flag are in `arguments.py`."""

# SGLang's speculative flags that DFLASH uses. Flags of other algorithms are refused, not ignored.
SPECULATIVE_FLAGS = {
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "speculative_draft_attention_backend",
    "speculative_dflash_block_size",
}
OTHER_ALGORITHMS = {"enable_multi_layer_eagle", "uno_lora_path", "decoupled_spec_role"}
ONE_STEP = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}  # SGLang sets these for DFLASH


def refuse_features(asked: Mapping[str, Any]) -> None:
    """Refuses a start that asks for a feature that is not served.

    Args:
        asked: server arguments as the user gave them, defaults included.

    Raises:
        ValueError: one sentence that names the flag, its value and the reason.
    """
    defaults = {field.name: field.default for field in record_fields(ServerArgs)}
    known = set(SPECULATIVE_FLAGS)
    for feature in FEATURES:
        known.update(feature.flags)
        for flag in feature.flags:
            if feature.refusal is not None and asked[flag] not in (defaults[flag], None, False):
                raise ValueError(_sentence(feature, flag, asked[flag]))
    for flag, value in asked.items():
        foreign = (flag.startswith("speculative_") and flag not in known) or flag in OTHER_ALGORITHMS
        if foreign and value not in (defaults[flag], ONE_STEP.get(flag)):
            raise ValueError(f"{spelled(flag, value)} belongs to other algorithms, not to DFLASH; leave it out.")


def spelled(flag: str, value: Any) -> str:
    """A server argument as on the command line."""
    name = "--" + flag.replace("_", "-")
    return name if value is True else f"{name} {value}"


def _sentence(feature: Feature, flag: str, value: Any) -> str:
    way_out = f"leave it out, or {USE_BUILTIN}" if feature.builtin else "leave it out"
    asked = f"{spelled(flag, value)} asks for {feature.name}"
    return f"{asked}, which is not served with DFLASH: {feature.refusal}; {way_out}."


@hook(
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    "._validate_accept_threshold",
    AROUND,
    why="lossy thresholds could be set while serving",
    until="stays",
)
def _keep_thresholds(original: Any, controller: Any, key: str, value: Any) -> None:
    """They can be changed while the server runs, too (`/set_internal_state`)."""
    if controller.scheduler.spec_algorithm.is_dflash() and float(value) != 1.0:
        raise UpdateRejected(f"{key}={value} would change the answers: with this worker it stays at 1.0.")
    original(controller, key, value)
