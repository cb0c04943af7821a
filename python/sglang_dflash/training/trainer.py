"""The training run: steps, evaluations, checkpoints, resumption; in one process or several under torchrun."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import signal
import time
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from datasets import Dataset
from torch import nn

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving.lifetime import Held, Stopped, held_back
from sglang_dflash.training.blocks import Blocks, dense_mask, flex_mask, make_blocks, sample_anchors
from sglang_dflash.training.conversations import check_ids, collate, lengths, micro_batches, read
from sglang_dflash.training.evaluation import Acceptance, held_out_acceptance
from sglang_dflash.training.folding import fold
from sglang_dflash.training.frozen import FrozenTarget, check_target, mask_token_id
from sglang_dflash.training.layout import new_config, save_draft, with_dflash2_head
from sglang_dflash.training.loss import decay_weights, dpace_weights, row_losses, selected_losses, weighted_mean
from sglang_dflash.training.options import TrainOptions, default_gamma
from sglang_dflash.training.progress import Reporter
from sglang_dflash.training.report import digest, draw_curves, write_card

_STATE = "run.json"
# Flex attention is compiled per shape: tokens and anchors are padded to multiples of these, which keeps shapes few.
_FLEX_TOKENS, _FLEX_ANCHORS = 128, 64


def train(options: TrainOptions) -> Acceptance:
    """Trains to the end and leaves checkpoint, card, curves and metrics in `options.output`.

    Returns:
        The last held-out acceptance.

    Raises:
        ValueError: target, data, options or the checkpoint to resume from do not fit; the message is one sentence.
    """
    return Trainer(options).run()


class Trainer:
    """The models, data, optimizer and position of one run."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.output = Path(options.output)
        self.accelerator = _accelerator(options.precision)
        self.device = self.accelerator.device
        if options.attention == "flex" and self.device.type == "cpu":
            raise ValueError("--attention is flex; on a CPU it must be dense or auto: flex has no backward pass there.")
        set_seed(options.seed)
        check_target(options)
        check_output(options)
        self.target = FrozenTarget(options.target, options.target_dtype, self.device)
        self.draft = self._make_draft().float().to(self.device)
        self.gamma = default_gamma(self.draft.block_size) if options.gamma is None else options.gamma
        self.flex = options.attention == "flex" or (options.attention == "auto" and self.device.type == "cuda")
        if self.flex:
            # Beyond the limit, torch would fall back to code that holds all scores in memory: fail instead.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        with self.accelerator.main_process_first():
            self.data, self.held_out, self.folded = self._read()
        self.steps = self._count_steps()
        optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.model, self.optimizer = self.accelerator.prepare(self.draft, optimizer)
        self.done = self._resume()
        self.held = Held()
        self.stopping = False
        """Whether a process was told to stop; the same in all of them."""

    def _make_draft(self) -> DFlashDraftModel:
        options = self.options
        if options.init is None:
            config = new_config(
                self.target.config,
                options,
                mask_token_id(self.target.tokenizer, self.target.config.vocab_size, options.mask_token_id),
            )
            return DFlashDraftModel(config)
        try:
            draft = DFlashDraftModel.from_pretrained(options.init, dtype=torch.float32)
        except OSError as error:
            raise ValueError(f"--init {options.init} cannot be loaded: {str(error).splitlines()[0]}") from None
        if draft.mask_embedding is not None or draft.draft_config.attention_sinks:
            raise ValueError(
                f"--init {options.init} has a mask embedding of its own or attention sinks, which are not trained here."
            )
        if draft.draft_config.domino is not None:
            raise ValueError(f"--init {options.init} is a Domino draft; allowed: a DFlash or a DFlash2 draft.")
        target = self.target.config
        if options.head == "dflash2" and draft.draft_config.selector is None:
            draft = with_dflash2_head(draft, target.vocab_size, options)
        draft.draft_config.check_target(target.num_hidden_layers, target.hidden_size, target.vocab_size)
        return draft

    def _read(self) -> tuple[Dataset, Dataset, tuple[int, int]]:
        """Samples to train on, held-out ones, and the numbers of --data's samples before and after folding."""
        options = self.options
        arguments = (self.target.tokenizer, self.target.end_ids, options.max_length, dict(options.chat_template_kwargs))
        data = read(options.data, *arguments)
        check_ids(data, self.target.config.vocab_size, "--data")
        found, data = len(data), fold(data)
        folded = found, len(data)
        if options.held_out_data is not None:
            held_out = read([options.held_out_data], *arguments)
            check_ids(held_out, self.target.config.vocab_size, "--held-out-data")
            held_out = fold(held_out)
        else:
            if len(data) < 2:
                raise ValueError(
                    f"--data holds {len(data)} conversation; one is held out, so there must be at least 2."
                )
            count = min(len(data) - 1, max(1, round(len(data) * options.held_out)))
            split = data.train_test_split(test_size=count, seed=options.seed)
            data, held_out = split["train"], split["test"]
        return data, held_out.select(range(min(len(held_out), options.held_out_limit))), folded

    def _count_steps(self) -> int:
        options, ranks = self.options, self.accelerator.num_processes
        batches = max(1, math.ceil(len(self.data) / options.batch_size) // ranks)
        steps = max(1, batches * options.epochs // options.accumulate)
        return steps if options.max_steps is None else min(steps, options.max_steps)

    def blocks(self, ids: torch.Tensor, learned: torch.Tensor, micro_step: int) -> Blocks:
        """Blocks at random anchors, which depend only on the seed, the micro-step and the process."""
        place = f"{self.options.seed}-{micro_step}-{self.accelerator.process_index}"
        generator = torch.Generator().manual_seed(random.Random(place).getrandbits(63))
        anchors = sample_anchors(learned, self.options.anchors, generator)
        if self.flex:
            anchors = F.pad(anchors, (-anchors.shape[1] % _FLEX_ANCHORS, 0), value=-1)
        return make_blocks(ids, learned, anchors, self.draft.block_size, self.draft.mask_token_id)

    def loss(self, model: nn.Module, ids: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The weighted loss of one micro-batch, a scalar.

        Args:
            model: the draft, plain or wrapped for data parallelism.
            ids: [B, T] int64; clean tokens.
        """
        features = self.target.features(ids, self.draft.target_layer_ids)
        context = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        make_mask = flex_mask if self.flex else dense_mask
        masks = {kind: make_mask(blocks, ids.shape[1], kind) for kind in set(self.draft.draft_config.attention)}
        positions = torch.cat((context, blocks.positions), dim=1)
        hidden = model(
            self.target.embed(blocks.ids), features, positions, masks, block_size=blocks.block_size
        ).unflatten(1, (-1, blocks.block_size))
        labels = blocks.labels.view(hidden.shape[:-1])
        selector = self.draft.candidate_selector
        if selector is None:
            losses = row_losses(hidden, labels, self.target.head)
            chosen = torch.zeros_like(losses)
        else:
            losses, chosen = selected_losses(hidden, labels, blocks.previous_ids(), self.target.head, selector)
        if self.options.loss == "dpace":
            weights = dpace_weights(labels, losses, self.options.dpace_alpha)
        else:
            weights = decay_weights(labels, self.gamma)
        return weighted_mean(losses + self.options.selector_weight * chosen, weights)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the 0-based `step`: linear warm-up, then a cosine decay to zero."""
        peak, warm = self.options.learning_rate, round(self.steps * self.options.warm_up)
        if step < warm:
            return peak * (step + 1) / warm
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def run(self) -> Acceptance:
        options, accelerator = self.options, self.accelerator
        reporter = Reporter(self.output / "metrics.jsonl", self.steps, self.done, not accelerator.is_main_process)
        reporter.say(self._opening())
        queue = micro_batches(
            lengths(self.data),
            options.batch_size,
            options.seed,
            accelerator.process_index,
            accelerator.num_processes,
            self.done * options.accumulate,
        )
        # A finished run that is resumed has no step left: its draft is evaluated again.
        finished = self.done == self.steps
        acceptance = self.evaluate() if finished else Acceptance((0,) * self.draft.block_size)
        self.model.train()
        try:
            with held_back() as self.held:
                for step in range(self.done, self.steps):
                    acceptance = self._advance(step, queue, reporter) or acceptance
        finally:
            reporter.close()
        if accelerator.is_main_process:
            self._publish(acceptance, reporter.history)
            reporter.say(f"The draft is saved in {self.output}. {_sentence(acceptance)}")
        accelerator.wait_for_everyone()
        return acceptance

    def _advance(self, step: int, queue: Any, reporter: Reporter) -> Acceptance | None:
        """One step, and the evaluation, if one is due, and the checkpoint behind it.

        Raises:
            Stopped: a signal came. The checkpoint is saved.
        """
        options, acceptance = self.options, None
        began = time.perf_counter()
        loss, rows = self._step(step, queue)
        seconds = time.perf_counter() - began
        now, last = step + 1, step + 1 == self.steps
        if now % options.log_every == 0 or last:
            reporter.record({"step": now, "loss": loss, "learning_rate": self.learning_rate(step)})
        reporter.show(now, loss, rows / seconds)
        if not self.stopping and (now % options.eval_every == 0 or last):
            acceptance = self.evaluate()
            if not self.stopping:
                reporter.record({"step": now, "tau": acceptance.tau, "by_position": acceptance.by_position})
                reporter.say(f"Step {now}. {_sentence(acceptance)}")
        if now % options.save_every == 0 or last or self.stopping:
            self._save(now)
        if self.stopping:
            reporter.say(f"Stopped after step {now:,}, which is saved. To go on, give the same command with --resume.")
            raise Stopped(self.held.number or signal.SIGTERM, said="")
        return acceptance

    def _step(self, step: int, queue: Any) -> tuple[float, int]:
        """One optimizer step; returns the mean loss of all processes and the number of this one's block rows."""
        options, accelerator = self.options, self.accelerator
        total, block_rows = torch.zeros((), device=self.device), 0
        for micro in range(options.accumulate):
            rows = self.data[next(queue)]
            samples = [{"input_ids": a, "spans": b} for a, b in zip(rows["input_ids"], rows["spans"], strict=True)]
            ids, learned = collate(samples, self.device, _FLEX_TOKENS if self.flex else 1)
            blocks = self.blocks(ids, learned, step * options.accumulate + micro)
            waits = micro + 1 < options.accumulate
            with accelerator.no_sync(self.model) if waits else contextlib.nullcontext(), accelerator.autocast():
                loss = self.loss(self.model, ids, blocks) / options.accumulate
            with accelerator.no_sync(self.model) if waits else contextlib.nullcontext():
                accelerator.backward(loss)
            total += loss.detach()
            block_rows += blocks.ids.numel()
        accelerator.clip_grad_norm_(self.model.parameters(), options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # A signal may reach the processes in different steps, or one of them alone: all learn of it here.
        told = torch.full_like(total, bool(self.held.number))
        mean, share = accelerator.reduce(torch.stack((total, told)), reduction="mean").tolist()
        self.stopping = share > 0
        return mean, block_rows

    def evaluate(self) -> Acceptance:
        """Held-out acceptance; each process evaluates its share of the held-out conversations. A signal cuts it."""
        mine = self.held_out.shard(self.accelerator.num_processes, self.accelerator.process_index, contiguous=False)
        with self.accelerator.autocast():
            until_told = takewhile(lambda _: not self.held.number, mine)
            here = held_out_acceptance(self.draft, self.target, until_told, self.device)
        counts = torch.tensor((*here.steps, bool(self.held.number)), device=self.device)
        *steps, told = self.accelerator.reduce(counts, reduction="sum").tolist()
        self.stopping = told > 0
        return Acceptance(tuple(steps))

    def _opening(self) -> str:
        config, mixed = self.draft.draft_config, self.accelerator.mixed_precision
        before, after = self.folded
        lines = [
            f"Training a draft for {self.options.target}",
            f"  draft: {'plain DFlash' if config.selector is None else 'DFlash2'}, {config.num_layers} layers, "
            f"block size {config.block_size}",
            f"  target layers read: {', '.join(map(str, config.target_layer_ids))}",
            f"  data: {len(self.data):,} samples to train on, {len(self.held_out)} held out",
            *([f"  shared beginnings: {before:,} samples folded into {after:,}"] if after < before else []),
            f"  steps: {self.steps:,}" + (f", resumed after step {self.done:,}" if self.done else ""),
            f"  processes: {self.accelerator.num_processes}",
            f"  device: {self.device.type}",
            f"  attention: {'flex' if self.flex else 'dense'}",
            f"  draft precision: {'float32' if mixed == 'no' else mixed}",
        ]
        return "\n".join(lines)

    def _save(self, step: int) -> None:
        """Writes everything that the next step depends on; the checkpoint gets its name only when it is complete."""
        folder = self.output / "checkpoints" / f"step-{step:08d}"
        partial = folder.with_name(f"partial-{step:08d}")
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()  # each process writes its own random state
        if self.accelerator.is_main_process:
            (partial / _STATE).write_text(json.dumps({"step": step, **self._identity()}))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in _checkpoints(self.output)[: -self.options.keep_checkpoints]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _identity(self) -> dict[str, Any]:
        """The values that a resumed run must have in common with this one."""
        return {
            "options": self.options.fingerprint(),
            "data": [digest(path) for path in self.options.data],
            "processes": self.accelerator.num_processes,
            "steps": self.steps,
        }

    def _resume(self) -> int:
        """Loads the last checkpoint, if there is one, and returns its step."""
        found = _checkpoints(self.output)
        if not found:
            return 0
        state = json.loads((found[-1] / _STATE).read_text())
        different = self.options.difference(state["options"])
        different += [name for name, value in self._identity().items() if name != "options" and state[name] != value]
        if different:
            raise ValueError(
                f"--resume: the checkpoint in {found[-1]} was made with other values of {', '.join(different)}; "
                "give the same values, or another --output."
            )
        self.accelerator.load_state(str(found[-1]))
        return state["step"]

    def _publish(self, acceptance: Acceptance, history: list[dict[str, Any]]) -> None:
        save_draft(self.draft, self.output)
        draw_curves(history, self.output / "curves.png")
        write_card(self.output / "README.md", self.options, self.draft, acceptance, len(self.data), len(self.held_out))


def check_output(options: TrainOptions) -> None:
    """Raises ValueError if an earlier run's checkpoints would mix with this one's."""
    if _checkpoints(Path(options.output)) and not options.resume:
        raise ValueError(
            f"--output {options.output} holds checkpoints of an earlier run; go on with --resume, or give another."
        )


def _accelerator(precision: str) -> Accelerator:
    cuda = torch.cuda.is_available()
    mixed = "bf16" if precision == "bf16" or (precision == "auto" and cuda) else "no"
    # The others wait while the first process tokenizes, which may take longer than the default ten minutes.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=24))
    return Accelerator(mixed_precision=mixed, cpu=not cuda, kwargs_handlers=[patience])


def _checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").glob("step-*"))


def _sentence(acceptance: Acceptance) -> str:
    shares = " ".join(f"{share:.0%}" for share in acceptance.by_position)
    rows = f"block rows 1 to {len(acceptance.by_position)}"
    return f"Held-out tau: {acceptance.tau:.2f}. Share of steps that accept {rows}: {shares}"
