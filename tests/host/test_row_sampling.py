"""The input of the host's sampler for every row of a block: fields, parameters, processors; and hidden states."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from stand_ins import Batch, configured, make_req, make_row_sampler, make_rows, make_sampler, output_of

from sglang_cpu.ops import murmur_hash32
from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker import hidden_states
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker.sampling import LOGPROBS, expand

VOCAB = 16
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()

# How `expand` treats every field of the host's `SamplingBatchInfo` when requests become rows.
ONCE_PER_ROW = {"temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"}
IN_THE_LOGITS = {"grammar_mask", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias"}
OF_ROWS = {
    *("custom_params", "custom_logit_processor"),
    *("sampling_mask_batch_indices", "sampling_support_logprobs_capture_indices"),
}
OF_THE_BATCH = {
    *("is_all_greedy", "is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"),
    *("vocab_size", "device", "has_custom_logit_processor", "max_top_k", "npu_top_k_top_p_eligible"),
    "grammars",  # read only to see whether there are any
    *("return_sampling_masks", "return_sampling_support_logprobs", "sampling_mask_top_ks"),  # the next two say the rows
    "penalizer_orchestrator",  # None in a forward's copy
}
REFUSED = {
    *("watermark_keys", "watermark_context_windows", "watermark_enabled"),
    *("watermark_candidates_host", "has_watermark_candidates"),
}
OTHER_DEVICES = {"rids_int", "bootstrap_room_ids_int"}  # read by Ascend's sampler


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


def info_of(*asked: dict[str, Any]) -> SamplingBatchInfo:
    return Batch([make_req(slot=i, vocab_size=VOCAB, **params) for i, params in enumerate(asked)], VOCAB).sampling_info


def expanded(info: SamplingBatchInfo, *lens: int, params: list[Any] | None = None) -> SamplingBatchInfo:
    """Of all rows; lens: rows of each request."""
    zeros, width = torch.zeros(sum(lens), dtype=torch.int64), max(lens)
    rows = VerifyRows(zeros, zeros, zeros, width, ops.keep_rows(torch.tensor(lens), width, sum(lens)))
    whole = VerifyRows(zeros, zeros, zeros, width)
    return expand(info, whole if len(set(lens)) == 1 else rows, slice(0, sum(lens)), params)


def test_every_field_of_the_host_is_accounted_for():
    """Fails where a release of SGLang adds a field that `expand` would pass to rows unchanged."""
    groups = (ONCE_PER_ROW, IN_THE_LOGITS, OF_ROWS, OF_THE_BATCH, REFUSED, OTHER_DEVICES)
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
    assert {field.name for field in fields(SamplingBatchInfo)} == set(names)


def test_each_row_has_its_requests_filters():
    """Fails where a row is sampled with another request's parameters; rows are ordered by request."""
    info = info_of(
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.75, "frequency_penalty": 1.0, "repetition_penalty": 2.0},
        {"temperature": 0.0, "min_p": 0.25, "logit_bias": {"3": 5.0}},
    )
    info = replace(info, sampling_seed=torch.tensor([5, 6, 7]), grammar_mask=object(), grammars=[None])
    rows = expanded(info, 2, 2, 2)
    assert rows.temperatures.tolist() == [[0.5], [0.5], [1.5], [1.5], [1.0], [1.0]]
    assert rows.top_ks.tolist() == [3, 3, *[1 << 30] * 2, 1, 1]
    assert rows.top_ps.tolist() == [1, 1, 0.75, 0.75, 1, 1]
    assert rows.min_ps.tolist() == [0, 0, 0, 0, 0.25, 0.25]
    assert rows.sampling_seed.tolist() == [5, 5, 6, 6, 7, 7]
    assert len(rows) == 6
    assert expanded(info, 1, 3, 2).sampling_seed.tolist() == [5, 6, 6, 6, 7, 7]
    for name in ONCE_PER_ROW:
        assert getattr(rows, name).dtype == getattr(info, name).dtype
    for name in IN_THE_LOGITS:
        assert getattr(info, name) is not None and getattr(rows, name) is None, name
    for name in OF_THE_BATCH:
        assert getattr(rows, name) is getattr(info, name), name


