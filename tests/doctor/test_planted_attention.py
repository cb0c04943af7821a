"""`sglang-dflash doctor URL` where rows see other keys than in the draft's training: flag and window are named."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import mean

import planted_drafts as plant
import pytest
from baseline import chat_ids
from commands import Diagnosed, doctor
from fine_tuning import fine_tune
from reference_pair import ReferencePair
from test_planted_acceptance import FULL, served
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_dflash.core.draft_config import LayerAttention
from sglang_dflash.doctor.questions import questions_for
from sglang_dflash.serving import TINY_TARGET, held_out_prompts_in_turn

pytestmark = pytest.mark.server
SEED, TOKENS, WINDOW = 1, 64, 24


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The embedded draft, taught to see the rows up to its own, and a window; and its tau by the reference.

    Drafts that were trained so from the start depend on both. This one began with neither, and hardly looks at later
    rows, so it is taught to draft badly without them, too.
    """
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    folder = plant.changed_config(tmp_path_factory.mktemp("narrow") / "draft", plant.window(WINDOW))
    folder = plant.changed_config(folder.with_name("causal"), plant.top(is_causal=True), folder)
    held = held_out_prompts_in_turn()
    answers = tokenizer([one.reference for one in held], add_special_tokens=False)["input_ids"]
    pairs = [
        (_ids(tokenizer, one.prompt), [*answer, tokenizer.eos_token_id])
        for one, answer in zip(held, answers, strict=True)
    ]
    wrong = [LayerAttention(causal=False, window=WINDOW), LayerAttention(causal=True, window=None)]
    fine_tune(folder, pairs, steps=80, learning_rate=1e-3, wrong=wrong)
    questions = questions_for(str(TINY_TARGET), Random(SEED))
    prompts = [_ids(tokenizer, one.messages[0].content) for one in questions]
    steps: dict[str, list[int]] = {}
    for one, answer in zip(questions, ReferencePair(draft=folder).generate(prompts, TOKENS), strict=True):
        steps.setdefault(one.kind, []).extend(answer.commit_lens)
    return folder, mean(mean(lengths) for lengths in steps.values())


def diagnosed(folder: Path, draft: Path, tau: float) -> Diagnosed:
    with served(folder, draft, **FULL) as url:
        return doctor(url, "--expect-tau", tau, "--seed", SEED, "--max-new-tokens", TOKENS)


def test_a_causal_draft_with_a_window_is_healthy(narrow: tuple[Path, float], tmp_path: Path) -> None:
    """Fails where a causal draft with a window is served otherwise than its config says, or is suspected for it."""
    draft, tau = narrow
    found = diagnosed(tmp_path, draft, tau)
    assert tau > 3 and found.code == 0, found.shown
    assert "WARN" not in found.levels().values(), found.shown


FAULTS: dict[str, tuple[plant.Change, int]] = {
    # change of config.json, and among how many causes the fault is
    "causal": (plant.top(is_causal=False), 2),
    "window": (plant.top(layer_types=["full_attention"] * 2, use_sliding_window=False), 3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_row_sees_is_among_the_causes(fault: str, narrow: tuple[Path, float], tmp_path: Path) -> None:
    """Fails where an inverted is_causal or a window that is ignored passes, or is not among the first causes."""
    (draft, tau), (change, among) = narrow, FAULTS[fault]
    found = diagnosed(tmp_path, plant.changed_config(tmp_path / "draft", change, draft), tau)
    assert found.code == 1 and found.finding("acceptance")["level"] == "FAIL", found.shown
    assert fault in found.causes()[:among], found.shown
