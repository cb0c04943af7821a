"""`spec_generate` commits what the target alone would, in the same steps as an independent loop."""

from __future__ import annotations

import pytest
import torch
from oracle import Oracle, OracleAnswer
from pairs import VOCABULARY, make_draft, make_target, pad, random_ids
from transformers import PreTrainedModel

from sglang_dflash.reference import DFlashDraftModel, Generation
from sglang_dflash.reference.generation import PositionCache
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 120


def _generate(draft: DFlashDraftModel, target: PreTrainedModel, ids: torch.Tensor, *args, **options) -> Generation:
    generation = draft.spec_generate(target, ids, *args, return_stats=True, **options)
    assert isinstance(generation, Generation)
    return generation


def _greedy(target: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int) -> list[int]:
    """The target's own answer to one request, the end token included."""
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return output[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[OracleAnswer]:
    oracle = Oracle(TINY_TARGET, TINY_DRAFT)
    return [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in prompts]


def test_same_steps_as_the_plain_loop(target, draft, prompts, expected):
    """Fails where taps, context, positions, masks, acceptance or caches differ from the paper's loop in any step."""
    for prompt, answer in zip(prompts, expected, strict=True):
        generation = _generate(draft, target, torch.tensor([prompt]), MAX_NEW_TOKENS)
        assert generation.new_ids(0) == answer.ids
        assert generation.commit_lens == [answer.commit_lens]
        assert generation.output_ids.tolist() == [[*prompt, *answer.ids]]
    steps = [commit_len for answer in expected for commit_len in answer.commit_lens]
    assert sum(steps) / len(steps) > 2.0
    assert {1, draft.block_size} <= set(steps), "no block was rejected as a whole, or none was accepted as a whole"


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_batch_with_padding(target, draft, prompts, expected, left):
    """Fails where a request's answer or steps depend on other requests, on padding, or on requests that end earlier."""
    assert len(set(map(len, prompts))) > 3
    assert len({len(answer.ids) for answer in expected}) > 3
    ids, mask = pad(prompts, left, value=7)
    generation = _generate(draft, target, ids, MAX_NEW_TOKENS, attention_mask=mask)
    assert generation.commit_lens == [answer.commit_lens for answer in expected]
    assert generation.num_new_tokens == [len(answer.ids) for answer in expected]
    assert [generation.new_ids(row) for row in range(len(ids))] == [answer.ids for answer in expected]
    assert torch.equal(generation.output_ids[:, : ids.shape[1]], ids)
    padding = target.config.pad_token_id
    for row, answer in enumerate(expected):
        assert set(generation.output_ids[row, ids.shape[1] + len(answer.ids) :].tolist()) <= {padding}


def test_no_place_is_written_twice_at_once(target, draft, prompts, monkeypatch):
    """Fails where one call writes twice to one place, such as context and block: a GPU may keep either value."""
    at, calls = PositionCache.at, []

    def record(cache: PositionCache, positions: torch.Tensor, visible: int) -> PositionCache:
        calls.append((cache.padding, positions.tolist()))
        return at(cache, positions, visible)

    monkeypatch.setattr(PositionCache, "at", record)
    ids, mask = pad(prompts)
    draft.spec_generate(target, ids, 40, attention_mask=mask)
    assert len(calls) > 10
    for padding, rows in calls:
        for row in rows:
            places = [place for place in row if place != padding]
            assert len(places) == len(set(places)), row


def test_prompt_in_chunks(target, draft, prompts, expected, monkeypatch):
    """Fails where prefill in chunks changes answers or drafts, of long prompts or of short ones in the same batch."""
    monkeypatch.setattr("sglang_dflash.reference.generation.PREFILL_ROWS", 16)
    ids, mask = pad(prompts)
    assert min(map(len, prompts)) < max(map(len, prompts)) - 16
    generation = _generate(draft, target, ids, MAX_NEW_TOKENS, attention_mask=mask)
    assert generation.commit_lens == [answer.commit_lens for answer in expected]
    assert [generation.new_ids(row) for row in range(len(ids))] == [answer.ids for answer in expected]


def test_trained_target_answers_as_alone(target, draft, prompts):
    """Fails where speculation changes a token or the end of a trained target's answer."""
    for prompt in prompts[::4]:
        ids = torch.tensor([prompt])
        assert _generate(draft, target, ids, 60).new_ids(0) == _greedy(target, ids, 60)


SLIDING_TARGET = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", SLIDING_TARGET),
        ("qwen3", {**SLIDING_TARGET, "max_window_layers": 0}),
        ("qwen3", {"attn_implementation": "eager"}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["llama", "qwen3", "tied", "sliding", "all-sliding", "eager", "biased"],
)
def test_random_target_answers_as_alone(kind, options):
    """Fails where a target's masks, windows, positions or caches are wrong in a verified block; also where no draft is
    accepted, because then nothing is tested."""
    target, draft = make_target(kind, **options), make_draft()
    expected = [_greedy(target, random_ids(length, seed=length), 40) for length in (3, 9, 17)]
    ids, mask = pad([random_ids(length, seed=length)[0].tolist() for length in (3, 9, 17)], left=True)
    generation = _generate(draft, target, ids, 40, attention_mask=mask)
    assert [generation.new_ids(row) for row in range(3)] == expected
    steps = [commit_len for request in generation.commit_lens for commit_len in request]
    assert sum(steps) > len(steps), "no draft was accepted"
    assert len({token for answer in expected for token in answer}) > 2, "the target repeats itself"


def test_sliding_layers_of_a_target_matter():
    """Fails where the window of the sliding case above hides nothing, because then that case tests nothing."""
    full, sliding = make_target("qwen3"), make_target("qwen3", **SLIDING_TARGET)
    assert _greedy(full, random_ids(17), 40) != _greedy(sliding, random_ids(17), 40)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "is_causal": False},
        {"is_causal": True},
        {"attention_bias": True},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=["sliding", "short-window", "causal", "biased", "other-heads"],
)
def test_kind_of_draft_changes_no_token(options):
    """Fails where a draft of another layout raises or changes the committed ids, alone or in a batch."""
    target, draft = make_target("qwen3"), make_draft(**options)
    rows = [random_ids(length, seed=length)[0].tolist() for length in (3, 17)]
    ids, mask = pad(rows)
    generation = _generate(draft, target, ids, 30, attention_mask=mask)
    for row, prompt in enumerate(rows):
        alone = _generate(draft, target, torch.tensor([prompt]), 30)
        assert generation.new_ids(row) == alone.new_ids(0) == _greedy(target, torch.tensor([prompt]), 30)
        assert generation.commit_lens[row] == alone.commit_lens[0]


