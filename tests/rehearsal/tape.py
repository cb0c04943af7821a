"""A graph of a device, rehearsed on a CPU: the torch ops of one run, executed again into the same tensors.

A tape keeps what a CUDA graph keeps: which ops ran, on which tensors, with which Python numbers. It forgets what a
graph forgets: Python does not run at a replay. Ops of other libraries are seen if torch dispatches them. Writes that go
past torch, such as through numpy, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class TapeError(RuntimeError):
    """A device could not capture this, or its graph would now read or write the wrong memory."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op as it ran at capture.

    Fields:
        made: index among the op's results, and the tensor, of each result that had memory of its own. A replay writes
            there. Other results are views or the op's own arguments.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, torch.Tensor]]

    def run(self) -> None:
        results = self.function(*self.args, **self.kwargs)
        if self.made:
            leaves = tree_leaves(results)
            for index, tensor in self.made:
                tensor.copy_(leaves[index])


class Tape:
    """Records one run of a function, and replays it.

    It keeps every tensor alive, as a graph's memory pool does. After the recording, memory that the run allocated holds
    NaN or the largest integer, so that what no op computes again at a replay is seen in the answer.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._made: dict[int, torch.Tensor] = {}  # storage -> a tensor in it; allocated during the run
        self._found: dict[int, tuple[torch.Tensor, int]] = {}  # tensor -> it and its address; allocated before the run

    def record(self, function: Callable[[], Any]) -> Any:
        """Returns what `function` returns; a replay writes the tensors in it."""
        with _Recorder(self):
            result = function()
        self.spoil(self._made.values())
        return result

    def replay(self) -> None:
        """Raises TapeError if a tensor from before the recording now has other memory."""
        for tensor, address in self._found.values():
            if tensor.data_ptr() != address:
                raise TapeError(f"a tensor of shape {list(tensor.shape)} was rebound between capture and replay")
        with torch.inference_mode():
            for call in self.calls:
                call.run()

    def spoil(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrites those of the tensors that lie in memory of this tape, as another graph of its pool may."""
        with torch.inference_mode():
            for tensor in tensors:
                if _storage(tensor) in self._made:
                    _spoil(tensor)

    def add(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        storages = {_storage(tensor) for tensor in given}
        for tensor in given:
            if _storage(tensor) not in self._made:
                self._found[id(tensor)] = tensor, tensor.data_ptr()
        made = [
            (index, leaf)
            for index, leaf in enumerate(tree_leaves(results))
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in storages
        ]
        self._made.update((_storage(tensor), tensor) for _, tensor in made)
        allocates = function._schema.name.removeprefix("aten::") in _ALLOCATIONS
        if function._schema.is_mutable or (made and not allocates):
            self.calls.append(Call(function, args, kwargs, made))


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():  # in inference mode, an op that consists of others comes whole
            with self:
                return function.decompose(*args, **kwargs)
        _refuse(function, args)
        results = function(*args, **kwargs)
        self._tape.add(function, args, kwargs, results)
        return results


def _refuse(function: Any, args: tuple[Any, ...]) -> None:
    """Raises TapeError for an op that no graph can hold."""
    if torch.Tag.inplace_view in function.tags:
        raise TapeError(f"{function} gives a tensor other memory or another shape during capture")
    waits = any(tag in function.tags for tag in _WAITS)
    if function is torch.ops.aten.index.Tensor:  # indices give a known shape, masks do not
        waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if waits:
        raise TapeError(f"{function} makes Python wait for a tensor's values during capture")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _spoil(tensor: torch.Tensor) -> None:
    """Fills the whole memory that the tensor lies in."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,))
    if tensor.dtype == torch.bool:
        whole.fill_(True)
    else:
        whole.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
