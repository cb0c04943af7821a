"""The grown pair computes what the embedded pair computes, in larger matrices."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from e2e.arms import OPENINGS
from e2e.reference_pair import ReferencePair
from sglang_dflash.gpu.grown_pair import Shape, make_grown_pair
from sglang_dflash.serving import TINY_TARGET

SHAPE = Shape(hidden=1024, intermediate=1024, heads=16, kv_heads=4, layers=9, draft_layers=3, vocab=2048)
"""As many times more heads of queries as Qwen3-8B's shape has, and further layers, ids and taps."""


def test_the_steps_are_those_of_the_small_pair(tmp_path: Path) -> None:
    """Fails where a matrix or norm is placed or scaled wrongly, where a further layer adds something, or where a
    further id is chosen."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    prompts = [tokenizer(text)["input_ids"] for text in OPENINGS[:4]]
    grown = ReferencePair(*make_grown_pair(tmp_path, SHAPE, "cpu"))
    assert grown.target.get_input_embeddings().weight.shape == (2048, 1024)
    assert grown.generate(prompts, 32) == ReferencePair().generate(prompts, 32)
