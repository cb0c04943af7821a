"""The first two stages: make the tokenizer and train the target, on single turns and then on sessions, too."""

import random
from pathlib import Path

from tools.tiny_pair import corpus, target
from tools.tiny_pair.conversations import SYSTEMS, Conversation
from tools.tiny_pair.shapes import MAX_POSITIONS, Shape
from tools.tiny_pair.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

VOCAB_SIZE = 1792
_TOKENIZER_CONVERSATIONS = 10_000
_LIBRARY_CHARS = 12_000


def make_target(
    shape: Shape,
    folder: Path,
    conversations: list[Conversation],
    steps: int,
    batch_tokens: int,
    peak: float,
    seed: int,
    library_rows: int,
) -> None:
    """Trains the tokenizer, then the target; saves both to `folder`.

    The training rows are all `conversations` and at most `library_rows` rows of Python sources, repeated in new orders
    as `steps` needs.
    """
    library = corpus.library_text()
    sample = conversations[:_TOKENIZER_CONVERSATIONS]
    texts = [message["content"] for conversation in sample for message in conversation.messages]
    texts += ["system\n", "user\n", "assistant\n", "tool\n", *SYSTEMS]
    texts += [source[:_LIBRARY_CHARS] for source in library]
    save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), folder, MAX_POSITIONS)
    tokenizer = load_tokenizer(folder)
    rows = target.conversation_rows(tokenizer, conversations)
    sources = target.library_rows(tokenizer, library)
    rows += random.Random(seed).sample(sources, min(library_rows, len(sources)))
    ids = sum(len(row) for row, _ in rows)
    print(f"target: {len(rows)} rows, {ids:,} ids, longest {max(len(row) for row, _ in rows)}", flush=True)
    target.train_target(
        target.new_target(shape.config(tokenizer), seed),
        rows,
        folder,
        steps=steps,
        batch_tokens=batch_tokens,
        peak=peak,
        seed=seed,
    )


def train_on_sessions(
    folder: Path,
    conversations: list[Conversation],
    sessions: list[Conversation],
    steps: int,
    batch_tokens: int,
    peak: float,
    seed: int,
) -> None:
    """Goes on with the target in `folder`: sessions of agents, and conversations so that it forgets nothing."""
    rows = target.conversation_rows(load_tokenizer(folder), [*conversations, *sessions])
    print(f"sessions: {len(rows)} rows, {sum(len(row) for row, _ in rows):,} ids", flush=True)
    model = target.load_target(folder).train()
    target.train_target(model, rows, folder, steps=steps, batch_tokens=batch_tokens, peak=peak, seed=seed)
