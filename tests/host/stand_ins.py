"""Requests, batches and a sampler without a server, from SGLang's own classes where possible."""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker.sampling import RowSampler


class Tokenizer:
    """One character per token."""

    eos_token_id = 0
    additional_stop_token_ids: set[int] | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def make_req(
    rid: str = "r",
    slot: int = 0,
    vocab_size: int = 128,
    output_ids: Sequence[int] = (),
    processor: str | None = None,
    eos_token_ids: set[int] | None = None,
    prompt: Sequence[int] = (1, 2, 3),
    **sampling: Any,
) -> Req:
    """The scheduler's `Req`, with the sampling parameters as a client would send them."""
    params = SamplingParams(**sampling)
    params.verify(vocab_size)
    params.normalize(Tokenizer())
    req = Req(
        rid,
        "",
        array("q", prompt),
        params,
        custom_logit_processor=processor,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
    )
    req.tokenizer = Tokenizer()
    req.output_ids.extend(output_ids)
    req.kv.req_pool_idx = slot
    return req


def copies(req: Req, count: int) -> list[Req]:
    """Copies of a request, without slots."""
    made = [copy.copy(req) for _ in range(count)]
    for other in made:
        other.kv = ReqKvInfo()
        other.output_ids = array("q", req.output_ids)
    return made


class Batch:
    """What a worker sees of a `ScheduleBatch`."""

    def __init__(self, reqs: Sequence[Req], vocab_size: int, device: str = "cpu", **fields: Any) -> None:
        self.reqs = list(reqs)
        self.device = device
        self.decoding_reqs: list[Req] | None = None
        self.has_grammar = False
        self.return_logprob = False
        self.top_logprobs_nums = [0] * len(self.reqs)
        self.token_ids_logprobs = [None] * len(self.reqs)
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, vocab_size).copy_for_forward()
        for name, value in fields.items():
            setattr(self, name, value)


def make_rows(ids: torch.Tensor, prefix_lens: torch.Tensor | None = None) -> VerifyRows:
    """Chains of equally many rows. ids: [B, W] int64."""
    if prefix_lens is None:
        prefix_lens = torch.full((len(ids),), 7)
    positions = (prefix_lens[:, None] + torch.arange(ids.shape[1])).flatten()
    return VerifyRows(ids.flatten(), positions, positions, ids.shape[1])


def output_of(logits: torch.Tensor) -> LogitsProcessorOutput:
    """The result of the target's forward. logits: [rows, V]; they will be overwritten."""
    return LogitsProcessorOutput(next_token_logits=logits)


def make_row_sampler(
    sampler: Any, vocab_size: int, width: int, device: str = "cpu", kernels: ops.Kernels | None = None
) -> RowSampler:
    runner = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=vocab_size), device=device, sampler=sampler, model=None
    )
    return RowSampler(runner, width, kernels or ops.choose_kernels(device, torch.float32), draws=True)


@contextmanager
def configured(**fields: Any) -> Iterator[None]:
    """SGLang's configuration on a server with this plugin; torch uncompiled and on one thread, for short tests.

    `torch.compile` would need a compiler. What the host compiles here, the scaling of a repetition penalty, gives the
    same bits uncompiled.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = {"sampling_backend": "pytorch", "speculative_algorithm": "DFLASH", "enable_custom_logit_processor": True}
    with (
        get_context().override_server_args(**{**config, **fields}),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
    torch.set_num_threads(threads)


def one_rank() -> Any:
    """SGLang's parallel state of a server of one rank, within a `with` block."""
    return get_parallel().override(tp_group=SimpleNamespace(world_size=1, rank_in_group=0, device_group=None))


def make_sampler() -> Sampler:
    """The host's sampler of one rank; to be constructed and called within `configured`."""
    with one_rank():
        return Sampler()


class Group:
    """Ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._sent: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(world_size)
        self.local = threading.local()

    @property
    def rank_in_group(self) -> int:
        return getattr(self.local, "rank", 0)

    @property
    def ranks(self) -> list[int]:
        return list(range(self.world_size))

    @property
    def cpu_group(self) -> Group:
        """What `torch.distributed` would be given."""
        return self

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._sent[self.local.rank] = tensor
        self._barrier.wait(10)
        if self.local.rank != src:
            tensor.copy_(self._sent[src])
        self._barrier.wait(10)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self._sent[self.local.rank] = tensor
        self._barrier.wait(10)
        gathered = torch.cat([self._sent[rank] for rank in range(self.world_size)], dim)
        self._barrier.wait(10)  # before anybody sends again
        return gathered

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What `function(rank)` returns in the thread of each rank."""

        @torch.inference_mode()
        def on(rank: int) -> Any:
            self.local.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()  # the other ranks wait in vain
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(on, range(self.world_size)))


def split_head(weight: torch.Tensor, ranks: int, span: int) -> list[SimpleNamespace]:
    """The target's head on each rank: `span` rows of `weight` ([V, H]), fewer on the last rank, and padding behind them
    whose logits could win."""
    heads = []
    for first in range(0, span * ranks, span):
        own = weight[first : first + span]
        padded = torch.cat((own, own.new_full((span + 2 - len(own), weight.shape[1]), 1e4)))
        shard = SimpleNamespace(num_added_elements=0, num_org_elements=len(own), org_vocab_start_index=first)
        heads.append(SimpleNamespace(weight=padded, shard_indices=shard))
    return heads


class PackedHead(torch.nn.Module):
    """A quantised head: its weight is packed, so only its method can multiply by it."""

    def __init__(self, weight: torch.Tensor, padding: int) -> None:
        super().__init__()
        padded = torch.cat((weight, torch.full((padding, weight.shape[1]), 1e4)))
        self.qweight = torch.nn.Parameter((padded * 2).to(torch.int8), requires_grad=False)
        self.shard_indices = SimpleNamespace(
            num_added_elements=0, num_org_elements=len(weight), org_vocab_start_index=0
        )
        self.quant_method = SimpleNamespace(apply=self._apply)
        self.calls = 0

    def _apply(self, head: torch.nn.Module, x: torch.Tensor, bias: None) -> torch.Tensor:
        self.calls += 1
        return x @ (head.qweight.to(x.dtype) / 2).T
