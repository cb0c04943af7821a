"""What an offline bundle contains, in which order, and what it leaves out, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

PURE_BYTES = 20_000_000
GPU_ARCHITECTURE = 90
"""The bundle is for a Hopper GPU. Of a large library's kernels for several GPUs, it holds those of this one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Wheels of a bundle that are useful together; a bundle holds its groups in order.

    Fields:
        works: what works once this group and those before it are installed.
    """

    name: str
    works: str


GROUPS = (
    Group("package", "sglang_dflash without SGLang: scripts/gpu_ops.sh, on the machine's own torch and triton"),
    Group(
        "server",
        "python -m sglang.launch_server --attention-backend triton --sampling-backend pytorch, "
        "on the machine's own triton",
    ),
    Group("triton", "the same with the Triton version that SGLang's torch requires"),
    Group("flashinfer", "--attention-backend flashinfer and its sampling kernels, compiled by nvcc at first use"),
    Group("fa3", "--attention-backend fa3 on Hopper"),
)

OWN_GROUP = {
    "triton": "triton",
    "flashinfer-python": "flashinfer",
    "nvidia-cudnn-frontend": "flashinfer",
    "flash-attn-4": "flashinfer",
    "quack-kernels": "flashinfer",
}
"""Exceptions to the default of `group_of`. nvidia-cutlass-dsl is none: SGLang's MLP imports it on every CUDA GPU."""

LEFT_OUT = {
    **dict.fromkeys(
        (
            "nvidia-cublas",
            "nvidia-cuda-cupti",
            "nvidia-cuda-nvrtc",
            "nvidia-cuda-runtime",
            "nvidia-cudnn-cu13",
            "nvidia-cufft",
            "nvidia-cufile",
            "nvidia-curand",
            "nvidia-cusolver",
            "nvidia-cusparse",
            "nvidia-cusparselt-cu13",
            "nvidia-nvjitlink",
            "nvidia-nvshmem-cu13",
            "nvidia-nvtx",
            "cuda-toolkit",
        ),
        "the machine's own CUDA 13.0 libraries have the same sonames",
    ),
    "nvidia-nccl-cu13": "200 MB; on one GPU the machine's NCCL works, with stubs for the functions it lacks",
    **dict.fromkeys(
        ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"), "the machine has the CUDA toolkit"
    ),
    "nvidia-cutlass-dsl-libs-cu12": "CUDA 12",
    "nvidia-mathdx": "FP8 MoE kernels",
    **dict.fromkeys(("nccl-extensions", "nccl4py", "nvshmem4py-cu13", "sgl-deep-ep"), "several GPUs"),
    "sgl-flash-mla": "MLA targets",
    **dict.fromkeys(("deepseek-recipe", "tml-renderers"), "targets with layers other than attention"),
    **dict.fromkeys(("modelscope", "modelscope-hub"), "another model hub"),
    "z3-solver": "only for tilelang, at compile time",
    "tilelang": "kernels of targets that DFLASH refuses",
    "humming-kernels": "quantised MoE targets",
    "anthropic": "a client of another API",
    "py-spy": "a profiler of processes",
    **dict.fromkeys(
        ("smg-grpc-servicer", "smg-grpc-proto", "grpcio-health-checking", "grpcio-reflection"), "serving by gRPC"
    ),
}
"""Distribution -> why it is left out although SGLang requires it."""

STRIPPED = {
    "torch": ("torch/test/*", "torch/bin/protoc*", "torch/lib/*.a"),
    "triton": ("triton/backends/nvidia/lib/*.a", "*/lib/cupti*/*.a", "triton/backends/nvidia/bin/ptxas-blackwell"),
    "sglang-kernel": ("sgl_kernel/sm100/*", "sgl_kernel/infllm_ops*", "sgl_kernel/flashmla_ops*"),
    "sglang": (
        "sglang/multimodal_gen/*",
        "sglang/srt/rust_extensions/_server*",
        "sglang/srt/rust_extensions/_bench*",
        "sglang/srt/rust_extensions/_grpc*",
    ),
}
"""Distribution -> files that a server on one Hopper GPU never opens."""

SPLIT_OFF = {"sglang-kernel": ("fa3", ("sgl_kernel/flash_ops*",))}
"""Distribution -> (group, files): these files become a separate wheel in that group."""


def group_of(distribution: str, pure: bool, size_bytes: int) -> str:
    """The group of a distribution. Small pure-Python wheels come first: they are useful with any later group."""
    by_default = "package" if pure and size_bytes <= PURE_BYTES and distribution != "torchvision" else "server"
    return OWN_GROUP.get(distribution, by_default)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)
