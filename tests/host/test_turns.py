"""Turns of several decode steps: each commits what plain decoding gives, and the scheduler counts them one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from plain_decoding import Asked
from planned_rig import TOKENS, Rig
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from stand_in_worker import BLOCK, VOCAB, decode_batch
from stand_ins import configured, make_req, one_rank

from sglang_dflash.host import planned_step, turns
from sglang_dflash.host.turns import Turns

GREEDY = {"temperature": 0.0, "ignore_eos": True}
RESOLVE = SchedulerBatchResultProcessor._resolve_spec_v2_tokens
RESOLVE = getattr(RESOLVE, "__wrapped__", RESOLVE)  # the host's own
PLAIN = [Asked(GREEDY, (5, 6, 7)), Asked(GREEDY, (9,)), Asked(GREEDY, (1, 2, 3, 4, 5))]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(planned_step, "mambaish_config", lambda config: None)
    with one_rank(), torch.no_grad():
        yield


class Taking(Rig):
    """A rig whose worker takes several steps in each call; the host learns of the tokens after the last."""

    def turn(self, most_steps: int) -> list[GenerationBatchResult]:
        batch = self._batch(self.running)
        batch.return_hidden_states = False
        for one in self.running:
            one.req.kv.kv_committed_len, one.req.kv.kv_allocated_len = one.prefix_len, TOKENS
        ticks = iter(range(1, 999))
        self.worker._turns = Turns(lambda: False, BLOCK, most_steps + 0.5, clock=lambda: next(ticks) - 1)
        decode = type(self.worker)._decode.__get__(self.worker)
        self.worker._decode = lambda *args: self._learn(decode(*args))
        last = self.worker.forward_batch_generation(batch)
        steps = vars(last).get(turns.STEPS, [last])
        for one in self.running:
            one.req.output_ids.extend(one.pending)
            one.pending = []
        self._check_draft_kv()
        return steps

    def _learn(self, result: GenerationBatchResult) -> GenerationBatchResult:
        """The made-up models follow each step; the host's requests do not."""
        stride = result.speculative_num_draft_tokens
        for place, (one, length) in enumerate(zip(self.running, result.accept_lens.tolist(), strict=True)):
            new = result.next_token_ids[place * stride :][:length].tolist()
            assert new == [plain.token for plain in one.expected[len(one.emitted) - 1 :][:length]], one.emitted
            text = one.text
            one.emitted += new
            one.pending += new
            assert self._read(self.table[one.slot, : one.prefix_len]) == one.text[:-1]
            self._write_context(self.writer, one, range(len(text) - 1, one.prefix_len))
        return result


@pytest.mark.parametrize("seed", range(4))
def test_every_step_of_a_turn_commits_plain_decoding(seed):
    """Fails where a step of a turn starts from another prefix, bonus or slot than the step before has left, where its
    rows see other text, or where draft KV is missing when the turn ends."""
    with configured():
        rig = Taking(seed, PLAIN)
        lengths = []
        while max(len(one.emitted) for one in rig.running) + 4 * BLOCK < TOKENS:
            lengths.append(len(rig.turn(3)))
            assert all(list(one.req.output_ids) == one.emitted for one in rig.running)
        assert max(lengths) == 3, lengths


def test_copies_see_what_a_turn_has_committed():
    """Fails where a step of a turn copies from a text that lacks the tokens of the steps before, or has them twice."""
    shown: list[list[int]] = []

    def see(texts: dict[str, Any]) -> None:
        shown.extend([*text.prompt, *text.answer, *text.newest] for text in texts.values())

    with configured():
        rig = Taking(0, PLAIN)
        rig.policy.copying = SimpleNamespace(see=see)
        for _ in range(2):
            before = [list(one.text) for one in rig.running]
            steps = rig.turn(3)
            lengths = [[int(step.accept_lens[place]) for step in steps] for place in range(len(PLAIN))]
            expected = [
                list(one.text[: len(text) + sum(lengths[place][:number])])
                for number in range(len(steps))
                for place, (one, text) in enumerate(zip(rig.running, before, strict=True))
            ]
            assert shown == expected and len(steps) == 3
            shown.clear()


def test_a_plan_is_told_of_turns():
    """Fails where the plan takes what lies between two turns for a gap within one, or the other way round."""
    with configured():
        rig = Taking(0, PLAIN)
        counts = [len(rig.turn(most)) for most in (3, 1, 2)]
        assert counts == [3, 1, 2]
        limits = [(most + 0.5, step > 0) for most in counts for step in range(most)]
        assert rig.policy.begun == limits and not rig.policy.interrupts
        del rig.worker._decode
        rig.worker._turns = None
        rig.step([0, 1, 2])
        assert rig.policy.begun[-1] == (0.0, False)


def batch_of(**sampling: Any) -> Any:
    batch = decode_batch(**{"ignore_eos": True, "max_new_tokens": 50} | sampling)
    for req in batch.reqs:
        req.kv.kv_committed_len, req.kv.kv_allocated_len = 30, 30 + 5 * BLOCK
    return batch


