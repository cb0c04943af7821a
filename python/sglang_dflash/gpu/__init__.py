"""For a GPU machine: `gpu.ops` (ops without SGLang), `sglang-dflash gpu-check` (our worker), and `gpu.hour` (both)."""
