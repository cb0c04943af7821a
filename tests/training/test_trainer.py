"""Whole runs on the embedded target: learning, output files, bitwise reproducibility, refusals."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib import image
from transformers import Gemma2Config

from families.models import make_target
from sglang_dflash.reference import DFlashDraftModel, FeatureTaps
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.serving.lifetime import Stopped
from sglang_dflash.training import TrainOptions
from sglang_dflash.training.conversations import collate, micro_batches
from sglang_dflash.training.data import LEARNED
from sglang_dflash.training.report import Card, write_card
from sglang_dflash.training.trainer import Trainer, train

LAST = "step-00000008"


def _rows(folder: Path | str, key: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def _digest(folder: Path | str) -> str:
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def _timeless(path: Path) -> str:
    """A file's text without the hours that the run took, and the draft's name, which is the folder's."""
    return re.sub(rf'(tokens in |"hours": )[\d.]+|name: "{path.parent.name}"', "", path.read_text())


def _said(capsys: pytest.CaptureFixture) -> str:
    return " ".join(capsys.readouterr().err.split())


def _eight(folder: Path, make: Any, **changes: Any) -> TrainOptions:
    return make(output=str(folder), max_steps=8, save_every=4, eval_every=4, **changes)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, data_file) -> Path:
    """The output of a run of eight steps, with checkpoints after four and eight."""
    folder = tmp_path_factory.mktemp("unbroken") / "draft"

    def make(**changes: Any) -> TrainOptions:
        return TrainOptions(
            target=str(TINY_TARGET),
            data=(str(data_file),),
            layers=1,
            num_taps=2,
            block_size=4,
            anchors=8,
            batch_size=2,
            max_length=96,
            log_every=1,
            held_out=0.1,
            held_out_limit=2,
            **changes,
        )

    train(_eight(folder, make))
    return folder


def learning_run(options: Any, **changes: Any) -> tuple[Path, float, list[float]]:
    """A run of 40 steps, evaluated on what it was trained on: its output, tau at the end, and the loss of each step."""
    made = options(
        **changes,
        anchors=32,
        batch_size=4,
        max_steps=40,
        learning_rate=3e-3,
        eval_every=20,
        held_out_data=options().data,
        held_out_limit=3,
    )
    acceptance = train(made)
    return Path(made.output), acceptance.tau, [row["loss"] for row in _rows(made.output, "loss")]


def test_loss_falls_and_tau_rises(options):
    """Fails if the run does not learn: after seconds, some drafts for answers it was trained on are right."""
    output, tau, losses = learning_run(options)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    taus = [row["tau"] for row in _rows(output, "tau")]
    assert len(taus) == 2 and taus[-1] == tau > 1.1


@pytest.mark.parametrize("family", ["Qwen3 MoE", "Qwen3.5"])
def test_a_run_learns_for_other_targets(family: str, options: Any, tmp_path: Path) -> None:
    """Fails where a mixture of experts, or a target with recurrent state, ends the run, or its head and embedding are
    read otherwise than those of a dense one: then the loss stays that of a uniform guess."""
    target = str(make_target(family, tmp_path / "target"))
    output, _, losses = learning_run(options, target=target, taps=(0, 2), num_taps=None)
    vocab_size = DFlashDraftModel.from_pretrained(output).config.vocab_size
    assert losses[0] > math.log(vocab_size) > sum(losses[-5:]) / 5 + 0.4, losses


def test_what_a_run_leaves_behind(unbroken, data_file):
    """Fails if a file is missing or broken, or the card lacks data, taps or tau."""
    files = {"README.md", "config.json", "curves.png", "metrics.jsonl", "model.safetensors", "checkpoints"}
    assert {path.name for path in unbroken.iterdir()} == files
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-00000004", LAST]
    pixels = image.imread(unbroken / "curves.png")
    assert pixels.shape[0] > 200 and pixels.shape[1] > 800 and pixels.std() > 0.01
    card = (unbroken / "README.md").read_text()
    (*_, last) = _rows(unbroken, "tau")
    digest = hashlib.sha256(data_file.read_bytes()).hexdigest()[:16]
    tau = f"tau {last['tau']:.2f}"
    for said in (data_file.name, digest, tau, "[1, 3]", "block size 4", "36 conversations", "2 conversations"):
        assert said in card, said
    assert DFlashDraftModel.from_pretrained(unbroken).block_size == 4
    assert [row["step"] for row in _rows(unbroken, "loss")] == list(range(1, 9))
    assert [row["step"] for row in _rows(unbroken, "tau")] == [4, 8]