def test_requests_keep_their_fields():
    """Fails where the rows of one step change the info from which the next step starts."""
    info = info_of({"presence_penalty": 1.0, "logit_bias": {"3": 5.0}}, {"top_k": 4})
    before = {field.name: getattr(info, field.name) for field in fields(info)}
    rows = expanded(info, 4, 4)
    rows.temperatures.fill_(9)
    assert all(getattr(info, name) is value for name, value in before.items())
    assert info.temperatures.tolist() == [[1.0], [1.0]]


def test_without_seeds_there_are_none():
    """Fails where sampling without seeds becomes seeded, or a batch without processors gets one."""
    rows = expanded(info_of({}, {}), 3, 3)
    assert rows.sampling_seed is None and rows.custom_logit_processor is None and rows.custom_params is None


class Recorder:
    """A processor that stores its arguments, and marks the rows that it has seen."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, list]] = []

    def __call__(self, logits: torch.Tensor, params: list) -> torch.Tensor:
        self.seen.append((logits.clone(), params))
        return logits + 100


def test_processors_see_the_rows_of_their_requests():
    """Fails where a processor gets another request's rows or parameters, or rows in another order than that of its
    requests."""
    first, second = Recorder(), Recorder()
    entries = {
        1: ProcessorEntry(first, [0, 3], torch.tensor([0, 3])),
        2: ProcessorEntry(second, [2], torch.tensor([2])),
    }
    info = replace(info_of({}, {}, {}, {}), has_custom_logit_processor=True, custom_logit_processor=entries)
    rows = expanded(info, 3, 3, 3, 3, params=[f"row {i}" for i in range(12)])
    logits = torch.arange(12.0)[:, None].repeat(1, VOCAB)
    apply_custom_logit_processor(logits, rows)
    ((seen, params),) = first.seen
    assert seen[:, 0].tolist() == [0, 1, 2, 9, 10, 11]
    assert params == [f"row {i}" for i in (0, 1, 2, 9, 10, 11)]
    ((seen, params),) = second.seen
    assert seen[:, 0].tolist() == [6, 7, 8]
    assert params == ["row 6", "row 7", "row 8"]
    assert (logits[:, 0] >= 100).tolist() == [True] * 3 + [False] * 3 + [True] * 6
    assert entries[1].rows == [0, 3] and entries[1].indices.tolist() == [0, 3]
    ragged = expanded(info, 1, 3, 2, 2, params=[f"row {i}" for i in range(8)]).custom_logit_processor
    assert {key: entry.rows for key, entry in ragged.items()} == {1: [0, 6, 7], 2: [4, 5]}


@pytest.mark.parametrize(
    ("sampling", "batch_fields", "plain"),
    [
        ({"temperature": 0.0}, {}, True),
        ({"temperature": 1.0, "top_k": 1}, {}, True),
        ({"temperature": 0.7}, {}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, {}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.5}, {}, False),
        ({"temperature": 0.0, "min_new_tokens": 3}, {}, False),
        ({"temperature": 0.0, "logit_bias": {"3": 1.0}}, {}, False),
        ({"temperature": 0.0, "custom_params": {"token_ids": [1]}, "processor": PROCESSOR}, {}, False),
        ({"temperature": 0.0}, {"has_grammar": True}, False),
        ({"temperature": 0.0}, {"return_logprob": True}, False),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_rows_are_plain_argmaxes_only_where_nothing_is_asked(sampling, batch_fields, plain, second):
    """Fails where the argmax shortcut skips a request's parameter, or is never taken."""
    others = [make_req(slot=1, vocab_size=VOCAB, temperature=0.0)] if second else []
    batch = Batch([make_req(vocab_size=VOCAB, **sampling), *others], VOCAB, **batch_fields)
    assert make_row_sampler(None, VOCAB, 4).is_plain_greedy(batch) == plain


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_have_one_dtype(dtype, monkeypatch):
    """Fails where the counts of a prefill have the dtype of its ids: a kernel would be compiled for each."""
    sampler, lens = make_row_sampler(None, VOCAB, 2), []
    monkeypatch.setattr(sampler, "commit", lambda batch, group, ids, counts: lens.append(counts))
    sampler.commit_first(None, None, torch.zeros(3, dtype=dtype))
    assert lens[0].dtype == torch.int32 and lens[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("one_rank", [True, False])
def test_plain_rows_take_the_lowest_of_equals(one_rank):
    """Fails where a tie goes to another id than in plain greedy decoding, or rows change their order."""
    batch = Batch([make_req(slot=i, vocab_size=VOCAB, temperature=0.0) for i in range(2)], VOCAB)
    logits = torch.zeros(4, VOCAB)
    logits[torch.arange(4), [5, 9, 3, 2]] = 1.0
    logits[1, 12] = 1.0
    rows = make_rows(torch.tensor([[0, 5], [0, 3]]))
    kernels, ranks = ops.choose_kernels("cpu", torch.float32), SimpleNamespace(sync=lambda site, ids: ids)
    acceptor = Acceptor(make_row_sampler(None, VOCAB, 2), kernels, ranks, None, one_rank)
    accepted, group = acceptor.accept(rows, batch, output_of(logits), None, None)
    assert accepted.out_ids.tolist() == [[5, 9], [3, 2]] and accepted.commit_lens.tolist() == [2, 2] and group is None


def test_penalties_then_grammar_then_bias(monkeypatch):
    """Fails where the order differs from the host's: a bias must not allow what a grammar forbids, and a grammar's mask
    must not be scaled."""
    seen = {}

    class Mask:
        def apply(self, logits: torch.Tensor) -> None:
            seen["before the mask"] = logits.clone()
            logits[:, 4:] = -torch.inf

    monkeypatch.setattr("sglang_dflash.host.worker.sampling.build_grammar_vocab_mask", lambda **_: Mask())
    req = make_req(vocab_size=VOCAB, temperature=0.0, presence_penalty=1.0, logit_bias={"2": 0.5, "9": 50.0})
    batch = Batch([req], VOCAB, has_grammar=True)
    sampler = make_row_sampler(lambda out, *_: out.next_token_logits.argmax(-1), VOCAB, 2)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3]))
    out = output_of(torch.full((2, VOCAB), 4.0))
    chosen, _ = sampler.choose(batch, make_rows(torch.tensor([[3, 1]])), out, object(), None)
    assert chosen.tolist() == [2, 2]
    assert seen["before the mask"][:, [1, 2, 3]].tolist() == [[4, 4, 3], [3, 4, 3]]
    assert out.next_token_logits[:, [1, 2, 3, 9]].tolist() == [[4, 4.5, 3, -torch.inf], [3, 4.5, 3, -torch.inf]]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_stand_where_the_host_looks_for_them(temperature):
    """Fails where a token's logprob is that of another row, or of the logits before penalties and temperature."""
    torch.manual_seed(0)
    asked = [{"temperature": temperature, "presence_penalty": 1.5}, {"temperature": temperature}]
    batch = Batch(
        [make_req(slot=i, vocab_size=VOCAB, **params) for i, params in enumerate(asked)],
        VOCAB,
        return_logprob=True,
        top_logprobs_nums=[2, 0],
        token_ids_logprobs=[None, [3, 1]],
    )
    sampler = make_row_sampler(make_sampler(), VOCAB, 3)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3, 4]))
    ids = torch.tensor([[3, 5, 6], [4, 7, 8]])
    logits = torch.randn(6, VOCAB) * 3
    expected = logits.clone()
    for row, penalised in enumerate([[3], [3, 5], [3, 5, 6]]):
        expected[row, penalised] -= 1.5
    expected = (expected / (temperature or 1.0)).log_softmax(-1)
    out = output_of(logits)
    chosen, _ = sampler.choose(batch, make_rows(ids), out, None, None)
    assert out.next_token_logprobs.shape == chosen.shape == (6,)
    exact = expected.gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(out.next_token_logprobs, exact)
    for row in range(3):
        best = expected[row].topk(2)
        torch.testing.assert_close(torch.as_tensor(out.next_token_top_logprobs_val[row]), best.values)
        assert torch.as_tensor(out.next_token_top_logprobs_idx[row]).tolist() == best.indices.tolist()
        listed = torch.as_tensor(out.next_token_token_ids_logprobs_val[3 + row])
        torch.testing.assert_close(listed, expected[3 + row, [3, 1]])
    assert [len(values) for values in out.next_token_top_logprobs_val] == [2, 2, 2, 0, 0, 0]
    assert [len(values) for values in out.next_token_token_ids_logprobs_val] == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize("sampled_rows", [1, 3, 7])
