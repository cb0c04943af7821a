"""The loss: weights by hand, cross-entropy against torch's, and the whole loss against one block at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.training import loss as loss_module
from sglang_dflash.training.blocks import IGNORED, make_blocks
from sglang_dflash.training.loss import LossHead, ShortLoss, decay_weights, dpace_weights, row_losses, weighted_mean
from sglang_dflash.training.trainer import Trainer

NO = IGNORED


def test_decay_weights_by_hand():
    """Fails if gamma, the first row's weight or a row without label is wrong: e^0, e^-1/4, e^-2/4."""
    labels = torch.tensor([[[NO, 7, 8, 9], [NO, 7, NO, NO]], [[NO, NO, NO, NO], [NO, 0, 0, NO]]])
    one, two, three = 1.0, 0.7788007830714049, 0.6065306597126334
    expected = [[[0, one, two, three], [0, one, 0, 0]], [[0, 0, 0, 0], [0, one, two, 0]]]
    torch.testing.assert_close(decay_weights(labels, 4.0), torch.tensor(expected))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_against_a_loop(alpha):
    """Fails if a weight is not the sum of the running products of its row and all later labelled rows."""
    labels = torch.tensor([[NO, 5, 6, 7, 8], [NO, 5, 6, NO, NO], [NO, NO, NO, NO, NO]])
    losses = torch.tensor([[9.0, 0.1, 1.5, 0.3, 2.0], [9.0, 0.7, 0.2, 9.0, 9.0], [9.0] * 5])
    expected = torch.zeros(labels.shape)
    for block in range(3):
        rows = [k for k in range(5) if labels[block, k] != NO]
        for k in rows:
            for last in rows:
                if last >= k:
                    product = 1.0
                    for j in rows:
                        if j <= last:
                            product *= (1 - alpha) * math.exp(-losses[block, j]) + alpha
                    expected[block, k] += product
    torch.testing.assert_close(dpace_weights(labels, losses, alpha), expected)


def test_dpace_weights_pass_no_gradient():
    """Fails if the draft could lower its loss by changing the weights."""
    losses = torch.rand(1, 4, requires_grad=True)
    assert not dpace_weights(torch.tensor([[NO, 1, 2, 3]]), losses, 0.5).requires_grad


@pytest.mark.parametrize("rows_at_once", [3, 2048])
def test_row_losses_are_cross_entropy(rows_at_once, monkeypatch):
    """Fails if a row's loss or gradient changes because the head runs in parts, or runs again in the backward pass."""
    monkeypatch.setattr(loss_module, "_ROWS_AT_ONCE", rows_at_once)
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 4, 8)
    weight, factors = torch.randn(11, 8), torch.rand(2, 3, 4)
    labels = torch.randint(11, (2, 3, 4)).masked_fill(torch.rand(2, 3, 4) < 0.3, NO)
    found, gradients = [], []
    for whole in (False, True):
        x = hidden.clone().requires_grad_(True)
        if whole:
            logits = (x @ weight.T).flatten(0, 2)
            losses = F.cross_entropy(logits, labels.flatten(), ignore_index=NO, reduction="none").view(labels.shape)
        else:
            losses = row_losses(x, LossHead(lambda rows: rows @ weight.T, labels))
        (losses * factors).sum().backward()
        found.append(losses.detach())
        gradients.append(x.grad)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients)
    assert (found[0][labels == NO] == 0).all()


def test_weighted_mean_by_hand():
    """Fails if the sum is divided by the number of rows instead of the sum of the weights."""
    losses, weights = torch.tensor([[1.0, 2.0], [4.0, 100.0]]), torch.tensor([[1.0, 0.5], [0.5, 0.0]])
    assert weighted_mean(losses, weights).item() == pytest.approx((1 + 1 + 2) / 2)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_nothing_labelled(kind):
    """Fails if a micro-batch without labels gives NaN, or no gradient, for which other processes would wait."""
    hidden, labels = torch.randn(1, 2, 4, 8, requires_grad=True), torch.full((1, 2, 4), NO)
    losses = row_losses(hidden, LossHead(lambda rows: rows @ torch.ones(8, 5), labels))
    weights = decay_weights(labels, 4.0) if kind == "decay" else dpace_weights(labels, losses, 0.5)
    loss = weighted_mean(losses, weights)
    loss.backward()
    assert loss.item() == 0.0
    assert (hidden.grad == 0).all()


# The example of test_blocks: answers at 5 to 11 and 3 to 6, blocks at 6, 9 and 4.
LENGTHS, SPANS, ANCHORS = (12, 7), ((5, 12), (3, 7)), ((6, 9), (-1, 4))