@pytest.fixture
def halfway(unbroken, tmp_path) -> Path:
    """The output of a run that was killed some steps after its checkpoint at step 4."""
    folder = tmp_path / "halfway"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(folder / "checkpoints" / LAST)
    for name in ("model.safetensors", "config.json", "README.md", "curves.png"):
        (folder / name).unlink()
    return folder


def test_a_resumed_run_is_the_unbroken_one(unbroken, halfway, options):
    """Fails if order, anchors, optimizer, learning rate or metrics do not continue bit for bit."""
    train(_eight(halfway, options, resume=True))
    assert _digest(halfway) == _digest(unbroken)
    for name in ("metrics.jsonl", "README.md"):
        assert _timeless(halfway / name) == _timeless(unbroken / name)


@pytest.mark.parametrize("where", ["_step", "evaluate"])
def test_a_signal_saves_the_step(where, unbroken, options, tmp_path, monkeypatch, capsys):
    """Fails if a signal in a step or in an evaluation loses work, or the run that goes on is not the unbroken one."""
    work = getattr(Trainer, where)

    def signalled(self: Trainer, *given: Any) -> Any:
        done = work(self, *given)
        if where == "evaluate" or given[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.undo()
        return done

    monkeypatch.setattr(Trainer, where, signalled)
    with pytest.raises(Stopped) as stopped:
        train(_eight(tmp_path / "draft", options))
    assert (stopped.value.number, stopped.value.said) == (signal.SIGTERM, "")
    # The step behind the one in which the signal comes: there all processes learn of it.
    last = {"_step": 4, "evaluate": 5}[where]
    assert f"Stopped after step {last}, which is saved. To go on, give the same command with --resume" in _said(capsys)
    assert not (tmp_path / "draft" / "model.safetensors").exists()
    train(_eight(tmp_path / "draft", options, resume=True))
    assert _digest(tmp_path / "draft") == _digest(unbroken)
    rows = [_rows(folder, "loss") for folder in (tmp_path / "draft", unbroken)]
    assert rows[0] == rows[1]


def test_a_half_written_checkpoint_is_passed_over(unbroken, halfway, options):
    """Fails if a run that was killed while it wrote a checkpoint cannot resume from the one before."""
    shutil.copytree(halfway / "checkpoints" / "step-00000004", halfway / "checkpoints" / "partial-00000008")
    (halfway / "checkpoints" / "partial-00000008" / "model.safetensors").unlink()
    train(_eight(halfway, options, resume=True))
    assert _digest(halfway) == _digest(unbroken)


def test_resuming_a_finished_run_changes_nothing(unbroken, tmp_path, options):
    """Fails if a run without steps left writes a card without its tau, or other weights."""
    folder = tmp_path / "finished"
    shutil.copytree(unbroken, folder)
    acceptance = train(_eight(folder, options, resume=True))
    assert acceptance.tau == _rows(unbroken, "tau")[-1]["tau"]
    for name in ("model.safetensors", "metrics.jsonl", "config.json"):
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes(), name
    assert _timeless(folder / "README.md") == _timeless(unbroken / "README.md")


@pytest.mark.parametrize(
    ("changes", "flag"), [({"seed": 1}, "--seed"), ({"learning_rate": 1e-3}, "--learning-rate"), ({"layers": 2}, "")]
)
def test_resuming_another_run_is_refused(halfway, options, changes, flag):
    """Fails if a run can resume with other training options, or with weights that do not fit."""
    with pytest.raises(ValueError, match=rf"--resume: .*{flag or '--layers'}"):
        train(_eight(halfway, options, resume=True, **changes))


def test_resuming_with_other_data_is_refused(halfway, options, tmp_path):
    """Fails if a run can resume with data of the same name and another length."""
    lines = Path(options().data[0]).read_text().splitlines(keepends=True)
    data = tmp_path / "asked.jsonl"
    data.write_text("".join(lines))
    made = {"data": (str(data),), "output": str(tmp_path / "moved"), "epochs": 1, "max_steps": None, "save_every": 9}
    train(options(**made))
    data.write_text("".join(lines[:20]))
    with pytest.raises(ValueError, match=r"--resume: .* other values of data, steps"):
        train(options(**made, resume=True))


def test_resuming_with_changed_data_of_the_same_length_is_refused(options, tmp_path):
    """Fails if a run can resume with other answers because their number is the same."""
    lines = Path(options().data[0]).read_text().splitlines(keepends=True)
    data = tmp_path / "asked.jsonl"
    data.write_text("".join(lines))
    made = {"data": (str(data),), "output": str(tmp_path / "moved"), "max_steps": 1, "save_every": 1}
    train(options(**made))
    data.write_text("".join(lines[::-1]))
    with pytest.raises(ValueError, match=r"--resume: .* other values of data;"):
        train(options(**made, resume=True))


def test_the_target_runs_in_its_own_dtype(options):
    """Fails if the draft's autocast also rounds the target: the served target's features have no such rounding."""
    trainer = Trainer(options(precision="bf16", target_dtype="float32"))
    ids = torch.arange(40)[None]
    plain = trainer.target.features(ids, (1, 3)), trainer.target.head(trainer.target.embed(ids))
    with trainer.accelerator.autocast():
        cast = trainer.target.features(ids, (1, 3)), trainer.target.head(trainer.target.embed(ids))
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))


