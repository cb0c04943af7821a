"""`sglang-dflash`: the command line."""
