"""Penalties of running requests: which requests ask for them, and what each has emitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker.draft_input import upload
from sglang_dflash.host.worker.protocols import Req, ScheduleBatch

Asking = tuple[int, int, Any]
"""A request with penalties: its index in the batch, its slot, and SGLang's `Req`."""


class Group(NamedTuple):
    """The requests of a batch that ask for penalties.

    Fields:
        requests: [P] int64; their indices in the batch.
        rows: [P] int64; their rows in `ops.EmittedTokens`.
        most: upper bound of the tokens that a row holds.
    """

    requests: torch.Tensor
    rows: torch.Tensor
    params: ops.PenaltyParams
    most: int


class RequestPenalties:
    """Token counts per request slot. Every prefill rebuilds them from the request's tokens, so also after a retraction.

    SGLang's own counts miss committed tokens under speculation, and are one step late under overlap. Ours are kept
    on the device, in the order of the steps.
    """

    def __init__(self, vocab_size: int, max_width: int, device: Any, kernels: ops.Kernels) -> None:
        self._emitted = kernels.emitted_tokens(vocab_size, device)
        self._max_width = max_width
        self._device = device
        self._row_of_slot: dict[int, int] = {}
        self._held: tuple[list[Asking], Group] | None = None

    def start(self, reqs: Sequence[Req]) -> None:
        """Starts the counts of requests with the tokens that they have emitted."""
        for req in reqs:
            if asks_for_penalties(req.sampling_params):
                row = self._row_of_slot.setdefault(req.kv.req_pool_idx, len(self._row_of_slot))
                ids = torch.tensor(list(req.output_ids), dtype=torch.int64)
                self._emitted.start(row, upload(ids, self._device), req.sampling_params.frequency_penalty)

    def prefill(self, batch: ScheduleBatch) -> Group | None:
        """Starts the counts of a prefill's requests, and sets the penalties that SGLang's sampler applies.

        A request that comes back after a retraction has already emitted tokens, and so have the running requests of a
        mixed batch. SGLang counts neither. Under overlap, a running request's `output_ids` also lack the last token.
        """
        tails = batch.decoding_reqs or ()  # running requests of a mixed batch: already counted
        self.start([req for req in batch.reqs if req not in tails])
        group = self.group(batch)
        info = batch.sampling_info  # this forward's own copy
        if group is not None and (tails or any(req.output_ids for req in batch.reqs)):
            additive, scaling = ops.penalties_of(self._emitted.of(group.rows, group.most), group.params)
            info.acc_additive_penalties[group.requests] = additive
            if info.acc_scaling_penalties is not None:
                info.acc_scaling_penalties[group.requests] = scaling
        return group

    def group(self, batch: ScheduleBatch) -> Group | None:
        """The batch's requests with penalties; None if there are none."""
        if batch.sampling_info.acc_additive_penalties is None:  # SGLang knows that none asks
            self._held = None
            return None
        asking = [
            (i, req.kv.req_pool_idx, req) for i, req in enumerate(batch.reqs) if asks_for_penalties(req.sampling_params)
        ]
        if not asking:
            return None
        # Under overlap SGLang does not know the previous step's tokens yet.
        most = max(len(req.output_ids) for *_, req in asking) + 2 * self._max_width
        if self._held is None or not _same(self._held[0], asking):
            self._held = asking, self._uploaded(asking)
        return self._held[1]._replace(most=most)

    def _uploaded(self, asking: list[Asking]) -> Group:
        return Group(
            self._upload([i for i, *_ in asking], torch.int64),
            self._upload([self._row_of_slot[slot] for _, slot, _ in asking], torch.int64),
            self._params([req for *_, req in asking]),
            0,
        )

    def _params(self, reqs: Sequence[Any]) -> ops.PenaltyParams:
        asked = [req.sampling_params for req in reqs]
        stops = [sorted(stop_ids(req)) if req.sampling_params.min_new_tokens else [] for req in reqs]
        most = max(1, *(len(ids) for ids in stops))
        # A request without stop ids masks nothing: its minimum is 0.
        padded = [(ids + ids[:1] * most)[:most] if ids else [0] * most for ids in stops]
        minima = [params.min_new_tokens if ids else 0 for params, ids in zip(asked, stops, strict=True)]
        return ops.PenaltyParams(
            self._upload([params.frequency_penalty for params in asked], torch.float32),
            self._upload([params.presence_penalty for params in asked], torch.float32),
            self._upload([params.repetition_penalty for params in asked], torch.float32),
            self._upload(minima, torch.int64),
            self._upload(padded, torch.int64),
        )

    def _upload(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self._device)

    def apply(self, group: Group, logits: torch.Tensor, rows: VerifyRows) -> None:
        """logits: [T, V], changed in place."""
        places = torch.arange(len(rows.ids), device=rows.ids.device)
        chosen = rows.chosen
        lens = torch.full_like(group.rows, rows.width) if chosen is None else chosen.lens[group.requests].long()
        block = ops.BlockRows(rows.blocks(places)[group.requests], rows.blocks(rows.ids)[group.requests], lens)
        self._emitted.penalize(logits, block, group.rows, group.most, group.params)

    def commit(self, group: Group, ids: torch.Tensor, lens: torch.Tensor) -> None:
        """Counts, for every request, the first `lens` ([B]) of its `ids` ([B, W])."""
        self._emitted.append(group.requests, group.rows, ids, lens, group.most, group.params)


def _same(held: list[Asking], asking: list[Asking]) -> bool:
    """Whether these are the same requests in the same places; a request keeps its parameters."""
    return len(held) == len(asking) and all(a[:2] == b[:2] and a[2] is b[2] for a, b in zip(held, asking, strict=True))


def asks_for_penalties(params: Any) -> bool:
    """params: SGLang's `SamplingParams`."""
    return bool(
        params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.min_new_tokens
    )


def stop_ids(req: Req) -> set[int]:
    """The ids that end a request (`Req._check_token_based_finish`), and that SGLang masks until `min_new_tokens`
    tokens are emitted (penaltylib/min_new_tokens.py)."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        ids |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return {token for token in ids if token is not None}