def test_an_earlier_runs_output_is_not_trained_over(halfway, options):
    """Fails if checkpoints of two runs can be in one folder, where one run would resume or delete the other's."""
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run; go on with --resume"):
        train(_eight(halfway, options))


def test_resuming_nothing_starts(options):
    """Fails if a job that always passes --resume cannot start the first time."""
    assert Trainer(options(resume=True)).done == 0


def test_the_seed_decides_everything(unbroken, options, tmp_path):
    """Fails if the same seed gives different bits, or another seed the same bits."""
    train(_eight(tmp_path / "same", options))
    assert _digest(tmp_path / "same") == _digest(unbroken)
    train(_eight(tmp_path / "other", options, seed=1))
    assert _digest(tmp_path / "other") != _digest(unbroken)


def test_only_the_last_checkpoints_stay(options, tmp_path):
    """Fails if old checkpoints stay, or the last one is deleted."""
    train(options(max_steps=4, save_every=1, keep_checkpoints=2))
    left = sorted(path.name for path in (tmp_path / "draft" / "checkpoints").iterdir())
    assert left == ["step-00000003", "step-00000004"]


VARIANTS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "bf16", "target_dtype": "bfloat16"},
    {"precision": "float32", "target_dtype": "bfloat16"},
    {"loss": "dpace"},
    {"layers": 2, "sliding_window": 8},
    {"is_causal": True, "taps": (0, 4), "num_taps": None},
    {"accumulate": 2, "weight_decay": 0.1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=[" ".join(map(str, v.items())) for v in VARIANTS])
def test_every_variant_learns(changes, options):
    """Fails if a combination of options gives an error, or its loss does not fall."""
    made = options(**changes, max_steps=8, learning_rate=3e-3)
    train(made)
    losses = [row["loss"] for row in _rows(made.output, "loss")]
    assert all(0 < loss < 100 for loss in losses)
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    assert (Path(made.output) / "model.safetensors").is_file()


def test_the_target_stays_as_it_is(options):
    """Fails if a step, an evaluation or weight decay changes the target."""
    trainer = Trainer(options(weight_decay=0.5))
    before = {name: weight.clone() for name, weight in trainer.target.model.named_parameters()}
    trainer.run()
    for name, weight in trainer.target.model.named_parameters():
        assert torch.equal(before[name], weight) and weight.grad is None and not weight.requires_grad, name


