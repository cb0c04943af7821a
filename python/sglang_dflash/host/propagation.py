"""Gives a hook to every module that imported its target before, without a walk through all modules for each hook.

SGLang's `_propagate_patch` looks at every name of every module, which takes 40 ms a hook on a Xeon: 4 s for our
hundred, in the main process and again in each process of the server. Here the names are looked up in an index.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

Place = tuple[ModuleType, str]  # a module, and its name for a value


class Importers:
    """Where functions and classes are bound in the modules of this process.

    A module is looked through once, when it is first seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by their ids; kept, so that no other module gets one of them
        self._places: defaultdict[int, list[Place]] = defaultdict(list)  # id of a value -> where it is bound

    def propagate(self, original: Any, wrapped: Any, source: Any) -> int:
        """Binds `wrapped` wherever `original` is bound, but for `source`, where SGLang has bound it already.

        Returns how many names were bound; the arguments and the result are those of SGLang's `_propagate_patch`.
        """
        self._look_through_new_modules()
        bound = 0
        for module, name in self._places.pop(id(original), []):
            value = vars(module).get(name)
            if value is original and module is not source:
                setattr(module, name, wrapped)
                bound += 1
                value = wrapped
            if value is original or value is wrapped:  # perhaps the target of a later hook
                self._places[id(value)].append((module, name))
        return bound

    def _look_through_new_modules(self) -> None:
        for module in [module for module in list(sys.modules.values()) if id(module) not in self._seen]:
            self._seen[id(module)] = module
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if callable(value):
                        self._places[id(value)].append((module, name))


def install() -> None:
    """Replaces SGLang's `_propagate_patch` in this process."""
    from sglang.srt.plugins import hook_registry

    hook_registry._propagate_patch = Importers().propagate
