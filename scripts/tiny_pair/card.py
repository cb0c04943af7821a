"""The pair's card: what it is, how it was made, and what the evaluation measured."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .corpus import KINDS
from .draft import BLOCK_SIZE
from .evaluate import Outcome


@dataclass(frozen=True, slots=True)
class Making:
    """How a pair was made: what a reader needs to make it again."""

    versions: str
    seed: int
    stages: dict[str, dict[str, str | float]]  # stage -> its minutes and command
    ended_share: float
    answer_count: int
    sizes_bytes: dict[str, int]


def _accept_lens(outcomes: Iterable[Outcome]) -> list[int]:
    return [accept_len for outcome in outcomes for accept_len in outcome.accept_lens]


def tau(outcomes: Iterable[Outcome]) -> float:
    """Mean commit_len over all blocks; 0.0 when there is none."""
    lens = _accept_lens(outcomes)
    return 1 + sum(lens) / len(lens) if lens else 0.0


def _row(name: str, outcomes: list[Outcome]) -> str:
    lens = _accept_lens(outcomes)
    share = {
        "middle": sum(0 < n < BLOCK_SIZE - 1 for n in lens) / max(1, len(lens)),
        "rejected": sum(n < BLOCK_SIZE - 1 for n in lens) / max(1, len(lens)),
        "right": sum(outcome.is_right for outcome in outcomes) / len(outcomes),
        "ended": sum(outcome.ended for outcome in outcomes) / len(outcomes),
    }
    mean_tokens = sum(outcome.new_tokens for outcome in outcomes) / len(outcomes)
    shown = " | ".join(f"{value:.1%}" for value in share.values())
    return f"| {name} | {tau(outcomes):.2f} | {len(lens)} | {shown} | {mean_tokens:.1f} |"


def _positions(lens: list[int]) -> str:
    rows = ["| k | reached | accepted of reached | accepted of all |", "|---|---|---|---|"]
    for k in range(1, BLOCK_SIZE):
        reached, accepted = sum(n >= k - 1 for n in lens), sum(n >= k for n in lens)
        of_reached, of_all = accepted / max(1, reached), accepted / max(1, len(lens))
        rows.append(f"| {k} | {reached} | {of_reached:.1%} | {of_all:.1%} |")
    return "\n".join(rows)


def _measures(outcomes: list[Outcome]) -> str:
    by_kind = {kind: [outcome for outcome in outcomes if outcome.example.kind == kind] for kind in KINDS}
    table = [_row(kind, chosen) for kind, chosen in by_kind.items()] + [_row("all", outcomes)]
    lens = _accept_lens(outcomes)
    counts = Counter(lens)
    histogram = " | ".join(str(counts[n]) for n in range(BLOCK_SIZE))
    least_gap = min(outcome.least_gap for outcome in outcomes)
    same = sum(outcome.same_ids for outcome in outcomes)
    return f"""| kind | tau | blocks | 0 < accept_len < 7 | accept_len < 7 | right | ended | mean tokens |
|---|---|---|---|---|---|---|---|
{chr(10).join(table)}

"right": arithmetic ends in the reference's number; code stands in a closed fence and parses;
chat ends by itself.
"ended": `<|im_end|>` within 200 tokens. The last block of an answer is cut at `<|im_end|>`.

accept_len | {" | ".join(str(n) for n in range(BLOCK_SIZE))}
---|{"---|" * BLOCK_SIZE}
blocks | {histogram}

Acceptance by position k in the block (k = 0 is the anchor):

{_positions(lens)}

Greedy DFlash ids equal plain greedy ids on {same} of {len(outcomes)} held-out prompts. The smallest gap
between the two best logits along the plain greedy paths is {least_gap:.2e}."""


def write_card(path: Path, outcomes: list[Outcome], making: Making) -> str:
    """Write the card and return its table of measures."""
    measures = _measures(outcomes)
    sizes = ", ".join(f"{name} {size:,} bytes" for name, size in making.sizes_bytes.items())
    stages = "\n".join(
        f"  * {name}: {made['minutes']} min, `{made['command']}`" for name, made in making.stages.items()
    )
    per_kind = len(outcomes) // len(KINDS)
    path.write_text(
        f"""# tiny-pair

A tiny Qwen3 target (`target/`) and a plain DFlash draft for it (`draft/`), made from nothing by
`scripts/train_tiny_pair.py`, so that a server, its tests and its benchmarks run on any machine. The pair
knows small sums, short Python functions and a little talk about both; it is no use for anything else.

* target: 6 layers, hidden 256, 4 heads over 2 kv heads, tied embeddings, byte-level BPE of 1792 entries,
  bfloat16.
* draft: 2 layers, block_size 8, taps on target layers 1, 3 and 4, no embedding and no head of its own,
  bfloat16.
* `heldout.jsonl`: {per_kind} prompts of each kind with reference answers; none shares its answer with the
  training data.

## Measured

Greedy, float32 from the bfloat16 weights, a plain torch loop over the held-out prompts:

{measures}

## Made

* seed {making.seed}; {making.versions}
* stages, with the time each took and the command that ran it:
{stages}
* size: {sizes}, {sum(making.sizes_bytes.values()):,} in all
* The draft was trained on {making.answer_count:,} answers of the target's own; {making.ended_share:.1%} of
  the answers it gave to training prompts ended by themselves.

The data is made by the script from templates, plus sources of the Python standard library as plain text.
A run with the same seed and versions sees the same data in the same order; weights may differ in the last
bits between machines.
""",
        encoding="utf-8",
    )
    return measures
