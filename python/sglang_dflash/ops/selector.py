"""The specification of DFlash2's selector: the candidates of each row, their scores in pairs, and the greedy walk.

Ties: the lowest id wins, among candidates at the cut and in the walk. So candidates stand in the order of their ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflash.ops.reference import Drafts


class Candidates(NamedTuple):
    """The candidates of each row.

    Fields:
        values: [N, k]; their logits.
        ids: [N, k] int64, rising.
    """

    values: torch.Tensor
    ids: torch.Tensor


def top_candidates(logits: torch.Tensor, count: int) -> Candidates:
    """The `count` ids with the largest logits; of equal logits at the cut, the lowest ids.

    logits: [N, V], V >= count, no NaN.
    """
    values, ids = logits.topk(count, dim=-1)
    cut = values[:, -1:]
    # `topk` keeps any of the ids that tie at the cut. They are replaced by the lowest ones.
    columns = logits.shape[1] - torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    lowest = logits.shape[1] - torch.where(logits == cut, columns, 0).topk(count, dim=-1).values.long()
    above = (values > cut).sum(-1, keepdim=True)  # they come first in `values`
    place = torch.arange(count, device=logits.device).expand_as(ids)
    ids = torch.where(place < above, ids, lowest.gather(1, (place - above).clamp(min=0)))
    return by_id(values, ids)


def by_id(values: torch.Tensor, ids: torch.Tensor) -> Candidates:
    """Puts the candidates of each row, [N, k] each, in the order of their ids."""
    ids, order = ids.long().sort(dim=-1)
    return Candidates(values.gather(-1, order), ids)


def candidate_logits(values: torch.Tensor, multiplier: float, softcap: float | None) -> torch.Tensor:
    """The candidates' logits as the selector adds them: in float32, multiplied, then capped to c * tanh(z / c)."""
    scaled = values.float() * multiplier
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def pair_scores(
    candidates: Candidates,
    keys: torch.Tensor,
    previous_ids: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
) -> torch.Tensor:
    """score(a, b) = logit(b) + <A(a) * key, B(b)> for every candidate b of a row behind every previous token a.

    Args:
        candidates: of N rows; values [N, k] as `candidate_logits` gives them.
        keys: [N, r]; the rows' hidden states, projected.
        previous_ids: [N, p] int64.
        predecessors, successors: A and B, [V, r] each.

    Returns:
        [N, p, k] float32.
    """
    queries = predecessors[previous_ids] * keys[:, None]  # [N, p, r]
    return candidates.values[:, None].float() + queries @ successors[candidates.ids].transpose(1, 2)


def greedy_walk(
    candidates: Candidates,
    keys: torch.Tensor,
    anchor_ids: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
) -> Drafts:
    """From the anchor on, each row's best candidate behind the one chosen before it; and how it stands among the row's
    candidates, the softmax of their scores.

    Args:
        candidates, keys: of B * S rows: S of a request, then those of the next one.
        anchor_ids: [B] int64.

    Returns:
        ids and log_probs, [B, S] each; a log-probability is -inf where the row's scores have no finite maximum.
    """
    requests, count = len(anchor_ids), candidates.ids.shape[1]
    ids = candidates.ids.view(requests, -1, count)
    anchors = anchor_ids[:, None, None].expand(-1, 1, count)
    previous = torch.cat((anchors, ids[:, :-1]), dim=1)  # [B, S, k]
    scores = pair_scores(candidates, keys, previous.flatten(0, 1), predecessors, successors)
    best = scores.argmax(-1).view(requests, -1, count)  # for every previous candidate; the first of equals
    log_probs = scores.log_softmax(-1).amax(-1).view(requests, -1, count)
    log_probs = torch.where(log_probs.isnan(), float("-inf"), log_probs)
    place = best[:, 0, :1]
    places, chosen = [place], [log_probs[:, 0, :1]]
    for slot in range(1, ids.shape[1]):
        chosen.append(log_probs[:, slot].gather(1, place))
        place = best[:, slot].gather(1, place)
        places.append(place)
    return Drafts(ids.gather(2, torch.stack(places, dim=1))[:, :, 0], torch.cat(chosen, dim=1))
