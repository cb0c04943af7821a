"""Captures a model's layers once and compiles them, so that a forward skips the Python of its modules.

As in a CUDA graph's capture, SGLang's layers are run once, here on tensors without data. The trace is a list of tensor
ops for any number of rows. It is cut at each attention and at each recurrent layer, where our backends run with the
current batch. Inductor compiles each piece between two of them to C++. Equal pieces, such as those of a model's inner
layers, are compiled once. Inductor keeps the compiled pieces on disk for the next start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from sglang_cpu.pieces import Piece, cut

Layers = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, list[torch.Tensor]]]
ROWS_HINT = 24  # rows of the example forward; its trace holds for any number

_library = torch.library.Library("sglang_cpu_layers", "DEF")
_library.define("attend(Tensor q, Tensor? k, Tensor? v, Tensor? sinks, int layer, int width) -> Tensor")
_library.define("recur(Tensor qkv, Tensor a, Tensor b, int layer, int heads, int dim) -> Tensor")
_ATTEND = torch.ops.sglang_cpu_layers.attend.default
_RECUR = torch.ops.sglang_cpu_layers.recur.default


@torch.library.register_fake("sglang_cpu_layers::attend", lib=_library)
def _attend_fake(q: torch.Tensor, k: Any, v: Any, sinks: Any, layer: int, width: int) -> torch.Tensor:
    return q.new_empty(q.shape[0], width)


@torch.library.register_fake("sglang_cpu_layers::recur", lib=_library)
def _recur_fake(qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: int, heads: int, dim: int) -> torch.Tensor:
    return qkv.new_empty(1, qkv.shape[0], heads, dim)


@dataclass(frozen=True, slots=True)
class _Step:
    """One piece, or one layer that the backends run.

    Fields:
        run: the compiled piece; None for such a layer.
        layer: the attention or recurrent layer; None for a piece.
        inputs: indices of the values that it reads; None for an argument that is not given.
        outputs: indices of the values that it writes.
    """

    run: Callable[[list[Any]], Any] | None
    layer: RadixAttention | RadixLinearAttention | None
    inputs: list[int | None]
    outputs: list[int]


class CapturedLayers:
    """The layers of one model: ids or input embeddings in, normed and tapped hidden states out.

    Weights are not copied, so a load in place takes effect.
    """

    def __init__(
        self, module: torch.nn.Module, call: Layers, rows: torch.Tensor, mode: ForwardMode, sections: bool = False
    ) -> None:
        """
        Args:
            module: holds the parameters and buffers that `call` reads.
            call: (rows, positions, forward_batch) -> hidden, tapped.
            rows: one example row of ids or input embeddings.
            mode: forward mode of the trace and of later runs.
            sections: positions are [3, N] (time, height, width), as images need them; else [N].
        """
        self._module = module
        self._layers = [layer for layer in module.modules() if isinstance(layer, RadixAttention | RadixLinearAttention)]
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._names = list(named)
        self._weights = [tensor.detach() for tensor in named.values()]
        self._steps: list[_Step] = []
        self._outputs: list[int] = []
        self._places = 0
        fakes = FakeTensorMode(
            shape_env=ShapeEnv(specialize_zero_one=False, duck_shape=False), allow_non_fake_inputs=True
        )
        with tracing(TracingContext(fakes)):  # without it, inductor does not use its cache
            examples = rows.expand(ROWS_HINT, *rows.shape[1:]).contiguous()
            self._compile(self._trace(call, examples, mode, fakes, sections))

    def _trace(
        self, call: Layers, rows: torch.Tensor, mode: ForwardMode, fakes: FakeTensorMode, sections: bool
    ) -> torch.fx.Graph:
        any_rows: StatelessSymbolicContext = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (rows.dim() - 1)
        )
        fake_rows = fakes.from_tensor(rows, symbolic_context=any_rows)
        weights = [fakes.from_tensor(tensor, static_shapes=True) for tensor in self._weights]
        with fakes:
            shape = (3, fake_rows.shape[0]) if sections else (fake_rows.shape[0],)
            positions = torch.zeros(shape, dtype=torch.int64)
            one = torch.ones(1, dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=positions,
            req_pool_indices=one,
            seq_lens=one,
            out_cache_loc=positions,
            seq_lens_sum=1,
            positions=positions,
        )
        called = _Called(self._module, call)
        names = ["module." + name for name in self._names]

        def run(weights: list[torch.Tensor], rows: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
            # Untied: a module that all layers share, such as the rotary table, would otherwise be swapped once per
            # layer and restored wrongly.
            swapped = dict(zip(names, weights, strict=True))
            hidden, tapped = functional_call(called, swapped, (rows, positions, batch), tie_weights=False)
            return [hidden, *tapped]

        backend: Any = _TracedBackend({id(layer): place for place, layer in enumerate(self._layers)})
        context = forward_context(ForwardContext(attn_backend=backend))
        with context, fakes, torch.no_grad(), _KeepRows(), _symbolic_len(self._module):
            graph = make_fx(run, decomposition_table=select_decomp_table())(weights, fake_rows, positions).graph
        rows_traced: Any = fake_rows.shape[0]
        if rows_traced.node.expr.is_number:  # a size became a number: the trace holds for the example alone
            raise ValueError(f"the model's code fixes the number of rows, to {ROWS_HINT}")
        return graph

    def _compile(self, graph: torch.fx.Graph) -> None:
        places: dict[torch.fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                places[node] = len(places)
        assert len(places) == len(self._weights) + 2, (len(places), len(self._weights))
        places_of_weights = len(self._weights)
        compiled: dict[str, Any] = {}
        for piece in cut(graph, {_ATTEND, _RECUR}):
            for node in piece.outputs:
                places[node] = len(places)
            if piece.graph is None:
                run = None
                *tensors, place = _arguments(piece.inputs[0])
                layer = self._layers[place]
                inputs = [None if node is None else places[node] for node in tensors]
            else:
                layer, inputs = None, [places[node] for node in piece.inputs]
                if piece.signature not in compiled:
                    weights = sum(places[node] < places_of_weights for node in piece.inputs)
                    compiled[piece.signature] = _build(piece, weights)
                run = compiled[piece.signature]
            self._steps.append(_Step(run, layer, inputs, [places[node] for node in piece.outputs]))
        outputs: Any = graph.output_node().args[0]
        self._outputs = [places[node] for node in outputs]
        self.taps = len(outputs) - 1
        self._places = len(places)
        self.distinct_pieces = len(compiled)

    def run(self, rows: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch) -> list[torch.Tensor]:
        """The hidden states, then the tapped ones. The attention backend must have prepared `forward_batch`."""
        backend: Any = get_attn_backend() if self._layers else None
        attend: Any = getattr(backend, "full_attn_backend", backend)  # a hybrid backend has one for each kind of layer
        recur: Any = getattr(backend, "linear_attn_backend", None)
        values: list[Any] = [*self._weights, rows, positions]
        values += [None] * (self._places - len(values))
        for step in self._steps:
            inputs = [None if place is None else values[place] for place in step.inputs]
            if isinstance(step.layer, RadixLinearAttention):
                qkv, a, b = inputs
                values[step.outputs[0]] = recur.forward_extend(
                    layer=step.layer, forward_batch=forward_batch, mixed_qkv=qkv, a=a, b=b
                )
            elif step.run is None:
                q, k, v, sinks = inputs
                out = attend.forward_extend(q, k, v, step.layer, forward_batch, sinks=sinks)
                values[step.outputs[0]] = out
            else:
                for place, value in zip(step.outputs, step.run(inputs), strict=True):
                    values[place] = value
        return [values[place] for place in self._outputs]


def _arguments(call: torch.fx.Node) -> Sequence[Any]:
    """The nodes of a recorded op's tensors (None where it has none), and the index of its layer."""
    return call.args[: 5 if call.target is _ATTEND else 4]


