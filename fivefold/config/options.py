"""The options of a method: keys of the recipe that have the names of its parameters, and its keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fivefold.config.problems import show
from fivefold.config.schema.fields import Section

Method = TypeVar("Method")
NOTHING: Mapping[str, Any] = MappingProxyType({})
_EXACT = ConfigDict(strict=True, allow_inf_nan=False)
"""Neither the text `no` nor 1 is a bool, and no option is NaN."""


def options(
    key: str,
    method: Callable[..., Any],
    config: Section,
    kwargs: Mapping[str, Any],
    n_arguments: int = 0,
    given: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """Return the keyword arguments with which a method is called.

    A parameter that is named like a key of the recipe's section, such as `eps_clip` of `actor`, gets the key's value;
    `kwargs` gives the others.

    Args:
        key: the recipe's key that names the method, such as `actor.loss`.
        method: a function or a class.
        config: the section that the key is in.
        kwargs: the recipe's mapping of further options.
        n_arguments: number of positional arguments with which the method is called besides.
        given: values of keys of the recipe's top level that a parameter of their name gets.

    Raises:
        ValueError: `kwargs` has an option that the method does not take or that is a key of the recipe, or lacks one.
    """
    try:
        parameters = list(inspect.signature(method).parameters.values())[n_arguments:]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key} has no signature that could be checked ({error}): give a function or a class"
        ) from error
    keys = {name: getattr(config, name) for name in type(config).model_fields} | dict(given)
    section = key.rpartition(".")[0]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name, value in kwargs.items():
        if name in keys:
            own = name if name in given else f"{section}.{name}"
            raise ValueError(f"{key}_kwargs.{name}={show(value)}: this option is the recipe's key {own}")
        if name not in names and not takes_all:
            known = [known for known in names if known not in keys] or ["none"]
            method_key = f"{key}={getattr(config, key.rpartition('.')[2])}"
            raise ValueError(
                f"{key}_kwargs.{name}={show(value)}: there is no such option; {method_key} has {', '.join(known)}"
            )
    chosen = {name: keys[name] for name in names if name in keys} | dict(kwargs)
    for parameter in parameters:
        if parameter.name in names and parameter.name not in chosen and parameter.default is parameter.empty:
            raise ValueError(f"{key} needs the option {parameter.name}: give {key}_kwargs.{parameter.name}")
    return chosen


def built_in(key: str, name: str, kind: type[Method], chosen: Mapping[str, Any]) -> Method:
    """Return a built-in method with its options, whose types and bounds are checked.

    Args:
        key: the recipe's key that names the method.
        name: the method's name.
        kind: its dataclass.
        chosen: its options.

    Raises:
        ValueError: an option of the wrong type, or out of its bounds.
    """
    try:
        return TypeAdapter(kind).validate_python(chosen)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # raised by the method itself, in its own words
            raise ValueError(str(first["ctx"]["error"])) from error
        option = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{key}={name}: {option}={show(first['input'])}: {first['msg']}") from error


def check_types(key: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check the further options of a built-in function against the types and bounds of its parameters.

    Args:
        key: the recipe's key that names the function.
        name: the function's name.
        function: the function, with annotations.
        kwargs: the recipe's mapping of further options; the function takes all of them.

    Raises:
        ValueError: an option of another type, out of its bounds, or not finite.
    """
    types = get_type_hints(function, include_extras=True)
    for option, value in kwargs.items():
        try:
            TypeAdapter(types[option], config=_EXACT).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key}={name}: {option}={show(value)}: {error.errors()[0]['msg']}") from error