def step_of(lens: list[int], token: int = 7, **fields: Any) -> GenerationBatchResult:
    """A step that commits `lens` tokens of each request, the last of them `token`."""
    ids = torch.full((len(lens), BLOCK), 5)
    for row, length in enumerate(lens):
        ids[row, length - 1] = token
    return GenerationBatchResult(
        logits_output=None,
        next_token_ids=ids.flatten(),
        accept_lens=torch.tensor(lens, dtype=torch.int32),
        speculative_num_draft_tokens=BLOCK,
        cap_lens=torch.tensor(lens, dtype=torch.int32),
        new_seq_lens=torch.tensor([40, 41, 42]),
        next_draft_input=SimpleNamespace(),
        can_run_cuda_graph=False,
        **fields,
    )


def turns_of(waits: bool = False, seconds: float = 0.0, kept_state: int | None = None) -> Turns:
    """The clock moves by `seconds` between two looks at it."""
    now = iter(range(1000))
    return Turns(lambda: waits, BLOCK, 1.0, kept_state, clock=lambda: next(now) * seconds)


def goes_on(step: GenerationBatchResult, waits: bool = False, seconds: float = 0.0, **sampling: Any) -> bool:
    turn = turns_of(waits, seconds).begin(batch_of(**sampling))
    assert turn is not None
    return turn.goes_on(step)


def test_a_turn_ends_where_the_scheduler_is_needed():
    """Fails where a turn goes on behind a request's last token, without slots for another block, behind its time, or
    while a message waits; or where it ends without such a reason."""
    with configured():
        assert goes_on(step_of([1, 4, 2]))
        assert not goes_on(step_of([1, 4, 2]), waits=True)
        assert not goes_on(step_of([1, 4, 2]), seconds=0.6)
        assert goes_on(step_of([1, 4, 2]), seconds=0.4)
        assert goes_on(step_of([1, 4, 2]), max_new_tokens=5)
        assert not goes_on(step_of([1, 4, 2]), max_new_tokens=4)
        assert goes_on(step_of([1, 4, 2], token=0), ignore_eos=True)
        assert not goes_on(step_of([1, 4, 2], token=0), ignore_eos=False)
        assert not goes_on(step_of([1, 4, 2]), ignore_eos=False, stop_token_ids=[7])
        assert not goes_on(step_of([1, 4, 2], routed_experts_output=object()))
        turn = turns_of().begin(batch_of())
        assert [turn.goes_on(step_of([1, BLOCK, 2])) for _ in range(5)] == [True] * 4 + [False]


def test_a_step_that_may_reach_a_kept_state_begins_a_turn():
    """Fails where a recurrent state is to be kept for the prefix cache at a point for which the scheduler has not named
    a place. The requests have 40, 41 and 42 tokens."""
    with configured():
        for every, expected in ((64, True), (51, True), (50, False), (48, False), (40, True), (49, False), (21, False)):
            assert turns_of(kept_state=every).begin(batch_of()).goes_on(step_of([1, 4, 2])) is expected, every


def test_ids_behind_the_committed_ones_end_nothing():
    """Fails where a rejected row that holds a stop token ends the turn."""
    with configured():
        step = step_of([2, 2, 2])
        step.next_token_ids.view(3, BLOCK)[:, 2:] = 0
        assert goes_on(step, ignore_eos=False)


@pytest.mark.parametrize("field", ["has_grammar", "return_logprob", "return_hidden_states"])
def test_a_batch_that_needs_the_scheduler_takes_single_steps(field):
    """Fails where several steps run for requests whose tokens are handed out, or read, one step at a time."""
    with configured():
        batch = batch_of()
        assert turns_of().begin(batch) is not None
        setattr(batch, field, True)
        assert turns_of().begin(batch) is None
        for sampling in ({"frequency_penalty": 0.5}, {"min_new_tokens": 3}):
            assert turns_of().begin(batch_of(**sampling)) is None
        batch = batch_of()
        batch.sampling_info.has_custom_logit_processor = True
        assert turns_of().begin(batch) is None


def test_the_next_step_finds_the_batch_as_the_scheduler_would_leave_it():
    """Fails where a field that a step changes is not given back, or where lengths and draft input are stale."""
    with configured():
        batch = batch_of()
        batch.input_ids = batch.out_cache_loc = None
        mode, step = batch.forward_mode, step_of([1, 4, 2])
        turn = turns_of().begin(batch)
        batch.forward_mode = batch.input_ids = batch.out_cache_loc = "changed"
        assert turn.goes_on(step)
        assert batch.forward_mode is mode and batch.input_ids is None and batch.out_cache_loc is None
        assert batch.spec_info is step.next_draft_input
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [40, 41, 42] and batch.seq_lens_sum == 123


def _processor() -> Any:
    reporter = SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None, spec_num_forward_ct=0)
    worker = SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None)
    return SimpleNamespace(metrics_reporter=reporter, model_worker=worker, advance_grammar_fsm=_no_grammar)


def _no_grammar(result: Any, batch: Any) -> None:
    result.grammar_retained_tokens = [None] * len(batch.reqs)


