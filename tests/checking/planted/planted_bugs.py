"""A plugin of SGLang that breaks our worker on purpose: `sglang-dflash check` must find every bug of it.

The file named by PLANTED_BUG holds the bug that is active; it is read at every step, so that one server serves all.
Bugs are rare enough for most answers to stay right.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

VARIABLE = "PLANTED_BUG"
ACCEPT, PENALTY, SWAP, LEAK = "one draft too many", "stale penalty", "swapped rows", "leaked slot"
SKIP_DECODE, SKIP_PREFILL = "draft KV of a block not written", "draft KV behind a cached prefix not written"
CRASH = "the scheduler ends"
LATE, WINDOW = "recurrent state of a row before", "inputs of convolutions not rolled back"
SNAPSHOT = "snapshot for the prefix cache from a wrong row"
MASK, SIBLING = "a row sees its parent's rival", "penalties count siblings"
ORDER, TWICE = "path committed in the order of the tree's rows", "slots exchanged twice"
TREES = (MASK, SIBLING, ORDER, TWICE)
EVERY = {ACCEPT: 12, SWAP: 1, LEAK: 8, SKIP_DECODE: 3, SKIP_PREFILL: 1, CRASH: 20, LATE: 9, WINDOW: 5, SNAPSHOT: 1}
EVERY |= {MASK: 1, SIBLING: 1, ORDER: 2, TWICE: 2}


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
    from sglang_dflash import ops
    from sglang_dflash.host.acceptance import Acceptor
    from sglang_dflash.host.cpu.recurrent import CpuHybridBackend
    from sglang_dflash.host.draft_runner import DraftRunner
    from sglang_dflash.host.penalties import RequestPenalties
    from sglang_dflash.host.planned_step import PlannedStep
    from sglang_dflash.host.sampling import RowSampler
    from sglang_dflash.host.worker import DFlashWorker

    now = Now()
    Acceptor.accept = _one_too_many(Acceptor.accept, now)
    RowSampler.commit = _bonus_only(RowSampler.commit)
    DraftRunner.write_context = _write_context(DraftRunner.write_context, now)
    DFlashWorker._decode = _decode(DFlashWorker._decode, now)
    DFlashWorker._prefill = _prefill(DFlashWorker._prefill, now)
    CpuHybridBackend.update_mamba_state_after_mtp_verify = _commit_state(
        CpuHybridBackend.update_mamba_state_after_mtp_verify, now
    )
    PlannedStep.propose = _wrong_parents(PlannedStep.propose, now)
    RequestPenalties.apply = _siblings_counted(RequestPenalties.apply, now)
    ops.choose_kernels = _choose_kernels(ops.choose_kernels, now)


def _one_too_many(original: Any, now: Now) -> Any:
    def accept(acceptor: Any, plan: Any, batch: Any, target_out: Any, *rest: Any) -> Any:
        right, group = original(acceptor, plan, batch, target_out, *rest)
        target_ids, rejected = target_out.next_token_logits.argmax(-1), _rejected(plan, right)
        if rejected is None or not now.strikes(ACCEPT):
            return right, group
        wrong = type(right)(*(field.clone() for field in right))
        request, row = rejected
        commit_len = int(right.commit_lens[request])
        wrong.out_ids[request, commit_len - 1] = plan.ids[row]
        wrong.out_ids[request, commit_len] = wrong.bonus_ids[request] = target_ids[row]
        wrong.commit_lens[request] += 1
        if plan.trees is not None:
            wrong.path[request, commit_len] = row
        return wrong, group

    return accept


def _rejected(plan: Any, right: Any) -> tuple[int, int] | None:
    """A request, and among all rows one that proposes a token behind the request's last accepted row."""
    first = 0
    for request, (count, commit_len) in enumerate(zip(plan.lens, right.commit_lens.tolist(), strict=True)):
        parents = (
            [row - 1 for row in range(count)] if plan.trees is None else plan.trees.parents[first:][:count].tolist()
        )
        last = commit_len - 1 if plan.trees is None else int(right.path[request, commit_len - 1]) - first
        if last in parents:
            return request, first + parents.index(last)
        first += count
    return None


def _bonus_only(original: Any) -> Any:
    """Penalties never hear of accepted drafts, only of the target's own token behind them."""

    def commit(self: Any, batch: Any, group: Any, ids: torch.Tensor, lens: torch.Tensor) -> None:
        if active() == PENALTY and ids.shape[1] > 1:
            ids, lens = ids.gather(1, lens.long()[:, None] - 1), torch.ones_like(lens)
        original(self, batch, group, ids, lens)

    return commit


def _write_context(original: Any, now: Now) -> Any:
    def write(self: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, **when: Any) -> None:
        skipped = now.strikes(SKIP_DECODE) if self.decoding else positions[0] > 0 and now.strikes(SKIP_PREFILL)
        if not skipped:
            original(self, hidden, positions, slots, **when)

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


def _rows_of(plan: Any) -> list[list[int]]:
    """The parents of each request's rows; -1 for the anchor."""
    parents, starts = plan.trees.parents.tolist(), plan.trees.row_starts.tolist()
    return [parents[first:end] for first, end in pairwise(starts)]


def _with_mask(plan: Any, mask: torch.Tensor) -> Any:
    return replace(plan, trees=plan.trees._replace(row_mask=mask))


def _wrong_parents(original: Any, now: Now) -> Any:
    """Rows see a sibling of their parent in its place."""

    def propose(self: Any, batch: Any) -> Any:
        plan, kv_plan = original(self, batch)
        if plan.trees.row_mask is None or not now.strikes(MASK):
            return plan, kv_plan
        mask = plan.trees.row_mask.clone()
        for request, parents in enumerate(_rows_of(plan)):
            for row, parent in enumerate(parents):
                rivals = [other for other in range(1, row) if other != parent and parents[other] == parents[parent]]
                if parent > 0 and rivals:
                    mask[request, row, parent], mask[request, row, rivals[0]] = False, True
        return _with_mask(plan, mask), kv_plan

    return propose


def _siblings_counted(original: Any, now: Now) -> Any:
    def apply(self: Any, group: Any, logits: torch.Tensor, plan: Any) -> None:
        if plan.trees is not None and plan.trees.row_mask is not None and now.strikes(SIBLING):
            mask = plan.trees.row_mask.clone()
            for request, parents in enumerate(_rows_of(plan)):
                for row, parent in enumerate(parents):
                    for other in range(1, len(parents)):
                        mask[request, row, other] |= parents[other] == parent
            plan = _with_mask(plan, mask)
        original(self, group, logits, plan)

    return apply


def _choose_kernels(original: Any, now: Now) -> Any:
    def choose(*arguments: Any) -> Any:
        kernels = original(*arguments)
        plans = replace(kernels.plans, exchange_slots=_exchange(kernels.plans.exchange_slots, now))
        return replace(kernels, plans=plans)

    return choose


def _exchange(original: Any, now: Now) -> Any:
    """Leaves the rows in the order of their tree, or exchanges their slots a second time."""

    def exchange(table: torch.Tensor, *rest: torch.Tensor) -> None:
        before = table.clone()
        original(table, *rest)
        if torch.equal(table, before):  # the path is the first rows
            return
        if now.strikes(ORDER):
            table.copy_(before)
        elif now.strikes(TWICE):
            original(table, *rest)

    return exchange
