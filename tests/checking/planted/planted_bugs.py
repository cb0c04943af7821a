"""A plugin of SGLang that breaks our worker on purpose: `sglang-dflash check` must find every bug of it.

The file named by PLANTED_BUG holds the bug that is active; it is read at every step, so that one server serves all.
Bugs are rare enough for most answers to stay right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "PLANTED_BUG"
ACCEPT, PENALTY, SWAP, LEAK = "one draft too many", "stale penalty", "swapped rows", "leaked slot"
SKIP_DECODE, SKIP_PREFILL = "draft KV of a block not written", "draft KV behind a cached prefix not written"
CRASH = "the scheduler ends"
LATE, WINDOW = "recurrent state of a row before", "inputs of convolutions not rolled back"
SNAPSHOT = "snapshot for the prefix cache from a wrong row"
LENS, NEIGHBOUR = "rows of each request off by one", "logits of a neighbour's row"
PAST, UNVERIFIED = "a commit past the verified rows", "KV of a row that was not verified"
RAGGED = (LENS, NEIGHBOUR, PAST, UNVERIFIED)
EVERY = {ACCEPT: 12, SWAP: 1, LEAK: 8, SKIP_DECODE: 3, SKIP_PREFILL: 1, CRASH: 20, LATE: 9, WINDOW: 5, SNAPSHOT: 1}
EVERY |= {LENS: 2, NEIGHBOUR: 2, PAST: 2, UNVERIFIED: 1}


def activate() -> None:
    """Entry point: hooks what makes the worker, in the scheduler's process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Not `create_worker` itself: our plugin does not call what other plugins made of it before.
    target = "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker"
    HookRegistry.register(target, _plant, HookType.BEFORE)


def active() -> str:
    return Path(os.environ[VARIABLE]).read_text().strip()


class Now:
    """Whether the bug strikes at this call: every n-th of those at which it could."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    def strikes(self, bug: str) -> bool:
        if active() != bug:
            return False
        self._calls[bug] = self._calls.get(bug, 0) + 1
        return self._calls[bug] % EVERY[bug] == 0


def _plant(*arguments: Any) -> None:
    """Wraps what the worker calls; an attribute that is gone ends the server, and with it the test."""
    from sglang_cpu.recurrent import CpuHybridBackend
    from sglang_dflash.host.worker.acceptance import Acceptor
    from sglang_dflash.host.worker.draft_runner import DraftRunner
    from sglang_dflash.host.worker.rows import StepRows
    from sglang_dflash.host.worker.sampling import RowSampler
    from sglang_dflash.host.worker.worker import DFlashWorker

    now = Now()
    Acceptor.accept = _past_the_rows(_one_too_many(Acceptor.accept, now), now)
    RowSampler.commit = _bonus_only(RowSampler.commit)
    DraftRunner.write_context = _write_context(DraftRunner.write_context, now)
    DFlashWorker._decode = _decode(DFlashWorker._decode, now)
    DFlashWorker._prefill = _prefill(DFlashWorker._prefill, now)
    CpuHybridBackend.update_mamba_state_after_mtp_verify = _commit_state(
        CpuHybridBackend.update_mamba_state_after_mtp_verify, now
    )
    StepRows.verify_fields = _past_the_last(_lens_off_by_one(StepRows.verify_fields, now), now)


def _one_too_many(original: Any, now: Now) -> Any:
    def accept(acceptor: Any, rows: Any, batch: Any, target_out: Any, *rest: Any) -> Any:
        if rows.chosen is not None and now.strikes(NEIGHBOUR):
            target_out.next_token_logits = target_out.next_token_logits.roll(1, 0)
        right, group = original(acceptor, rows, batch, target_out, *rest)
        rejected = _rejected(rows, right)
        if rejected is None or not now.strikes(ACCEPT):
            return right, group
        wrong = right._replace(**{name: field.clone() for name, field in right._asdict().items() if field is not None})
        request, commit_len = rejected, int(right.commit_lens[rejected])
        target_ids = rows.blocks(target_out.next_token_logits).argmax(-1)
        wrong.out_ids[request, commit_len - 1] = rows.chains()[request, commit_len]
        wrong.out_ids[request, commit_len] = wrong.bonus_ids[request] = target_ids[request, commit_len]
        wrong.commit_lens[request] += 1
        return wrong, group

    return accept


def _rejected(rows: Any, right: Any) -> int | None:
    """A request with a verified row behind its last accepted one."""
    for request, (count, commit_len) in enumerate(zip(_lens(rows), right.commit_lens.tolist(), strict=True)):
        if commit_len < count:
            return request
    return None


def _lens(rows: Any) -> list[int]:
    """Rows of each request."""
    return (rows.chains() >= 0).sum(1).tolist()


def _past_the_rows(original: Any, now: Now) -> Any:
    """Where all verified rows are accepted, a token of the next, unverified row is committed, too."""

    def accept(acceptor: Any, rows: Any, *rest: Any) -> Any:
        right, group = original(acceptor, rows, *rest)
        for request, (count, commit_len) in enumerate(zip(_lens(rows), right.commit_lens.tolist(), strict=True)):
            if commit_len == count < rows.width and now.strikes(PAST):
                right.out_ids[request, commit_len] = right.bonus_ids[request]
                right.commit_lens[request] += 1
        return right, group

    return accept


def _lens_off_by_one(original: Any, now: Now) -> Any:
    """One request's last row passes for the next one's first."""

    def fields(step_rows: Any, rows: Any) -> Any:
        right = original(step_rows, rows)
        lens = right.get("lens")
        if lens is not None and len(lens) > 1 and lens[0] > 1 and lens[1] < rows.width and now.strikes(LENS):
            right["lens"] = lens + torch.tensor([-1, 1] + [0] * (len(lens) - 2), dtype=lens.dtype)
        return right

    return fields


def _past_the_last(original: Any, now: Now) -> Any:
    """The last verified row of a request leaves its KV in the slot of the next row, which is not verified."""

    def fields(step_rows: Any, rows: Any) -> Any:
        right = original(step_rows, rows)
        if rows.chosen is not None and now.strikes(UNVERIFIED):
            lens = rows.chosen.lens
            cut = lens < rows.width
            cols = right["kv_loc_cols"].clone()
            cols[lens.cumsum(0)[cut] - 1] += 1
            right["kv_loc_cols"] = cols
        return right

    return fields


def _bonus_only(original: Any) -> Any:
    """Penalties never hear of accepted drafts, only of the target's own token behind them."""

    def commit(self: Any, batch: Any, group: Any, ids: torch.Tensor, lens: torch.Tensor) -> None:
        if active() == PENALTY and ids.shape[1] > 1:
            ids, lens = ids.gather(1, lens.long()[:, None] - 1), torch.ones_like(lens)
        original(self, batch, group, ids, lens)

    return commit