def _build(piece: Piece, weights: int) -> Any:
    assert piece.graph is not None
    module = torch.fx.GraphModule(torch.nn.Module(), piece.graph)
    examples = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
    return compile_fx_inner(module, examples, static_input_idxs=range(weights), is_inference=True)


class _Called(torch.nn.Module):
    """Wraps a module for `functional_call`, which swaps its tensors: the wrapper's forward runs `call`."""

    def __init__(self, module: torch.nn.Module, call: Layers) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self._call(*args)


class _KeepRows(TorchFunctionMode):
    """Gives heads their own dimension where a layer folds them into the rows, as norms of heads do. With a symbolic
    number of rows, inductor's code for the folded shape computes a quotient and a remainder at every element."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.view, torch.Tensor.reshape) and not kwargs:
            shape = args[1:] if isinstance(args[1], int) else args[1]
            rows = args[0]
            folds = isinstance(shape, tuple | list) and len(shape) == 2 and isinstance(shape[0], int) and shape[0] == -1
            if folds and rows.dim() == 2 and rows.shape[1] != shape[1]:
                return rows.unflatten(1, (-1, shape[1]))
            if folds and rows.dim() == 4 and isinstance(rows.shape[0], int) and rows.shape[0] == 1:  # recurrent layers'
                rows = rows[0]
            if folds and rows.dim() == 3 and rows.shape[2] == shape[1]:
                return rows
        return function(*args, **(kwargs or {}))


@contextmanager
def _symbolic_len(module: torch.nn.Module) -> Iterator[None]:
    """`len` of a tensor is an int, which would fix the number of rows. The files of the model's classes get one that
    gives the symbol."""

    def symbolic_len(value: Any) -> Any:
        return value.shape[0] if isinstance(value, torch.Tensor) else len(value)

    classes = {base for part in module.modules() for base in type(part).__mro__}
    names = {base.__module__ for base in classes if base.__module__.startswith("sglang.srt.models.")}
    files = [sys.modules[name] for name in names if not hasattr(sys.modules[name], "len")]
    for file in files:
        vars(file)["len"] = symbolic_len
    try:
        yield
    finally:
        for file in files:
            del vars(file)["len"]


class _TracedBackend:
    """The attention backend during tracing: records one op for each layer."""

    def __init__(self, places: dict[int, int]) -> None:
        self._places = places

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        mixed_qkv: torch.Tensor | None = None,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        place = self._places[id(layer)]
        if isinstance(layer, RadixLinearAttention):
            return _RECUR(mixed_qkv, a, b, place, layer.num_v_heads, layer.head_v_dim)
        assert save_kv_cache or k is None, "keys that are not written"
        return _ATTEND(q, k, v, sinks, place, layer.tp_q_head_num * layer.v_head_dim)
