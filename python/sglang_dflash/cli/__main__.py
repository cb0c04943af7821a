"""`python -m sglang_dflash.cli`, for torchrun."""

from sglang_dflash.cli.main import run

run()
