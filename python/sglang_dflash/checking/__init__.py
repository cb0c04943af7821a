"""Proof of losslessness on a user's own models: the parts of `sglang-dflash check`."""
