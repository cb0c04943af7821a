"""A hook reaches the modules that SGLang's own walk would reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import _propagate_patch

from sglang_dflash.host.start import propagation
from sglang_dflash.host.start.propagation import Importers

# The tests of other files may have installed ours.
SGLANGS = _propagate_patch if _propagate_patch.__module__ != propagation.__name__ else None
_numbers = count()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes a module that binds the given names."""

    def make(**names: Any) -> ModuleType:
        made = ModuleType(f"made_{next(_numbers)}")
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    yield make


def _apply(propagate: Callable[..., int], source: ModuleType, name: str, wrapped: Any) -> int:
    """As SGLang applies a hook."""
    original = getattr(source, name)
    setattr(source, name, wrapped)
    return propagate(original, wrapped, source)


@pytest.mark.parametrize("kind", ["function", "cached", "class"])
@pytest.mark.parametrize("ways", ["SGLang's", "ours"])
def test_importers_get_the_hook(kind: str, ways: str, module: Callable[..., ModuleType]) -> None:
    """Fails where a module keeps the original: under another name, imported between two hooks, or where it is hooked
    once more through the module that imported it."""
    if ways == "SGLang's" and SGLANGS is None:
        pytest.skip("ours is installed")
    propagate = SGLANGS if ways == "SGLang's" else Importers().propagate
    assert propagate is not None
    target: Any = {"function": lambda: 0, "cached": lru_cache(lambda: 0), "class": type("Made", (), {})}[kind]
    source = module(f=target, other=_apply)
    first, second = module(f=target, g=target), module(h=target, constant=3)
    once, twice = (lambda: 1), (lambda: 2)
    assert _apply(propagate, source, "f", once) == 3
    assert (source.f, first.f, first.g, second.h, second.constant) == (once, once, once, once, 3)
    late = module(f=once, other=_apply)
    assert _apply(propagate, first, "f", twice) == 3
    assert (source.f, first.f, second.h, late.f, late.other) == (twice, twice, twice, twice, _apply)
    assert first.g is once  # the module through which a hook is applied keeps its other names
    late.f = _apply  # bound anew since: no longer the original
    assert _apply(propagate, second, "h", target) == 2
    assert (source.f, first.f, late.f) == (target, target, _apply)
    assert _apply(propagate, first, "g", twice) == 0
