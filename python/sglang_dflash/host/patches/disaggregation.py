"""Prefill and decode on two servers (`--disaggregation-mode`), where SGLang would lose draft KV or state of ours.

SGLang transfers the draft's KV like further layers of the target. It knows neither which draft it is of, nor what our
worker keeps beside a batch.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.patches.stored_kv import draft_in_use
from sglang_dflash.host.start.version import serves_dflash

logger = logging.getLogger(__name__)
SOURCE = "sglang_dflash.decode_prefixes"
BESIDE = " beside DFLASH draft "
"""Between the dtype of the target's KV and the name of the draft, in what a prefill server says of its KV."""


def check(cfg: Any, target: Any) -> None:
    """Refuses what would resume a retracted request with another state than it had.

    Args:
        cfg: SGLang's view of the server arguments.
        target: SGLang's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the flags.
    """
    kept = cfg.disaggregation_decode_retraction_backup != "none"
    decodes = cfg.disaggregation_mode == "decode" and not cfg.disable_overlap_schedule
    if decodes and kept and mambaish_config(target) is not None:
        raise ValueError(
            f"--disaggregation-mode is decode, and the target {', '.join(target.hf_config.architectures)} has "
            "recurrent state: under overlap scheduling a retracted request would come back with the state of a later "
            "token (SGLang issue 39743); add --disable-overlap-schedule, or --disaggregation-decode-retraction-backup "
            "none, with which a client asks again."
        )


def allowing_prefixes(server_args: Any, previous: Any) -> None:
    """Runs SGLang's speculative checks without its refusal of a prefix cache on a decode server: it lists the
    algorithms whose draft has KV of its own at the target's places, and leaves out DFLASH."""
    asked = resolving_view(server_args).disaggregation_decode_enable_radix_cache
    if asked:
        declare_resolution(server_args, SOURCE, disaggregation_decode_enable_radix_cache=False)
    previous(server_args)
    if asked:
        declare_resolution(server_args, SOURCE, disaggregation_decode_enable_radix_cache=True)


@hook(
    "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch",
    AROUND,
    why="requests that arrive from a prefill server, or from a backup, never come to the worker: it would lack their "
    "penalty counts and texts, or have those of another request",
    until="SGLang tells its worker of them",
)
def _receive(original: Any, scheduler: Any, running_batch: Any) -> Any:
    batch = original(scheduler, running_batch)
    if batch is not None and scheduler.spec_algorithm.is_dflash():
        scheduler.draft_worker.receive(batch)
    return batch


def _slots(req: Any, req_to_token_pool: Any) -> Any:
    """[N] int32: of the tokens whose KV a backup holds, as `Req.offload_kv_cache` says."""
    return req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1]


@hook(
    "sglang.srt.managers.schedule_batch.Req.offload_kv_cache",
    AROUND,
    why="a `cpu_tensor` backup holds the target's KV alone: after a retraction the draft would read what lies in the "
    "new slots (SGLang issue 39749)",
    until="the issue is fixed",
)
def _back_up_draft(original: Any, req: Any, req_to_token_pool: Any, allocator: Any) -> None:
    original(req, req_to_token_pool, allocator)
    pool = getattr(allocator, "dflash_draft_kv", None)
    if pool is not None:
        held = req.kv.retraction_backup
        draft = pool.get_cpu_copy(_slots(req, req_to_token_pool))
        req.kv.retraction_backup = held._replace(cpu_tensors=(held.cpu_tensors, draft))


@hook(
    "sglang.srt.managers.schedule_batch.Req.load_kv_cache",
    AROUND,
    why="see `Req.offload_kv_cache`",
    until="the issue is fixed",
)
def _restore_draft(original: Any, req: Any, req_to_token_pool: Any, allocator: Any) -> None:
    pool = getattr(allocator, "dflash_draft_kv", None)
    if pool is not None:
        target, draft = req.kv.retraction_backup.cpu_tensors
        pool.load_cpu_copy(draft, _slots(req, req_to_token_pool))
        req.kv.retraction_backup = req.kv.retraction_backup._replace(cpu_tensors=target)
    original(req, req_to_token_pool, allocator)


@hook(
    "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__",
    AROUND,
    why="a prefill server does not say which draft its KV is of: without one, or with another, next to nothing would "
    "be accepted",
    until="SGLang compares the drafts",
    always=True,
)
def _name_the_draft(original: Any, manager: Any, args: Any, *more: Any, **named: Any) -> None:
    """A decode server compares what both sides say of their KV's dtype."""
    if serves_dflash():
        args.kv_cache_dtype_str += BESIDE + draft_in_use()
    original(manager, args, *more, **named)


@hook(
    "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
    AROUND,
    why="a prefill server whose KV does not fit would end the decode server, or be read at wrong places",
    until="SGLang refuses its requests alone, and knows that a draft's KV is sharded by heads",
    always=True,
)
def _refuse_misfits(original: Any, manager: Any, bootstrap_addr: str) -> bool:
    """SGLang ends the requests of a prefill server that it gets no answer from; so those of one that does not fit."""
    ours = manager.kv_cache_dtype_str
    try:
        known = original(manager, bootstrap_addr)
    except RuntimeError as error:
        if BESIDE not in ours + str(error):
            raise
        logger.error("Requests of the prefill server at %s are refused: %s", bootstrap_addr, _sentence(ours, error))
        return False
    if not known or BESIDE not in ours:
        return bool(known)
    theirs = manager.prefill_info_table[bootstrap_addr].attn_tp_size
    if theirs == manager.attn_tp_size or (not manager.is_mla_backend and len(set(manager.kv_args.kv_item_lens)) == 1):
        return True
    del manager.prefill_info_table[bootstrap_addr]
    logger.error(
        "Requests of the prefill server at %s are refused: its --tp-size is %d and here it is %d, but target and draft "
        "have KV of different sizes; allowed: the same --tp-size on both servers.",
        bootstrap_addr,
        theirs,
        manager.attn_tp_size,
    )
    return False


def _sentence(ours: str, error: RuntimeError) -> str:
    """SGLang's sentence, or, where the drafts differ, one that says so."""
    theirs = str(error).partition("kv_cache_dtype=")[2].partition(",")[0]
    if not theirs:
        return str(error)
    here, there = (said.partition(BESIDE)[2] or "no draft of sglang-dflash" for said in (ours, theirs))
    if here == there:
        return str(error)
    return (
        f"it has {there}, and this server has {here}; both need sglang-dflash, --speculative-algorithm DFLASH and the "
        "same --speculative-draft-model-path, --speculative-draft-kv-cache-dtype, --dtype, --kv-cache-dtype and "
        "--json-model-override-args."
    )
