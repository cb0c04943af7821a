"""The draft's head over a part of the vocabulary: right ids before and after every exchange, new weights taken up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from stand_in_worker import BATCH, COLUMNS, decode_batch, prefill_batch, worker_of
from stand_in_worker import VOCAB as WORKER_VOCAB
from stand_ins import Group, configured, make_req, one_rank, split_head
from test_draft_head import PackedHead
from test_selector_head import _host_model

from sglang_dflash import ops
from sglang_dflash.core.draft_vocab import DraftVocabulary
from sglang_dflash.host.patches import weights
from sglang_dflash.host.worker import draft_heads, draft_runner, short_head
from sglang_dflash.host.worker.draft_heads import DominoHead, DraftHead, SelectorHead
from sglang_dflash.host.worker.short_head import VARIABLE, DraftIds, ShortHead, asked, special_ids

VOCAB, HIDDEN, BLOCK, FEW = 30, 12, 4, 9


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_heads, "FEWEST_IDS", 2)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    monkeypatch.setattr(short_head, "PIECE_BYTES", 3 * HIDDEN * 4)  # three rows of float32
    monkeypatch.delenv(VARIABLE, raising=False)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _short_of(head: DraftHead, kept: tuple[int, ...] = (29,)) -> ShortHead:
    head.shorten(DraftIds(FEW), kept)
    assert head._short is not None
    return head._short


def _masked(head: DraftHead, ids: torch.Tensor) -> None:
    """Makes a head over the whole vocabulary choose among `ids` alone: the others' logits are -inf."""
    whole = head._logits

    def logits(rows: torch.Tensor) -> torch.Tensor:
        out = whole(rows)
        others = torch.ones(out.shape[1], dtype=torch.bool)
        others[ids] = False
        return out.masked_fill(others, float("-inf"))

    head._logits = logits  # type: ignore[method-assign]


def _exchanges(head: DraftHead, short: ShortHead, lm_head: Any, make: Callable[[Any], DraftHead]) -> None:
    """Fails where, after any piece, the head proposes other than a whole head over the same ids would."""
    hidden, block_ids = _random(5 * BLOCK, HIDDEN, seed=2), torch.arange(5 * BLOCK).view(5, BLOCK) % VOCAB
    proposed: set[int] = set()
    for step in range(12):
        short._vocabulary.count([(step * 7 + i) % VOCAB for i in range(10)])
        short.exchange()
        expected = make(lm_head)
        _masked(expected, torch.from_numpy(short._vocabulary.ids))
        ids = head.draft_ids(hidden, block_ids)
        assert torch.equal(ids, expected.draft_ids(hidden, block_ids))
        got, wanted = (one.weighed(hidden, block_ids) for one in (head, expected))
        assert torch.equal(got.ids, wanted.ids)
        torch.testing.assert_close(got.log_probs, wanted.log_probs)
        proposed.update(ids.flatten().tolist())
    assert len(proposed) > FEW, "the exchanges have changed nothing"


def _plain(lm_head: Any) -> DraftHead:
    return DraftHead(lm_head, BLOCK)


def _selector(lm_head: Any) -> DraftHead:
    return SelectorHead(lm_head, BLOCK, _host_model())


@pytest.mark.parametrize("make", [_plain, _selector])
@torch.inference_mode()
def test_ids_after_every_exchange(make: Callable[[Any], DraftHead]) -> None:
    """Fails where a logit is taken for another id than that of its row, the log-probabilities count ids that are not
    in, or a selector's candidates are not in the order of their ids."""
    lm_head = SimpleNamespace(weight=_random(VOCAB, HIDDEN), shard_indices=None)
    head = make(lm_head)
    _exchanges(head, _short_of(head), lm_head, make)


def _plant_stale(short: ShortHead, field: str) -> None:
    """Makes every exchange leave the tensor of that name as it was."""
    exchange, tensor = short.exchange, getattr(short, field)

    def stale() -> None:
        before = tensor.clone()
        exchange()
        tensor.copy_(before)

    short.exchange = stale  # type: ignore[method-assign]


@pytest.mark.parametrize("field", ["ids", "weight"])
@torch.inference_mode()
def test_planted_bugs_are_found(field: str) -> None:
    """Fails where the test above would pass although an exchange forgets the map of ids, or the rows."""
    lm_head = SimpleNamespace(weight=_random(VOCAB, HIDDEN), shard_indices=None)
    head = _plain(lm_head)
    short = _short_of(head)
    _plant_stale(short, field)
    with pytest.raises(AssertionError):
        _exchanges(head, short, lm_head, _plain)


