"""A made-up scheduler over steps of our worker, in which every committed token is compared with plain decoding.

The target reads the text of each row from its KV pool, through the slot table and the rows before it. So KV at a wrong
slot gives other logits. The draft offers the right token mostly. The policy verifies random rows of random requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from plain_decoding import LISTED_IDS, Asked, Plain, decode_plain, vector
from plugins.every_width import RandomRows
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from stand_in_worker import BATCH, BLOCK, COLUMNS, HIDDEN, TAPS, VOCAB, StepBatch, worker_of
from stand_ins import make_sampler

from sglang_dflash import ops
from sglang_dflash.host.worker.draft_heads import DraftHead
from sglang_dflash.host.worker.draft_input import DraftInput
from sglang_dflash.host.worker.rows import StepRows

LONGEST_PROMPT = 8
TOKENS = COLUMNS - LONGEST_PROMPT  # of an answer


@dataclass
class Running:
    """One request: its tokens, those of plain decoding, and its host's object, which may lag behind."""

    asked: Asked
    slot: int
    req: Req
    expected: list[Plain]  # behind the first token
    emitted: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # emitted tokens that the host has not seen yet
    unparsed: list[int] = field(default_factory=list)  # emitted tokens that the grammar has not seen yet

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens, the pending bonus included."""
        return (*self.asked.prompt, *self.emitted)

    @property
    def prefix_len(self) -> int:
        return len(self.text) - 1

    def plain(self, depth: int) -> Plain:
        """Plain decoding's token at a depth below the bonus."""
        return self.expected[len(self.emitted) - 1 + depth - 1]


