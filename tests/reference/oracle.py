"""A DFlash loop in plain torch, written from the paper's reference; it shares no code with the package.

Batch size 1, greedy, float32. It recomputes the draft's context at every step: slow, but easy to check.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """ids: the answer's token ids, the end token included; commit_lens: the commit_len of every verify step."""

    ids: list[int]
    commit_lens: list[int]


class Oracle:
    """Target in Hugging Face form, draft as bare weights."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        end_ids = self.target.generation_config.eos_token_id
        self.end_ids = set(end_ids if isinstance(end_ids, list) else [end_ids])
        self.weights = {name: weight.float() for name, weight in load_file(draft / "model.safetensors").items()}
        config = json.loads((draft / "config.json").read_text())
        self.block_size = config["block_size"]
        self.mask_id = config["dflash_config"]["mask_token_id"]
        self.taps = config["dflash_config"]["target_layer_ids"]
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", config.get("rope_theta"))
        self.frequencies = theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> OracleAnswer:
        """Draft a block, verify it, commit the accepted drafts and the target's next token; repeat."""
        logits, features = self._run_target(prompt)
        committed = [*prompt, int(logits[-1].argmax())]
        commit_lens: list[int] = []
        end_ids = self.end_ids
        while not self._ended(committed[len(prompt) :], max_new_tokens, end_ids):
            start = len(committed) - 1  # position of the bonus, which has no features yet
            drafts = self._draft(committed[-1], features[:start])
            logits, features = self._run_target([*committed, *drafts])
            choices = logits[start:].argmax(-1).tolist()
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
                accepted += 1
            committed += choices[: accepted + 1]
            commit_lens.append(accepted + 1)
        ids = committed[len(prompt) :][:max_new_tokens]
        end = next((i + 1 for i, token in enumerate(ids) if token in end_ids), len(ids))
        return OracleAnswer(ids[:end], commit_lens)

    @staticmethod
    def _ended(ids: list[int], max_new_tokens: int, end_ids: set[int]) -> bool:
        return len(ids) >= max_new_tokens or not end_ids.isdisjoint(ids)

    def _run_target(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """[T, V] logits and [T, taps * H] residual outputs of the tapped layers (`hidden_states[0]`: embeddings)."""
        out = self.target(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in self.taps], dim=-1)

    def _draft(self, bonus: int, features: Tensor) -> list[int]:
        """K-1 drafts after `bonus`. Their context: `features` of all tokens before the bonus."""
        weights = self.weights
        context = self._norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
        block = torch.tensor([bonus] + [self.mask_id] * (self.block_size - 1))
        hidden = self.target.get_input_embeddings()(block)  # [K, H]
        positions = torch.arange(len(context) + len(block))
        for index in range(self.layers):
            layer = {
                k.removeprefix(f"layers.{index}."): w for k, w in weights.items() if k.startswith(f"layers.{index}.")
            }
            hidden = hidden + self._attend(layer, hidden, context, positions)
            x = self._norm(hidden, layer["post_attention_layernorm.weight"])
            gate = F.silu(x @ layer["mlp.gate_proj.weight"].T) * (x @ layer["mlp.up_proj.weight"].T)
            hidden = hidden + gate @ layer["mlp.down_proj.weight"].T
        hidden = self._norm(hidden, weights["norm.weight"])
        return self.target.lm_head(hidden[1:]).argmax(-1).tolist()

    def _attend(self, layer: dict[str, Tensor], hidden: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Full attention of the block over context and block; the context is not input-normed."""
        x = self._norm(hidden, layer["input_layernorm.weight"])
        source = torch.cat((context, x))
        q = (x @ layer["self_attn.q_proj.weight"].T).view(len(x), self.heads, -1)
        k = (source @ layer["self_attn.k_proj.weight"].T).view(len(source), self.kv_heads, -1)
        v = (source @ layer["self_attn.v_proj.weight"].T).view(len(source), self.kv_heads, -1)
        q = self._rope(self._norm(q, layer["self_attn.q_norm.weight"]), positions[len(context) :])
        k = self._rope(self._norm(k, layer["self_attn.k_norm.weight"]), positions)
        groups = self.heads // self.kv_heads
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(groups, 1)) * self.head_dim**-0.5
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(groups, 1))
        return mixed.reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[:, None] * self.frequencies)[:, None]  # [N, 1, D/2]
        first, second = x.chunk(2, -1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )
