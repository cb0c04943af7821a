"""The parts of train_tiny_pair.py: data, tokenizer, target, draft, evaluation and card."""
