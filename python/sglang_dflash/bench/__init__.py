"""Behind `benchmark_sglang.py`: arms, datasets, traffic, measures and reports of a sweep."""
