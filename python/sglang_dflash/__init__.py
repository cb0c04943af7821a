"""sglang-dflash: DFlash speculative decoding for SGLang. Importing this loads neither torch nor sglang."""

__version__ = "0.1.0"
