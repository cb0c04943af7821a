"""On a GPU, with `-m cuda`: each op against its reference, then its time beside torch's and the device's bandwidth.

It needs torch, NumPy, Triton and pytest, no SGLang and no installed package. A line is printed for each shape;
`--junitxml` keeps the numbers as properties. Only errors decide, times never do. A time is that of a CUDA graph with
one call in it, after the L2 cache was emptied: it holds no launch by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import op_cases
import pytest
import torch
import triton
from triton.testing import do_bench

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
VOCAB = 151_936  # Qwen3's
COPIED_BYTES = 1 << 30
SHAPES: list[tuple[Callable[..., op_cases.Case], tuple[int, ...]]] = [
    *((op_cases.block_layout, (batch, 16, 40_960)) for batch in (1, 8, 32, 64)),
    *((op_cases.accept_greedy, (batch, 16, VOCAB)) for batch in (1, 8, 32, 64)),
    *((op_cases.row_argmax, (rows, VOCAB)) for rows in (16, 128)),
    *((op_cases.accept_chain, (batch, 16)) for batch in (1, 8, 32)),
    *((op_cases.sample_rows, (rows, VOCAB, top_k)) for rows in (16, 128, 512) for top_k in (20, 64)),
    *((op_cases.context_kv, (rows, 5, 8, 128, 8192)) for rows in (16, 128, 512, 2048)),
    *((op_cases.penalties, (batch, 16, VOCAB, 512)) for batch in (1, 8, 32)),
    *((op_cases.likeliest, (batch, 16, 4 * batch)) for batch in (8, 32, 64)),
]


def time_us(call: Callable[[], Any]) -> float:
    """The median over as many replays as fit a tenth of a second."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return do_bench(graph.replay, return_mode="median") * 1e3


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a line past pytest's capture, so that `-s` is not needed."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", end="", flush=True)

    return print_line


@pytest.fixture(scope="session")
def bandwidth_gb_s(say: Callable[[str], None], record_testsuite_property: Callable[[str, object], None]) -> float:
    """Of a copy, bytes read plus bytes written."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = 2 * COPIED_BYTES / time_us(lambda: target.copy_(source)) / 1e3
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    say(f"{device}: a copy moves {found:.0f} GB/s")
    record_testsuite_property("device", device)
    record_testsuite_property("copy_gb_s", found)
    return found


@pytest.mark.parametrize(("op", "sizes"), SHAPES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_op_on_the_gpu(
    op: Callable[..., op_cases.Case],
    sizes: tuple[int, ...],
    bandwidth_gb_s: float,
    say: Callable[[str], None],
    record_property: Callable[[str, object], None],
) -> None:
    """Fails where whole numbers or penalised logits differ from the reference, a key's error against float32 is above
    twice that of torch in bfloat16, or a call waits for the device, so that no graph can hold it."""
    measured = op_cases.measure(op.__name__, op("cuda", *sizes), time_us, bandwidth_gb_s)
    say(measured.line())
    for name, value in asdict(measured).items():
        record_property(name, value)
