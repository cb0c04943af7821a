"""Features of plain drafts: norms as in Gemma, scaled values, attention sinks, a mask embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import SMALL, make_draft, make_target, random_ids

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.reference.modeling import block_mask, with_sinks

FEATURES = {"attention_value_scale": 4.0, "attention_sink_bias": True}


def dressed(plain: DFlashDraftModel, sink: float = -1e4) -> DFlashDraftModel:
    """The same function as `plain`, in other weights."""
    draft = make_draft(FEATURES, use_gemma_norm=True)
    weights = {}
    for name, weight in plain.state_dict().items():
        weights[name] = weight - 1 if name.endswith("norm.weight") else weight / 4 if "v_proj" in name else weight
    for layer in range(len(draft.layers)):
        weights[f"layers.{layer}.self_attn.attention_sink_bias"] = torch.full((SMALL["num_attention_heads"],), sink)
    draft.load_state_dict(weights)
    return draft


def _steps(draft: DFlashDraftModel, **options: int) -> list[list[int]]:
    ids = random_ids(9, requests=3)
    return draft.spec_generate(make_target("qwen3"), ids, 24, return_stats=True, **options).commit_lens


def test_the_same_draft_in_other_weights() -> None:
    """Fails where a norm's offset, the scale of values or a sink is applied in another way, or not at all."""
    plain = make_draft()
    inputs = {
        "noise_embedding": torch.randn(2, 4, SMALL["hidden_size"]),
        "target_hidden": torch.randn(2, 6, 2 * SMALL["hidden_size"]),
        "position_ids": torch.arange(10).repeat(2, 1),
    }
    expected = plain(**inputs)
    torch.testing.assert_close(dressed(plain)(**inputs), expected, rtol=1e-4, atol=1e-4)
    assert (dressed(plain, sink=2.0)(**inputs) - expected).abs().max() > 1e-2
    assert _steps(dressed(plain)) == _steps(plain)


@pytest.mark.parametrize("ragged", [False, True])
def test_sinks_take_part_in_the_softmax(ragged: bool) -> None:
    """Fails where a sink gets a value, the wrong head's logit, or a hidden key becomes visible."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 8, generator=generator) for heads, rows in ((4, 3), (2, 7), (2, 7)))
    sinks = torch.randn(4, generator=generator)
    rows = torch.tensor([[4, 5, 6], [2, 3, 4]]) if ragged else torch.tensor([[4, 5, 6]] * 2)
    mask = block_mask(rows, 7, make_draft().draft_config.attention[0], ragged)
    wide_k, wide_v, bias = with_sinks(k, v, mask, sinks, 3)
    got = torch.nn.functional.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=bias, enable_gqa=True)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    logits = (q @ k.transpose(-1, -2) * 8**-0.5).exp()
    seen = logits if mask is None else logits * mask
    expected = seen @ v / (seen.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("positions", [1, 3, 4])
def test_mask_embedding(tmp_path: Path, positions: int) -> None:
    """Fails where a draft does not see its own embedding at the masks, or sees another position's."""
    target, plain = make_target("qwen3"), make_draft()
    plain.save_pretrained(tmp_path)
    own = target.get_input_embeddings().weight[[0, 1, 2, 3][:positions]].detach().clone()
    torch.save(own, tmp_path / "mask_embedding.pt")
    draft = DFlashDraftModel.from_pretrained(tmp_path)
    embeds = target.get_input_embeddings()(torch.tensor([[3, 4, 4, 4]]))
    expected = embeds.clone()
    expected[0, 1:] = own[-3:] if positions > 1 else own
    assert torch.equal(draft.embed_block(embeds), expected)
    assert torch.equal(draft.embed_block(embeds[:, :2]), expected[:, :2])
    if positions == 1:  # the same as the plain draft with that token as its mask
        assert _steps(draft) == _steps(make_draft({"mask_token_id": 0})) != _steps(plain)
    else:
        with pytest.raises(ValueError, match="blocks of up to 4"):
            _steps(draft, block_size=5)


def test_a_quantised_draft_is_refused(tmp_path: Path) -> None:
    """Fails where quantised weights are read as plain ones."""
    draft = make_draft()
    draft.config.quantization_config = {"quant_method": "fp8"}
    draft.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is quantised \(fp8\)"):
        DFlashDraftModel.from_pretrained(tmp_path)
