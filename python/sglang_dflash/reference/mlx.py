"""DFlash in MLX: plain drafts over the attention-only targets of `mlx_lm`, one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx import nn
from mlx_lm.generate import wired_limit
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache, trim_prompt_cache
from mlx_lm.sample_utils import Sampler, greedy_sampler

from sglang_dflash.core.draft_config import DraftConfig, LayerAttention
from sglang_dflash.core.draft_folder import FILES
from sglang_dflash.core.draft_weights import ALIASES, check_weights, expected_shapes, read_shapes
from sglang_dflash.core.mask_embedding import MASK_EMBEDDING_FILE
from sglang_dflash.reference.config import DFlashConfig, check_call, read_config
from sglang_dflash.reference.mlx_target import Rope, Target, check_family, load_target

__all__ = ["DFlashDraft", "Response", "load_draft", "load_target", "stream_generate"]
NOT_HERE = {
    "selector": "a selector (DFlash2)",
    "convolution": "convolutions (DFlash2)",
    "domino": "Domino's head",
    "head_vocab_size": "a head of its own",
    "attention_sinks": "attention sinks",
    "gemma_norms": "Gemma's norms",
    "value_scale": "scaled values",
}
"""Fields of `DraftConfig` -> what a draft has for which the transformers engine must be used."""


@dataclass(frozen=True, slots=True)
class Response:
    """What one step of `stream_generate` committed.

    Fields:
        ids: the new ids, the end token included.
        text: what they make readable, without the end token.
        commit_len: of the step; the last one also counts tokens beyond the end. 0: the prefill, which drafts nothing.
        finish_reason: "stop" or "length"; None if more follow.
    """

    ids: list[int]
    text: str
    commit_len: int
    finish_reason: str | None


def block_mask(rows: int, keys: int, attention: LayerAttention) -> mx.array | None:
    """Which of keys 0 to S-1 the block's rows see, which are the last of them; as `reference.block_mask`.

    Returns:
        [rows, keys] bool; None if every row sees every key.
    """
    if not attention.causal and attention.window is None:
        return None
    behind = mx.arange(keys - rows, keys)[:, None] - mx.arange(keys)
    visible = behind >= (0 if attention.causal else -rows)
    return visible if attention.window is None else visible & (behind < attention.window)


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU; the context features bypass the layer's input norm."""

    def __init__(self, draft: DraftConfig, eps: float) -> None:
        super().__init__()
        hidden, bias, dim = draft.hidden_size, draft.attention_bias, draft.head_dim
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, heads in (
            ("q_proj", draft.num_heads),
            ("k_proj", draft.num_kv_heads),
            ("v_proj", draft.num_kv_heads),
        ):
            setattr(self.self_attn, name, nn.Linear(hidden, heads * dim, bias=bias))
        self.self_attn.o_proj = nn.Linear(draft.num_heads * dim, hidden, bias=bias)
        self.self_attn.q_norm, self.self_attn.k_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.mlp.gate_proj = nn.Linear(hidden, draft.intermediate_size, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, draft.intermediate_size, bias=False)
        self.mlp.down_proj = nn.Linear(draft.intermediate_size, hidden, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self._head_dim = dim

    def __call__(
        self, x: mx.array, context: mx.array, rope: Rope, attention: LayerAttention, cache: KVCache
    ) -> mx.array:
        """x: [1, Q, H], the block; context: [1, T, H], features of the tokens before it that the cache lacks."""
        x = x + self._attend(self.input_layernorm(x), context, rope, attention, cache)
        rows = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(swiglu(self.mlp.gate_proj(rows), self.mlp.up_proj(rows)))

    def _attend(
        self, x: mx.array, context: mx.array, rope: Rope, attention: LayerAttention, cache: KVCache
    ) -> mx.array:
        at, start, block = self.self_attn, cache.offset, x.shape[1]
        rows = mx.concatenate((context, x), axis=1)  # [1, T + Q, H]
        q = rope(at.q_norm(self._heads(at.q_proj(x))).swapaxes(1, 2), start + context.shape[1])  # [1, Hq, Q, D]
        k = rope(at.k_norm(self._heads(at.k_proj(rows))).swapaxes(1, 2), start)  # [1, Hkv, T + Q, D]
        k, v = cache.update_and_fetch(k, self._heads(at.v_proj(rows)).swapaxes(1, 2))
        cache.trim(block)  # the block itself is no context
        mask = block_mask(block, k.shape[2], attention)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self._head_dim**-0.5, mask=mask)
        return at.o_proj(out.swapaxes(1, 2).flatten(2))

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], -1, self._head_dim)


