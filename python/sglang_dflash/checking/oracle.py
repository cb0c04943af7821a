"""Compares the server's number of verify steps with that of the package's reference in transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_dflash.checking.compare import step_loss
from sglang_dflash.checking.draft_kv import OF_ANY_WIDTH, DraftKv
from sglang_dflash.checking.recording import Exchange
from sglang_dflash.serving import AcceptanceStats, Completion, ServerInfo


def probe_reference(
    server: ServerInfo, plain: Sequence[Exchange], alone: Sequence[Completion], on_done: Callable[[], None]
) -> DraftKv:
    """Compares verify steps over the plain requests to which both give the same answer.

    Args:
        server: the on arm; this loads its two models, in its dtype.
        alone: the on arm's outcomes for these requests, sent one at a time.

    Raises:
        ValueError, OSError: the models cannot be loaded here.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from sglang_dflash.reference import DFlashDraftModel, spec_generate

    if any(outcome.adapts for outcome in alone):
        return DraftKv(skipped=OF_ANY_WIDTH)
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, server.dtype, torch.bfloat16)
    target = AutoModelForCausalLM.from_pretrained(server.model_path, dtype=dtype).to(device).eval()
    draft = DFlashDraftModel.from_pretrained(server.draft_path, dtype=dtype).to(device).eval()
    ours, theirs, commit_lens = [], [], []
    for exchange, outcome in zip(plain, alone, strict=True):
        body = exchange.request.body
        ids = torch.tensor([body["input_ids"]], device=device)
        limit = body["sampling_params"]["max_new_tokens"]
        generation = spec_generate(draft, target, ids, limit, block_size=server.block_size, return_stats=True)
        on_done()
        if outcome.steps and generation.new_ids(0) == outcome.ids:
            ours.append(outcome)
            theirs.append(len(generation.commit_lens[0]))
            commit_lens += generation.commit_lens[0]
    if not ours:
        return DraftKv(skipped="the reference in transformers gives no prompt the server's answer")
    loss = step_loss([outcome.steps for outcome in ours], theirs, exact=server.dtype == "float32")
    said = f"{loss.share:.0%} more verify steps than the reference in transformers takes for the same answers"
    tau = {"server": AcceptanceStats.of(ours).tau, "reference": sum(commit_lens) / len(commit_lens)}
    return DraftKv(tau, len(ours), [said] if loss.lost else [])