def _one_block_losses(draft: DFlashDraftModel, target, ids: torch.Tensor, anchor: int, end: int) -> torch.Tensor:
    """-log p of the tokens that the block at `anchor` must fill, from a forward pass of this block alone."""
    clean = target(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([clean[layer + 1] for layer in draft.target_layer_ids], dim=-1)[:, :anchor]
    block = torch.tensor([[int(ids[anchor]), *[draft.mask_token_id] * (draft.block_size - 1)]])
    positions = torch.arange(anchor + draft.block_size)[None]
    hidden = draft(target.get_input_embeddings()(block), features, positions)[0]
    logits = hidden @ target.get_output_embeddings().weight.T
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    wanted = range(anchor + 1, min(anchor + draft.block_size, end))
    return torch.stack([-log_p[position - anchor, ids[position]] for position in wanted])


def _weights(losses: torch.Tensor, kind: str) -> list[float]:
    if kind == "decay":
        return [math.exp(-k / 2) for k in range(len(losses))]  # gamma of block size 4
    products = [math.prod(0.5 * math.exp(-x) + 0.5 for x in losses[: k + 1].tolist()) for k in range(len(losses))]
    return [sum(products[k:]) for k in range(len(losses))]


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and the learned positions."""
    ids = torch.randint(1700, (2, 12), generator=torch.Generator().manual_seed(1))
    learned = torch.zeros(2, 12, dtype=torch.bool)
    for row, (length, (start, end)) in enumerate(zip(LENGTHS, SPANS, strict=True)):
        ids[row, length:] = 0
        learned[row, start:end] = True
    return ids, learned


SHAPES = [{}, {"is_causal": True}, {"layers": 2, "sliding_window": 3, "sliding_layers": 1}, {"sliding_window": 4}]
SHAPE_NAMES = ["full", "causal", "sliding-then-full", "sliding"]


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_the_whole_loss_is_that_of_each_block_alone(shape, kind, options, target):
    """Fails if a block of the packed forward pass sees another block, or features at or after its own anchor, if
    padding changes a conversation's loss, or if a weight goes to another row."""
    trainer = Trainer(options(**shape, loss=kind))
    draft = trainer.draft
    ids, learned = _example()
    total, weight_sum = torch.zeros(()), 0.0
    for row, anchor in ((0, 6), (0, 9), (1, 4)):
        losses = _one_block_losses(draft, target, ids[row, : LENGTHS[row]], anchor, SPANS[row][1])
        weights = _weights(losses, kind)
        total = total + sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        weight_sum += sum(weights)
    expected = total / weight_sum
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in draft.named_parameters()}
    draft.zero_grad()
    blocks = make_blocks(ids, learned, torch.tensor(ANCHORS), 4, draft.mask_token_id)
    loss = trainer.loss(trainer.model, ids, trainer.features([], ids), blocks)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, weight in draft.named_parameters():
        scale = gradients[name].abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_every_attention_gives_the_same_loss(shape, options):
    """Fails if flex or split attention gives another loss than the dense mask (forward only: flex has no backward)."""
    trainer = Trainer(options(**shape))
    ids, learned = _example()
    blocks = make_blocks(ids, learned, torch.tensor(ANCHORS), 4, trainer.draft.mask_token_id)
    trainer.draft.requires_grad_(False)
    losses = []
    for trainer.attention in ("dense", "flex", "split"):
        losses.append(trainer.loss(trainer.model, ids, trainer.features([], ids), blocks))
    torch.testing.assert_close(losses[1:], losses[:1] * 2)


def _short(size: int, labels: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over fewer ids of rows with the given labels, and the gradient of their hidden states."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 8, generator=generator)
    hidden = torch.randn(*labels.shape, 8, generator=generator, requires_grad=True)
    counts = torch.arange(40, 0, -1)  # id 0 is the most frequent one
    drawn = torch.Generator().manual_seed(seed)
    few = ShortLoss(counts, size).drawn(labels, lambda ids: lambda x: x @ weight[ids].T, drawn)
    losses = row_losses(hidden, few)
    whole = row_losses(hidden, LossHead(lambda x: x @ weight.T, labels))
    return losses, whole


LABELS = torch.tensor([[NO, 3, 39, 0], [NO, 38, 38, NO]])


@pytest.mark.parametrize("size", [40, 54])
def test_a_loss_over_all_ids_is_the_whole_one(size):
    """Fails if ids are mapped to other rows of the head or a label is lost: of 40 ids, 40 and 54 leave out none."""
    losses, whole = _short(size, LABELS)
    torch.testing.assert_close(losses, whole)
    assert ((losses == 0) == (LABELS == NO)).all()


def test_the_drawn_ids_stand_for_all_others():
    """Fails if rare labels are left out, or the drawn ids do not weigh as much as the ids that they stand for."""
    whole = _short(16, LABELS)[1]
    sums = torch.stack([(_short(16, LABELS, seed)[0] - whole).exp() for seed in range(400)])
    learned = LABELS != NO
    torch.testing.assert_close(sums.mean(0)[learned], torch.ones(int(learned.sum())), rtol=0.1, atol=0)
    assert (sums.std(0)[learned] > 0.01).all()  # other ids each time


def test_a_run_with_fewer_ids_learns(options):
    """Fails if a draft that learns by the loss over fewer ids gets no better by the whole loss."""
    trainer = Trainer(options(loss_ids=256, learning_rate=3e-3, max_steps=40))
    ids, learned = _example()
    blocks = make_blocks(ids, learned, torch.tensor(ANCHORS), 4, trainer.draft.mask_token_id)
    features = trainer.features([], ids)

    def whole() -> float:
        short, trainer.short_loss = trainer.short_loss, None
        with torch.no_grad():
            loss = trainer.loss(trainer.draft, ids, features, blocks).item()
        trainer.short_loss = short
        return loss

    before = whole()
    for step in range(20):
        trainer.loss(trainer.draft, ids, features, blocks, trainer.generator(step)).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    assert whole() < 0.7 * before