@pytest.mark.parametrize("block_size", [2, 3, 7])
def test_block_of_another_size(block_size):
    """Fails where a block size other than the trained one changes a token, or is not used."""
    target, draft = make_target("llama"), make_draft()
    ids = random_ids(9)
    generation = _generate(draft, target, ids, 60, block_size=block_size)
    assert generation.new_ids(0) == _greedy(target, ids, 60)
    assert 1 < max(generation.commit_lens[0]) <= block_size


def test_block_of_trained_size_is_the_default():
    """Fails where the default block size is not the config's."""
    target, draft = make_target("llama"), make_draft()
    named, default = (_generate(draft, target, random_ids(9), 60, **o) for o in ({"block_size": 4}, {}))
    assert named.commit_lens == default.commit_lens != _generate(draft, target, random_ids(9), 60, block_size=3)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 6])
def test_length_limit(max_new_tokens):
    """Fails where an answer is longer or shorter than its limit, at any place of the limit in a block."""
    target, draft = make_target("llama"), make_draft()
    ids = random_ids(9)
    generation = _generate(draft, target, ids, max_new_tokens)
    assert generation.new_ids(0) == _greedy(target, ids, max_new_tokens)
    assert generation.num_new_tokens == [max_new_tokens]
    if max_new_tokens == 1:
        assert generation.commit_lens == [[]] and generation.tau == 0.0
    else:
        # The last step may pass the limit; the one before it did not reach it.
        assert 1 + sum(generation.commit_lens[0][:-1]) < max_new_tokens <= 1 + sum(generation.commit_lens[0])


@pytest.mark.parametrize("end_ids", [3, [1, 3]], ids=["one", "several"])
def test_end_tokens(end_ids):
    """Fails where None does not mean the target's own end tokens, [] does not mean none, or a list does not replace
    them; or where the answer does not end with the first of them, at any place in a block."""
    target, draft = make_target("llama"), make_draft()
    for seed in range(6):
        ids = random_ids(5, seed)
        endless = _greedy(target, ids, 40)
        target.generation_config.eos_token_id = end_ids
        own = _greedy(target, ids, 40)
        assert _generate(draft, target, ids, 40).new_ids(0) == own
        target.generation_config.eos_token_id = None
        listed = end_ids if isinstance(end_ids, list) else [end_ids]
        assert _generate(draft, target, ids, 40, listed).new_ids(0) == own
        assert _generate(draft, target, ids, 40).new_ids(0) == endless
        target.generation_config.eos_token_id = list(range(VOCABULARY))
        assert _generate(draft, target, ids, 40, []).new_ids(0) == endless
        assert _generate(draft, target, ids, 40).new_ids(0) == endless[:1]
        target.generation_config.eos_token_id = None


def test_ids_alone_are_the_default(target, draft, prompts):
    """Fails where a call without statistics returns other ids, or not the tensor that users of transformers expect."""
    ids = torch.tensor([prompts[0]])
    output = draft.spec_generate(target, ids, 20)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, _generate(draft, target, ids, 20).output_ids)


class _Pieces(list):
    """A streamer of transformers that keeps what it gets, and None for the end."""

    def put(self, ids: torch.Tensor) -> None:
        self.append(ids.tolist())

    def end(self) -> None:
        self.append(None)


@pytest.mark.parametrize("limit", [1, 9, 40])
def test_streamer(limit):
    """Fails where a streamer gets an id twice, late, beyond the limit or the end token, or no end; or several prompts
    are streamed into one another."""
    target, draft = make_target("llama"), make_draft()
    ids, pieces = random_ids(9), _Pieces()
    for stop_ids in ([], [int(_greedy(target, ids, 40)[12])]):
        pieces.clear()
        generation = _generate(draft, target, ids, limit, stop_ids, streamer=pieces)
        prompt, *steps, end = pieces
        assert prompt == ids.tolist() and end is None
        assert [token for step in steps for token in step] == generation.new_ids(0)
        assert list(map(len, steps[1:-1])) == generation.commit_lens[0][:-1]
    with pytest.raises(ValueError, match="input_ids has 2"):
        draft.spec_generate(target, random_ids(5, requests=2), 4, streamer=pieces)
