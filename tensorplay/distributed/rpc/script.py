"""TorchScript functions as callees: what can be told of a call before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorplay.errors import ArgumentError


def check_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that a script function can be called with such arguments.

    Args:
        function: A ``torch.jit.ScriptFunction``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ArgumentError: If there are too many, too few, or unknown ones.
    """
    schema = function.schema
    name, declared = schema.name, schema.arguments
    if len(args) > len(declared):
        raise ArgumentError(
            f"{name}() expected at most {len(declared)} argument(s) but received {len(args)} "
            f"argument(s). Declaration: {schema}"
        )
    names = {argument.name for argument in declared}
    for keyword in kwargs:
        if keyword not in names:
            raise ArgumentError(f"Unknown keyword argument {keyword!r}. Declaration: {schema}")
    for argument in declared[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise ArgumentError(
                f"{name}() is missing value for argument {argument.name!r}. Declaration: {schema}"
            )
