"""Proof of losslessness on a user's own models: what `sglang-dflash check` runs, compares and reports."""
