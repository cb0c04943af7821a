"""Steps and prefills on a made-up CUDA device: torch's fake tensors have shapes, dtypes and devices, but no values.

A fake tensor raises where code reads a value on the CPU (`.item()`, `.tolist()`, a tensor as a condition), and where
tensors of two devices meet. `Watch` lists what fake tensors let pass but a device waits for: operands and results on
the CPU. Triton bodies are replaced by their references, which count as one launch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as host_sampler
from sglang.srt.models import dflash as host_dflash
from stand_in_worker import BATCH, BLOCK, COLUMNS, HIDDEN, TAPS, VOCAB, decode_batch, prefill_batch, worker_of
from stand_ins import configured, make_row_sampler, make_sampler, one_rank
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_cpu.ops import murmur_hash32
from sglang_dflash import ops
from sglang_dflash.core import block
from sglang_dflash.host.patches import ragged
from sglang_dflash.host.patches.sampler import seeded_min_p
from sglang_dflash.host.worker import (
    context_kv,
    device_rows,
    draft_heads,
    draft_input,
    emitted_text,
    penalties,
    rows,
    sampling,
    sampling_memory,
    short_head,
    worker,
)
from sglang_dflash.host.worker.draft_heads import SelectorHead
from sglang_dflash.host.worker.sampling_memory import rehearse
from sglang_dflash.host.worker.short_head import DraftIds
from sglang_dflash.ops import penalties as torch_penalties
from sglang_dflash.ops import (
    reference,
    triton_acceptance,
    triton_block,
    triton_context_kv,
    triton_penalties,
    triton_sampling,
    triton_warm_up,
)

TRITON = {
    triton_block: ["block_layout"],
    triton_acceptance: ["row_argmax", "accept_chain", "accept_greedy"],
    triton_context_kv: ["write_context_kv"],
    triton_sampling: ["sample_rows"],
}
"""Modules of Triton bodies, and their functions that have a reference of the same name."""
NO_LAUNCH = {
    "prim.device",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.detach",
    "aten.lift_fresh",
}


class Watch(TorchDispatchMode):
    """Counts launches, and lists the ops that a stream may wait for: those with an operand or a result on the CPU.

    SGLang's own are in `host_waits`: its pytorch sampler, for one, assigns Python numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.host_waits: list[str] = []
        self.quiet = False
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.quiet:
            return out
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        operands = [one.device.type for one in flat if isinstance(one, torch.Tensor)]
        made = [one for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        results = [one.device.type for one in made]
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        if "cuda" in (*operands, *results):
            if "cpu" in (*operands, *results) and name != "aten.lift_fresh":
                (self.waits if _is_ours() else self.host_waits).append(name)
            if name not in NO_LAUNCH and not func.is_view:
                self.launches[name] += 1
        self._count_bytes(made)
        return out

    def _count_bytes(self, made: list[torch.Tensor]) -> None:
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        known = {storage.cdata for storage, _ in self._alive}
        for one in made:
            storage = StorageWeakRef(one.untyped_storage())
            if one.device.type == "cuda" and storage.cdata not in known:
                known.add(storage.cdata)
                self._alive.append((storage, one.untyped_storage().nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        before, self.quiet = self.quiet, True
        yield
        self.quiet = before

    def as_one(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body`, counted as a launch of its own whatever it dispatches."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.launches[f"triton.{name}"] += 1
            with self.unseen():
                return body(*args, **kwargs)

        return call


def _is_ours() -> bool:
    """Whether our package, and not SGLang within its call, dispatches the present op."""
    frame = sys._getframe(2)
    while frame is not None:
        if "sglang_dflash" in frame.f_code.co_filename:
            return True
        if "/sglang/srt/" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return True


def upload_unseen(watch: Watch) -> Callable[..., torch.Tensor]:
    """`upload` is the one way from the CPU to the device; it does not wait, because its memory is pinned."""

    def upload(tensor_cpu: torch.Tensor, device: Any) -> torch.Tensor:
        watch.launches["upload"] += 1
        with watch.unseen():
            return tensor_cpu.to(device)

    return upload


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watch]:
    """Fake CUDA tensors within the test, Triton and SGLang's kernels replaced."""
    watch = Watch()
    for cached in (block._whole, rows._same_lens):
        cached.cache_clear()  # of tensors of an earlier test's device
    for module, names in TRITON.items():
        for name in names:
            monkeypatch.setattr(module, name, watch.as_one(name, getattr(reference, name)))

    class Emitted(triton_penalties.TritonEmittedTokens):
        append = watch.as_one("append", torch_penalties.EmittedTokens.append)
        penalize = watch.as_one("penalize", torch_penalties.EmittedTokens.penalize)

    for module in (triton_penalties, triton_warm_up):
        monkeypatch.setattr(module, "TritonEmittedTokens", Emitted)
    for module in (device_rows, draft_input, penalties, ragged, sampling, short_head, worker):
        monkeypatch.setattr(module, "upload", upload_unseen(watch))
    monkeypatch.setattr(context_kv.ops, "fits", lambda *_: False)  # fake tensors have no addresses: layer by layer
    monkeypatch.setattr(host_sampler, "sampler_softmax", lambda logits: torch.softmax(logits, -1))
    monkeypatch.setattr(host_sampler, "murmur_hash32", murmur_hash32)
    filters = "top_k_top_p_min_p_sampling_from_probs_torch"  # hooked, as on a server
    monkeypatch.setattr(host_sampler, filters, partial(seeded_min_p, getattr(host_sampler, filters)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with configured(), one_rank(), FakeTensorMode(), torch.no_grad():
        yield watch


def table_of() -> torch.Tensor:
    return torch.arange(BATCH * COLUMNS, dtype=torch.int32, device="cuda").view(BATCH, COLUMNS)


def run(watch: Watch, one: Any, batch: Any) -> Any:
    """One step or prefill of the worker under watch."""
    with watch:
        result = one.forward_batch_generation(batch)
    print(dict(watch.launches), watch.waits, watch.host_waits)
    assert set(watch.host_waits) <= {"aten.index_put_"}  # its pytorch sampler assigns 0.0 by a mask
    return result


def test_a_greedy_step(watch):
    """Fails where a greedy step waits for the device, mixes devices, or launches more kernels than before."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32))
    result = run(watch, one, decode_batch("cuda"))
    assert result.next_token_ids.device.type == "cuda" and result.next_token_ids.shape == (BATCH * BLOCK,)
    assert not watch.waits
    ours = {name: count for name, count in watch.launches.items() if name.startswith("triton.")}
    assert ours == {"triton.block_layout": 1, "triton.row_argmax": 1, "triton.accept_greedy": 1}


def test_a_greedy_step_with_a_selector(watch, monkeypatch):
    """Fails where DFlash2's head waits for the device or mixes devices; the host's top-k kernel is torch's here."""
    monkeypatch.setattr(host_dflash, "_flashinfer_top_k", None)
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32))
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "state_rank": 4, "top_k": 6}
    config = SimpleNamespace(output_multiplier=2.0, final_logit_softcapping=30.0)
    with torch.device("cuda"):
        selector = host_dflash.CandidateSelector(**shape)
    model = SimpleNamespace(candidate_selector=selector, draft_config=config)
    one._draft._head = SelectorHead(one._draft._head._lm_head, BLOCK, model)
    result = run(watch, one, decode_batch("cuda"))
    assert result.next_token_ids.device.type == "cuda" and result.next_token_ids.shape == (BATCH * BLOCK,)
    assert not watch.waits
    assert watch.launches["aten.topk"] == 1 and not watch.launches["triton.row_argmax"]


def test_a_greedy_step_with_a_short_head(watch, monkeypatch):
    """Fails where counting what was seen, or exchanging rows of the draft's head, waits for the device, or an exchange
    takes more launches than one upload, one gather and two writes."""
    monkeypatch.setattr(draft_heads, "FEWEST_IDS", 2)
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32))
    short = one._draft.short_head = one._draft._head.shorten(DraftIds(16), [VOCAB - 1])
    assert short is not None and short.weight.device.type == "cuda"
    short.see_prompts(decode_batch("cuda", prompt=[40, 41]).reqs)
    watch.launches.clear()
    result = run(watch, one, decode_batch("cuda"))
    assert result.next_token_ids.shape == (BATCH * BLOCK,) and not watch.waits and 41 in short._vocabulary.ids
    expected = {"upload": 1, "aten.index_select": 1, "aten.index_copy_": 2}
    assert {name: watch.launches[name] for name in expected} == expected


ASKED: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 9},
    "a bias": {"logit_bias": {"3": 1.0}},
    "all": {"temperature": 0.7, "min_p": 0.1, "top_p": 0.8, "frequency_penalty": 0.5, "logit_bias": {"3": 1.0}},
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_sampled_step(asked, watch):
    """Fails where sampling, penalties or a bias wait for the device, or the two launches of penalties are more."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), make_sampler())
    batch = decode_batch("cuda", **ASKED[asked])
    group = one._sampler.prefill(batch)
    one._sampler.commit_first(batch, group, torch.zeros(BATCH, dtype=torch.int32, device="cuda"))
    watch.launches.clear()
    run(watch, one, batch)
    assert not watch.waits
    penalised = "frequency_penalty" in ASKED[asked]
    assert watch.launches["triton.penalize"] == watch.launches["triton.append"] == int(penalised)
    assert not watch.launches["triton.sample_rows"], "the pytorch backend splits ties"


DRAWN: dict[str, dict[str, Any]] = {
    "filters": ASKED["filters"],
    "penalties and a bias": {**ASKED["penalties"], "top_k": 64, "logit_bias": {"3": 1.0}},
}
"""What the op `sample_rows` draws where flashinfer samples."""


@pytest.mark.parametrize("asked", DRAWN)
def test_a_step_that_the_op_samples(asked, watch):
    """Fails where the op is not used, waits for the device, or takes more launches than the numbers and the draw."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), make_sampler())
    batch = decode_batch("cuda", **{"temperature": 0.7} | DRAWN[asked])
    one._sampler.prefill(batch)
    watch.launches.clear()
    with configured(sampling_backend="flashinfer"):
        result = run(watch, one, batch)
    assert result.next_token_ids.shape == (BATCH * BLOCK,) and result.next_token_ids.dtype == torch.int64
    assert not watch.waits and not watch.host_waits
    assert watch.launches["triton.sample_rows"] == watch.launches["aten.rand"] == 1
    assert not watch.launches["aten._softmax"]


def test_the_penalties_of_a_running_batch_are_uploaded_once(watch):
    """Fails where every step sends the same parameters to the device anew."""
    sampler = make_row_sampler(make_sampler(), VOCAB, BLOCK, "cuda")
    batch = decode_batch("cuda", frequency_penalty=0.5)
    with watch:
        group = sampler.prefill(batch)
        first = watch.launches["upload"]
        group = sampler._penalties.group(batch)
        assert watch.launches["upload"] == first > 0
        batch.reqs.pop()
        assert len(sampler._penalties.group(batch).requests) == BATCH - 1 != len(group.requests)
        assert watch.launches["upload"] > first


@pytest.mark.parametrize("asked", [{}, ASKED["all"]], ids=["greedy", "all"])
def test_a_prefill(asked, watch):
    """Fails where a prefill waits for the device: the start of penalties did so twice per request. Also fails where its
    tokens are not counted."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), make_sampler())
    run(watch, one, prefill_batch("cuda", **asked))
    assert not watch.waits
    assert one.prefilled == 5 + 9


class HostLens(list):
    """The lengths that the host keeps on the CPU, with the arithmetic that a step does on them."""

    def __add__(self, extra: int) -> HostLens:
        return HostLens(n + extra for n in self)

    def clamp(self, max: int) -> HostLens:
        return HostLens(min(n, max) for n in self)

    def sum(self) -> int:
        return sum(self)


def test_a_step_with_a_window(watch):
    """Fails where the draft's window waits for the device or reads a table of the CPU."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), window=16)
    batch = decode_batch("cuda")
    batch.seq_lens_cpu = HostLens([5, 9, 30])  # a fake tensor of the CPU has no values either
    run(watch, one, batch)
    assert not watch.waits


@pytest.mark.parametrize("wrong", ["a value from the CPU", "a read of a value", "a tensor of the CPU"])
def test_the_watch_sees_what_it_should(wrong, watch):
    """Fails where this file could not fail: three planted errors in a step."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32))
    accept = one._acceptor.accept

    def planted(rows: Any, *rest: Any) -> Any:
        if wrong == "a value from the CPU":
            rows.ids[0] = torch.tensor(3)
        elif wrong == "a read of a value":
            rows.ids[rows.ids > 3].sum()
        else:
            rows = replace(rows, ids=rows.ids + torch.ones(BATCH * BLOCK, dtype=torch.int64))
        return accept(rows, *rest)

    one._acceptor.accept = planted
    if wrong == "a value from the CPU":
        run(watch, one, decode_batch("cuda"))
        assert watch.waits
    else:
        with pytest.raises((DynamicOutputShapeException, RuntimeError)):
            run(watch, one, decode_batch("cuda"))


@pytest.mark.parametrize("seeded", [False, True])
def test_sampling_memory_does_not_grow_with_the_batch(seeded, watch):
    """Fails where sampling 256 requests in blocks of 16 rows of 151,936 ids takes more than 4.5 GB beside the logits.
    All rows at once take 13 GB, with seeds 32."""
    rows, vocab_size = 256 * 16, 151_936
    logits_bytes = rows * vocab_size * 4
    sampler = make_row_sampler(make_sampler(), vocab_size, 16, "cuda")
    with watch:
        rehearse(sampler, 256, 16, vocab_size, seeded, "cuda")
    print(f"{(watch.peak_bytes - logits_bytes) / 1e9:.2f} GB beside {logits_bytes / 1e9:.2f} GB of logits")
    assert watch.peak_bytes - logits_bytes < 4.5e9
    watch.peak_bytes, sampler.sampled_rows = 0, rows
    with watch:
        rehearse(sampler, 256, 16, vocab_size, seeded, "cuda")
    print(f"{(watch.peak_bytes - logits_bytes) / 1e9:.2f} GB for all rows at once")
    assert watch.peak_bytes - logits_bytes > (25e9 if seeded else 10e9)


def test_the_start_of_a_server_warms_up(watch, monkeypatch):
    """Fails where a kernel of a step is left to the first request, or the host does not learn what sampling takes."""
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), make_sampler())
    one._target.max_running_requests = 4
    one._draft.model = SimpleNamespace(fc=SimpleNamespace(weight=torch.zeros(HIDDEN, TAPS * HIDDEN, device="cuda")))
    monkeypatch.setattr(sampling_memory, "_peak_bytes", lambda call: call() or 11)
    with watch:
        result = one.prewarm_sampling()
    assert one._target.sampling_prewarm_result is result and result.sampling_headroom_bytes == 11
    launched = {name for name in watch.launches if name.startswith("triton.")}
    assert launched == {
        f"triton.{name}" for names in TRITON.values() for name in names if name != "write_context_kv"
    } | {
        "triton.append",
        "triton.penalize",
    }


def test_processors_are_the_one_wait(watch):
    """Fails where a custom processor's tokens are read otherwise than at the documented place, which fake tensors
    refuse: this test shows that the other tests would see such a read."""
    text = emitted_text.EmittedText()
    with pytest.raises(RuntimeError), watch:
        text._pending.append(([], torch.zeros((1, 2), device="cuda"), torch.zeros(1, device="cuda")))
        text._read_pending()