def _write_context(original: Any, now: Now) -> Any:
    def write(self: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        skipped = now.strikes(SKIP_DECODE) if self.decoding else positions[0] > 0 and now.strikes(SKIP_PREFILL)
        if not skipped:
            original(self, hidden, positions, slots)

    return write


def _decode(original: Any, now: Now) -> Any:
    def decode(self: Any, batch: Any, *rest: Any) -> Any:
        if now.strikes(CRASH):
            raise RuntimeError("planted")
        self._draft.decoding = True
        result = original(self, batch, *rest)
        lens, width = result.accept_lens, result.speculative_num_draft_tokens
        if len(lens) > 1 and now.strikes(SWAP):
            rows, both = result.next_token_ids.view(-1, width).clone(), int(lens[:2].min())
            rows[[0, 1], :both] = rows[[1, 0], :both]
            result.next_token_ids = rows.flatten()
        return result

    return decode


def _prefill(original: Any, now: Now) -> Any:
    def prefill(self: Any, batch: Any, *rest: Any) -> Any:
        self._draft.decoding = False
        if now.strikes(LEAK):
            self._target.token_to_kv_pool_allocator.alloc(1)
        return original(self, batch, *rest)

    return prefill


def _commit_state(original: Any, now: Now) -> Any:
    def commit(self: Any, **moved: Any) -> None:
        last, track = moved["last_correct_step_indices"], moved["mamba_steps_to_track"]  # [B] each, or None
        if (last > 0).any() and now.strikes(LATE):
            moved["last_correct_step_indices"] = (last - 1).clamp(min=0)
        if track is not None and (track > 0).any() and now.strikes(SNAPSHOT):
            moved["mamba_steps_to_track"] = torch.where(track > 0, track - 1, track)
        original(self, **moved)
        states = self.req_to_token_pool.get_speculative_mamba2_params_all_layers()
        width = states.intermediate_conv_window[0].shape[2]
        if (last < width - 1).any() and now.strikes(WINDOW):
            slots = self.linear_attn_backend.state_slots[: len(last)].long()
            for kept, windows in zip(states.conv, states.intermediate_conv_window, strict=True):
                kept[:, slots] = windows[:, : len(slots), width - 1]

    return commit