def test_parts_of_a_batch_are_sampled_as_the_whole(sampled_rows, monkeypatch):
    """Fails where sampling some requests at a time changes a token, a logprob or a processor's rows, or where a part in
    which nobody asks for logprobs shifts those of the others."""
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)  # the host's needs CUDA
    recorder, width = Recorder(), 3
    entry = ProcessorEntry(recorder, [1, 4], torch.tensor([1, 4]))
    asked: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5, "presence_penalty": 0.5},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.5},
    ]

    def run(sampled_rows: int) -> tuple[torch.Tensor, Any, list]:
        recorder.seen.clear()
        fields = {"return_logprob": True, "top_logprobs_nums": [0, 2, 0, 0, 1]}
        fields["token_ids_logprobs"] = [None, None, [3, 1], None, None]
        reqs = [make_req(slot=i, vocab_size=VOCAB, **params) for i, params in enumerate(asked)]
        batch = Batch(reqs, VOCAB, **fields)
        info = batch.sampling_info
        batch.sampling_info = replace(
            info,
            sampling_seed=torch.arange(len(asked)),
            has_custom_logit_processor=True,
            custom_logit_processor={1: entry},
            custom_params=[None, "b", None, None, "e"],
        )
        sampler = make_row_sampler(make_sampler(), VOCAB, width)
        sampler.sampled_rows = sampled_rows
        group = sampler.prefill(batch)
        sampler.commit_first(batch, group, torch.arange(len(asked)))
        generator = torch.Generator().manual_seed(0)
        out = output_of(torch.randn(len(asked) * width, VOCAB, generator=generator) * 2)
        ids = torch.randint(VOCAB, (len(asked), width), generator=generator)
        return sampler.choose(batch, make_rows(ids), out, None, None)[0], out, list(recorder.seen)

    ids, out, seen = run(512)
    part_ids, part_out, part_seen = run(sampled_rows)
    assert torch.equal(part_ids, ids)
    assert torch.equal(part_out.next_token_logprobs, out.next_token_logprobs)
    for name in LOGPROBS:
        whole, parts = ([torch.as_tensor(x).tolist() for x in getattr(o, name)] for o in (out, part_out))
        assert parts == whole, name
    assert len(part_seen) > len(seen) == 1
    assert torch.equal(torch.cat([logits for logits, _ in part_seen]), seen[0][0])
    assert [param for _, params in part_seen for param in params] == seen[0][1] == ["b"] * width + ["e"] * width


