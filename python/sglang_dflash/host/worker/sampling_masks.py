"""`return_sampling_mask`: the tokens that each emitted one was drawn from, as SGLang's sampler captures them by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.worker import simulated
from sglang_dflash.host.worker.draft_input import upload


@hook(
    "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request",
    AROUND,
    why="SGLang's worker takes neither min_p nor, without its CUDA kernel, sampled requests; ours takes both",
    until="stays",
)
def validate(original: Any, req: Any, spec_algorithm: Any) -> str | None:
    """Why the scheduler must refuse the mask; None if it is served."""
    if not spec_algorithm.is_dflash():
        refusal: str | None = original(req, spec_algorithm)
        return refusal
    if simulated.simulates():
        return f"return_sampling_mask is not served while {simulated.VARIABLE} simulates acceptance."
    return None


def captured(info: SamplingBatchInfo, requests: Sequence[int], device: Any) -> dict[str, torch.Tensor | None]:
    """The fields of `SamplingBatchInfo` that say which rows are captured, and which of those with all logprobs.

    requests: of each row.
    """
    asked = info.return_sampling_masks or ()
    rows = [row for row, request in enumerate(requests) if asked and asked[request]]
    whole = info.return_sampling_support_logprobs or ()
    places = [place for place, row in enumerate(rows) if whole and whole[requests[row]]]

    def indices(values: list[int]) -> torch.Tensor | None:
        return upload(torch.tensor(values, dtype=torch.int64), device) if values else None

    return {
        "sampling_mask_batch_indices": indices(rows),
        "sampling_support_logprobs_capture_indices": indices(places),
    }


def join(
    target_out: Any, outs: Sequence[LogitsProcessorOutput], info: SamplingBatchInfo, requests: Sequence[int], width: int
) -> None:
    """Writes what all spans captured into `target_out.sampling_mask_output`, as blocks of the requests that ask.

    Args:
        outs: of the spans, in order.
        requests: of each of the T rows; a request's rows stand together, the shallower first.
        width: W. A block that has fewer rows repeats its last one, which nobody reads.
    """
    parts = [out.sampling_mask_output for out in outs if out.sampling_mask_output is not None]
    if not parts:
        return
    asked, whole = info.return_sampling_masks or (), info.return_sampling_support_logprobs or ()

    def in_blocks(values: torch.Tensor, asking: Sequence[bool]) -> torch.Tensor:
        """[A, W, ...], of the values of all rows whose request asks, [N, ...]."""
        counts = [requests.count(request) for request, own in enumerate(asking) if own]
        firsts = [sum(counts[:place]) for place in range(len(counts))]
        table = [
            [first + min(depth, count - 1) for depth in range(width)]
            for first, count in zip(firsts, counts, strict=True)
        ]
        return values[upload(torch.tensor(table, dtype=torch.int64), values.device)]

    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """In the first dimension; shorter supports ([N, S]) are filled up."""
        if tensors[0].dim() == 1:
            return torch.cat(list(tensors))
        most = max(tensor.shape[1] for tensor in tensors)
        return torch.cat([F.pad(tensor, (0, most - tensor.shape[1])) for tensor in tensors])

    support = [part.support_logprobs for part in parts if part.support_logprobs is not None]
    target_out.sampling_mask_output = SamplingMaskOutput(
        token_ids=in_blocks(joined([part.token_ids for part in parts]), asked),
        lengths=in_blocks(joined([part.lengths for part in parts]), asked),
        selected_logprobs=in_blocks(joined([part.selected_logprobs for part in parts]), asked),
        support_logprobs=in_blocks(joined(support), [a and b for a, b in zip(asked, whole, strict=True)])
        if support
        else None,
        statuses=in_blocks(joined([part.statuses for part in parts]), asked),
    )


def accept(target_out: Any, info: SamplingBatchInfo, commit_lens: torch.Tensor) -> None:
    """Says how many rows of each block in `target_out.sampling_mask_output` are committed. commit_lens: [B]."""
    if target_out.sampling_mask_output is not None:
        asking = [request for request, own in enumerate(info.return_sampling_masks or ()) if own]
        chosen = upload(torch.tensor(asking, dtype=torch.int64), commit_lens.device)
        target_out.sampling_mask_output.num_accept_tokens = commit_lens[chosen]
