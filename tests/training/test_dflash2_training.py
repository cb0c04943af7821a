"""Training a DFlash2 head: the selector's loss by loops, what passes gradients, the start from a plain draft, a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_trainer import learning_run

from sglang_dflash.core.draft_heads import Convolution, Selector
from sglang_dflash.reference import CandidateSelector, DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.training import loss as loss_module
from sglang_dflash.training.blocks import IGNORED, make_blocks
from sglang_dflash.training.evaluation import accept_lens
from sglang_dflash.training.frozen import FrozenTarget
from sglang_dflash.training.layout import with_dflash2_head
from sglang_dflash.training.loss import LossHead, decay_weights, row_losses, selected_losses, weighted_mean
from sglang_dflash.training.trainer import Trainer

HEAD: dict[str, Any] = {"head": "dflash2", "selector_rank": 8, "selector_top_k": 4, "conv_group_size": 32}
VOCAB, WIDTH, TOP_K = 11, 6, 6


def _selector() -> CandidateSelector:
    torch.manual_seed(0)
    selector = CandidateSelector(WIDTH, Selector(rank=4, top_k=TOP_K, vocab_size=VOCAB, multiplier=0.5, softcap=4.0))
    for weight in selector.parameters():
        torch.nn.init.normal_(weight)
    return selector


@pytest.mark.parametrize("rows_at_once", [2, 2048])
def test_the_selector_s_loss_against_loops(rows_at_once, monkeypatch):
    """Fails if candidates, scores, the previous token, or a label that is no candidate are handled differently from
    serving; also if the plain loss beside it changes."""
    monkeypatch.setattr(loss_module, "_ROWS_AT_ONCE", rows_at_once)
    selector, generator = _selector(), torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, 4, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels, previous = torch.randint(VOCAB, (2, 2, 3, 4), generator=generator).unbind(0)
    labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORED)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weight.T

    plain, chosen = selected_losses(hidden, LossHead(head, labels), previous, selector)
    torch.testing.assert_close(plain, row_losses(hidden, LossHead(head, labels)))
    reached = 0
    for place, label in enumerate(labels.flatten().tolist()):
        row = hidden.view(-1, WIDTH)[place]
        logits = head(row)
        ids = sorted(logits.topk(TOP_K).indices.tolist())
        if label not in ids:
            assert chosen.flatten()[place] == 0
            continue
        reached += 1
        key = selector.hidden_projection(row)
        before = selector.predecessor_codebook[previous.flatten()[place]]
        scores = [
            4.0 * torch.tanh(0.5 * logits[token] / 4.0) + (before * key * selector.successor_codebook[token]).sum()
            for token in ids
        ]
        expected = F.cross_entropy(torch.stack(scores)[None], torch.tensor([ids.index(label)]))
        torch.testing.assert_close(chosen.flatten()[place], expected)
    assert reached >= 3


def test_fewer_ids_have_the_same_loss():
    """Fails if candidates among fewer ids read other rows of the tables, or are raised like drawn ids: the best ones of
    all ids are among the few, so both losses must be what they are over all."""
    selector, generator = _selector(), torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels, previous = torch.randint(VOCAB, (2, 2, 3), generator=generator).unbind(0)
    logits = hidden @ weight.T
    best = logits.topk(TOP_K).indices.flatten()
    ids = torch.cat((best, labels.flatten())).unique()
    raised = torch.rand(len(ids), generator=generator)
    few = LossHead(lambda rows: rows @ weight[ids].T, torch.searchsorted(ids, labels), ids, raised)
    plain, chosen = selected_losses(hidden, few, previous, selector)
    _, expected = selected_losses(hidden, LossHead(lambda rows: rows @ weight.T, labels), previous, selector)
    torch.testing.assert_close(chosen, expected)
    below = (logits[..., ids] + raised).logsumexp(-1)
    torch.testing.assert_close(plain, below - logits.gather(-1, labels[..., None])[..., 0] - raised[few.labels])


def test_nothing_labelled():
    """Fails if a micro-batch without labels gives NaN, or no gradient."""
    hidden, labels = torch.randn(1, 2, 4, WIDTH, requires_grad=True), torch.full((1, 2, 4), IGNORED)
    selector = _selector()
    over = LossHead(lambda rows: rows @ torch.ones(WIDTH, VOCAB), labels)
    losses = selected_losses(hidden, over, labels.clamp(min=0), selector)
    loss = weighted_mean(sum(losses), decay_weights(labels, 4.0))
    loss.backward()
    assert loss.item() == 0.0 and (hidden.grad == 0).all()
    assert all((weight.grad == 0).all() for weight in selector.parameters())


def test_previous_ids():
    """Fails if a row's predecessor is the mask, the label of its own row, or another block's token."""
    ids = torch.arange(100, 112)[None]
    learned = torch.ones(1, 12, dtype=torch.bool)
    blocks = make_blocks(ids, learned, torch.tensor([[2, 9]]), 4, mask_token_id=7)
    assert blocks.labels.view(2, 4).tolist() == [[IGNORED, 103, 104, 105], [IGNORED, 110, 111, IGNORED]]
    assert blocks.previous_ids()[0, :, 1:].tolist() == [[102, 103, 104], [109, 110, 111]]


def test_every_weight_learns(options):
    """Fails if a part of the head gets no gradient from where it starts: at zero influence."""
    trainer = Trainer(options(**{**HEAD, "selector_top_k": 1792}))  # every label is a candidate
    ids = torch.randint(1700, (2, 24), generator=torch.Generator().manual_seed(1))
    blocks = trainer.blocks(ids, torch.ones_like(ids, dtype=torch.bool), trainer.generator(0))
    assert not trainer.draft.candidate_selector.successor_codebook.any()
    trainer.loss(trainer.model, ids, trainer.features([], ids), blocks).backward()
    still = {"candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight"}
    for name, weight in trainer.draft.named_parameters():
        assert bool(weight.grad.abs().max() > 0) != (name in still), name  # these two follow once B is not zero


def test_it_starts_from_a_plain_draft(options):
    """Fails if --init with --head dflash2 loses the plain draft's weights, or drafts anything else before training."""
    trainer = Trainer(options(init=str(TINY_DRAFT), **HEAD))
    plain = DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32)
    assert trainer.draft.draft_config.convolution == Convolution(taps=2, group_size=32)
    for name, weight in plain.named_parameters():
        assert torch.equal(trainer.draft.get_parameter(name), weight), name
    target = FrozenTarget(str(TINY_TARGET), "float32", torch.device("cpu"))
    ids = torch.randint(1700, (1, 40), generator=torch.Generator().manual_seed(3))
    features = target.features(ids, plain.target_layer_ids)
    found = [accept_lens(draft, target, ids, features, torch.arange(3, 30), 40) for draft in (plain, trainer.draft)]
    assert found[0] == found[1]


