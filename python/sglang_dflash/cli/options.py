"""Makes a command of dataclasses: each field is declared once, with its type, its default and its help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from sglang_dflash.serving import exit_code


def command(run: Callable[..., int | None], *options: type, code: int) -> Callable[..., None]:
    """A command for typer, with the docstring of `run`.

    A field `name: Annotated[type, typer.Option(...)] = default` is the flag --name; `tuple[str, ...]` makes a flag that
    may be given several times. A function behind the option makes the value of the flag's text.

    Args:
        run: gets an instance of each class; returns the exit code, None for 0.
        options: frozen dataclasses; their `__post_init__` refuses wrong values with a ValueError.
        code: the exit code of an error.
    """
    parameters = {name: one for each in options for name, one in _parameters(each).items()}

    def call(**given: Any) -> None:
        def made(each: type) -> Any:
            return each(**{field.name: _value(field, given[field.name], each) for field in fields(each)})

        raise typer.Exit(exit_code(lambda: run(*map(made, options)), code))

    call.__doc__ = run.__doc__
    call.__name__ = run.__name__
    required_first = sorted(parameters.values(), key=lambda one: one.default is not Parameter.empty)
    call.__signature__ = Signature(required_first)  # type: ignore[attr-defined]
    call.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return call


def _parameters(options: type) -> dict[str, Parameter]:
    hints = get_type_hints(options, include_extras=True)
    made = {}
    for field in fields(options):
        kind, info, *reader = get_args(hints[field.name])
        default = Parameter.empty if field.default is MISSING else field.default
        if reader:
            kind, default = str | None, None
        elif get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]]  # type: ignore[misc]
            default = None if default == () else default
        annotation = Annotated[kind, info]
        made[field.name] = Parameter(
            field.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
    return made


def _value(field: Field[Any], given: Any, options: type) -> Any:
    """The field's value for what typer gives."""
    if given is None:
        return field.default
    _, _, *reader = get_args(get_type_hints(options, include_extras=True)[field.name])
    if reader:
        return reader[0](given)
    return tuple(given) if isinstance(given, list) else given
