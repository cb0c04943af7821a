"""Trains a draft for your own target: the paper's recipe on top of `transformers`, `datasets` and `accelerate`."""

from sglang_dflash.training.options import TrainOptions

__all__ = ["TrainOptions"]