class Rig:
    """`step` runs one step of some requests and checks all that it leaves.

    Args:
        asked: one request each, at most BATCH.
        overlap: whether the host sees the tokens of a step only after the next one.
    """

    def __init__(
        self,
        seed: int,
        asked: Sequence[Asked],
        page_size: int = 1,
        overlap: bool = False,
        window: int | None = None,
    ) -> None:
        self.rng, self.page_size, self.overlap = random.Random(seed), page_size, overlap
        self.table = self._table()
        sampler = make_sampler()
        self.worker = worker_of(self.table, ops.choose_kernels("cpu", torch.float32), sampler, window)
        self.writer = worker_of(self.table, ops.choose_kernels("cpu", torch.float32))._draft  # the same weights
        self.pool = _pool()
        target = self.worker._target
        target.token_to_kv_pool, target.token_to_kv_pool_allocator = self.pool, SimpleNamespace(page_size=page_size)
        self.prefill = self.worker._target_worker.forward_batch_generation  # made-up values, of no text
        self.worker._target_worker.forward_batch_generation = self._verify
        draft = self.worker._draft
        draft.runner.forward = self._propose
        draft._head = DraftHead(SimpleNamespace(weight=torch.eye(VOCAB), shard_indices=None), BLOCK)
        self.policy = RandomRows(BLOCK, self.rng)
        kernels = ops.choose_kernels("cpu", torch.float32)
        self.worker.step_rows = StepRows(BLOCK, self.policy, target, draft, VOCAB - 1, kernels)
        self.worker._sampler.sampled_rows = self.rng.choice([3, 512])
        events = ("ragged", "deep", "not drafted", "nobody drafted", "trimmed before a right draft", "whole block")
        self.seen = dict.fromkeys(events, 0)
        self.running = [self._admit(place, one, sampler) for place, one in enumerate(asked)]

    def _table(self) -> torch.Tensor:
        pages = torch.randperm(BATCH * COLUMNS // self.page_size, generator=torch.Generator().manual_seed(3))
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return slots.view(BATCH, COLUMNS).int()

    def _admit(self, place: int, asked: Asked, sampler: Any) -> Running:
        """A request behind its prefill: KV of its prompt in both pools, its first token emitted."""
        slot, first = (place + 1) % BATCH, self.rng.randrange(VOCAB)
        expected = decode_plain(asked, first, TOKENS, VOCAB, sampler)
        running = Running(asked, slot, asked.req(f"request {place}", slot, VOCAB, first), expected)
        batch = self._batch([running])
        running.req.output_ids.pop()  # as before the prefill
        group = self.worker._sampler.prefill(batch)
        self.worker._sampler.commit_first(batch, group, torch.tensor([first]))
        running.req.output_ids.append(first)
        running.emitted.append(first)
        for position in range(len(asked.prompt)):
            self._hold(self.table[slot, position], running.text[position], position)
        self._write_context(self.worker._draft, running, range(len(asked.prompt)))
        self._write_context(self.writer, running, range(len(asked.prompt)))
        return running

    def _hold(self, slot: torch.Tensor, token: int, position: int) -> None:
        self.pool.k_buffer[0][slot], self.pool.v_buffer[0][slot] = float(token), float(position)

    def _write_context(self, draft: Any, running: Running, positions: range) -> None:
        hidden = torch.stack([vector("taps", running.text[: place + 1], TAPS * HIDDEN) for place in positions])
        places = torch.tensor(list(positions))
        draft.write_context(hidden, places, self.table[running.slot, places].long())

    def _batch(self, chosen: list[Running]) -> StepBatch:
        lens = torch.tensor([one.prefix_len if one.emitted else len(one.asked.prompt) for one in chosen])
        for one, length in zip(chosen, lens.tolist(), strict=True):
            one.req.kv.kv_committed_len = length
            one.req.kv.kv_allocated_len = min(len(one.asked.prompt) + TOKENS - 1, length + 3 * BLOCK)
        logprobs = any(one.asked.top_logprobs or one.asked.listed_ids for one in chosen)
        fields: dict[str, Any] = {"forward_mode": ForwardMode.DECODE, "is_extend_in_batch": False}
        fields |= {
            "seq_lens": lens,
            "seq_lens_cpu": lens,
            "seq_lens_sum": int(lens.sum()),
            "return_hidden_states": True,
        }
        fields |= {"return_logprob": logprobs, "has_grammar": any(one.asked.grammar for one in chosen)}
        fields["top_logprobs_nums"] = [one.asked.top_logprobs for one in chosen]
        fields["token_ids_logprobs"] = [LISTED_IDS if one.asked.listed_ids else None for one in chosen]
        fields["req_pool_indices"] = torch.tensor([one.slot for one in chosen])
        batch = StepBatch([one.req for one in chosen], VOCAB, **fields)
        if all(one.emitted for one in chosen):
            batch.spec_info = DraftInput.create(torch.tensor([one.emitted[-1] for one in chosen]), lens)
        return batch

    # The two models.

    def _propose(self, forward_batch: Any) -> SimpleNamespace:
        """Reads the draft's KV and writes the block's own; the head's best ids are the drafts."""
        self._check_draft_kv()
        width = forward_batch.spec_info.draft_token_num
        hidden = torch.zeros(forward_batch.batch_size, width, VOCAB)
        by_slot = {one.slot: one for one in self.running}
        positions = forward_batch.positions.view(-1, width)
        for place, slot in enumerate(forward_batch.req_pool_indices.tolist()):
            running = by_slot[slot]
            assert positions[place].tolist() == list(range(running.prefix_len, running.prefix_len + width))
            assert forward_batch.input_ids.view(-1, width)[place].tolist() == [running.emitted[-1]] + [VOCAB - 1] * (
                width - 1
            )
            self._check_window(slot, int(forward_batch.seq_lens[place]), running.prefix_len, width)
            for depth in range(1, width):
                right = running.plain(depth).token
                hidden[place, depth, right if self.rng.random() < 0.85 else self.rng.randrange(VOCAB)] = 20.0
        self.drafted_slots = forward_batch.out_cache_loc
        assert torch.equal(
            self.drafted_slots, self.table[forward_batch.req_pool_indices[:, None], positions].long().flatten()
        )
        for buffer in (*self._draft_buffers(self.worker._draft), *self._draft_buffers(self.writer)):
            buffer[self.drafted_slots] = torch.nan
        out = SimpleNamespace(hidden_states=hidden.flatten(0, 1))
        return SimpleNamespace(can_run_graph=False, logits_output=out)

    def _check_window(self, slot: int, kept: int, prefix_len: int, width: int) -> None:
        window = self.worker._draft._window
        if window is None:
            assert kept == prefix_len
            return
        seen = window._draft_table[slot, : kept + width]
        assert torch.equal(seen, self.table[slot, prefix_len - kept : prefix_len + width])

    def _draft_buffers(self, draft: Any) -> list[torch.Tensor]:
        pool = draft.runner.token_to_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    def _verify(self, forward_batch: Any = None, **_: Any) -> GenerationBatchResult:
        """Every row writes its KV; then each row reads the text that it sees."""
        width, batch = forward_batch.spec_info.draft_token_num, len(forward_batch.req_pool_indices)
        lens = forward_batch.spec_info.lens
        self.lens = [width] * batch if lens is None else lens.tolist()
        assert max(self.lens) <= width and sum(self.lens) == len(forward_batch.input_ids)
        for slot, token, position in zip(
            forward_batch.out_cache_loc, forward_batch.input_ids, forward_batch.positions, strict=True
        ):
            self._hold(slot, int(token), int(position))
        texts = []
        for place, count in enumerate(self.lens):
            slots = self.table[forward_batch.req_pool_indices[place]]
            prefix_len = int(forward_batch.seq_lens[place])
            for row in range(count):
                texts.append(self._read(slots[: prefix_len + row + 1]))
        self.texts = texts
        out = LogitsProcessorOutput(
            next_token_logits=torch.stack([vector("logits", text, VOCAB) for text in texts]),
            hidden_states=torch.stack([vector("taps", text, TAPS * HIDDEN) for text in texts]),
            last_hidden_states=torch.stack([vector("last", text, HIDDEN) for text in texts]),
        )
        return GenerationBatchResult(logits_output=out, can_run_cuda_graph=False)

    def _read(self, slots: torch.Tensor) -> tuple[int, ...]:
        """The text in these slots, by position."""
        tokens, positions = (
            buffer[0][slots.long()].flatten().long() for buffer in (self.pool.k_buffer, self.pool.v_buffer)
        )
        order = positions.argsort()
        assert positions[order].tolist() == list(range(len(slots))), "KV of another position"
        return tuple(tokens[order].tolist())

    # A step.

    def step(self, places: Sequence[int]) -> None:
        chosen = [self.running[place] for place in places]
        batch, table = self._batch(chosen), self.table.clone()
        kept = [one.text for one in chosen]
        published: list[torch.Tensor] = []

        def publish(lens: torch.Tensor) -> None:
            published.append(lens)
            for one, length in zip(chosen, lens.tolist(), strict=True):
                known = (*one.text, *(plain.token for plain in one.expected[len(one.emitted) - 1 :]))
                assert self._read(self.table[one.slot, :length]) == known[:length], "published before the commit"

        result = self.worker.forward_batch_generation(batch, publish, lambda: self._parse(chosen))
        stride, lens = result.speculative_num_draft_tokens, result.accept_lens.tolist()
        ids = result.next_token_ids.view(len(chosen), stride)
        self._note(chosen, lens)
        for place, (one, length) in enumerate(zip(chosen, lens, strict=True)):
            plain = one.expected[len(one.emitted) - 1 :][:length]
            new = ids[place, :length].tolist()
            assert new == [token for token, *_ in plain], (one.asked, one.emitted)
            self._check_output(result.logits_output, place, stride, one, plain)
            if one.pending:
                one.req.output_ids.extend(one.pending)
            one.pending = new
            one.unparsed += new
            one.emitted += new
        for one in self.running if not self.overlap else []:
            one.req.output_ids.extend(one.pending)
            one.pending = []
        if not self.overlap:
            self._parse(chosen)
        assert [lens.tolist() for lens in published] == [[one.prefix_len for one in chosen]]
        assert result.new_seq_lens.tolist() == [one.prefix_len for one in chosen]
        assert result.cap_lens.tolist() == self._counted()
        assert result.next_draft_input.bonus_tokens.tolist() == [one.emitted[-1] for one in chosen]
        self._check_slots(table, chosen, kept)

    def _counted(self) -> list[int]:
        """Rows of each request as SGLang's and our metrics count them."""
        return self.lens

    def _parse(self, chosen: list[Running]) -> None:
        for one in chosen:
            if one.req.grammar is not None:
                for token in one.unparsed:
                    one.req.grammar.accept_token(token)
            one.unparsed = []

    def _note(self, chosen: list[Running], lens: list[int]) -> None:
        """Compares the lengths with those that the verified rows allow, and counts what has happened."""
        drafting, first = self.policy.drafting, 0
        if drafting.requests:
            (step,) = self.policy.learned
            assert step.names == [chosen[place].req.rid for place in drafting.requests]
            assert step.commit_lens.tolist() == [lens[place] for place in drafting.requests]
            assert step.lens.tolist() == [self.lens[place] for place in drafting.requests]
        for place, (one, count) in enumerate(zip(chosen, self.lens, strict=True)):
            known = (*one.text, *(plain.token for plain in one.expected[len(one.emitted) - 1 :]))
            texts = self.texts[first : first + count]
            right = [text for text in texts if text == known[: len(text)]]
            assert lens[place] == len(right), "a row was right and is not accepted"
            self.seen["ragged"] += len(set(self.lens)) > 1
            self.seen["deep"] += lens[place] > 3
            self.seen["whole block"] += count == BLOCK
            self.seen["trimmed before a right draft"] += 1 < count == lens[place] < drafting.width
            self.seen["not drafted"] += drafting.width > 1 and place not in drafting.requests
            self.seen["nobody drafted"] += drafting.width == 1
            first += count

    def _check_output(self, out: Any, place: int, stride: int, one: Running, plain: list[Plain]) -> None:
        """What the host reads of a request's committed tokens: states and logprobs, in the order of the tokens."""
        known = (*one.text, *(token for token, *_ in plain))
        for depth, expected in enumerate(plain):
            at = place * stride + depth
            assert torch.equal(out.hidden_states[at], vector("last", known[: one.prefix_len + 1 + depth], HIDDEN))
            if one.asked.top_logprobs or one.asked.listed_ids:
                torch.testing.assert_close(float(out.next_token_logprobs[place, depth]), expected.logprob)
            if count := one.asked.top_logprobs:
                best = torch.as_tensor(out.next_token_top_logprobs_val[at])
                torch.testing.assert_close(best, expected.best[:count])
                assert torch.as_tensor(out.next_token_top_logprobs_idx[at]).tolist() == expected.best_ids[:count]
            if one.asked.listed_ids:
                listed = torch.as_tensor(out.next_token_token_ids_logprobs_val[at])
                torch.testing.assert_close(listed, expected.listed)
                assert out.next_token_token_ids_logprobs_idx[at] == LISTED_IDS

    def _check_slots(self, before: torch.Tensor, chosen: list[Running], kept: list[tuple[int, ...]]) -> None:
        """The table and both pools, after the step."""
        assert torch.equal(self.table, before), "slots have changed their places"
        for one in self.running:
            assert self._read(self.table[one.slot, : one.prefix_len]) == one.text[:-1]
        for one, text in zip(chosen, kept, strict=True):
            self._write_context(self.writer, one, range(len(text) - 1, one.prefix_len))
        self._check_draft_kv()

    def _check_draft_kv(self) -> None:
        """Both pools hold the same of all committed tokens. What a rejected row has left is overwritten before it is
        read."""
        slots = torch.cat([self.table[one.slot, : one.prefix_len] for one in self.running]).long()
        pairs = zip(self._draft_buffers(self.worker._draft), self._draft_buffers(self.writer), strict=True)
        for ours, expected in pairs:
            torch.testing.assert_close(ours[slots], expected[slots])

    def run(self) -> None:
        """Steps of changing requests until one of them has no room for another block."""
        assert all(len(one.asked.prompt) <= LONGEST_PROMPT for one in self.running)
        while max(len(one.emitted) for one in self.running) + BLOCK < TOKENS:
            places = list(range(len(self.running)))
            self.step(self.rng.sample(places, self.rng.randint(1, len(places))))
        self._check_draft_kv()


def _pool() -> MHATokenToKVPool:
    """The target's pool, with its own move of KV: a token in K and its position in V."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.layer_num, pool.size, pool.page_size, pool.use_hnd = 1, BATCH * COLUMNS, 16, False
    pool.use_native_move_kv_cache, pool.native_k_scale_buffer = True, None
    pool.k_buffer, pool.v_buffer = ([torch.full((BATCH * COLUMNS, 1, 1), -1.0)] for _ in "kv")
    return pool
