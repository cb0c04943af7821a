"""The one way to declare a hook into SGLang: `@hook` says where it is, how it is applied, why, and until when.

Importing it loads nothing of SGLang, so that `hooks.install` can check the release before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

Kind = Literal["AROUND", "REPLACE", "AFTER"]
"""AROUND: our function gets SGLang's and its arguments. REPLACE: ours is called in its place. AFTER: ours gets the
result of SGLang and its arguments. The names are those of SGLang's `HookType`."""
AROUND: Kind = "AROUND"
REPLACE: Kind = "REPLACE"
AFTER: Kind = "AFTER"
Function = TypeVar("Function", bound=Callable[..., Any])

_declared: dict[str, dict[str, Hook]] = {}  # module -> target -> hook


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of ours at a function of SGLang.

    Fields:
        target: the dotted name of SGLang's function.
        why: what SGLang does there, and what would go wrong.
        until: when the hook can go.
        always: in place with either worker; otherwise the module decides, see `hooks.registered_hooks`.
    """

    target: str
    kind: Kind
    function: Callable[..., Any]
    why: str
    until: str
    always: bool = False


def hook(target: str, kind: Kind, *, why: str, until: str, always: bool = False) -> Callable[[Function], Function]:
    """Declares the decorated function as our hook at `target`; it may be repeated for several targets.

    target: a whole literal or a constant of one, because test_contract.py finds targets by reading the source. `why`
    and `until` are sentences for `python -m sglang_dflash.host.start.hook_table`, which prints every hook.
    """

    def declare(function: Function) -> Function:
        hooks = _declared.setdefault(function.__module__, {})
        assert target not in hooks, (target, hooks[target].function, function)
        hooks[target] = Hook(target, kind, function, why, until, always)
        return function

    return declare


def hooks_of(module: ModuleType) -> dict[str, Hook]:
    """Target -> hook, of all hooks that a module declares."""
    return dict(_declared.get(module.__name__, {}))
