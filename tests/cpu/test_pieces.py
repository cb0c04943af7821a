"""The pieces of a traced forward compute the same as the whole, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sglang_cpu.pieces import Piece, cut

WIDTH, LAYERS = 6, 4


def layer(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = torch.ops.aten.sin(rows)  # the op at which the graph is cut
    return rows.view(rows.shape[0], 2, WIDTH // 2).flip(1).reshape(rows.shape[0], WIDTH) @ weight


def forward(weights: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    tapped = []
    for place, weight in enumerate(weights):
        rows = layer(rows + 1, weight)
        if place == 1:
            tapped.append(rows * 2)
    return [rows, *tapped]


@pytest.fixture(scope="module")
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(LAYERS)]


@pytest.fixture(scope="module")
def graph(weights) -> torch.fx.Graph:
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fakes = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    any_rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    rows = fakes.from_tensor(torch.randn(5, WIDTH), symbolic_context=any_rows)
    with fakes:
        return make_fx(forward)([fakes.from_tensor(weight, static_shapes=True) for weight in weights], rows).graph


def run(graph: torch.fx.Graph, pieces: list[Piece], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    values = dict(zip([node for node in graph.nodes if node.op == "placeholder"], inputs, strict=True))
    for piece in pieces:
        if piece.graph is None:
            (node,) = piece.inputs
            values[node] = torch.sin(values[node.args[0]])
        else:
            module = torch.fx.GraphModule(torch.nn.Module(), piece.graph)
            results = module(*[values[node] for node in piece.inputs])
            values |= dict(zip(piece.outputs, results, strict=True))
    return [values[node] for node in graph.output_node().args[0]]


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_the_pieces_compute_the_whole(graph, weights, rows):
    """Fails where a piece lacks an input, takes inputs in another order, or fixes the traced number of rows."""
    pieces = list(cut(graph, {torch.ops.aten.sin.default}))
    x = torch.randn(rows, WIDTH)
    for got, expected in zip(run(graph, pieces, [*weights, x]), forward(weights, x), strict=True):
        assert torch.equal(got, expected)


def test_inner_pieces_are_alike(graph):
    """Fails where equal layers would be compiled twice, or a tapped layer counts as equal to an untapped one."""
    pieces = list(cut(graph, {torch.ops.aten.sin.default}))
    assert [piece.graph is None for piece in pieces] == [False, True] * LAYERS + [False]
    signatures = [piece.signature for piece in pieces if piece.graph is not None]
    assert signatures[1] == signatures[3] != signatures[2]
    assert len(set(signatures)) == 4  # first, inner, tapped, last
