"""The DFlash decode loop in plain transformers: draft a block, verify it, commit, for one request or several."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sglang_dflash.ops.reference import accept_chain
from sglang_dflash.reference.config import check_call
from sglang_dflash.reference.position_cache import PositionCache
from sglang_dflash.reference.recurrent import RecurrentCache
from sglang_dflash.reference.target import FeatureTaps, end_token_ids, text_config

TARGETS = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "glm4",
    "glm4_moe",
    "minimax_m2",
)
RECURRENT = "linear_attention"  # the kind of layers that keep a state instead of keys and values
PREFILL_ROWS = 2048
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of `spec_generate`, with its statistics.

    Fields:
        output_ids: [B, P + N] int64; the prompts as they came, then the new ids, padded on the right.
        num_new_tokens: of each request, the end token included.
        commit_lens: of each request's verify steps; the last one also counts tokens committed beyond the end.
        prefill_s, decode_s: seconds until every request has its first token, and from there to the end.
    """

    output_ids: torch.Tensor
    num_new_tokens: list[int]
    commit_lens: list[list[int]]
    prefill_s: float
    decode_s: float

    @property
    def tau(self) -> float:
        """Mean commit_len over all steps; 0.0 where there is none."""
        steps = [commit_len for request in self.commit_lens for commit_len in request]
        return sum(steps) / len(steps) if steps else 0.0

    def new_ids(self, request: int) -> list[int]:
        """The ids that one request got, the end token included."""
        start = self.output_ids.shape[1] - max(self.num_new_tokens)
        return self.output_ids[request, start : start + self.num_new_tokens[request]].tolist()


@dataclass(slots=True)
class _State:
    """The unfinished requests; tensors are [B, ...]. `order` holds each one's index in the caller's batch."""

    order: torch.Tensor
    ids: torch.Tensor
    lens: torch.Tensor
    prompt_lens: torch.Tensor
    features: torch.Tensor
    feature_positions: torch.Tensor
    target_cache: PositionCache
    draft_cache: PositionCache

    def keep(self, requests: torch.Tensor) -> None:
        for name in ("order", "ids", "lens", "prompt_lens", "features", "feature_positions"):
            setattr(self, name, getattr(self, name)[requests])
        self.target_cache.keep(requests)
        self.draft_cache.keep(requests)


