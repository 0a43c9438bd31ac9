"""What can be said about a recipe's reward without running a user's code: it is quick, and needs no torch.

The source of a user's module is read, not imported. `resolve_reward` imports it and checks the rest.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fivefold.config.paths import user_path
from fivefold.config.problems import did_you_mean, show
from fivefold.config.schema.rewards import OF_ENVIRONMENT, OF_MODEL, OneRewardConfig, RewardConfig, is_hosted
from fivefold.rewards.choice import Choice
from fivefold.rewards.code_reward import CodeReward
from fivefold.rewards.countdown import Countdown
from fivefold.rewards.detection import Detection
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.http_reward import HTTPReward
from fivefold.rewards.instructions import Instructions
from fivefold.rewards.judge import HostedJudge, Judge
from fivefold.rewards.math_reward import MathReward
from fivefold.rewards.repetition import Repetition
from fivefold.rewards.user_function import check_call

BuiltInReward = (
    ExactMatch
    | MathReward
    | Choice
    | Countdown
    | Detection
    | Instructions
    | Repetition
    | Judge
    | HostedJudge
    | HTTPReward
    | CodeReward
)
BUILT_IN: Mapping[str, type[BuiltInReward]] = {
    "exact_match": ExactMatch,
    "math": MathReward,
    "choice": Choice,
    "countdown": Countdown,
    "detection": Detection,
    "instructions": Instructions,
    "repetition": Repetition,
    "judge": Judge,
    "http": HTTPReward,
    "code": CodeReward,
}
DYNAMIC = frozenset({"globals", "exec", "setattr", "vars"})
"""Functions by which a module may define names that its source does not show."""


def built_in_reward(config: OneRewardConfig) -> BuiltInReward:
    """Return the built-in reward that a recipe names.

    Raises:
        ValueError: it does not take the keyword arguments.
    """
    kind: type[BuiltInReward] = HostedJudge if is_hosted(config) else BUILT_IN[config.fn]
    known = sorted(field.name for field in fields(kind) if field.init)
    if unknown := sorted(set(config.kwargs) - set(known)):
        raise ValueError(f"reward.kwargs has {unknown}, but the reward {config.fn!r} takes {known}")
    try:
        return TypeAdapter(kind).validate_python(config.kwargs)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise ValueError(str(first["ctx"]["error"])) from error
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"reward.kwargs.{key}={show(first['input'])}: {first['msg']}") from error


def no_such_reward(name: str) -> ValueError:
    """Return the error for a name that is no reward's."""
    names = sorted([*BUILT_IN, OF_MODEL, OF_ENVIRONMENT])
    return ValueError(
        f"reward.fn={name!r} is neither one of {names} nor of the form module:function or file.py:function"
        f"{did_you_mean(name, names)}"
    )


def reward_problems(config: RewardConfig) -> Iterator[str]:
    """Yield a line for what is wrong with the `reward` section; nothing where only the import could tell."""
    for name, each in config.rewards.items() or [(None, config)]:
        try:
            with in_rewards(name):
                _check(each)
        except ValueError as error:
            yield str(error)


@contextmanager
def in_rewards(name: str | None) -> Iterator[None]:
    """Let errors about one of several rewards name it; None: there is one, whose errors name its keys already.

    Raises:
        ValueError: what the block raised.
    """
    try:
        yield
    except ValueError as error:
        if name is None:
            raise
        raise ValueError(f"reward.rewards.{name}: {str(error).removeprefix('reward.')}") from error


def _check(config: OneRewardConfig) -> None:
    if config.fn in (OF_MODEL, OF_ENVIRONMENT):
        return
    if config.fn in BUILT_IN:
        built_in_reward(config)
        return
    place, _, function = config.fn.rpartition(":")
    if not (place and function):
        raise no_such_reward(config.fn)
    file = _file(config.fn, place) if place.endswith(".py") or "/" in place else _module_file(config.fn, place)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except SyntaxError as error:
        raise ValueError(f"reward.fn={config.fn!r}: {file}, line {error.lineno}: {error.msg}") from error
    defined = dict(_defined(tree.body))
    if function not in defined:
        if not _may_define_more(tree):
            raise ValueError(
                f"reward.fn={config.fn!r}: {file} defines no {function!r}{did_you_mean(function, defined)}"
            )
        return
    definition = defined[function]
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) and not definition.decorator_list:
        check_call(config.fn, _signature(definition.args), config.kwargs)


def _file(name: str, path: str) -> Path:
    file = user_path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(
            f"reward.fn={name!r}: there is no Python file {file}: give the path of a file that ends in .py"
        )
    return file


def _module_file(name: str, module: str) -> Path | None:
    """Return the source of a module; None if it has none that could be read here.

    Raises:
        ValueError: there is no such module, installed or in the working folder.
    """
    if module in sys.modules:
        spec = sys.modules[module].__spec__
    else:
        spec = _find(module)
        if spec is None:
            raise ValueError(f"reward.fn={name!r}: there is no module {module!r}, installed or in {Path.cwd()}")
    is_source = spec is not None and spec.has_location and str(spec.origin).endswith(".py")
    return Path(str(spec.origin)) if spec is not None and is_source and Path(str(spec.origin)).is_file() else None


def _find(module: str) -> ModuleSpec | None:
    """Return where a module is; unlike `importlib.util.find_spec`, this imports no package on the way."""
    first, *rest = module.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return None
    spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [str(Path.cwd())])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name alone: under its whole name, a folder without __init__.py looks for its parent among the
        # modules that are imported already.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _defined(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that statements of a module define, each with its statement."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0], statement
            case _:
                for node in ast.iter_child_nodes(statement):
                    if isinstance(node, ast.stmt):
                        yield from _defined([node])
                    elif isinstance(node, ast.ExceptHandler | ast.match_case):
                        yield from _defined(node.body)
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id, statement


def _may_define_more(tree: ast.Module) -> bool:
    """Whether the module may define names that are not written in it, as `from x import *` does."""
    return any(
        (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
        or (isinstance(node, ast.Name) and node.id in DYNAMIC)
        for node in ast.walk(tree)
    )


def _signature(arguments: ast.arguments) -> Signature:
    """Return the signature that a function's source has."""
    positional = [
        *((argument.arg, Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument.arg, Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    without = [None] * (len(positional) - len(arguments.defaults))
    parameters = [
        Parameter(name, kind, default=_default(default))
        for (name, kind), default in zip(positional, [*without, *arguments.defaults], strict=True)
    ]
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=_default(default))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


@dataclass(frozen=True)
class _Written:
    """A default value, which a signature shows as the source writes it."""

    source: str

    def __repr__(self) -> str:
        return self.source


def _default(value: ast.expr | None) -> Any:
    return Parameter.empty if value is None else _Written(ast.unparse(value))
