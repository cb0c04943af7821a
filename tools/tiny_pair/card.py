"""The pair's card: what it is, how it was made, and what the evaluation measured."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.tiny_pair.corpus import KINDS
from tools.tiny_pair.evaluate import Outcome, TurnOutcome
from tools.tiny_pair.shapes import Shape


@dataclass(frozen=True, slots=True)
class Making:
    """How a pair was made: what a reader needs to reproduce it."""

    shape: Shape
    pair: str  # the value of --pair
    versions: str
    seed: int
    stages: dict[str, dict[str, str | float]]  # stage -> its minutes and command
    target: str  # one line on its training
    draft: str
    block_size: int
    sizes_bytes: dict[str, int]


def _accept_lens(outcomes: Iterable[Outcome]) -> list[int]:
    return [accept_len for outcome in outcomes for accept_len in outcome.accept_lens]


def tau(accept_lens: Sequence[int]) -> float:
    """Mean commit_len over all steps; 0.0 when there is none."""
    return 1 + sum(accept_lens) / len(accept_lens) if accept_lens else 0.0


def _row(name: str, outcomes: list[Outcome], full: int) -> str:
    lens = _accept_lens(outcomes)
    share = {
        "middle": sum(0 < n < full for n in lens) / max(1, len(lens)),
        "rejected": sum(n < full for n in lens) / max(1, len(lens)),
        "right": sum(outcome.right for outcome in outcomes) / len(outcomes),
        "ended": sum(outcome.ended for outcome in outcomes) / len(outcomes),
    }
    mean_tokens = sum(outcome.new_tokens for outcome in outcomes) / len(outcomes)
    shown = " | ".join(f"{value:.1%}" for value in share.values())
    return f"| {name} | {tau(lens):.2f} | {len(lens)} | {shown} | {mean_tokens:.1f} |"


def _by_position(by_kind: dict[str, list[int]], full: int) -> str:
    """Per row k: the share of accepted drafts among the steps that reached row k, and among all steps."""
    rows = [f"| k | {' | '.join(by_kind)} |", "|---|" + "---|" * len(by_kind)]
    for k in range(1, full + 1):
        cells = []
        for lens in by_kind.values():
            reached, accepted = sum(n >= k - 1 for n in lens), sum(n >= k for n in lens)
            cells.append(f"{accepted / max(1, reached):.1%}, {accepted / max(1, len(lens)):.1%}")
        rows.append(f"| {k} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _measures(outcomes: list[Outcome], turns: list[TurnOutcome], full: int) -> str:
    by_kind = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in KINDS}
    by_kind["all"] = outcomes
    table = "\n".join(_row(kind, chosen, full) for kind, chosen in by_kind.items())
    counts = Counter(_accept_lens(outcomes))
    histogram = " | ".join(str(counts[n]) for n in range(full + 1))
    least_gap = min(outcome.least_gap for outcome in outcomes)
    same = sum(outcome.greedy for outcome in outcomes)
    later = "; ".join(f"turn {number}: {tau(turn.accept_lens):.2f}" for number, turn in enumerate(turns, start=1))
    return f"""| kind | tau | steps | 0 < accept_len < {full} | accept_len < {full} | right | ended | mean tokens |
|---|---|---|---|---|---|---|---|
{table}

"right": arithmetic ends in the reference's number; code stands in a closed fence and parses;
chat ends by itself. "ended": `<|im_end|>` within 200 tokens.

accept_len | {" | ".join(str(n) for n in range(full + 1))}
---|{"---|" * (full + 1)}
steps | {histogram}

Acceptance by row k of the block (k = 0 is the anchor): of the steps that reached row k, of all steps.

{_by_position({kind: _accept_lens(chosen) for kind, chosen in by_kind.items()}, full)}

tau in conversations of {len(turns)} held-out prompts, each turn with as many of each kind: {later}.

Ids drafted and verified equal the argmax of one plain pass over prompt and answer on {same} of {len(outcomes)}
held-out prompts. The smallest gap between the two best logits on the way is {least_gap:.2e}."""


_AGENT = """,
and follows a coding agent's sessions with their calls of tools"""


def _session_measures(turns: list[TurnOutcome]) -> str:
    """The table of agents' sessions; "" without them."""
    if not turns:
        return ""
    rows = [(str(number), [turn]) for number, turn in enumerate(turns, start=1)]
    rows.append(("2 and later", turns[1:]))
    lines = []
    for name, some in rows:
        lens = [accept_len for turn in some for accept_len in turn.accept_lens]
        answers = sum(turn.answers for turn in some)
        share = sum(turn.expected for turn in some) / max(1, answers)
        lines.append(f"| {name} | {tau(lens):.2f} | {len(lens)} | {answers} | {share:.1%} |")
    return "\n".join(
        [
            "",
            f"Sessions of a coding agent ({turns[0].answers} that were not trained on, with the target's own answers):",
            "",
            "| turn | tau | steps | answers | as the script expects |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def write_card(
    path: Path, outcomes: list[Outcome], turns: list[TurnOutcome], agent_turns: list[TurnOutcome], making: Making
) -> str:
    """Writes the card; returns its measures section."""
    measures = _measures(outcomes, turns, making.block_size - 1) + "\n" + _session_measures(agent_turns)
    sizes = ", ".join(f"{name} {size:,} bytes" for name, size in making.sizes_bytes.items())
    stages = "\n".join(
        f"  * {name}: {made['minutes']} min, `{made['command']}`" for name, made in making.stages.items()
    )
    per_kind = len(outcomes) // len(KINDS)
    taps = ", ".join(map(str, making.shape.taps))
    path.write_text(
        f"""# {making.shape.name}

A tiny target (`target/`) and a plain DFlash draft for it (`draft/`), made from nothing by
`python -m tools.tiny_pair --pair {making.pair}`, so that a server, its tests and its benchmarks run on any machine.
The pair knows small sums, short Python functions and a little talk about both{_AGENT if agent_turns else ""};
it is no use for anything else.

* target: {making.shape.described}; tied embeddings,
  byte-level BPE of 1792 entries, bfloat16.
* draft: 2 layers, block_size {making.block_size}, taps on target layers {taps}, no embedding and no head of
  its own, bfloat16.
* held-out prompts: {per_kind} of each kind with reference answers (`tiny-pair/heldout.jsonl`); none shares its answer
  with the training data.

Chat is told so that every word depends on the ones just drawn: the target follows, a draft that proposes a whole
block at once cannot. That is why its tau is lower.

## Measured

Greedy, float32 from the bfloat16 weights, `spec_generate` of `sglang_dflash.reference` on the held-out prompts:

{measures}

## Made

* seed {making.seed}; {making.versions}
* stages, with the time each took and the command that ran it:
{stages}
* target: {making.target}
* draft: {making.draft}
* size: {sizes}, {sum(making.sizes_bytes.values()):,} in all

The data is made by the script from templates, plus sources of the Python standard library as plain text.
A run with the same seed and versions sees the same data in the same order; weights may differ in the last
bits between machines.
""",
        encoding="utf-8",
    )
    return measures
