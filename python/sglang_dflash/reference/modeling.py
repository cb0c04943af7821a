"""The DFlash draft, plain or DFlash2, as a Hugging Face model, with the names and shapes of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import cached_file

from sglang_dflash import ops
from sglang_dflash.core.draft_config import DraftConfig, LayerAttention
from sglang_dflash.core.draft_folder import OwnHead, read_own_head
from sglang_dflash.core.mask_embedding import MASK_EMBEDDING_FILE, read_mask_embedding
from sglang_dflash.reference.config import DFlashConfig, read_config
from sglang_dflash.reference.dflash2 import CandidateSelector, GroupedConvolution
from sglang_dflash.reference.domino import domino_projector, domino_weights
from sglang_dflash.reference.generation import Generation, spec_generate

# A function that computes the attention itself: q [B, Hq, Q, D], k and v [B, Hkv, S, D] -> [B, Hq, Q, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mask = torch.Tensor | BlockMask | Attend | None
_compiled_flex_attention = torch.compile(flex_attention)


def block_mask(
    row_positions: torch.Tensor, keys: int, attention: LayerAttention, ragged: bool = True
) -> torch.Tensor | None:
    """Which keys the block rows of each request see, for one block per request. Key j is at position j.

    A row sees the context and its block, so nothing after the block's last row (paper, section 4); see
    `LayerAttention` for causality and window.

    Args:
        row_positions: [B, K] int64, rising by one.
        keys: S, the number of keys; those after a request's last row are not its own.
        ragged: whether requests end at different positions.

    Returns:
        [B, 1, K, S] bool; None if every row sees every key.
    """
    if not ragged and not attention.causal and attention.window is None:
        return None
    key_positions = torch.arange(keys, device=row_positions.device)
    last = row_positions if attention.causal else row_positions[:, -1:]
    visible = key_positions <= last[..., None]  # [B, K or 1, S]
    if attention.window is not None:
        visible = visible & (row_positions[..., None] - key_positions < attention.window)
    return visible.expand(-1, row_positions.shape[1], -1)[:, None]


class DFlashAttention(nn.Module):
    """Block rows attend to context features and to block rows, through one set of K/V projections."""

    def __init__(self, config: DFlashConfig, draft: DraftConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        q_dim, kv_dim = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.o_proj = nn.Linear(q_dim, hidden, bias=bias)
        self.q_norm = _norm(config, draft, self.head_dim)
        self.k_norm = _norm(config, draft, self.head_dim)
        self.value_scale = draft.value_scale
        self.attention_sink_bias: nn.Parameter | None = None  # [Hq]; the name is the checkpoints'
        if draft.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """
        Args:
            x: [B, Q, H]; input-normed block rows.
            context: [B, T, H]; context features, not input-normed.
            rope: cosines and sines, each [B, T + Q, D], context first.
            mask: [B or 1, 1, Q, S] bool (True: sees), a flex BlockMask, a function that computes the attention itself,
                or None if every key is seen.
            past_key_values: a cache with the `update` of transformers', or None.
        """
        rows = torch.cat((context, x), dim=1)  # [B, T+Q, H]
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # [B, Hq, Q, D]
        k = self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2)  # [B, Hkv, T+Q, D]
        v = self._heads(self.v_proj(rows)).transpose(1, 2)
        if self.value_scale is not None:
            v = v * self.value_scale
        cos, sin = rope
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -x.shape[1] :], sin[:, -x.shape[1] :])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms return float32
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if self.attention_sink_bias is not None:
            k, v, mask = with_sinks(k, v, mask, self.attention_sink_bias, q.shape[2])
        if isinstance(mask, BlockMask):
            attend = _compiled_flex_attention if q.is_cuda else flex_attention
            out = attend(q, k, v, block_mask=mask, enable_gqa=True)
        elif callable(mask):
            out = mask(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def with_sinks(
    k: torch.Tensor, v: torch.Tensor, mask: Mask, sinks: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds one key of zeros, with a value of zeros; the mask, which SDPA adds to the scores, gives it its score.

    Args:
        k, v: [B, Hkv, S, D].
        mask: bool, broadcastable to [B, Hq, Q, S]; None: every row sees every key. Other than dense masks raise
            ValueError.
        sinks: [Hq]; the score of the added key for each head.
        rows: Q.

    Returns:
        k and v, [B, Hkv, S + 1, D], and the mask, [B, Hq, Q, S + 1].
    """
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ValueError("A draft with attention sinks takes dense masks only.")
    scores = sinks.to(k.dtype).view(1, -1, 1, 1).expand(len(k), -1, rows, -1)
    seen = torch.zeros((), dtype=k.dtype, device=k.device).expand(len(k), len(sinks), rows, k.shape[2])
    if mask is not None:
        seen = seen.masked_fill(~mask, -torch.inf)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), torch.cat((seen, scores), -1)