class DFlashDraft(nn.Module):
    """A plain draft, as `load_draft` makes it. It has neither embedding nor head: both are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        draft, eps = config.draft, config.rms_norm_eps
        self.draft_config, self._rope = draft, Rope(config)
        self.layers = [DraftLayer(draft, eps) for _ in range(draft.num_layers)]
        self.fc = nn.Linear(len(draft.target_layer_ids) * draft.hidden_size, draft.hidden_size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(draft.hidden_size, eps), nn.RMSNorm(draft.hidden_size, eps)

    def __call__(self, block: mx.array, features: mx.array, caches: Sequence[KVCache]) -> mx.array:
        """One denoising pass over `[anchor, MASK x (Q-1)]`.

        Args:
            block: [1, Q, H]; the target's embedding of the block.
            features: [1, T, taps * H]; of the tokens between the caches' and the block.
            caches: one per layer; they hold the context without the block, before and after.

        Returns:
            [1, Q, H]; final-normed, ready for the target's head, in the block's dtype.
        """
        dtype = self.fc.weight.dtype  # the target may use another dtype
        context = self.hidden_norm(self.fc(features.astype(dtype)))  # [1, T, H]
        x = block.astype(dtype)
        for layer, attention, cache in zip(self.layers, self.draft_config.attention, caches, strict=True):
            x = layer(x, context, self._rope, attention, cache)
        return self.norm(x).astype(block.dtype)


def load_draft(folder: str | Path, dtype: mx.Dtype | None = None) -> DFlashDraft:
    """Loads a plain draft in a published layout: full and sliding layers, rotary embeddings of `mlx_target.ROPE_TYPES`.

    Args:
        folder: a folder, or a name of the hub.
        dtype: of the weights; None: as they are stored.

    Raises:
        ValueError: the checkpoint is no draft, is not plain, or its weights do not fit its config; one sentence.
    """
    name, config = read_config(str(folder))
    path = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=FILES))
    draft = config.draft
    found = [what for field, what in NOT_HERE.items() if getattr(draft, field)]
    found += ["a mask embedding of its own"] if (path / MASK_EMBEDDING_FILE).exists() else []
    found += [f"the activation {config.hidden_act}"] if config.hidden_act != "silu" else []
    if found:
        raise ValueError(f"The draft {folder} has {' and '.join(found)}, which MLX does not get; use transformers.")
    shapes = read_shapes(path)
    unread = ["weights in another format than safetensors"] if shapes is None else check_weights(shapes, draft)
    if unread:
        raise ValueError(f"The draft {folder} has {', '.join(unread[:4])}, which nothing reads.")
    model, wanted, weights = DFlashDraft(config), expected_shapes(draft), {}
    for file in sorted(path.glob("*.safetensors")):
        for key, value in mx.load(str(file)).items():
            key = key.removeprefix("model.")
            weights[ALIASES.get(key, key)] = value if dtype is None else value.astype(dtype)
    model.load_weights([(key, weights[key]) for key in wanted])
    mx.eval(model.parameters())
    return model


def stream_generate(
    model: nn.Module,
    draft: DFlashDraft,
    tokenizer: Any,
    prompt: str | Sequence[int],
    max_new_tokens: int = 256,
    *,
    sampler: Sampler = greedy_sampler,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    prefill_step_size: int = 2048,
) -> Iterator[Response]:
    """The target's own answer, as `mlx_lm.stream_generate` gives it, several tokens a step.

    A draft is committed if it equals the target's own token, which the sampler chooses for each row by itself. So a
    greedy answer is the target's, if a row has the same logits alone and among others (float32 but for ties); a
    sampled one has the target's distribution.

    Args:
        model, tokenizer: of `load_target`.
        prompt: a text, which gets the tokenizer's special tokens as in mlx-lm, or token ids.
        sampler: of `mlx_lm.sample_utils.make_sampler`; its draws are seeded by `mx.random.seed`.
        stop_token_ids: the answer ends after the first of these; None: the tokenizer's end tokens; []: never.
        block_size: rows of a step, 2 or more; default: as many as the draft can give.
        mask_token_id: default: the draft's; needed if the draft's config gives only the token's text.
        prefill_step_size: rows of the prompt in one forward.

    Raises:
        ValueError: the models do not fit, or an argument is out of range; one sentence, before the first step.
    """
    args, width = model.args, draft.draft_config.most_rows if block_size is None else block_size
    mask_id = draft.draft_config.mask_token_id if mask_token_id is None else mask_token_id
    check_family(model.model_type, getattr(args, "layer_types", None) or [])
    shape = (len(model.layers), args.hidden_size, args.vocab_size)
    check_call(draft.draft_config, shape, mask_id, max_new_tokens, width)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    if not len(prompt):
        raise ValueError("The prompt has no tokens; it must have at least one.")
    stops = set(tokenizer.eos_token_ids if stop_token_ids is None else stop_token_ids)
    ids = mx.array(prompt)
    return _steps(
        model, draft, tokenizer.detokenizer, ids, max_new_tokens, sampler, stops, width, mask_id, prefill_step_size
    )


def _steps(
    model: nn.Module,
    draft: DFlashDraft,
    detokenizer: Any,
    prompt: mx.array,
    limit: int,
    sampler: Sampler,
    stops: set[int],
    width: int,
    mask_id: int | None,
    prefill_step: int,
) -> Iterator[Response]:
    target, caches = Target(model, draft.draft_config.target_layer_ids), [KVCache() for _ in draft.layers]
    anchor_first, given = draft.draft_config.anchor_first, 0
    with wired_limit(model):
        logits, features = target.prefill(prompt, prefill_step)
        committed, commit_len = _choose(sampler, logits), 0
        while True:
            ids = committed[: limit - given]
            stop = next((place for place, token in enumerate(ids) if token in stops), None)
            ids = ids if stop is None else ids[: stop + 1]
            given += len(ids)
            reason = "stop" if stop is not None else "length" if given == limit else None
            for token in ids[:stop]:
                detokenizer.add_token(token)
            if reason is not None:
                detokenizer.finalize()
            yield Response(ids, detokenizer.last_segment, commit_len, reason)
            if reason is not None:
                return
            block = mx.array([[committed[-1], *[mask_id] * (width - 1 - anchor_first)]])
            hidden = draft(target.embed(block), features, caches)[:, 1 - anchor_first :]
            drafts = target.head(hidden).argmax(-1)  # [1, K-1]
            logits, features = target(mx.concatenate((block[:, :1], drafts), axis=1))
            chosen, proposed = _choose(sampler, logits), drafts[0].tolist()
            pairs = zip(proposed, chosen, strict=False)
            commit_len = 1 + next((place for place, (a, b) in enumerate(pairs) if a != b), len(proposed))
            committed, features = chosen[:commit_len], features[:, :commit_len]
            trim_prompt_cache(target.cache, width - commit_len)


def _choose(sampler: Sampler, logits: mx.array) -> list[int]:
    """The target's own token of each row; logits: [1, T, V]. Rows are drawn one by one: XTC draws once a call."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.concatenate([sampler(row[None]) for row in logprobs[0]]).tolist()
