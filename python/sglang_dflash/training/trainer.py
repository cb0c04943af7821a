"""The training run: steps, evaluations, checkpoints, resumption; in one process or several under torchrun."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import nn

from sglang_dflash.serving.lifetime import Held, Stopped, held_back
from sglang_dflash.training.blocks import MASKS, Blocks, make_blocks, sample_anchors
from sglang_dflash.training.conversations import collate, learned_counts, lengths, micro_batches
from sglang_dflash.training.data import LEARNED, read_data
from sglang_dflash.training.evaluation import Acceptance, Evaluation, held_out_acceptance
from sglang_dflash.training.feature_cache import FeatureCache
from sglang_dflash.training.frozen import FrozenTarget, check_target
from sglang_dflash.training.initial import first_draft
from sglang_dflash.training.layout import save_draft
from sglang_dflash.training.loss import (
    LossHead,
    ShortLoss,
    decay_weights,
    dpace_weights,
    row_losses,
    selected_losses,
    weighted_mean,
)
from sglang_dflash.training.options import TrainOptions, default_gamma
from sglang_dflash.training.progress import Reporter
from sglang_dflash.training.report import Card, digest, draw_curves, write_card

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
            raise ValueError("--attention is flex; on a CPU it must be split, dense or auto: flex cannot learn there.")
        self.attention = options.attention
        if options.attention == "auto":
            self.attention = "flex" if self.device.type == "cuda" else "split"
        set_seed(options.seed)
        check_target(options)
        check_output(options)
        self.target = FrozenTarget(options.target, options.target_dtype, self.device)
        with self.accelerator.main_process_first():
            self.data = read_data(options, self.target)
        self.draft = first_draft(options, self.target, self.data).to(self.device)
        self.gamma = default_gamma(self.draft.block_size) if options.gamma is None else options.gamma
        if self.flex:
            # Beyond the limit, torch would fall back to code that holds all scores in memory: fail instead.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.short_loss: ShortLoss | None = None
        if options.loss_ids:
            counts = learned_counts(self.data.learned, self.target.config.vocab_size)
            self.short_loss = ShortLoss(counts, options.loss_ids)
        self.cache = self._open_cache()
        self.steps = self._count_steps()
        optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.model, self.optimizer = self.accelerator.prepare(self.draft, optimizer)
        self.tokens, self.seconds, self.began_at = 0, 0.0, time.monotonic()
        self.done = self._resume()
        self.held = Held()
        self.stopping = False
        """Whether a process was told to stop; the same in all of them."""

    @property
    def flex(self) -> bool:
        return self.attention == "flex"

    def _open_cache(self) -> FeatureCache | None:
        if self.options.cache is None:
            return None
        cache = FeatureCache(Path(self.options.cache), self.target, self.draft.target_layer_ids)
        cache.check_space(sample["input_ids"] for some in self.data.all() for sample in some)
        return cache

    def features(self, samples: Sequence[Mapping[str, Any]], ids: torch.Tensor) -> torch.Tensor:
        """Context features of a batch: of the cache, or computed."""
        if self.cache is not None:
            return self.cache.features(samples, ids)
        return self.target.features(ids, self.draft.target_layer_ids)

    def _count_steps(self) -> int:
        options, ranks = self.options, self.accelerator.num_processes
        batches = max(1, math.ceil(len(self.data.learned) / options.batch_size) // ranks)
        steps = max(1, batches * options.epochs // options.accumulate)
        return steps if options.max_steps is None else min(steps, options.max_steps)

    def generator(self, micro_step: int) -> torch.Generator:
        """Draws what is random in a micro-step: it depends only on the seed, the micro-step and the process."""
        place = f"{self.options.seed}-{micro_step}-{self.accelerator.process_index}"
        return torch.Generator().manual_seed(random.Random(place).getrandbits(63))

    def blocks(self, ids: torch.Tensor, learned: torch.Tensor, generator: torch.Generator) -> Blocks:
        """Blocks at random anchors."""
        anchors = sample_anchors(learned, self.options.anchors, generator)
        if self.flex:
            anchors = F.pad(anchors, (-anchors.shape[1] % _FLEX_ANCHORS, 0), value=-1)
        draft = self.draft
        first = draft.draft_config.anchor_first
        return make_blocks(ids, learned, anchors, draft.block_size, draft.mask_token_id, first)

    def loss(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        features: torch.Tensor,
        blocks: Blocks,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """The weighted loss of one micro-batch, a scalar.

        Args:
            model: the draft, plain or wrapped for data parallelism.
            ids: [B, T] int64; clean tokens.
            features: [B, T, taps * H]; the target's, of `ids`.
            generator: draws the ids of a loss over few ids.
        """
        context = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        make_mask = MASKS[self.attention]
        masks = {kind: make_mask(blocks, ids.shape[1], kind) for kind in set(self.draft.draft_config.attention)}
        positions = torch.cat((context, blocks.positions), dim=1)
        hidden = model(
            self.target.embed(blocks.ids), features, positions, masks, block_size=blocks.block_size
        ).unflatten(1, (-1, blocks.block_size))
        labels = blocks.labels.view(hidden.shape[:-1])
        over = LossHead(self.target.head, labels)
        if self.short_loss is not None:
            over = self.short_loss.drawn(labels, self.target.head_of, generator)
        selector = self.draft.candidate_selector
        if selector is None:
            losses = row_losses(hidden, over)
            chosen = torch.zeros_like(losses)
        else:
            losses, chosen = selected_losses(hidden, over, blocks.previous_ids(), selector)
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
            lengths(self.data.learned),
            options.batch_size,
            options.seed,
            accelerator.process_index,
            accelerator.num_processes,
            self.done * options.accumulate,
        )
        self.model.train()
        evaluation: Evaluation | None = None
        try:
            with held_back() as self.held:
                for step in range(self.done, self.steps):
                    evaluation = self._advance(step, queue, reporter) or evaluation
                if evaluation is None:  # a finished run that is resumed: its draft is evaluated again
                    evaluation = self.evaluate()
        finally:
            reporter.close()
            if self.cache is not None:
                self.cache.close()
        if accelerator.is_main_process:
            self._publish(evaluation, reporter.history)
            reporter.say(f"The draft is saved in {self.output}. {evaluation}")
        accelerator.wait_for_everyone()
        return evaluation.whole

    def _advance(self, step: int, queue: Any, reporter: Reporter) -> Evaluation | None:
        """One step, and the evaluation, if one is due, and the checkpoint behind it.

        Raises:
            Stopped: a signal came. The checkpoint is saved.
        """
        options, evaluation = self.options, None
        began = time.perf_counter()
        loss, rows = self._step(step, queue)
        seconds = time.perf_counter() - began
        now, last = step + 1, step + 1 == self.steps
        if now % options.log_every == 0 or last:
            reporter.record({"step": now, "loss": loss, "learning_rate": self.learning_rate(step)})
        reporter.show(now, loss, rows / seconds)
        if not self.stopping and (now % options.eval_every == 0 or last):
            evaluation = self.evaluate()
            if not self.stopping:
                reporter.record({"step": now, **self._progress(), **evaluation.row()})
                reporter.say(f"Step {now}. {evaluation}")
        if now % options.save_every == 0 or last or self.stopping:
            self._save(now)
        if self.stopping:
            reporter.say(f"Stopped after step {now:,}, which is saved. To go on, give the same command with --resume.")
            raise Stopped(self.held.number or signal.SIGTERM, said="")
        return evaluation

    def _progress(self) -> dict[str, float]:
        """Learned tokens so far, of all processes and epochs, and the hours that it took."""
        return {"tokens": self.tokens, "hours": round((self.seconds + time.monotonic() - self.began_at) / 3600, 4)}

    def _step(self, step: int, queue: Any) -> tuple[float, int]:
        """One optimizer step; returns the mean loss of all processes and the number of this one's block rows."""
        options, accelerator = self.options, self.accelerator
        total, block_rows = torch.zeros((), device=self.device), 0
        tokens = torch.zeros_like(total)
        for micro in range(options.accumulate):
            rows = self.data.learned[next(queue)]
            samples = [{"input_ids": a, "spans": b} for a, b in zip(rows["input_ids"], rows["spans"], strict=True)]
            ids, learned = collate(samples, self.device, _FLEX_TOKENS if self.flex else 1)
            features = self.features(samples, ids)
            generator = self.generator(step * options.accumulate + micro)
            blocks = self.blocks(ids, learned, generator)
            waits = micro + 1 < options.accumulate
            with accelerator.no_sync(self.model) if waits else contextlib.nullcontext(), accelerator.autocast():
                loss = self.loss(self.model, ids, features, blocks, generator) / options.accumulate
            with accelerator.no_sync(self.model) if waits else contextlib.nullcontext():
                accelerator.backward(loss)
            total += loss.detach()
            tokens += learned.sum()
            block_rows += blocks.ids.numel()
        accelerator.clip_grad_norm_(self.model.parameters(), options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # A signal may reach the processes in different steps, or one of them alone: all learn of it here.
        told = torch.full_like(total, bool(self.held.number))
        mean, share, each = accelerator.reduce(torch.stack((total, told, tokens)), reduction="mean").tolist()
        self.tokens += round(each * accelerator.num_processes)
        self.stopping = share > 0
        return mean, block_rows

    def evaluate(self) -> Evaluation:
        """Held-out acceptance; each process evaluates its share of the held-out conversations. A signal cuts it."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        counts = []
        for samples in self.data.held_out.values():
            mine = takewhile(lambda _: not self.held.number, samples.shard(ranks, rank, contiguous=False))
            with self.accelerator.autocast():
                here = held_out_acceptance(self.draft, self.target, mine, self.features, self.device)
            counts.append((*here.steps, bool(self.held.number)))
        found = self.accelerator.reduce(torch.tensor(counts, device=self.device), reduction="sum").tolist()
        self.stopping = any(told for *_, told in found)
        kinds = zip(self.data.held_out, found, strict=True)
        return Evaluation({kind: Acceptance(tuple(steps)) for kind, (*steps, _) in kinds})

    def _opening(self) -> str:
        config, mixed = self.draft.draft_config, self.accelerator.mixed_precision
        before, after = self.data.found, self.data.folded
        held_out = f"{self.data.held_out_count} held out"
        if LEARNED in self.data.held_out:
            held_out = "none held out. Warning: tau is measured on what is learned; --held-out-data measures other text"
        lines = [
            f"Training a draft for {self.options.target}",
            f"  draft: {'plain DFlash' if config.selector is None else 'DFlash2'}, {config.num_layers} layers, "
            f"block size {config.block_size}",
            f"  target layers read: {', '.join(map(str, config.target_layer_ids))}",
            f"  data: {len(self.data.learned):,} samples to train on, {held_out}",
            *([f"  shared beginnings: {before:,} samples folded into {after:,}"] if after < before else []),
            f"  steps: {self.steps:,}" + (f", resumed after step {self.done:,}" if self.done else ""),
            f"  processes: {self.accelerator.num_processes}",
            f"  device: {self.device.type}",
            f"  attention: {self.attention}",
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
            (partial / _STATE).write_text(json.dumps({"step": step, **self._progress(), **self._identity()}))
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
        self.tokens, self.seconds = state["tokens"], state["hours"] * 3600
        return int(state["step"])

    def _publish(self, evaluation: Evaluation, history: list[dict[str, Any]]) -> None:
        save_draft(self.draft, self.output)
        draw_curves(history, self.output / "curves.png")
        card = Card(self.options, self.draft, self.data, evaluation, **self._progress())
        write_card(self.output / "README.md", card)


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
