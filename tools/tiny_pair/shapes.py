"""The two embedded pairs: the shape of each target, and what differs in how the pairs are made."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

from tools.tiny_pair.tokenizer import END_OF_TEXT, TURN_END

MAX_POSITIONS, ROPE_THETA, RMS_EPS = 2048, 10000.0, 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """One pair.

    Fields:
        name: its folder under assets/.
        config: makes the target's config for a tokenizer.
        described: the target in words, for the card.
        target_steps: batches of the target's training.
        session_steps: batches of its training on agents' sessions, after that; 0: it learns none.
        sessions: of agents, for the target; the draft learns from a quarter as many others.
        answers: conversations that the target answers for the draft's training.
        draft_steps: batches of the draft's training.
        taps: target layers that the draft reads.
        size_limit_bytes: of all files of the pair together.
    """

    name: str
    config: Callable[[PreTrainedTokenizerFast], PreTrainedConfig]
    described: str
    target_steps: int
    session_steps: int
    sessions: int
    answers: int
    draft_steps: int
    taps: tuple[int, ...]
    size_limit_bytes: int


def _ends(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    }


def _dense(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=576,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=RMS_EPS,
        tie_word_embeddings=True,
        **_ends(tokenizer),
    )


def _hybrid(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    """Qwen3.5 in miniature: three layers with recurrent state (gated delta rule) to each layer of gated attention."""
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        full_attention_interval=3,  # the same for SGLang, which does not read layer_types
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=288,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        rms_norm_eps=RMS_EPS,
        tie_word_embeddings=True,
        **_ends(tokenizer),
    )


SHAPES = {
    "dense": Shape(
        name="tiny-pair",
        config=_dense,
        described="Qwen3: 6 layers, hidden 256, 4 heads over 2 kv heads",
        target_steps=2_600,
        session_steps=2_200,
        sessions=3_000,
        answers=3_000,
        draft_steps=1_500,
        taps=(1, 3, 4),
        size_limit_bytes=12_000_000,
    ),
    "hybrid": Shape(
        name="tiny-hybrid-pair",
        config=_hybrid,
        described=(
            "Qwen3.5: 6 layers, hidden 192; layers 2 and 5 are gated attention with 4 heads over 2 kv heads, the\n  "
            "others keep recurrent state (gated delta rule)"
        ),
        target_steps=1_500,
        session_steps=0,
        sessions=0,
        answers=2_400,
        draft_steps=1_000,
        taps=(1, 3, 4),
        size_limit_bytes=6_000_000,
    ),
}
"""`--pair` -> the pair's shape."""