def _counts(reqs: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (
            req.kv.kv_committed_len,
            req.spec_verify_ct,
            req.spec_num_correct_drafts,
            list(req.spec_correct_drafts_histogram),
            req.spec_num_cap_tokens,
            list(req.spec_cap_lens_histogram),
        )
        for req in reqs
    ]


def test_steps_of_a_turn_are_counted_one_by_one():
    """Fails where a request's verify steps, accepted drafts or histograms, or the server's sums, differ from those of
    the same steps in turns of their own, or where tokens are lost or change their order."""
    lens = ([1, 4, 2], [3, 1, 1], [8, 2, 1])

    def requests() -> list[Any]:
        reqs = [make_req(str(row), row, VOCAB) for row in range(3)]
        for req in reqs:
            req.kv.kv_committed_len = 10
        return reqs

    with configured():
        alone, together = SimpleNamespace(reqs=requests()), SimpleNamespace(reqs=requests())
        runs: list[list[int]] = [[], [], []]
        generated = correct = rows = 0
        for token, one in enumerate(lens):
            step = step_of(one, token)
            for run, ids in zip(runs, RESOLVE(_processor(), step, alone), strict=True):
                run.extend(ids)
            generated += step.get_num_generated_tokens(3)
            correct, rows = correct + step.num_correct_drafts, rows + step.num_cap_tokens
        steps = [step_of(one, token) for token, one in enumerate(lens)]
        setattr(steps[-1], turns.STEPS, steps)
        processor = _processor()
        assert turns.resolve_step_by_step(RESOLVE, processor, steps[-1], together) == runs
        result = steps[-1]
        assert _counts(together.reqs) == _counts(alone.reqs)
        assert result.get_num_generated_tokens(3) == generated == sum(map(sum, lens))
        assert (result.num_correct_drafts, result.num_cap_tokens) == (correct, rows)
        assert processor.metrics_reporter.spec_num_forward_ct + 3 == 9  # the host adds 3 for one step
        single = step_of([1, 4, 2])
        assert turns.resolve_step_by_step(RESOLVE, processor, single, together)[1] == [5, 5, 5, 7]


@pytest.mark.parametrize(
    ("finished_len", "steps"), [(None, 3), (11, 3), (8, 3), (7, 2), (5, 2), (4, 1), (1, 1)], ids=str
)
def test_steps_behind_a_stop_are_not_counted(finished_len, steps):
    """Fails where steps of a turn behind a request's stop string count, or the step that reaches it does not."""
    lens = ([4], [3], [4])

    def counted(count: int) -> Any:
        req = make_req(vocab_size=VOCAB, stop=["never"])
        with configured():
            taken = [step_of(one, token) for token, one in enumerate(lens[:count])]
            setattr(taken[-1], turns.STEPS, taken)
            (run,) = turns.resolve_step_by_step(RESOLVE, _processor(), taken[-1], SimpleNamespace(reqs=[req]))
        req.output_ids.extend(run)
        return req

    req = counted(3)
    req.finished_len = finished_len
    turns.uncount_steps_behind_the_end(req)
    expected = counted(steps)
    for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_cap_tokens"):
        assert getattr(req, name) == getattr(expected, name), name
    for name in ("spec_correct_drafts_histogram", "spec_cap_lens_histogram"):
        ours, theirs = getattr(req, name), getattr(expected, name)
        assert list(ours) == list(theirs) + [0] * (len(ours) - len(theirs)), name
    assert "dflash_turn" not in vars(req)


def test_the_variable(monkeypatch):
    """Fails where a limit that is no number of milliseconds is taken, or one that is allowed is refused."""
    for text, seconds in (("", 0.032), ("0", 0.0), ("2.5", 0.0025)):
        monkeypatch.setenv(turns.VARIABLE, text)
        assert turns.turn_s() == pytest.approx(seconds)
    for text in ("-1", "soon", "nan", "2000"):
        monkeypatch.setenv(turns.VARIABLE, text)
        with pytest.raises(ValueError, match=f"{turns.VARIABLE} is {text!r}; allowed: 0"):
            turns.check()


def test_messages_are_watched_where_steps_can_share_a_turn():
    """Fails where a waiting message goes unseen, or where a worker without turns, or a socket of another kind, ends
    the scheduler."""
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    push.connect(f"tcp://127.0.0.1:{port}")
    given: list[Any] = []
    worker = SimpleNamespace(take_turns=given.append)
    receiver = SimpleNamespace(recv_from_tokenizer=pull, recv_from_rpc=None)
    turns.watch_messages(lambda scheduler: None, SimpleNamespace(draft_worker=worker, request_receiver=receiver))
    (waits,) = given
    assert not waits()
    push.send(b"a request")
    assert pull.poll(5000) and waits() and waits()
    pull.recv()
    assert not waits()
    turns.watch_messages(lambda scheduler: None, SimpleNamespace(draft_worker=None, request_receiver=receiver))
    receiver.recv_from_tokenizer = SimpleNamespace()
    turns.watch_messages(lambda scheduler: None, SimpleNamespace(draft_worker=worker, request_receiver=receiver))
    assert len(given) == 1
    push.close(0)
    pull.close(0)
    context.term()