@torch.inference_mode()
def test_an_exchange_is_bounded_and_in_place() -> None:
    """Fails where one step copies more rows than a piece has, a captured graph would read another tensor, or special
    ids leave."""
    head = _plain(SimpleNamespace(weight=_random(VOCAB, HIDDEN), shard_indices=None))
    short = _short_of(head)
    head.reserve(2)
    places = short.weight.data_ptr(), short.ids.data_ptr()
    short._vocabulary.count(range(VOCAB - 10, VOCAB))
    changes = []
    for _ in range(5):
        before = short.ids.clone()
        short.exchange()
        changes.append(int((short.ids != before).sum()))
    assert changes == [3, 3, 2, 0, 0] and 29 in short.ids
    short.take_up()
    assert (short.weight.data_ptr(), short.ids.data_ptr()) == places
    hidden, block_ids = _random(2 * BLOCK, HIDDEN), torch.zeros(2, BLOCK, dtype=torch.int64)
    head(hidden, block_ids)
    assert torch.equal(head.captured_ids, head.draft_ids(hidden, block_ids)) and head.compared_logits[0] == FEW


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_take_their_shares(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a rank copies rows of another's span, gives ids of its own span as ids of the vocabulary, or counts
    with a wrong offset; the last rank's span is short."""
    group = Group(ranks)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    weight, hidden = _random(VOCAB, HIDDEN), _random(3 * BLOCK, HIDDEN, seed=1)
    heads = [_plain(head) for head in split_head(weight, ranks, -(-VOCAB // ranks) + 1)]
    shorts = [_short_of(head) for head in heads]
    block_ids = torch.zeros(3, BLOCK, dtype=torch.int64)
    for step in range(6):
        for short in shorts:
            short._vocabulary.count(range(step * 4, step * 4 + 8))
            short.exchange()
        drafted = group.run(lambda rank: heads[rank].draft_ids(hidden, block_ids))
        chosen = torch.cat([short.ids + head._first_id for short, head in zip(shorts, heads, strict=True)])
        assert len(chosen) == ranks * -(-FEW // ranks) and 29 in chosen
        logits = torch.full((3 * (BLOCK - 1), VOCAB), float("-inf"))
        logits[:, chosen] = (hidden.view(3, BLOCK, -1)[:, 1:].reshape(-1, HIDDEN) @ weight.T)[:, chosen]
        assert all(torch.equal(ids.flatten(), logits.argmax(-1)) for ids in drafted)


def test_new_weights_of_the_target_are_taken_up() -> None:
    """Fails where an update of the target through the host does not reach the copied rows, or the draft's updates copy
    them for nothing."""
    lm_head = SimpleNamespace(weight=torch.nn.Parameter(_random(VOCAB, HIDDEN), requires_grad=False))
    short = ShortHead(lm_head, DraftVocabulary(VOCAB, FEW))
    followed: list[int] = []

    def follow() -> None:
        followed.append(1)
        short.mark_stale()

    def runner(update: Callable[[], Any]) -> SimpleNamespace:
        return SimpleNamespace(weight_updater=SimpleNamespace(update=update), check_weights=None)

    new = _random(VOCAB, HIDDEN, seed=5)
    target, draft = runner(lambda: lm_head.weight.data.copy_(new)), runner(lambda: None)
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(weight_update_runners=lambda: [("target", target)]),
        draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", draft)], follow_target=follow),
        _session=None,
    )
    original = SchedulerWeightUpdaterManager._select_runners
    with configured():
        ((_, only),) = weights._select_runners(original, manager, "draft")
        only.weight_updater.update()
        assert not followed
        for selector in ("target", "all"):
            short.weight.zero_()
            runners = dict(weights._select_runners(original, manager, selector))
            runners["target"].weight_updater.update()
            short.exchange()
            assert torch.equal(short.weight, new[short.ids])


def test_whole_heads() -> None:
    """Fails where a quantised head is copied as if its rows were values, or Domino's correction of all ids would meet
    logits of some."""
    assert "quantised" in (DraftHead(PackedHead(torch.eye(4), 0), 2).why_whole or "")
    assert "Domino" in (DominoHead.why_whole.fget(None) or "")  # type: ignore[attr-defined]
    assert _plain(SimpleNamespace(weight=torch.eye(4), shard_indices=None)).why_whole is None
    head = _plain(SimpleNamespace(weight=torch.eye(4), shard_indices=None))
    assert head.shorten(DraftIds(4), []) is None, "all ids are no part"


@pytest.fixture
def worker() -> Iterator[Any]:
    with configured(), one_rank(), torch.no_grad():
        table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
        made = worker_of(table, ops.TORCH_KERNELS)
        made._draft.short_head = made._draft._head.shorten(DraftIds(16), [WORKER_VOCAB - 1])
        yield made


def test_a_worker_counts_what_it_serves(worker: Any) -> None:
    """Fails where prompts, answers or the end of an answer are not counted, are counted twice, or a step does not
    exchange rows."""
    short = worker._draft.short_head
    counts = short._vocabulary._counts
    prefill = prefill_batch()
    prefill.reqs = [make_req("long", 0, WORKER_VOCAB, prompt=[40, 41, 42, 1 << 40]), *prefill.reqs[1:]]
    worker.forward_batch_generation(prefill)
    worker.forward_batch_generation(prefill)  # its next chunk
    assert [int(counts[one]) for one in (40, 41, 42)] == [1, 1, 1] and 42 not in short.ids
    decode = decode_batch()
    decode.reqs = prefill.reqs + decode.reqs[2:]
    worker.forward_batch_generation(decode)
    assert sum(one in short.ids for one in (40, 41, 42)) == 2, "a piece has two rows of this head"
    short.exchange()
    assert all(one in short.ids for one in (40, 41, 42, WORKER_VOCAB - 1))
    decode.reqs[0].output_ids.extend([50, 51])
    decode.reqs[2].output_ids.extend([52, 52])
    for _ in range(2 * short_head.COUNTED_STEPS):
        short.see_answers(decode.reqs)
    decode.reqs[0].output_ids.append(53)
    left = decode.reqs[1:]
    for _ in range(2 * short_head.COUNTED_STEPS):
        short.see_answers(left)
    assert [int(counts[one]) for one in (40, 50, 51, 52, 53)] == [1, 1, 1, 0, 1], "52 came before its request was known"


def test_requests_that_end_at_once_are_let_go(worker: Any) -> None:
    """Fails where requests that never come to a decode step are kept for good, or their one token is not counted."""
    short = worker._draft.short_head
    counts = short._vocabulary._counts
    for turn in range(200):
        req = make_req(str(turn), 0, WORKER_VOCAB, prompt=[40])
        short.see_prompts([req])
        req.output_ids.append(50)
        req.to_finish = req.finished_reason = FINISH_LENGTH(1)
    assert len(short._followed) == 1
    assert [int(counts[one]) for one in (40, 50)] == [200, 199]


@pytest.mark.parametrize(
    ("value", "wrapped", "words"),
    [
        ("16", False, "among 16 of this rank's ids, the likeliest (0.0 MB of the target's head); "),
        ("16", True, "among all 64 ids, because LoRA adapters wrap the target's head."),
        ("full", True, "among all 64 ids."),
        ("64", False, "among all 64 ids."),
    ],
)
def test_the_start_says_how_many(
    value: str, wrapped: bool, words: str, worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Fails where a head that adapters wrap is copied without them, or the log does not say what serves and why."""
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(short_head, "FEWEST_IDS", 2)
    monkeypatch.setattr(draft_runner, "unwrap_lora_layer", lambda head: object() if wrapped else head)
    draft = worker._draft
    draft.short_head = draft._head._short = None
    with caplog.at_level("INFO"):
        draft.shorten_head(draft._head._lm_head, WORKER_VOCAB, [WORKER_VOCAB - 1])
    assert words in caplog.text and (draft.short_head is None) == ("all 64" in words.split(";")[0])


def test_special_ids() -> None:
    """Fails where the ids that end an answer are not the first to be kept, or a server without a tokenizer ends."""
    config = SimpleNamespace(model_config=SimpleNamespace(hf_eos_token_id={7, 3}))
    tokenizer = SimpleNamespace(all_special_ids=[9, None], get_added_vocab=lambda: {"b": 12, "a": 11})
    assert special_ids(SimpleNamespace(tokenizer=tokenizer, model_runner=config)) == [3, 7, 9, 11, 12]
    assert special_ids(SimpleNamespace(tokenizer=None, model_runner=config)) == [3, 7]


def test_what_the_variable_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Fails where a value is read as another, or the default shortens a small vocabulary."""
    assert asked(1792) == DraftIds(None)
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(map(str, range(1000, 1100))))
    cases = {"auto": DraftIds(None), "full": DraftIds(None), "64": DraftIds(64), "1792": DraftIds(1792)}
    for value, expected in (cases | {str(file): DraftIds(100, list(range(1000, 1100)))}).items():
        monkeypatch.setenv(VARIABLE, value)
        assert asked(1792) == expected
    monkeypatch.setenv(VARIABLE, "auto")
    assert (asked(151_936).count or 0) > 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("63", "SGLANG_DFLASH_DRAFT_VOCAB is 63; allowed: auto, full, a number from 64 to 1792, or the path"),
        ("1793", "SGLANG_DFLASH_DRAFT_VOCAB is 1793; allowed"),
        ("-5", "'-5', and there is no such file; allowed: auto"),
        ("atuo", "'atuo', and there is no such file; allowed: auto"),
        ("{folder}", "there is no such file"),
        ("{folder}/words", "words' holds 'some'; allowed: token ids from 0 to 1791"),
        ("{folder}/empty", "empty' holds no token ids"),
        ("{folder}/bytes", "is no text; allowed: auto"),
    ],
)
def test_refused_values(value: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Fails where a wrong value is accepted, or its sentence lacks what is allowed."""
    (tmp_path / "words").write_text("some words")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setenv(VARIABLE, value.replace("{folder}", str(tmp_path)))
    with pytest.raises(ValueError, match=words):
        asked(1792)
