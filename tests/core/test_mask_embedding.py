"""Which mask embeddings are read, which rows they become, and the sentences of those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_config import PUBLISHED

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.mask_embedding import read_mask_embedding

HIDDEN, BLOCK = 6, 4
DRAFT = DraftConfig.from_dict(PUBLISHED | {"hidden_size": HIDDEN, "block_size": BLOCK})


def saved(folder: Path, content: Any) -> Path:
    path = folder / "mask_embedding.pt"
    torch.save(content, path)
    return path


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("shape", "first"), [((HIDDEN,), 0), ((1, HIDDEN), 0), ((BLOCK - 1, HIDDEN), 0), ((BLOCK, HIDDEN), 1)], ids=str
)
def test_rows_of_the_masks(tmp_path, shape, first, wrapped):
    """Fails where a mask gets another position's vector, or the anchor's."""
    embedding = torch.randn(shape)
    content = {"embedding": embedding, "mask_token_id": 151669, "per_position": len(shape) == 2}
    rows = read_mask_embedding(saved(tmp_path, content if wrapped else embedding), DRAFT)
    assert torch.equal(rows, embedding.view(-1, HIDDEN)[first:])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.ones(HIDDEN + 1), ["[7]", "[6]", "[3, 6]", "[4, 6]"]),
        (torch.ones(2, HIDDEN), ["[2, 6]"]),
        (torch.ones(HIDDEN, dtype=torch.int64), ["floating-point"]),
        ({"vector": torch.ones(HIDDEN)}, ["'embedding'"]),
        ({"embedding": torch.ones(HIDDEN), "mask_token_id": 5}, ["mask_token_id 5", "151669", "equal"]),
        ({"embedding": Path("code")}, ["cannot be read"]),
    ],
    ids=["width", "positions", "ids", "no tensor", "another mask", "pickled code"],
)
def test_what_does_not_fit_is_refused(tmp_path, content, words):
    """Fails where a file is accepted whose vectors the draft was not trained with, or that runs code."""
    with pytest.raises(ValueError) as refused:
        read_mask_embedding(saved(tmp_path, content), DRAFT)
    sentence = str(refused.value)
    assert sentence.endswith(".") and "\n" not in sentence and all(word in sentence for word in words), sentence


def test_a_damaged_file_is_refused(tmp_path):
    """Fails where a file that torch cannot read ends in another error."""
    path = tmp_path / "mask_embedding.pt"
    for content in (b"", b"no archive", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            read_mask_embedding(path, DRAFT)
