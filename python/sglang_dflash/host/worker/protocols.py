"""What we read and write of SGLang's objects, as types: SGLang carries none. tests/host/test_protocols.py holds them to
its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class RequestKV(Protocol):
    """The KV of a request.

    Fields:
        req_pool_idx: its row in the slot table.
        kv_committed_len, kv_allocated_len: tokens whose KV exists as far as SGLang knows, and whose slots it owns.
    """

    req_pool_idx: int
    kv_committed_len: int
    kv_allocated_len: int


class Req(Protocol):
    """SGLang's `Req`: one request, as the scheduler knows it. `output_ids` lag by one step under overlap.

    The fields that begin with `dflash_` are ours, and absent until they are set.
    """

    rid: str
    kv: RequestKV
    origin_input_ids: Sequence[int]
    output_ids: Any  # list or array of int
    sampling_params: Any
    grammar: Any
    custom_logit_processor: str | None
    vocab_size: int
    tokenizer: Any
    eos_token_ids: set[int] | None
    to_finish: Any
    finished_len: int | None
    decode_batch_idx: int
    dflash_past_grammar: bool
    dflash_grammar_is_ahead: bool
    dflash_rejected: Any
    dflash_reasoning: Any

    def finished(self) -> bool: ...


class ScheduleBatch(Protocol):
    """SGLang's `ScheduleBatch`: the requests of one step.

    Fields:
        seq_lens: [B] int64, on the device; committed tokens. In a prefill, after it.
        seq_lens_cpu, seq_lens_sum: the same on the CPU, and their sum; None where SGLang keeps none.
        req_pool_indices: [B] int64; rows of the slot table.
        out_cache_loc: [T] int64; slots that the forward writes.
        sampling_info: SGLang's `SamplingBatchInfo`.
        spec_info: our `DraftInput` between two steps.
        prefix_lens, extend_lens: of a prefill.
        decoding_reqs: running requests of a mixed prefill.
    """

    reqs: list[Any]
    forward_mode: Any
    device: Any
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    seq_lens_sum: int | None
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    sampling_info: Any
    spec_info: Any
    prefix_lens: list[int]
    extend_lens: list[int]
    decoding_reqs: list[Any] | None
    has_grammar: bool
    return_logprob: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[Any]
    return_hidden_states: bool
    return_hidden_states_mode: Any
    can_run_decode_cuda_graph: bool
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any

    def maybe_evict_swa(self) -> None: ...


class ForwardBatch(Protocol):
    """SGLang's `ForwardBatch`: what a model's forward reads. `seq_lens`: [B] int64; in a verification without the
    block, in a decode with the new token."""

    forward_mode: Any
    spec_info: Any
    positions: torch.Tensor
    mrope_positions: torch.Tensor | None
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]


class LogitsOutput(Protocol):
    """SGLang's `LogitsProcessorOutput`. Logits are [T or more, V]; the states of the tapped layers and the last ones
    [T or more, *]."""

    next_token_logits: Any  # a tensor; None where each rank keeps its shard
    next_token_logprobs: torch.Tensor | None
    hidden_states: torch.Tensor | None
    last_hidden_states: torch.Tensor | None


class ModelRunner(Protocol):
    """SGLang's `ModelRunner`, of the target or of the draft."""

    device: str
    dtype: torch.dtype
    model: Any
    model_config: Any
    sampler: Any
    attn_backend: Any
    req_to_token_pool: Any
    token_to_kv_pool: Any
    kv_index_translator: Any
    decode_cuda_graph_runner: Any
    max_running_requests: int
    sampling_prewarm_result: Any
    sliding_window_size: int | None
    graph_memory_usage: Any
    graph_time_usage: Any

    def _get_attention_backend(self, init_new_workspace: bool = False) -> Any: ...
    def init_decode_cuda_graph(self) -> None: ...
