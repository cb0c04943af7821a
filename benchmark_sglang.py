"""Measures DFLASH in SGLang against speculation off and other engines. See `python benchmark_sglang.py --help`."""

from sglang_dflash.cli.benchmark import run

if __name__ == "__main__":
    run()
