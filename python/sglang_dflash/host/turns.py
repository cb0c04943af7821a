"""Several decode steps in one turn of the scheduler, where a step takes hardly longer than what surrounds it.

Before and after each step SGLang's scheduler looks for new requests, prepares the batch, and handles and sends the
tokens. That takes about a millisecond, which is a third of a plain step of a small model on a CPU. A turn shares it
among its steps: it goes on until somebody has something to say to the scheduler, a request has its last token, or the
turn has lasted long enough. Each step is what it would be alone, so answers do not change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import zmq
from sglang.srt.managers.scheduler import GenerationBatchResult

from sglang_dflash.host.draft_input import slots_and_tokens_left
from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.penalties import stop_ids

VARIABLE = "SGLANG_DFLASH_TURN_MS"
TURN_MS = 32.0
"""Within this time the tokens of several steps are sent together: 30 times a second, too often to be seen one by one. A
new request ends the turn before that."""
MOST_MS = 1000.0
STEPS = "dflash_steps"
"""Attribute of a turn's result: the results of all its steps."""


def check() -> None:
    """Raises ValueError if the variable has no allowed value."""
    turn_s()


def turn_s() -> float:
    asked = os.environ.get(VARIABLE) or str(TURN_MS)
    try:
        limit_ms = float(asked)
    except ValueError:
        limit_ms = -1.0
    if not 0 <= limit_ms <= MOST_MS:
        raise ValueError(f"{VARIABLE} is {asked!r}; allowed: 0 (one step a turn) to {MOST_MS:g} milliseconds.")
    return limit_ms / 1000