def test_a_dflash2_draft_stays_one(options, tmp_path):
    """Fails if training goes on from a DFlash2 draft without its head."""
    plain = DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32)
    with_dflash2_head(plain, 1792, options(**HEAD)).save_pretrained(tmp_path / "start")
    trainer = Trainer(options(init=str(tmp_path / "start")))
    assert trainer.draft.draft_config.selector == Selector(8, 4, 1792, 1.0, None)


def test_a_run(options):
    """Fails if the head does not learn what the plain draft learns, or the checkpoint or its card is not DFlash2's."""
    output, tau, losses = learning_run(options, **HEAD)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert tau > 1.1
    draft = DFlashDraftModel.from_pretrained(output)
    assert draft.config.architectures == ["DFlash2DraftModel"]
    selector = draft.candidate_selector
    assert selector.successor_codebook.any() and draft.layers[0].mlp_conv.kernel_projection.weight.any()
    assert "DFlash2 draft with a selector of rank 8 over 4 candidates" in (output / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "dflash3"}, ["--head is dflash3", "dflash, dflash2"]),
        ({"selector_rank": 0}, ["--selector-rank is 0", "at least 1"]),
        ({"selector_weight": 0.0}, ["--selector-weight is 0.0", "above 0"]),
        ({"conv_kernel_size": -1}, ["--conv-kernel-size is -1", "0"]),
    ],
)
def test_options_are_refused(change, words, options):
    """Fails if such a value is accepted."""
    with pytest.raises(ValueError) as refused:
        options(**{**HEAD, **change})
    assert all(word in str(refused.value) for word in words), refused.value


def test_groups_that_do_not_divide(options):
    """Fails if a group size that does not divide the hidden size ends in a traceback, or after the data is read."""
    with pytest.raises(ValueError, match=r"conv_group_size is 48 .* 256"):
        Trainer(options(**{**HEAD, "conv_group_size": 48}))
