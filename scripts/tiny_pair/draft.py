"""The plain DFlash draft: the module, its published layout on disk, and loading it back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

BLOCK_SIZE, DRAFT_LAYERS = 8, 2
TARGET_LAYER_IDS = (1, 3, 4)


class _Attention(nn.Module):
    """Block rows attend to context features and to block rows, through one set of K/V projections."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        rows = torch.cat((context, x), dim=1)  # [N, T+Q, H]
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # [N, heads, Q, D]
        k = self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2)  # [N, kv_heads, T+Q, D]
        v = self._heads(self.v_proj(rows)).transpose(1, 2)
        cos, sin = rope  # [N, T+Q, D], context first
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -q.shape[2] :], sin[:, -q.shape[2] :])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        # The context features are shared by all layers and skip input_layernorm (DFlash, KV injection).
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraft(nn.Module):
    """Two Qwen3 layers over `[anchor, MASK x 7]` blocks, reading the target's tapped hidden states.

    forward takes block embeddings [N, Q, H], taps [N, T, 3*H], positions [N, T+Q] (context first) and a
    mask [N, 1, Q, T+Q] (True: may attend), and returns the normed hidden states [N, Q, H]; the caller
    applies the target's head. A row at block index k predicts the token at its own position.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(DRAFT_LAYERS))
        self.fc = nn.Linear(len(TARGET_LAYER_IDS) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(
        self,
        x: torch.Tensor,
        taps: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        context = self.hidden_norm(self.fc(taps))  # [N, T, H]: the context features
        rope = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        return self.norm(x)


def tap(hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Residual outputs of the tapped layers side by side, [N, T, 3*H]; entry 0 is the embedding."""
    return torch.cat([hidden_states[layer + 1] for layer in TARGET_LAYER_IDS], dim=-1)


def save_draft(draft: DFlashDraft, target: Qwen3Config, mask_token_id: int, folder: Path) -> None:
    """Write bfloat16 weights and config.json under the names of the published DFlash checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(TARGET_LAYER_IDS)},
        "dtype": "bfloat16",
        "eos_token_id": target.eos_token_id,
        "head_dim": target.head_dim,
        "hidden_act": target.hidden_act,
        "hidden_size": target.hidden_size,
        "initializer_range": target.initializer_range,
        "intermediate_size": target.intermediate_size,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": DRAFT_LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": target.num_attention_heads,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_key_value_heads": target.num_key_value_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": target.rope_parameters,
        "rope_theta": target.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_draft(folder: Path, target: Qwen3Config) -> DFlashDraft:
    """The saved draft as it is served: bfloat16-rounded weights in float32."""
    draft = DFlashDraft(target)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.float().eval()
