"""`spec_generate` with targets of other families: recurrent state is rolled back to the accepted row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from families.models import FAMILIES, make_draft, make_target
from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.reference.generation import TARGETS, _Loop

pytestmark = pytest.mark.slow

NEW_TOKENS = 60
PROMPTS = [[5, 9, 700], list(range(100, 137)), [44] * 12]


SERVED = [
    name
    for name, family in FAMILIES.items()
    if family.packed is None and family.config().get_text_config().model_type in TARGETS
]


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DFlashDraftModel, object]:
    folder: Path = tmp_path_factory.mktemp("family")
    target = make_target(request.param, folder / "target")
    draft = DFlashDraftModel.from_pretrained(
        make_draft(request.param, target, folder / "draft"), dtype=torch.float32
    ).eval()
    return draft, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def greedy(target: object, prompt: list[int]) -> list[int]:
    """Transformers' own greedy answer."""
    ids = torch.tensor([prompt])
    out = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_answers_are_the_greedy_ones(pair: tuple[DFlashDraftModel, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a rejected row, the padding of a prompt or another request changes a request's state."""
    draft, target = pair
    answers = [greedy(target, prompt) for prompt in PROMPTS]

    def replayed(loop: _Loop, state: object, block: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The greedy answer, wrong at uneven distances."""
        drafts = torch.zeros_like(positions[:, 1:])
        for row, request in enumerate(state.order.tolist()):
            whole = PROMPTS[request] + answers[request]
            for column, place in enumerate(positions[row, 1:].tolist()):
                right = whole[place] if place < len(whole) else 0
                drafts[row, column] = right + 1 if place * place % 13 in (1, 4) else right
        return drafts

    monkeypatch.setattr(_Loop, "propose", replayed)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    real = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in PROMPTS])
    done = draft.spec_generate(target, ids, NEW_TOKENS, [], attention_mask=real, return_stats=True)
    assert [done.new_ids(request) for request in range(len(PROMPTS))] == answers
    assert done.tau > 2 and len({n for lens in done.commit_lens for n in lens}) > 3
