"""Serving SGLang on a plain CPU: no accelerator, no AMX, no Triton, no `sgl_kernel`."""
