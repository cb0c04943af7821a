"""Cuts a traced graph at each call of some ops into independent pieces, and tells which of them are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default)


@dataclass(frozen=True, slots=True)
class Piece:
    """The nodes between two calls of such ops, or one such call.

    Fields:
        graph: takes `inputs` in their order and returns `outputs`; None for a call of an op.
        inputs: nodes of the whole graph; weights first. For a call of an op: its node.
        outputs: nodes of the whole graph that later pieces read, or the graph returns.
        signature: equal for two pieces that compute the same from different inputs; empty for a call of an op.
    """

    graph: Graph | None
    inputs: list[Node]
    outputs: list[Node]
    signature: str


def cut(graph: Graph, at: Collection[Any]) -> Iterator[Piece]:
    """Yields the pieces in the order in which they run. `at`: the ops.

    Sizes are not passed from piece to piece: each piece reads them from its own tensors.
    """
    segments: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function" and node.target in at:
            segments += [[node], []]
        elif node.op not in ("placeholder", "output") and not _is_size(node):
            segments[-1].append(node)
    owner = {node: index for index, segment in enumerate(segments) for node in segment}
    for index, segment in enumerate(segments):
        if not segment:
            continue
        outputs = [
            node for node in segment if any(owner.get(user, -1) != index and not _is_size(user) for user in node.users)
        ]
        if segment[0].target in at:
            yield Piece(None, segment, segment, "")
        else:
            yield _piece(segment, outputs)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def _piece(segment: list[Node], outputs: list[Node]) -> Piece:
    own = set(segment)
    inputs: list[Node] = []
    for node in segment:
        inputs += [arg for arg in node.all_input_nodes if arg not in own and arg not in inputs and not _is_size(arg)]
    inputs.sort(key=lambda node: node.op != "placeholder")  # stable: placeholders first
    graph = Graph()
    copies: dict[Node, Node] = {}
    lines: list[str] = []
    for node in inputs:
        copies[node] = graph.placeholder(f"in_{len(copies)}")
        copies[node].meta["val"] = node.meta["val"]
        lines.append(_describe(node.meta["val"]))
    rows = next(node for node in inputs if isinstance(node.meta["val"].shape[0], torch.SymInt))
    size = graph.call_function(torch.ops.aten.sym_size.int, (copies[rows], 0))
    size.meta["val"] = rows.meta["val"].shape[0]

    def copied(arg: Node) -> Node:
        if not _is_size(arg):
            return copies[arg]
        if arg.target in _SIZES:
            return size
        if arg not in copies:  # arithmetic on sizes
            copies[arg] = graph.node_copy(arg, copied)
        return copies[arg]

    for node in segment:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copies[node] for node in outputs))
    names = {node: f"n{place}" for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: names[arg])
        lines.append(f"{names[node]} = {node.target if node.op == 'call_function' else node.op}{arguments}")
    return Piece(graph, inputs, outputs, "\n".join(lines))


def _describe(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
