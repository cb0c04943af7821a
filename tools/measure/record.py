"""Records what a draft proposes at every place of the target's own answers, so that policies of rows can be replayed.

Greedy answers, in float32, without a server. For each place of an answer, the file holds the draft's best candidates
for the rows behind it, their probabilities, and which of them is the target's token. `replay_rows` reads it.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from sglang_dflash.reference import DFlashDraftModel, FeatureTaps, spec_generate
from sglang_dflash.serving.prompts import read_rows, session_of
from sglang_dflash.serving.rendering import Renderer, prompt_of

CANDIDATES = 8
console = Console(stderr=True, highlight=False)


@torch.inference_mode()
def record(draft: DFlashDraftModel, target: torch.nn.Module, prompt: list[int], tokens: int) -> dict[str, np.ndarray]:
    """Of one answer of L tokens: `chances` [L, K-1, 8] float32, falling, and `taken` [L, K-1] int8, the candidate that
    is the target's token; 8: none is, or the answer has ended."""
    taps, size, embed = FeatureTaps(target, draft.target_layer_ids), draft.block_size, target.get_input_embeddings()
    whole = spec_generate(draft, target, torch.tensor([prompt]), tokens)
    with taps:
        target(whole)
        features = taps.take()
    answer = whole[0, len(prompt) :]
    chances = np.zeros((len(answer), size - 1, CANDIDATES), np.float32)
    taken = np.full((len(answer), size - 1), CANDIDATES, np.int8)
    for place, anchor in enumerate(answer):
        block = torch.full((1, size), draft.mask_token_id)
        block[0, 0] = anchor
        positions = torch.arange(len(prompt) + place + size)[None]
        hidden = draft(draft.embed_block(embed(block)), features[:, : len(prompt) + place], positions)
        best = target.lm_head(hidden[0, 1:]).softmax(-1).topk(CANDIDATES)
        chances[place] = best.values.clamp(max=1 - 1e-6)
        for row, token in enumerate(answer[place + 1 : place + size]):
            found = (best.indices[row] == token).nonzero()
            taken[place, row] = int(found[0]) if len(found) else CANDIDATES
    return {"chances": chances, "taken": taken}


def main(
    target: Annotated[str, typer.Option(help="Target: folder or hub name.")],
    draft: Annotated[str, typer.Option(help="Its draft.")],
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts; of several turns the first is asked.")],
    output: Annotated[Path, typer.Option(help="File to write (.npz).")],
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 12,
    tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 128,
) -> None:
    renderer = Renderer(target, {}, "--target")
    sessions = islice(read_rows(prompts, "--prompts", session_of), count)
    ids = [prompt_of(session, session.turns[0].messages, renderer) for session in sessions]
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    draft_model = DFlashDraftModel.from_pretrained(draft, dtype=torch.float32).eval()
    texts = [record(draft_model, target_model, prompt, tokens) for prompt in track(ids, console=console)]
    np.savez_compressed(
        output,
        lens=np.array([len(text["taken"]) for text in texts]),
        chances=np.concatenate([text["chances"] for text in texts]),
        taken=np.concatenate([text["taken"] for text in texts]),
    )
    console.print(f"{len(texts)} answers of {sum(len(text['taken']) for text in texts)} tokens in {output}.")


if __name__ == "__main__":
    typer.run(main)
