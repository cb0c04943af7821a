"""Make the tiny pair from nothing: data, tokenizer, Qwen3 target, its own answers, DFlash draft, evaluation, card.

The draft is made as any user makes one: `sglang-dflash train`, on answers regenerated through a server. A run that
stopped goes on where it was, but for the target's training. `--smoke` runs all stages in a few minutes with tiny
settings, into a temporary folder.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from sglang_dflash.cli.regenerate import regenerate
from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_ENVIRONMENT
from sglang_dflash.training import TrainOptions
from sglang_dflash.training.trainer import train
from tiny_pair import corpus
from tiny_pair.card import Making, tau, write_card
from tiny_pair.conversations import make_conversations, training_prompts
from tiny_pair.evaluate import MAX_NEW_TOKENS, evaluate, later_turns
from tiny_pair.target import load_target
from tiny_pair.target_stage import make_target
from tiny_pair.tokenizer import load_tokenizer
from tiny_pair.wording import Example

_ROOT = Path(__file__).resolve().parents[1]
_DEFAULT_OUT = _ROOT / "python/sglang_dflash/assets/tiny-pair"
_SIZE_LIMIT_BYTES = 12_000_000
_BLOCK_SIZE, _LAYERS, _TAPS = 8, 2, (1, 3, 4)
# The draft sees less chat than the target, as drafts do: one more reason for a lower tau there.
_DRAFT_SHARES = {"arithmetic": 0.45, "code": 0.4, "chat": 0.15}
_TURNS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of every stage."""

    conversations: int = 52_000
    library_rows: int = 500
    target_steps: int = 2_600
    batch_tokens: int = 4_096
    peak: float = 2e-3
    answers: int = 3_000
    draft_steps: int = 1_500
    draft_batch: int = 16
    draft_anchors: int = 32
    draft_peak: float = 2e-3
    heldout_per_kind: int = 200


_SMOKE = Settings(
    conversations=600,
    library_rows=20,
    target_steps=150,
    batch_tokens=2_048,
    answers=60,
    draft_steps=20,
    draft_batch=4,
    draft_anchors=8,
    heldout_per_kind=6,
)


def _arguments() -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen3 target and a DFlash draft for it.")
    parser.add_argument("--out", type=Path, help="folder to write (default: the embedded pair)")
    parser.add_argument("--work", type=Path, help="folder for answers and the draft's run (default: build/tiny-pair)")
    parser.add_argument("--seed", type=int, default=7)
    for name in ("target-steps", "draft-steps", "answers"):
        parser.add_argument(f"--{name}", type=int, help="default: see Settings in this script")
    parser.add_argument("--keep-target", action="store_true", help="use the target that stands in --out")
    parser.add_argument("--keep-draft", action="store_true", help="use what stands in --out: measure, write the card")
    parser.add_argument("--only-target", action="store_true", help="stop behind the target")
    parser.add_argument("--smoke", action="store_true", help="a quick run of all stages, in a temporary one")
    args = parser.parse_args()
    base = _SMOKE if args.smoke else Settings()
    chosen = {name: getattr(args, name) for name in ("target_steps", "draft_steps", "answers")}
    for name, value in chosen.items():
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, but it must be at least 1.")
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="tiny-pair-")) if args.smoke else _DEFAULT_OUT
    if args.work is None:
        args.work = args.out / "work" if args.smoke else _ROOT / "build/tiny-pair"
    for kept, name in ((args.keep_target or args.keep_draft, "target"), (args.keep_draft, "draft")):
        if kept and not (args.out / name / "model.safetensors").is_file():
            parser.error(f"--keep-{name} needs a trained {name} in {args.out / name}, and there is none.")
    values = {name: getattr(base, name) for name in Settings.__dataclass_fields__}
    return args, Settings(**values | {name: value for name, value in chosen.items() if value is not None})


@contextmanager
def _recorded(out: Path, stage: str) -> Iterator[None]:
    """Note the stage's minutes and command in made.json, which outlives a stop between stages."""
    started = time.perf_counter()
    yield
    minutes = round((time.perf_counter() - started) / 60, 1)
    path = out / "made.json"
    made = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    made[stage] = {
        "minutes": minutes,
        "command": shlex.join(["python", "scripts/train_tiny_pair.py", *sys.argv[1:]]),
    }
    path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"{stage}: {minutes} min", flush=True)


def _train_target(args: argparse.Namespace, settings: Settings, heldout: list[Example]) -> None:
    conversations = make_conversations(args.seed, settings.conversations, heldout)
    shared = corpus.shared_answers((text for talk in conversations for text in talk.answers()), heldout)
    if shared:
        sys.exit(f"{len(shared)} held-out answers stand in the training data, the first: {shared[0]!r}.")
    with _recorded(args.out, "target"):
        make_target(
            args.out / "target",
            conversations,
            settings.target_steps,
            settings.batch_tokens,
            settings.peak,
            args.seed,
            settings.library_rows,
        )


