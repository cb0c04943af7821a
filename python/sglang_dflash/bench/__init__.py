"""The implementation of `benchmark_sglang.py`: arms, datasets, traffic, measures and reports."""
