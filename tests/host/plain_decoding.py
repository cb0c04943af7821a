"""Plain decoding by SGLang's own classes, token by token: what a request gets alone, without speculation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from stand_ins import Batch, make_req

from sglang_dflash.host.patches.block_results import order_penalizers

PENALIZERS = (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
LISTED_IDS = [3, 1]  # ids whose logprobs a request asks for


class One:
    """A batch of one request. The orchestrator holds only a weak reference to it."""

    def __init__(self, req: Req) -> None:
        self.reqs, self.device = [req], "cpu"


class Host:
    """What plain decoding without overlap does to one request's logits."""

    def __init__(self, req: Req, vocab_size: int) -> None:
        self._batch = One(req)
        self.penalizers = BatchedPenalizerOrchestrator(vocab_size, self._batch, set(PENALIZERS))
        order_penalizers(None, self.penalizers)

    def emit(self, ids: Sequence[int]) -> Host:
        for token in ids:
            self.penalizers.cumulate_output_tokens(torch.tensor([token]))
        return self

    def penalized(self, row: torch.Tensor) -> torch.Tensor:
        """[V] -> [V]."""
        row = row.clone()[None]
        self.penalizers.apply(row)
        return row[0]


class SomeTokens(BaseGrammarObject):
    """A grammar that allows two thirds of the tokens, which ones depends on all tokens before."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.accepted: list[int] = []

    def allows(self) -> torch.Tensor:
        """[V] bool."""
        return (torch.arange(self._vocab_size) + 2 * sum(self.accepted) + len(self.accepted)) % 3 != 0

    def accept_token(self, token: int) -> None:
        assert self.allows()[token], (token, self.accepted)
        self.accepted.append(token)

    def rollback(self, k: int) -> None:
        del self.accepted[len(self.accepted) - k :]

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        bits = self.allows().view(-1, 32).long() << torch.arange(32)
        vocab_mask[idx] = bits.sum(-1).int()  # wraps to a negative word

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        allowed = (vocab_mask[:, :, None] >> torch.arange(32)) & 1
        logits.masked_fill_(allowed.flatten(1) == 0, -torch.inf)


class NotTheSum(CustomLogitProcessor):
    """Excludes tokens that depend on the number and the sum of those emitted before, and on the request's parameter."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            emitted = list(params["__req__"].output_ids)
            excluded = torch.arange(len(row)) % 4 == (sum(emitted) + len(emitted) + params["shift"]) % 4
            row.masked_fill_(excluded, -torch.inf)
        return logits


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. sampling: as a client would send it."""

    sampling: dict[str, Any]
    prompt: tuple[int, ...]
    grammar: bool = False
    shift: int | None = None  # None: no custom processor
    top_logprobs: int = 0
    listed_ids: bool = False

    def req(self, rid: str, slot: int, vocab_size: int, first: int) -> Req:
        """The request behind its prefill, which has chosen its first token."""
        processor = None if self.shift is None else NotTheSum.to_str()
        custom = None if self.shift is None else {"shift": self.shift}
        sampling = {"max_new_tokens": 999, "custom_params": custom, **self.sampling}
        req = make_req(rid, slot, vocab_size, [first], processor, prompt=self.prompt, **sampling)
        req.grammar = SomeTokens(vocab_size) if self.grammar else None
        return req


class Plain(NamedTuple):
    """One token of plain decoding. Logprobs: of the token; best values and ids; those of `LISTED_IDS`."""

    token: int
    logprob: float
    best: torch.Tensor
    best_ids: list[int]
    listed: torch.Tensor


@cache
def vector(kind: str, text: tuple[int, ...], size: int) -> torch.Tensor:
    """[size] float32: a made-up target's logits or hidden states behind a text, each a function of all its tokens."""
    seed = zlib.crc32(f"{kind} {text}".encode())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def decode_plain(asked: Asked, first: int, count: int, vocab_size: int, sampler: Any) -> list[Plain]:
    """The `count` tokens behind `first`."""
    req = asked.req("alone", 0, vocab_size, first)
    host, out = Host(req, vocab_size).emit([first]), []
    for _ in range(count):
        text = (*asked.prompt, *req.output_ids)
        logits = host.penalized(vector("logits", text, vocab_size))[None]
        if req.grammar is not None:
            logits.masked_fill_(~req.grammar.allows(), -torch.inf)
        info = Batch([req], vocab_size).sampling_info  # with counts of its own, which lack the emitted tokens
        info = replace(info, acc_additive_penalties=None, acc_scaling_penalties=None)
        info.apply_logits_bias(logits)
        chosen = LogitsProcessorOutput(next_token_logits=logits)
        (token,) = sampler(chosen, info, True, [4], [LISTED_IDS], torch.tensor([len(text) - 1])).tolist()
        best = torch.as_tensor(chosen.next_token_top_logprobs_val[0])
        best_ids = torch.as_tensor(chosen.next_token_top_logprobs_idx[0]).tolist()
        listed = torch.as_tensor(chosen.next_token_token_ids_logprobs_val[0])
        out.append(Plain(token, float(chosen.next_token_logprobs[0]), best, best_ids, listed))
        host.emit([token])
        req.output_ids.append(token)
        if req.grammar is not None:
            req.grammar.accept_token(token)
    return out