def _own_answers(args: argparse.Namespace, settings: Settings, heldout: list[Example]) -> Path:
    """The target's answers to new conversations, without those that a held-out prompt's reference gives."""
    args.work.mkdir(parents=True, exist_ok=True)
    asked, answered, kept = (args.work / f"{name}.jsonl" for name in ("asked", "answered", "answers"))
    talks = training_prompts(args.seed, settings.answers, heldout, _DRAFT_SHARES)
    asked.write_text("".join(json.dumps({"messages": talk.messages}) + "\n" for talk in talks), encoding="utf-8")
    os.environ |= TINY_ENVIRONMENT
    regenerate(
        asked,
        answered,
        str(args.out / "target"),
        max_new_tokens=MAX_NEW_TOKENS,
        concurrency=48,
        server_args="--dtype float32 --max-total-tokens 65536 --max-running-requests 48 --log-level warning",
    )
    closed = {example.answer for example in heldout}
    with answered.open(encoding="utf-8") as source, kept.open("w", encoding="utf-8") as file:
        for line in source:
            if not any(message["content"] in closed for message in json.loads(line)["messages"]):
                file.write(line)
    return kept


def _train_draft(args: argparse.Namespace, settings: Settings, answers: Path) -> None:
    options = TrainOptions(
        target=str(args.out / "target"),
        data=(str(answers),),
        output=str(args.work / "draft"),
        layers=_LAYERS,
        block_size=_BLOCK_SIZE,
        taps=_TAPS,
        anchors=settings.draft_anchors,
        batch_size=settings.draft_batch,
        max_length=1024,
        epochs=1000,
        max_steps=settings.draft_steps,
        learning_rate=settings.draft_peak,
        seed=args.seed,
        eval_every=max(1, settings.draft_steps // 10),
        save_every=max(1, settings.draft_steps // 5),
        resume=True,
    )
    train(options)
    folder = args.out / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy2(args.work / "draft" / name, folder / name)


def _sizes_bytes(out: Path) -> dict[str, int]:
    sizes = {name: sum(file.stat().st_size for file in (out / name).iterdir()) for name in ("target", "draft")}
    sizes["heldout.jsonl"] = (out / "heldout.jsonl").stat().st_size
    total = sum(sizes.values())
    if total > _SIZE_LIMIT_BYTES:
        sys.exit(f"The pair takes {total:,} bytes, more than the allowed {_SIZE_LIMIT_BYTES:,}.")
    return sizes


def _versions() -> str:
    libraries = ("torch", "transformers", "accelerate", "sglang", "sglang-dflash")
    return ", ".join(f"{name} {version(name)}" for name in libraries) + f", Python {platform.python_version()}"


def main() -> None:
    """Run every stage; leaves target/, draft/, heldout.jsonl and README.md in --out."""
    args, settings = _arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    heldout = corpus.make_heldout(args.seed, settings.heldout_per_kind)
    corpus.write_heldout(args.out / "heldout.jsonl", heldout)
    if not (args.keep_target or args.keep_draft):
        _train_target(args, settings, heldout)
    if args.only_target:
        return
    if not args.keep_draft:
        with _recorded(args.out, "answers"):
            answers = _own_answers(args, settings, heldout)
        with _recorded(args.out, "draft"):
            _train_draft(args, settings, answers)
    with _recorded(args.out, "evaluation"):
        tokenizer, model = load_tokenizer(args.out / "target"), load_target(args.out / "target")
        draft = DFlashDraftModel.from_pretrained(args.out / "draft", dtype=torch.float32).eval()
        outcomes = evaluate(model, draft, tokenizer, heldout)
        turns = later_turns(model, draft, tokenizer, heldout, _TURNS)
    making = Making(
        _versions(),
        args.seed,
        json.loads((args.out / "made.json").read_text(encoding="utf-8")),
        f"{settings.target_steps:,} steps of {settings.batch_tokens:,} ids, {settings.conversations:,} conversations",
        f"`sglang-dflash train`, {settings.draft_steps:,} steps of {settings.draft_batch} conversations with up to "
        f"{settings.draft_anchors}\n  blocks each, on the target's own greedy answers to {settings.answers:,} "
        "conversations",
        _BLOCK_SIZE,
        _sizes_bytes(args.out),
    )
    print(write_card(args.out / "README.md", outcomes, turns, making))
    accept_lens = [accept_len for outcome in outcomes for accept_len in outcome.accept_lens]
    print(f"tau {tau(accept_lens):.2f}; the pair stands in {args.out}")


if __name__ == "__main__":
    main()
