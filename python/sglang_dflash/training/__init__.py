"""Training of a draft for one's own target: the paper's recipe over `transformers`, `datasets` and `accelerate`."""

from sglang_dflash.training.options import TrainOptions

__all__ = ["TrainOptions"]