class GemmaNorm(Qwen3RMSNorm):
    """An RMS norm that multiplies by 1 + weight, in float32."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).to(hidden_states.dtype)


def _norm(config: DFlashConfig, draft: DraftConfig, size: int) -> Qwen3RMSNorm:
    return (GemmaNorm if draft.gemma_norms else Qwen3RMSNorm)(size, eps=config.rms_norm_eps)


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU; the context features bypass the layer's input norm, and its convolutions."""

    def __init__(self, config: DFlashConfig, draft: DraftConfig, layer_idx: int) -> None:
        super().__init__()
        convolution = draft.convolution
        self.attention_conv = GroupedConvolution(config.hidden_size, convolution) if convolution else None
        self.mlp_conv = GroupedConvolution(config.hidden_size, convolution) if convolution else None
        self.self_attn = DFlashAttention(config, draft, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = _norm(config, draft, config.hidden_size)
        self.post_attention_layernorm = _norm(config, draft, config.hidden_size)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
        block_size: int,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """block_size: rows of each block in x; the rest as in `DFlashAttention.forward`."""

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return self.self_attn(rows, context, rope, mask, past_key_values)

        x = x + _convolved(self.attention_conv, attend, self.input_layernorm(x), block_size)
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x), block_size)


def _convolved(
    convolution: GroupedConvolution | None, sublayer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, size: int
) -> torch.Tensor:
    if convolution is None:
        return sublayer(x)
    x, delta = convolution.prepare(x, size)
    return convolution.finish(sublayer(x), delta, size)