@dataclass(slots=True)
class _Loop:
    """One call of `spec_generate`: the two models and the settings of all steps."""

    draft: Any
    target: Any
    block_size: int
    mask_token_id: int
    sample: Callable[[torch.Tensor], torch.Tensor]
    taps: FeatureTaps
    windows: dict[str, int | None] = field(default_factory=dict)

    def prefill(self, ids: torch.Tensor, prompt_lens: torch.Tensor, positions: int) -> _State:
        """Runs the prompts, [B, P] with padding on the right, and appends each one's first token to `ids`."""
        requests, width = len(ids), int(prompt_lens.max())
        target_cache = self.new_cache(requests, positions)
        columns = torch.arange(width, device=ids.device).expand(requests, -1)
        # Padding rows are written to positions that later rows overwrite before anything reads them.
        features, last = [], torch.zeros(requests, text_config(self.target).hidden_size, device=ids.device)
        for start in range(0, width, PREFILL_ROWS):
            rows = columns[:, start : start + PREFILL_ROWS]
            part = ids[:, start : start + rows.shape[1]]
            hidden, chunk = self.run_target(part, rows, target_cache, prompt_lens - start)
            features.append(chunk)
            here = (prompt_lens - 1 - start).clamp(0, rows.shape[1] - 1)
            ended = (prompt_lens - 1 >= start) & (prompt_lens - 1 < start + PREFILL_ROWS)
            row = hidden[torch.arange(requests, device=ids.device), here]
            last = torch.where(ended[:, None], row, last.to(row.dtype))
        ids[torch.arange(requests, device=ids.device), prompt_lens] = self.sample(self.head(last[:, None]))[:, 0]
        return _State(
            order=torch.arange(requests, device=ids.device),
            ids=ids,
            lens=prompt_lens + 1,
            prompt_lens=prompt_lens,
            features=torch.cat(features, dim=1),
            feature_positions=torch.where(columns < prompt_lens[:, None], columns, positions),
            target_cache=target_cache,
            draft_cache=PositionCache(requests, positions),
        )

    def step(self, state: _State) -> torch.Tensor:
        """Drafts, verifies and commits one block of every request; returns commit_lens, [B] int64."""
        starts = state.lens - 1  # of the bonus, which is committed but has no features yet
        offsets = torch.arange(self.block_size, device=starts.device)
        positions = starts[:, None] + offsets  # [B, K] int64
        ids = torch.full_like(positions, self.mask_token_id)
        ids[:, 0] = state.ids.gather(1, starts[:, None])[:, 0]
        ids[:, 1:] = self.propose(state, ids, positions)
        hidden, features = self.run_target(ids, positions, state.target_cache)
        accepted = accept_chain(self.sample(self.head(hidden)), ids)
        commit_lens = accepted.commit_lens.long()
        state.target_cache.commit(commit_lens)
        committed = offsets < commit_lens[:, None]
        # The committed ids are followed by zeros, which the next step overwrites.
        state.ids.scatter_(1, positions + 1, accepted.out_ids)
        state.lens = state.lens + commit_lens
        width = int(commit_lens.max())
        state.features = features[:, :width]
        padding = state.draft_cache.padding
        state.feature_positions = torch.where(committed, positions, padding)[:, :width]
        return commit_lens

    def propose(self, state: _State, block: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Drafts for rows 1..K-1, [B, K-1] int64: greedy, whatever the temperature (paper, section 4)."""
        rows = positions.shape[1] - self.draft.draft_config.anchor_first
        block, positions = block[:, :rows], positions[:, :rows]
        position_ids = torch.cat((state.feature_positions, positions), dim=1)
        hidden = self.draft(
            noise_embedding=self.draft.embed_block(self.target.get_input_embeddings()(block)),
            target_hidden=state.features,
            position_ids=position_ids,
            past_key_values=state.draft_cache.at(position_ids, int(positions.max()) + 1),
        )
        return self.draft.choose(hidden, block[:, 0], self.head, self.target.get_input_embeddings())

    def new_cache(self, requests: int, positions: int) -> PositionCache:
        """The target's cache."""
        if RECURRENT not in self.windows:
            return PositionCache(requests, positions)
        return RecurrentCache(requests, positions, text_config(self.target).num_hidden_layers)

    def run_target(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: PositionCache, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states [B, T, H] and context features [B, T, taps * H] of rows at `positions`.

        lens: [B]; of a prompt's rows, how many are not padding. None: the rows are a block, which `commit` follows.
        """
        if isinstance(cache, RecurrentCache):
            return cache.run(lambda *rows: self._forward(*rows, cache), ids, positions, lens)
        return self._forward(ids, positions, cache)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: PositionCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        visible = int(positions.max()) + 1
        behind = positions[..., None] - torch.arange(visible, device=ids.device)  # [B, T, S]
        masks: dict[str, torch.Tensor | None] = {}
        for kind, window in self.windows.items():
            if kind == RECURRENT:
                masks[kind] = None
                continue
            hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
            mask = torch.zeros(hidden.shape, dtype=self.target.dtype, device=ids.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]
        with self.taps:
            out = self.target.get_decoder()(
                input_ids=ids,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions,
                past_key_values=cache.at(positions, visible),
                use_cache=True,
            )
        return out.last_hidden_state, self.taps.take()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.get_output_embeddings()(hidden.to(self.target.dtype))


@torch.inference_mode()
def spec_generate(
    draft: Any,
    target: nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    stop_token_ids: list[int] | None = None,
    temperature: float = 0.0,
    *,
    attention_mask: torch.Tensor | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    return_stats: bool = False,
) -> torch.Tensor | Generation:
    """Generates with `target`, using drafts from `draft`: at temperature 0 the target's greedy answer; above, a sample
    of the target's distribution (a draft is committed if it equals the target's own sample).

    The greedy answer is equal token for token if the target gives a row the same logits alone and among other rows. In
    float32 this holds except for ties; in bfloat16, two tokens that nearly tie may be swapped.

    Args:
        draft: a `DFlashDraftModel`.
        target: a causal language model of one of `TARGETS`, loaded with sdpa or eager attention.
        input_ids: [B, P] int64.
        stop_token_ids: an answer ends after the first of these; None: the target's own end tokens; []: never.
        temperature: 0 is greedy.
        attention_mask: [B, P], 0 where `input_ids` is padding, on either side; None: no padding.
        block_size: rows of a step, 2 or more; default: as many as the draft can give.
        mask_token_id: default: the draft's; needed if the draft's config gives only the token's text.
        generator: for sampling; on the target's device.
        streamer: of transformers, for one request: gets the prompt, then the new ids of every step.
        return_stats: return a `Generation` instead of its `output_ids`.

    Raises:
        ValueError: the models do not fit, or an argument is out of range; one sentence.
    """
    width = draft.draft_config.most_rows if block_size is None else block_size
    mask_token_id = draft.mask_token_id if mask_token_id is None else mask_token_id
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    _check(draft, target, input_ids, real, max_new_tokens, temperature, width, mask_token_id)
    stop_ids = torch.tensor(end_token_ids(target) if stop_token_ids is None else stop_token_ids, dtype=torch.long)
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"A streamer takes one request; input_ids has {len(input_ids)}.")
    loop = _Loop(
        draft,
        target,
        width,
        mask_token_id,
        _sampler(temperature, generator),
        FeatureTaps(target, draft.target_layer_ids),
        _windows(target),
    )
    began = time.perf_counter()
    prompt_lens = real.sum(1)
    limit = int(prompt_lens.max()) + max_new_tokens + width
    ids = input_ids.new_zeros((len(input_ids), limit + 1))
    for request, row in enumerate(real.bool()):
        ids[request, : prompt_lens[request]] = input_ids[request][row]
    state = loop.prefill(ids, prompt_lens, limit)
    prefilled = time.perf_counter()
    commit_lens: list[list[int]] = [[] for _ in range(len(input_ids))]
    answers: list[torch.Tensor] = [input_ids.new_empty(0)] * len(input_ids)
    stop_ids = stop_ids.to(input_ids.device)
    shown = 0
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while True:
        _collect(state, stop_ids, max_new_tokens, answers)
        if streamer is not None:
            new_ids = state.ids[0, prompt_lens[0] : state.lens[0]] if len(state.order) else answers[0]
            streamer.put(new_ids[shown:].cpu())
            shown = len(new_ids)
        if not len(state.order):
            break
        steps = loop.step(state)
        for request, commit_len in zip(state.order.tolist(), steps.tolist(), strict=True):
            commit_lens[request].append(commit_len)
    decoded = time.perf_counter()
    if streamer is not None:
        streamer.end()
    output = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=_padding_id(target))
    output_ids = torch.cat((input_ids, output), dim=1)
    if not return_stats:
        return output_ids
    new = [len(answer) for answer in answers]
    return Generation(output_ids, new, commit_lens, prefilled - began, decoded - prefilled)


def _collect(state: _State, stop_ids: torch.Tensor, max_new_tokens: int, answers: list[torch.Tensor]) -> None:
    """Moves every finished request's new ids to `answers` and drops the request."""
    columns = torch.arange(state.ids.shape[1], device=state.ids.device)
    new = (columns >= state.prompt_lens[:, None]) & (columns < state.lens[:, None])
    stops = torch.isin(state.ids, stop_ids) & new
    finished = stops.any(1) | (state.lens - state.prompt_lens >= max_new_tokens)
    if not finished.any():
        return
    for row in finished.nonzero()[:, 0].tolist():
        start = int(state.prompt_lens[row])
        end = min(int(state.lens[row]), start + max_new_tokens)
        first_stop = int(stops[row].int().argmax()) + 1 if stops[row].any() else end
        answers[int(state.order[row])] = state.ids[row, start : min(end, first_stop)].clone()
    state.keep((~finished).nonzero()[:, 0])


def _sampler(temperature: float, generator: torch.Generator | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits [B, T, V] -> ids [B, T] int64."""

    def sample(logits: torch.Tensor) -> torch.Tensor:
        if temperature < _GREEDY_BELOW:
            return logits.argmax(-1)
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        return torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(logits.shape[:2])

    return sample


def _windows(target: Any) -> dict[str, int | None]:
    """Kind of target layer -> its sliding window, or None for full attention."""
    config = text_config(target)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}


def _padding_id(target: Any) -> int:
    padding = text_config(target).pad_token_id
    return 0 if padding is None else padding


def _check(
    draft: Any,
    target: Any,
    input_ids: torch.Tensor,
    real: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    width: int,
    mask_token_id: int | None,
) -> None:
    config = text_config(target)
    if config.model_type not in TARGETS:
        raise ValueError(f"The target's model_type is {config.model_type!r}; allowed: {', '.join(TARGETS)}.")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"The target's attention is {config._attn_implementation!r}, which does not take our mask: load it with "
            "attn_implementation='sdpa' (or 'eager')."
        )
    shape = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    check_call(draft.draft_config, shape, mask_token_id, max_new_tokens, width)
    if input_ids.dim() != 2 or not len(input_ids) or real.shape != input_ids.shape or not bool((real.sum(1) > 0).all()):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(real.shape)}; both must be "
            "[requests, tokens], with at least one request and one token each."
        )
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or above.")
    masks = draft.mask_embedding
    if masks is not None and 1 < len(masks) < width - 1 - draft.draft_config.anchor_first:
        raise ValueError(f"block_size is {width}; the draft's mask embedding is for blocks of up to {len(masks) + 1}.")
