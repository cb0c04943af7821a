"""Benchmarks DFLASH in SGLang beside speculation off and its peers. `python benchmark_sglang.py --help`."""

from sglang_dflash.bench.command import run

if __name__ == "__main__":
    run()