class DFlashDraftModel(Qwen3PreTrainedModel):
    """A DFlash, DFlash2 or Domino draft. It has neither embedding nor head: both are the target's.

    `from_pretrained` reads the published layout (z-lab's checkpoints, those of `sglang-dflash train`).
    """

    config_class = DFlashConfig
    _no_split_modules = ("DFlashDecoderLayer",)
    _keys_to_ignore_on_load_unexpected = (r"^embed_tokens\.weight$", r"^lm_head\.weight$", "^d2t$", "^t2d$")

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        draft = self.draft_config = config.draft
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, draft, i) for i in range(config.num_hidden_layers))
        taps = len(draft.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = _norm(config, draft, config.hidden_size)
        self.norm = _norm(config, draft, config.hidden_size)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.mask_embedding: torch.Tensor | None = None  # [1 or K-1, H]; see `read_mask_embedding`
        self.own_head: OwnHead | None = None  # None: the target's
        selector, domino = draft.selector, draft.domino
        self.candidate_selector = CandidateSelector(config.hidden_size, selector) if selector else None
        self.prefix_gru = nn.GRU(config.hidden_size, domino.gru_size, bias=False, batch_first=True) if domino else None
        self.embed_proj = domino_projector(config.hidden_size, domino) if domino else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedConvolution | CandidateSelector):  # after its parts
            module.initialize()

    @property
    def block_size(self) -> int:
        return self.draft_config.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft_config.target_layer_ids

    @property
    def mask_token_id(self) -> int | None:
        return self.draft_config.mask_token_id

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Self:
        """As in transformers, but strict. Reads the mask embedding, too.

        Raises:
            ValueError: the checkpoint is not a draft that we serve, is quantised, lacks a weight, or has an unknown
                weight or one of another shape.
        """
        revision = kwargs.get("revision")
        where = {key: kwargs[key] for key in ("cache_dir", "local_files_only", "subfolder", "token") if key in kwargs}
        name, _ = read_config(str(name), revision, **where)
        wanted = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # else transformers raises, and its error names no weight
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            listed = "; ".join(f"{key.replace('_', ' ')}: {names[:4]}" for key, names in wrong.items() if names)
            raise ValueError(f"The weights of {name} do not fit its config.json: {listed}.")
        side_car = cached_file(
            name, MASK_EMBEDDING_FILE, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if side_car is not None:
            model.mask_embedding = read_mask_embedding(side_car, model.draft_config)
        if model.draft_config.head_vocab_size is not None:
            model.own_head = read_own_head(Path(name), model.draft_config.head_vocab_size)
        return (model, info) if wanted else model

    def embed_block(self, embeds: torch.Tensor) -> torch.Tensor:
        """What the draft sees of its block: [B, K, H], the target's embedding, with the draft's own at the masks."""
        if self.mask_embedding is None:
            return embeds
        masks = self.mask_embedding.to(embeds.device, embeds.dtype)
        masks = masks[: embeds.shape[1] - 1].expand(embeds.shape[1] - 1, -1)
        return torch.cat((embeds[:, :1], masks.expand(len(embeds), -1, -1)), dim=1)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, but the saved config keeps its architecture: one class here serves several."""
        architectures = self.config.architectures
        super().save_pretrained(save_directory, *args, **kwargs)
        self.config.architectures = architectures
        self.config.save_pretrained(save_directory)

    def forward(
        self,
        noise_embedding: torch.Tensor,
        target_hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Mapping[LayerAttention, Mask] | None = None,
        past_key_values: Any = None,
        block_size: int | None = None,
    ) -> torch.Tensor:
        """One denoising pass over `[anchor, MASK x (K-1)]`; row k predicts the token at its own position.

        Args:
            noise_embedding: [B, Q, H]; the target's embedding of the block, through `embed_block`.
            target_hidden: [B, T, taps * H]; residual outputs of the tapped target layers, of tokens not yet in the
                cache (`FeatureTaps`).
            position_ids: [B, T + Q] int64, context first.
            attention_mask: a mask for each kind of layer; None: Q is one block per request, and its keys are at
                positions 0, 1, ... in the cache (or in this call).
            past_key_values: a cache with the `update` of transformers'.
            block_size: rows of each block, if Q holds several per request; None: Q.

        Returns:
            [B, Q, H]; final-normed, ready for the target's head.
        """
        dtype = self.fc.weight.dtype  # the target may use another dtype
        noise_embedding, target_hidden = noise_embedding.to(dtype), target_hidden.to(dtype)
        context = self.hidden_norm(self.fc(target_hidden))  # [B, T, H]: once, for all layers
        rope = self.rotary_emb(noise_embedding, position_ids)
        attention = self.draft_config.attention
        if attention_mask is None:
            rows = position_ids[:, -noise_embedding.shape[1] :]
            ends = rows[:, -1].tolist()
            attention_mask = {
                kind: block_mask(rows, max(ends) + 1, kind, ragged=len(set(ends)) > 1) for kind in set(attention)
            }
        x = noise_embedding
        size = block_size or x.shape[1]
        for layer, kind in zip(self.layers, attention, strict=True):
            x = layer(x, context, rope, attention_mask[kind], size, past_key_values)
        return self.norm(x)

    def choose(
        self,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The drafts of each block: the argmax of each row, the selector's walk, or Domino's rollout.

        Args:
            hidden: [B, K, H], as from `forward`.
            anchor_ids: [B] int64.
            head: the target's, [..., H] -> [..., V].
            embed: the target's embedding, ids -> [..., H].

        Returns:
            [B, K-1] int64, for rows 1..K-1; [B, K] if the anchor's row gives a draft, too.
        """
        if self.prefix_gru is not None and self.embed_proj is not None:
            rows = hidden[:, :-1] if self.draft_config.domino.shift_label else hidden[:, 1:]
            weights = domino_weights(self.prefix_gru, self.embed_proj)

            def embedded(ids: torch.Tensor) -> torch.Tensor:
                return embed(ids).to(rows.dtype)

            return ops.domino_rollout(weights, rows, head(rows), anchor_ids, embedded, lambda row: row.argmax(-1))
        hidden = hidden[:, 1 - self.draft_config.anchor_first :]
        if self.own_head is not None:
            ids, weight = (value.to(hidden.device) for value in self.own_head)
            return ids[F.linear(hidden, weight.to(hidden.dtype)).argmax(-1)]
        logits = head(hidden)
        if self.candidate_selector is None:
            return logits.argmax(-1)
        return self.candidate_selector.drafts(hidden, logits, anchor_ids)

    def spec_generate(
        self,
        target: nn.Module,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
        **options: Any,
    ) -> torch.Tensor | Generation:
        """The target's own answer, with drafts from this model; see `sglang_dflash.reference.spec_generate`."""
        return spec_generate(self, target, input_ids, max_new_tokens, stop_token_ids, temperature, **options)
