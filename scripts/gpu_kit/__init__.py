"""Behind gpu_ops.py: what a GPU is asked before SGLang runs on it."""