def test_features_are_the_residual_outputs(options, target):
    """Fails if a tap is off by one layer, is normalized, or depends on the padding after it."""
    trainer = Trainer(options(taps=(0, 4), num_taps=None))
    ids = torch.randint(1700, (1, 9), generator=torch.Generator().manual_seed(0))
    states = target(ids, output_hidden_states=True).hidden_states
    padded = torch.cat((ids, torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    features = trainer.target.features(padded, (0, 4))
    torch.testing.assert_close(features[:, :9], torch.cat((states[1], states[5]), dim=-1))
    with FeatureTaps(target, (0, 4)) as taps, torch.no_grad():
        target(ids)
    torch.testing.assert_close(taps.take(), features[:, :9])


def test_a_step_by_hand(options):
    """Fails if the accumulated gradient is not the mean of the micro-batches', its norm is not clipped, or the step is
    not AdamW's at the scheduled learning rate."""
    made = options(accumulate=2, max_steps=10, warm_up=0.5, clip=0.5, learning_rate=1e-2, weight_decay=0.1)
    ours, plain = Trainer(made), Trainer(made)
    queue = micro_batches([len(ids) for ids in plain.data.learned["input_ids"]], 2, 0, 0, 1, 0)
    recorded = ours._step(0, micro_batches([len(ids) for ids in ours.data.learned["input_ids"]], 2, 0, 0, 1, 0))[0]
    losses = []
    for micro in range(2):
        ids, learned = collate([plain.data.learned[index] for index in next(queue)], torch.device("cpu"))
        blocks = plain.blocks(ids, learned, plain.generator(micro))
        losses.append(plain.loss(plain.draft, ids, plain.features([], ids), blocks))
    mean = sum(losses) / 2
    weights = dict(plain.draft.named_parameters())
    gradients = dict(zip(weights, torch.autograd.grad(mean, list(weights.values())), strict=True))
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert norm > 0.5
    rate = 1e-2 / 5  # the first of five warm-up steps
    for name, weight in ours.draft.named_parameters():
        state = ours.optimizer.state[weight]
        cut = gradients[name] * 0.5 / norm
        torch.testing.assert_close(state["exp_avg"], 0.1 * cut, rtol=1e-3, atol=1e-7)
        moved = weights[name] * (1 - rate * 0.1) - rate * state["exp_avg"] / 0.1 / (
            (state["exp_avg_sq"] / 0.001).sqrt() + 1e-8
        )
        torch.testing.assert_close(weight, moved, rtol=1e-4, atol=1e-6)
    assert recorded == pytest.approx(mean.item(), rel=1e-5)


def test_learning_rate(options):
    """Fails if warm-up does not end at the peak, or the cosine does not end at zero after the last step."""
    trainer = Trainer(options(max_steps=20, warm_up=0.2, learning_rate=1.0))
    rates = [trainer.learning_rate(step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[12] == pytest.approx(0.5) and rates[20] == pytest.approx(0.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"batch_size": 1, "epochs": 2, "max_steps": None}, 72),
        ({"batch_size": 5, "epochs": 3, "max_steps": None}, 24),
        ({"batch_size": 5, "epochs": 3, "accumulate": 5, "max_steps": None}, 4),
        ({"batch_size": 5, "epochs": 3, "max_steps": 10}, 10),
        ({"batch_size": 50, "epochs": 1, "accumulate": 9, "max_steps": None}, 1),
    ],
)
def test_steps_of_a_run(changes, steps, options):
    """Fails if a run is longer than its epochs or --max-steps, or has no step: 36 conversations, 4 held out."""
    assert Trainer(options(**changes)).steps == steps


def test_a_draft_to_go_on_from(options, draft):
    """Fails if --init starts from other weights, or gamma and blocks do not follow the draft's block size."""
    trainer = Trainer(options(init=str(TINY_DRAFT), block_size=16, layers=5))
    assert trainer.draft.draft_config == draft.draft_config
    assert all(torch.equal(a, b) for a, b in zip(trainer.draft.parameters(), draft.parameters(), strict=True))
    assert trainer.gamma == 4.0
    trainer.run()
    assert DFlashDraftModel.from_pretrained(trainer.output).block_size == 8
    assert "exp(-(k-1)/4)" in (trainer.output / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "/nowhere/target"}, "The target /nowhere/target cannot be read"),
        ({"init": "/nowhere/draft"}, "--init /nowhere/draft cannot be loaded"),
        ({"init": str(TINY_TARGET)}, "architectures are ['Qwen3ForCausalLM']"),
        ({"target_dtype": "int8"}, "--target-dtype is int8; it must be one of"),
        ({"taps": (1, 5), "num_taps": None}, "--taps has [5]"),
        ({"mask_token_id": 1792}, "--mask-token-id is 1792"),
        ({"mask_token_id": -1}, "--mask-token-id is -1"),
        ({"attention": "flex"}, "--attention is flex"),
    ],
)
def test_refused(changes, said, options):
    """Fails if the error for a wrong target, draft or value is not one sentence."""
    with pytest.raises(ValueError) as refused:
        Trainer(options(**changes))
    sentence = str(refused.value)
    assert said in sentence and "\n" not in sentence
    assert sentence.endswith((".", "!", "'"))