def test_logits_may_be_a_slice_of_a_padded_vocabulary():
    """Fails where float32 logits raise: the host cuts them to the vocabulary without a copy."""
    batch = Batch([make_req(vocab_size=VOCAB, temperature=1.0, top_k=3, frequency_penalty=1.0)], VOCAB)
    sampler = make_row_sampler(make_sampler(), VOCAB, 2)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3]))
    logits = torch.zeros(2, 64)
    logits[:, 5] = 50.0
    chosen, _ = sampler.choose(batch, make_rows(torch.tensor([[3, 1]])), output_of(logits[:, :VOCAB]), None, None)
    assert chosen.tolist() == [5, 5]


# Hidden states.


class Norm(LogitsProcessor):
    """The host's class without its constructor, which needs a model."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.keep_last_hidden_states = False


def returned(monkeypatch: pytest.MonkeyPatch, mode: CaptureHiddenMode, model: Any = None) -> ReturnedHiddenStates:
    monkeypatch.setattr(hidden_states, "get_server_return_hidden_states_mode", lambda: mode)
    return ReturnedHiddenStates(model or torch.nn.Module())


@pytest.mark.parametrize("mode", list(CaptureHiddenMode))
def test_last_states_are_kept_where_they_may_be_asked_for(monkeypatch, mode):
    """Fails where the target does not keep them, or keeps them on a server that never returns any."""
    model = torch.nn.ModuleDict({"inner": torch.nn.ModuleDict({"norm": Norm()}), "other": torch.nn.Linear(1, 1)})
    returned(monkeypatch, mode, model)
    assert model["inner"]["norm"].keep_last_hidden_states == (mode != CaptureHiddenMode.NULL)


@pytest.mark.parametrize(
    ("server", "request_mode", "rows", "expected"),
    [
        (CaptureHiddenMode.FULL, CaptureHiddenMode.FULL, [2, 4], [0, 1, 2, 3, 4]),  # a prefill of 3 and 2 tokens
        (CaptureHiddenMode.FULL, CaptureHiddenMode.LAST, [2, 4], [0, 1, 2, 3, 4]),
        (CaptureHiddenMode.LAST, CaptureHiddenMode.LAST, [2, 4], [2, 4]),
        (CaptureHiddenMode.LAST, CaptureHiddenMode.LAST, None, [0, 1, 2, 3, 4]),  # a decode: one row per token
        (CaptureHiddenMode.FULL, CaptureHiddenMode.FULL, None, [0, 1, 2, 3, 4]),
        (CaptureHiddenMode.FULL, None, [2, 4], None),
        (CaptureHiddenMode.FULL, None, None, None),
    ],
)
def test_states_are_those_that_the_host_will_cut(monkeypatch, server, request_mode, rows, expected):
    """Fails where the host gets the tapped layers, or the rows of other tokens, instead of the last states."""
    states = torch.arange(10.0).view(5, 2)
    output = output_of(torch.zeros(5, VOCAB))
    output.hidden_states, output.last_hidden_states = torch.full((5, 8), torch.nan), states
    batch = SimpleNamespace(
        return_hidden_states=request_mode is not None,
        return_hidden_states_mode=CaptureHiddenMode.NULL if request_mode is None else request_mode,
    )
    returned(monkeypatch, server).put(batch, output, rows)
    assert output.last_hidden_states is None, "the host copies what stands here to the CPU"
    if expected is None:
        assert output.hidden_states is None
    else:
        assert output.hidden_states.tolist() == states[expected].tolist()


def test_a_server_that_returns_none_hands_on_none(monkeypatch):
    """Fails where the worker returns the tapped layers instead of last states, which were not kept."""
    output = output_of(torch.zeros(1, VOCAB))
    output.hidden_states = torch.ones(1, 8)
    batch = SimpleNamespace(return_hidden_states=False, return_hidden_states_mode=CaptureHiddenMode.NULL)
    returned(monkeypatch, CaptureHiddenMode.NULL).put(batch, output)
    assert output.hidden_states is None


def test_a_processor_of_the_host_works_on_rows():
    """Fails where one of SGLang's own processors, given our rows, touches another request's."""
    reqs = [make_req(slot=i, vocab_size=VOCAB, temperature=0.0) for i in range(2)]
    reqs.append(make_req("p", 2, VOCAB, processor=PROCESSOR, temperature=0.0, custom_params={"token_ids": [7]}))
    batch = Batch(reqs, VOCAB)
    sampler = make_row_sampler(make_sampler(), VOCAB, 2)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([1, 2, 3]))
    logits = torch.zeros(6, VOCAB)
    logits[:, 7], logits[:, 8] = 2.0, 1.0
    rows = make_rows(torch.tensor([[1, 1], [2, 2], [3, 3]]))
    chosen, _ = sampler.choose(batch, rows, output_of(logits), None, None)
    assert chosen.tolist() == [7, 7, 7, 7, 8, 8]
    assert isinstance(next(iter(batch.sampling_info.custom_logit_processor.values())).processor, CustomLogitProcessor)
