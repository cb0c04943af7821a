"""Makes the embedded pairs, `python -m tools.tiny_pair`: data, tokenizer, target, draft, evaluation and card."""