def test_a_draft_with_its_own_mask_is_refused(options, tmp_path):
    """Fails if training goes on from a draft as if its masks looked like the target's."""
    folder = shutil.copytree(TINY_DRAFT, tmp_path / "masked")
    torch.save(torch.zeros(256), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match="a mask embedding of its own or attention sinks, which are not trained here"):
        Trainer(options(init=str(folder)))


def test_one_conversation_is_learned_and_measured(options, tmp_path):
    """Fails where one conversation is refused, or its tau is called held-out."""
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"prompt": "Compute 9 * 7.", "response": "The answer is 63."}) + "\n")
    trainer = Trainer(options(data=(str(data),)))
    assert list(trainer.data.learned) == list(trainer.data.held_out[LEARNED]) and len(trainer.data.learned) == 1
    assert "1 samples to train on, none held out. Warning: tau is measured on what is learned" in trainer._opening()
    evaluation = trainer.evaluate()
    assert str(evaluation).startswith("Tau: ")
    write_card(tmp_path / "README.md", Card(trainer.options, trainer.draft, trainer.data, evaluation, 1, 1.0))
    card = (tmp_path / "README.md").read_text()
    assert "\nTau " in card and "Held-out tau" not in card and f"| {LEARNED} | 1 | " in card
    assert len(Trainer(options(data=(str(data),), held_out_data=(str(data),))).data.learned) == 1


def test_every_micro_batch_draws_its_own_anchors(options):
    """Fails if a conversation gets the same anchors in every micro-step, or one micro-step gets different anchors."""
    trainer = Trainer(options())
    ids, learned = torch.arange(90)[None], torch.ones(1, 90, dtype=torch.bool)
    drawn = [trainer.blocks(ids, learned, trainer.generator(place)).anchors.tolist() for place in (0, 1, 2, 0)]
    assert drawn[0] == drawn[3] and drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_a_target_that_scales_its_logits_is_refused(options, tokenizer, tmp_path):
    """Fails if a draft learns another distribution than the target's own."""
    Gemma2Config(vocab_size=len(tokenizer), num_hidden_layers=6).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    with pytest.raises(ValueError, match=r"scales embeddings or logits \(final_logit_softcapping\)"):
        Trainer(options(target=str(tmp_path / "gemma")))


def test_held_out_files_are_told_apart(options, tmp_path):
    """Fails if metrics, card or the whole tau mix up the kinds of held-out text."""
    lines = Path(options().data[0]).read_text().splitlines(keepends=True)
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, some in zip(files, (lines[:3], lines[3:4]), strict=True):
        path.write_text("".join(some))
    made = options(held_out_data=tuple(map(str, files)), max_steps=1, held_out_limit=2)
    whole = train(made)
    (row,) = _rows(made.output, "tau")
    taus = {}
    for path in files:
        alone = options(held_out_data=(str(path),), output=str(tmp_path / path.stem), max_steps=1, held_out_limit=2)
        taus[path.stem] = train(alone).tau
    assert row["by_kind"] == taus and row["tau"] == whole.tau
    card = (Path(made.output) / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    results = {one["dataset"]["name"]: one["metrics"][0]["value"] for one in head["model-index"][0]["results"]}
    assert results == {kind: round(tau, 2) for kind, tau in taus.items()}
    assert f"| first | 2 | {taus['first']:.2f} |" in card and "| second | 1 |" in card


def test_the_curve_counts_learned_tokens(unbroken, options):
    """Fails if the tokens of the curve are not those of the answers that were learned, over all steps."""
    data = Trainer(options()).data.learned
    learned = [sum(end - start for start, end in spans) for spans in data["spans"]]
    queue = micro_batches([len(ids) for ids in data["input_ids"]], 2, 0, 0, 1, 0)
    counts = [sum(learned[index] for index in next(queue)) for _ in range(8)]
    first, last = _rows(unbroken, "tau")
    assert (first["tokens"], last["tokens"]) == (sum(counts[:4]), sum(counts))
    assert 0 <= first["hours"] <= last["hours"]
    assert f"{last['tokens']:,} learned tokens in " in (unbroken / "README.md").read_text()
