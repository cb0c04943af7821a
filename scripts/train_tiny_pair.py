"""Make the tiny pair from nothing: data, tokenizer, Qwen3 target, DFlash draft, evaluation and card.

Everything is seeded and counted in steps, so that one seed always sees the same data in the same order.
`--smoke` runs all stages in a minute or two with tiny settings, into a temporary folder.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tiny_pair import corpus, target
from tiny_pair.card import Making, tau, write_card
from tiny_pair.draft import load_draft, save_draft
from tiny_pair.draft_training import train_draft
from tiny_pair.evaluate import evaluate
from tiny_pair.regenerate import regenerate
from tiny_pair.tokenizer import MASK, load_tokenizer, save_tokenizer, train_tokenizer
from tiny_pair.wording import Example

_DEFAULT_OUT = Path(__file__).resolve().parents[1] / "python/sglang_dflash/assets/tiny-pair"
_VOCAB_SIZE = 1792
_SIZE_LIMIT_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of every stage."""

    examples: int = 100_000
    library_rows: int = 5_000
    target_steps: int = 2_000
    batch_tokens: int = 4_096
    answers: int = 7_000
    draft_steps: int = 450
    draft_batch: int = 48
    peak: float = 2e-3
    heldout_per_kind: int = 40


_SMOKE = Settings(
    examples=2_000,
    library_rows=50,
    target_steps=40,
    batch_tokens=2_048,
    answers=150,
    draft_steps=20,
    draft_batch=16,
    heldout_per_kind=3,
)


def _arguments() -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen3 target and a DFlash draft for it.")
    parser.add_argument("--out", type=Path, help="folder to write (default: the embedded pair)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--draft-steps", type=int)
    parser.add_argument("--answers", type=int, help="prompts whose answers the draft learns from")
    parser.add_argument("--keep-target", action="store_true", help="use the target that stands in --out")
    parser.add_argument("--smoke", action="store_true", help="a quick run of all stages, in a temporary one")
    args = parser.parse_args()
    base = _SMOKE if args.smoke else Settings()
    chosen = {name: getattr(args, name) for name in ("target_steps", "draft_steps", "answers")}
    for name, value in chosen.items():
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, but it must be at least 1.")
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="tiny-pair-")) if args.smoke else _DEFAULT_OUT
    if args.keep_target and not (args.out / "target/model.safetensors").is_file():
        parser.error(f"--keep-target needs a trained target in {args.out}/target, and there is none.")
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


def _make_target(folder: Path, examples: list[Example], settings: Settings, seed: int) -> None:
    library = corpus.library_text()
    texts = [f"{example.prompt}\n{example.answer}" for example in examples[:10_000]]
    texts += [source[:20_000] for source in library]
    save_tokenizer(train_tokenizer(texts, _VOCAB_SIZE), folder, target.MAX_POSITIONS)
    tokenizer = load_tokenizer(folder)
    rows = target.answer_rows(tokenizer, examples)
    rows += target.library_rows(tokenizer, library)[: settings.library_rows]
    config = target.target_config(tokenizer)
    target.train_target(
        config,
        rows,
        folder,
        steps=settings.target_steps,
        batch_tokens=settings.batch_tokens,
        peak=settings.peak,
        seed=seed,
    )


def _sizes_bytes(out: Path) -> dict[str, int]:
    folders = ("target", "draft")
    sizes = {name: sum(file.stat().st_size for file in (out / name).iterdir()) for name in folders}
    total = sum(sizes.values())
    if total > _SIZE_LIMIT_BYTES:
        sys.exit(f"The pair takes {total:,} bytes, more than the allowed {_SIZE_LIMIT_BYTES:,}.")
    return sizes


def main() -> None:
    """Run every stage; leaves target/, draft/, heldout.jsonl and README.md in --out."""
    args, settings = _arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    heldout = corpus.make_heldout(args.seed, settings.heldout_per_kind)
    examples = corpus.make_training(args.seed, settings.examples, heldout)
    shared = corpus.shared_answers([example.answer for example in examples], heldout)
    if shared:
        sys.exit(f"{len(shared)} held-out answers stand in the training data, the first: {shared[0]!r}.")
    corpus.write_heldout(args.out / "heldout.jsonl", heldout)
    if not args.keep_target:
        with _recorded(args.out, "target"):
            _make_target(args.out / "target", examples, settings, args.seed)
    tokenizer, model = load_tokenizer(args.out / "target"), target.load_target(args.out / "target")
    mask_token_id = tokenizer.convert_tokens_to_ids(MASK)

    with _recorded(args.out, "answers"):
        prompts = list(dict.fromkeys(example.prompt for example in examples))[: settings.answers]
        closed = {example.answer for example in heldout}
        answers, ended_share = regenerate(model, tokenizer, prompts, closed, args.seed)
    if not answers:
        sys.exit("The target ended none of its answers: train it for more steps (--target-steps).")
    with _recorded(args.out, "draft"):
        draft = train_draft(
            model,
            answers,
            mask_token_id,
            steps=settings.draft_steps,
            batch=settings.draft_batch,
            peak=settings.peak,
            seed=args.seed,
        )
        save_draft(draft, model.config, mask_token_id, args.out / "draft")
    with _recorded(args.out, "evaluation"):
        served = load_draft(args.out / "draft", model.config)
        outcomes = evaluate(model, served, tokenizer, heldout, mask_token_id)

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    versions += f", Python {platform.python_version()}"
    stages = json.loads((args.out / "made.json").read_text(encoding="utf-8"))
    making = Making(versions, args.seed, stages, ended_share, len(answers), _sizes_bytes(args.out))
    print(write_card(args.out / "README.md", outcomes, making))
    print(f"tau {tau(outcomes):.2f}; the pair stands in {args.out}")


if __name__ == "__main__":
    main()
