"""Drafts in other trainers' layouts are served in the steps of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from arms import FULL, MAX_NEW_TOKENS, PLAIN, POOL, Baseline, widths_of
from reference_pair import ReferencePair
from safetensors.torch import load_file, save_file
from test_features import assert_served
from test_lifecycle import assert_pool_empties
from transformers import AutoModelForCausalLM

from equality import tau
from preloaded import PreloadedServer
from published_layouts import publish
from sglang_dflash.reference import DFlashDraftModel, FeatureTaps
from sglang_dflash.serving import TINY_DRAFT, TINY_OVERLAPPING, TINY_TARGET, Client
from sglang_dflash.training.blocks import IGNORED, make_blocks, sample_anchors, split_attention

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("published layouts")]
STEPS, BATCH, ANCHORS = 120, 6, 16


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def served(draft: Path, folder: Path, environment: dict[str, str], *flags: str) -> PreloadedServer:
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return PreloadedServer([*PLAIN, *POOL, *speculate, *flags], folder / "log", environment)


def assert_steps(client: Client, draft: Path, prompts: list[list[int]], rows: int) -> float:
    """Fails where a step differs from the reference's. Returns the server's tau."""
    answers = [client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
    for answer, expected in zip(answers, ReferencePair(draft=draft).generate(prompts, MAX_NEW_TOKENS), strict=True):
        counts = [expected.commit_lens.count(length) for length in range(1, rows + 1)]
        padded = [*answer.accept_histogram, *[0] * (rows - len(answer.accept_histogram))]
        assert (answer.ids, answer.steps, padded) == (expected.ids, len(expected.commit_lens), counts)
    return tau(answers)


def test_a_head_over_fewer_ids(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where a nested config, taps, head or ids are misread: the steps would not be those of the plain draft."""
    draft, prompts = publish("speculators", tmp_path / "draft"), baseline.prompts[::4]
    with served(draft, tmp_path, TINY_OVERLAPPING | FULL) as server:
        client = server.client()
        assert assert_steps(client, draft, prompts, 8) == assert_steps(client, TINY_DRAFT, prompts, 8) > 2.5
        client.flush_when_idle()
        assert_served(client, baseline, 2.5)
        log = server.log.read_text()
    assert "The draft chooses among 1783 ids by a head of its own" in log
    assert "speculators" in log


@pytest.fixture(scope="module")
def anchor_first(baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft, taught in DeepSpec's layout to draft from the anchor's row what the target answered."""
    folder = publish("DeepSpec", tmp_path_factory.mktemp("deepspec") / "draft")
    draft = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    taps, embed = FeatureTaps(target, draft.target_layer_ids), target.get_input_embeddings()
    pairs = list(zip(baseline.prompts, baseline.answers, strict=True))
    optimizer, generator = torch.optim.AdamW(draft.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for step in range(STEPS):
        some = [pairs[(step * BATCH + n) % len(pairs)] for n in range(BATCH)]
        rows = [torch.tensor([*prompt, *answer.ids]) for prompt, answer in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        learned = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(some):
            learned[row, len(prompt) : len(prompt) + len(answer.ids)] = True
        with torch.no_grad(), taps:
            target(ids)
            features = taps.take()
        anchors = sample_anchors(learned, ANCHORS, generator)
        blocks = make_blocks(ids, learned, anchors, draft.block_size, draft.mask_token_id, anchor_first=True)
        masks = {kind: split_attention(blocks, ids.shape[1], kind) for kind in set(draft.draft_config.attention)}
        positions = torch.cat((torch.arange(ids.shape[1]).expand(len(ids), -1), blocks.positions), 1)
        hidden = draft(embed(blocks.ids).detach(), features, positions, masks, block_size=draft.block_size)
        loss = F.cross_entropy(target.lm_head(hidden).flatten(0, 1), blocks.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    own = {name: weight.detach().to(torch.bfloat16) for name, weight in draft.state_dict().items()}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_anchor_that_drafts(anchor_first: Path, baseline: Baseline, tmp_path: Path) -> None:
    """Fails where 8 rows give 7 drafts, or a row's draft is taken for another position's."""
    with served(anchor_first, tmp_path, TINY_OVERLAPPING | FULL) as server:
        client = server.client()
        assert assert_steps(client, anchor_first, baseline.prompts[::4], 9) > 2.5
        client.flush_when_idle()
        assert_served(client, baseline, 2.0)
        assert_pool_empties(client)


def test_an_anchor_that_drafts_where_it_pays(anchor_first: Path, baseline: Baseline, tmp_path: Path) -> None:
    """Fails where blocks of fewer rows, or of some of the requests, get drafts of other positions."""
    environment = TINY_OVERLAPPING | {"SGLANG_DFLASH_WIDTH": "auto"}
    with served(anchor_first, tmp_path, environment) as server:
        client = server.client()
        assert_served(client, baseline, 1.2)
        widths = widths_of(client, *baseline.prompts[:10])
        assert len(widths) == 10 and widths[9] > 0, widths
