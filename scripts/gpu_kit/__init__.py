"""The stages of gpu_ops.py (ops without SGLang) and gpu_check.py (our worker in SGLang)."""
