"""What custom logit processors see: each row's request as if the drafts before the row were emitted."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import torch

from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker.protocols import Req, ScheduleBatch


class EmittedText:
    """The emitted tokens of requests with custom logit processors, on the CPU and up to date.

    `Req.output_ids` lags one step under overlap. Every step of a batch with processors waits for its drafts.
    """

    def __init__(self) -> None:
        self._ids: dict[int, array] = {}  # by request slot
        self._pending: list[tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]] = []

    def prefill(self, batch: ScheduleBatch) -> None:
        """Starts a prefill's requests with SGLang's `output_ids`, which are complete at a prefill.

        For the running requests of a mixed batch SGLang may lack one step, so processors get the tokens kept here.
        """
        self._read_pending()  # first: a finished request's slot may go to another one
        info = batch.sampling_info  # this forward's own copy
        info.custom_params = list(info.custom_params)
        tails = batch.decoding_reqs or ()
        for i, slot, req in _tracked(batch):
            if req not in tails:
                self._ids[slot] = array("q", req.output_ids)
            elif isinstance(info.custom_params[i], dict):
                info.custom_params[i] = self._params(req, info.custom_params[i], [])

    def start(self, batch: ScheduleBatch) -> None:
        """Starts requests that no prefill here has seen with the tokens that they have emitted."""
        self._read_pending()
        for _, slot, req in _tracked(batch):
            self._ids[slot] = array("q", req.output_ids)

    def commit(self, batch: ScheduleBatch, ids: torch.Tensor, lens: torch.Tensor) -> None:
        """Of every request, the first `lens` ([B]) of its `ids` ([B, W]) are emitted; read when next needed."""
        self._pending.append(([(i, slot) for i, slot, _ in _tracked(batch)], ids, lens))

    def row_params(self, batch: ScheduleBatch, rows: VerifyRows) -> list[Any]:
        """Custom parameters of all T rows."""
        self._read_pending()
        found: list[Any] = []
        chains = [[token for token in chain if token >= 0] for chain in rows.chains().tolist()]
        for req, params, chain in zip(batch.reqs, batch.sampling_info.custom_params, chains, strict=True):
            if req.custom_logit_processor and isinstance(params, dict):
                found += [self._params(req, params, chain[1 : row + 1]) for row in range(len(chain))]
            else:
                found += [params] * len(chain)
        return found

    def _params(self, req: Req, params: dict[str, Any], drafts: list[int]) -> dict[str, Any]:
        row_req = copy.copy(req)  # so that what depends on `output_ids`, such as `seqlen`, follows
        row_req.output_ids = self._ids[req.kv.req_pool_idx] + array("q", drafts)
        return params | {"__req__": row_req}

    def _read_pending(self) -> None:
        for tracked, ids, lens in self._pending:
            ids_cpu, lens_cpu = ids.tolist(), lens.tolist()
            for i, slot in tracked:
                self._ids[slot].extend(ids_cpu[i][: lens_cpu[i]])
        self._pending.clear()


def _tracked(batch: ScheduleBatch) -> list[tuple[int, int, Any]]:
    """Index in the batch, slot and `Req` of every request with a processor."""
    return [(i, req.kv.req_pool_idx, req) for i, req in enumerate(batch.reqs) if req.custom_logit_processor]