class Turns:
    """Opens a turn where all requests of a batch need nothing from the scheduler between two steps."""

    def __init__(
        self,
        messages_wait: Callable[[], bool],
        block_size: int,
        limit_s: float,
        kept_state: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            messages_wait: whether a message for the scheduler has arrived.
            block_size: most slots that a step writes behind the prefix of a request that is drafted. A copy writes no
                more than its request has.
            limit_s: a step that would probably end later than this is left to the next turn.
            kept_state: the prefix cache keeps a recurrent state at each multiple of so many tokens, and the scheduler
                says where before the step that may get there; None: no recurrent state.
        """
        self.messages_wait, self.block_size, self.limit_s, self.clock = messages_wait, block_size, limit_s, clock
        self.kept_state = kept_state

    def begin(self, batch: Any) -> Turn | None:
        """None: after one step the scheduler is needed, because penalties, a grammar or a logit processor read the
        emitted tokens, because logprobs or hidden states are handed out step by step, or because a request is aborted
        and ends with the next token."""
        info = batch.sampling_info
        reads = batch.has_grammar or info.has_custom_logit_processor or info.acc_additive_penalties is not None
        if reads or batch.return_logprob or batch.return_hidden_states:
            return None
        if any(req.to_finish is not None for req in batch.reqs):
            return None
        return Turn(self, batch)


class Turn:
    """The steps of one turn. Their batch is a `ScheduleBatch`, which the scheduler restores after the turn."""

    def __init__(self, turns: Turns, batch: Any) -> None:
        self._turns, self._batch = turns, batch
        self._fields = dict(vars(batch))  # as the scheduler prepared them; a step changes some
        self._begun_s = turns.clock()
        self._steps: list[GenerationBatchResult] = []
        reqs = batch.reqs
        self.tokens: list[list[int]] = [[] for _ in reqs]
        """Of each request, what the steps so far have committed."""
        left = [slots_and_tokens_left(req) for req in reqs]
        self._slots_left, self._tokens_left = [slots for slots, _ in left], [tokens for _, tokens in left]
        self._stops = [_stop_ids(req) for req in reqs]

    def goes_on(self, step: GenerationBatchResult) -> bool:
        """Whether another step follows. step: the latest; its ids and lengths are on the CPU."""
        self._steps.append(step)
        if step.routed_experts_output is not None or step.indexer_topk_output is not None:
            return False
        if self._somebody_ends(step) or self._reaches_kept_state(step):
            return False
        spent_s = self._turns.clock() - self._begun_s
        if spent_s * (1 + 1 / len(self._steps)) > self._turns.limit_s or self._turns.messages_wait():
            return False
        self._prepare(step)
        return True

    def _somebody_ends(self, step: GenerationBatchResult) -> bool:
        """Whether a request has its last token, or may lack slots for another block."""
        ids, stride = step.next_token_ids.tolist(), step.speculative_num_draft_tokens
        most = self._turns.block_size
        ends = False
        for place, commit_len in enumerate(step.accept_lens.tolist()):
            self._tokens_left[place] -= commit_len
            self._slots_left[place] -= commit_len
            committed = ids[place * stride : place * stride + commit_len]
            self.tokens[place] += committed
            ended = self._tokens_left[place] <= 0 or not self._stops[place].isdisjoint(committed)
            ends = ends or ended or self._slots_left[place] < most
        return ends

    def _reaches_kept_state(self, step: GenerationBatchResult) -> bool:
        """Whether the next step may get to a point where the prefix cache keeps a recurrent state."""
        every, most = self._turns.kept_state, self._turns.block_size
        return every is not None and any(length % every + most >= every for length in step.new_seq_lens.tolist())

    def _prepare(self, step: GenerationBatchResult) -> None:
        """Makes the batch what the scheduler would make it for the next step."""
        batch, prefix_lens = self._batch, step.new_seq_lens
        vars(batch).update(self._fields)
        batch.spec_info, batch.seq_lens = step.next_draft_input, prefix_lens
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu, batch.seq_lens_sum = prefix_lens, int(prefix_lens.sum())

    def result(self) -> GenerationBatchResult:
        """The turn's result: that of the latest step, with all steps for `resolve_step_by_step`."""
        last = self._steps[-1]
        if len(self._steps) > 1:
            setattr(last, STEPS, self._steps)
        return last

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def limit_s(self) -> float:
        return self._turns.limit_s


def _stop_ids(req: Any) -> set[int]:
    """Ids at which the host ends the request."""
    known: set[int] | None = req.__dict__.get("dflash_stop_ids")
    if known is None:
        known = req.dflash_stop_ids = set() if req.sampling_params.ignore_eos else stop_ids(req)
    return known


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._resolve_spec_v2_tokens",
    AROUND,
    why="a result counts as one step",
    until="stays",
)
def resolve_step_by_step(original: Any, processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """Counts a turn's steps one by one: verify steps, accepted drafts and histograms of each request and of the server.

    The host takes a result for one step. Its other readers want the tokens of the whole turn.
    """
    steps: list[Any] | None = result.__dict__.pop(STEPS, None)
    if steps is None:
        tokens: list[list[int]] = original(processor, result, batch)
        return tokens
    runs: list[list[int]] = [[] for _ in batch.reqs]
    correct = 0
    for step in steps:
        for run, committed in zip(runs, original(processor, step, batch), strict=True):
            run.extend(committed)
        correct += step.num_correct_drafts
    counts = [(step.accept_lens, step.cap_lens) for step in steps]
    for place, req in enumerate(batch.reqs):
        req.dflash_turn = place, counts  # for a stop string, which is found once the turn is over
    result.num_correct_drafts = correct
    result.num_cap_tokens = sum(step.num_cap_tokens for step in steps)
    result.num_non_draft_tokens_per_req = len(steps)
    result.num_correct_drafts_per_req_cpu = [len(run) - 1 for run in runs]
    result.accept_lens = sum(step.accept_lens for step in steps)
    processor.metrics_reporter.spec_num_forward_ct += len(batch.reqs) * (len(steps) - 1)  # the host adds one step
    return runs


def uncount_steps_behind_the_end(req: Any) -> None:
    """Takes back what was counted of a turn's steps that lie wholly behind the stop at which the request has ended."""
    place, counts = req.__dict__.pop("dflash_turn", (0, []))
    if req.finished_len is None:
        return
    behind = len(req.output_ids) - req.finished_len
    for accept_lens, cap_lens in reversed(counts):
        commit_len = int(accept_lens[place])
        if commit_len > behind:
            return
        behind -= commit_len
        req.spec_verify_ct -= 1
        req.spec_num_correct_drafts -= commit_len - 1
        req.spec_correct_drafts_histogram[commit_len - 1] -= 1
        if cap_lens is not None:
            rows = int(cap_lens[place])
            req.spec_num_cap_tokens -= rows
            req.spec_cap_lens_histogram[rows] -= 1


@hook(
    "sglang.srt.managers.scheduler.Scheduler.event_loop_normal",
    AROUND,
    why="the worker must see that a message waits, to end its turn",
    until="stays",
)
def watch_messages(original: Any, scheduler: Any) -> Any:
    """Shows our worker when a message has arrived for the scheduler. Only this event loop, without overlap, has a use
    for several steps a turn: under overlap, the scheduler works beside the forward."""
    take_turns = getattr(scheduler.draft_worker, "take_turns", None)
    receiver = scheduler.request_receiver
    sockets = [each for each in (receiver.recv_from_tokenizer, receiver.recv_from_rpc) if each is not None]
    if take_turns is not None and all(isinstance(each, zmq.Socket) for each in sockets):
        take_turns(lambda: any(each.get(zmq.EVENTS) & zmq.POLLIN for each in sockets))
    return original(scheduler)
