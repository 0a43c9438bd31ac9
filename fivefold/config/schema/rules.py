"""Rules as metadata of keys: when a key is read, and what a value needs.

    top_k: Annotated[int | None, reads_if(equals("over", "top_k"))] = None
    kl_horizon: Annotated[int, reads_if(given("kl_target"), warns=True)] = 10_000
    attn_impl: Annotated[str, needs("flash_attention_4", equals("dtype", "bfloat16"), "is for bfloat16 models")] = ...

A condition names a key of the same section or, if that has none of this name, of the nearest section around it. The
error, the warning and the column "read with" of docs/recipe.md follow from the rule. What takes more than a condition
is a method that yields a line for each problem, marked with `rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from fivefold.config.keys import section_of
from fivefold.config.methods import Method

Kind = Literal["equals", "differs", "given", "absent", "above_0"]


@dataclass(frozen=True)
class Condition:
    """A condition on another key."""

    key: str
    """Dotted, from the section that has its first word."""
    kind: Kind
    values: tuple[Any, ...] = ()
    or_own: bool = False
    """Whether a user's own code fulfils it too."""
    fix: str = ""
    """How to fulfil it, where that takes more than the values."""

    def holds(self, value: Any) -> bool:
        """Return whether the key's value fulfils the condition."""
        match self.kind:
            case "equals":
                return value in self.values or (self.or_own and ":" in value)
            case "differs":
                return value not in self.values
            case "given":
                return value is not None and value not in ({}, [])
            case "absent":
                return not value
            case "above_0":
                return bool(value > 0)

    def obstacle(self, key: str, value: Any) -> str:
        """Return in which way the condition fails: `with over=full`."""
        return f"without {key}" if self.kind == "given" else f"with {key}={said(value)}"

    def remedy(self, key: str) -> str:
        """Return how it is fulfilled: `set over to top_k`."""
        if self.fix:
            return self.fix
        match self.kind:
            case "equals":
                return f"set {key} to {' or '.join(map(said, self.values))}"
            case "differs":
                return f"choose another {key}"
            case "given":
                return f"set {key}"
            case "absent":
                return f"drop {key}"
            case "above_0":
                return f"raise {key}"

    def __str__(self) -> str:
        match self.kind:
            case "equals":
                return f"`{self.key}={'` or `'.join(map(said, self.values))}`"
            case "differs":
                return f"`{self.key}` other than `{'` or `'.join(map(said, self.values))}`"
            case "given":
                return f"`{self.key}`"
            case "absent":
                return f"no `{self.key}`"
            case "above_0":
                return f"`{self.key}` above 0"


def equals(key: str, *values: Any, fix: str = "") -> Condition:
    """Return the condition that a key has one of some values."""
    return Condition(key, "equals", values, fix=fix)


def differs(key: str, *values: Any, fix: str = "") -> Condition:
    """Return the condition that a key has none of some values."""
    return Condition(key, "differs", values, fix=fix)


def given(key: str, fix: str = "") -> Condition:
    """Return the condition that a key is set: it is not null, nor an empty mapping."""
    return Condition(key, "given", fix=fix)


def absent(key: str) -> Condition:
    """Return the condition that a key is null, or 0."""
    return Condition(key, "absent")


def above_0(key: str, fix: str = "") -> Condition:
    """Return the condition that a number is greater than 0."""
    return Condition(key, "above_0", fix=fix)


@dataclass(frozen=True)
class Rule:
    """Metadata of a key: a value other than the default, or one of some values, needs a condition."""

    condition: Condition
    values: tuple[Any, ...] = ()
    """The values that need it; empty: all but the default."""
    why: str = ""
    """What the message says of the value, as its verb; empty: it has no effect."""
    warns: bool = False
    """Whether a value that breaks the rule is reported and not refused."""

    def concerns(self, value: Any, default: Any) -> bool:
        """Return whether a value needs the condition."""
        return value in self.values if self.values else value != default


def reads_if(condition: Condition, why: str = "", *, warns: bool = False) -> Rule:
    """Return the rule that a key has an effect only under a condition; `why` may say why, as the verb of the value."""
    return Rule(condition, why=why, warns=warns)


def read_by(key: str, rows: Mapping[str, Method], name: str) -> Rule:
    """Return the rule that a key is read if the method that `key` names reads `name`, or is a user's own."""
    readers = tuple(method for method, row in rows.items() if name in row.reads)
    return Rule(Condition(key, "equals", readers, or_own=True), warns=True)


def needs(value: Any, condition: Condition, why: str) -> Rule:
    """Return the rule that a key may have a value only under a condition; `why` says why, as the verb of the value."""
    return Rule(condition, (value,), why)


@dataclass(frozen=True)
class Named:
    """Metadata of a text that is one of some names, or that names a user's own code."""

    names: tuple[str, ...]
    own: Literal["Class", "function"]
    """What the user's own code is."""


@dataclass(frozen=True)
class OfPart:
    """Metadata of a key about a part that only some models have."""

    part: str
    """The attribute of the model's shape that is true, or above 0, if it has the part."""
    name: str
    """What a message calls the part."""
    warns: bool = False
    """Whether the key is reported, and not refused, for a model without the part."""

    def __str__(self) -> str:
        return f"models with {self.name}"


@dataclass(frozen=True)
class OfServers:
    """Metadata of a key that only servers read."""

    otherwise: str = ""
    """What the embedded engine always does, as its verb."""

    def __str__(self) -> str:
        return "servers"


Mark = TypeVar("Mark", OfPart, OfServers)


def marked(section: BaseModel, kind: type[Mark], prefix: str = "") -> Iterator[tuple[str, Any, Mark]]:
    """Yield the dotted key, the value and the mark of each key with a mark whose value is not the default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from marked(value, kind, f"{prefix}{name}.")
        if value != field.default:
            yield from ((f"{prefix}{name}", value, mark) for mark in field.metadata if isinstance(mark, kind))


@dataclass(frozen=True)
class Broken:
    """A rule that a section breaks. All keys are dotted, from the section."""

    key: str
    value: Any
    rule: Rule
    other: str
    """The key of the condition."""
    other_value: Any

    def error(self, section: str = "") -> str:
        """Return the value, the rule and the fix in one line; `section` is the dotted key of the section."""
        condition, key, other = self.rule.condition, joined(section, self.key), joined(section, self.other)
        what = f"the section {key}" if isinstance(self.value, BaseModel) else f"{key}={said(self.value)}"
        fix = f"{condition.remedy(other)}, or drop {self.key.rpartition('.')[2]}"
        if not self.rule.why:
            return f"{what} has no effect {condition.obstacle(other, self.other_value)}: {fix}"
        got = f"and {other} is not set" if condition.kind == "given" else f"got {other}={said(self.other_value)}"
        return f"{what} {self.rule.why}, {got}: {fix}"

    def warning(self, section: str = "") -> str:
        """Return the value and why it has no effect, in one line; `section` is the dotted key of the section."""
        key, other = joined(section, self.key), joined(section, self.other)
        return f"{key}={said(self.value)} has no effect: {other} is {said(self.other_value)}"


class RuleErrors(ValueError):
    """All problems of a section."""

    def __init__(self, problems: Sequence[Broken | str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.lines("")))

    def lines(self, section: str) -> Iterator[str]:
        """Yield a line for each problem; `section` is the dotted key of the section."""
        for problem in self.problems:
            if isinstance(problem, Broken):
                yield problem.error(section)
            else:
                yield f"{section}: {problem}" if section else problem


def joined(section: str, key: str) -> str:
    """Return the dotted key of a key in a section."""
    return f"{section}.{key}" if section else key


Problems = Callable[[Any], Iterator[str]]


def rule(method: Problems) -> Problems:
    """Mark a method of a section that yields a line for each problem."""
    method.is_rule = True  # type: ignore[attr-defined]
    return method


def check_rules(section: BaseModel) -> None:
    """Refuse a section that breaks its rules.

    Raises:
        RuleErrors: a line for each problem.
    """
    problems: list[Broken | str] = list(_misnamed(section))
    problems += [broken for broken in broken_rules(section) if not broken.rule.warns]
    problems += [line for name in _methods(type(section)) for line in getattr(section, name)()]
    if problems:
        raise RuleErrors(problems)


def broken_rules(section: BaseModel) -> Iterator[Broken]:
    """Yield each rule of a section, or of one inside it, that it breaks and whose condition is on one of its keys."""
    found = set[tuple[tuple[str, ...], bool]]()
    for names, each in _rules(type(section)):
        owner = _value(section, names[:-1])
        if owner is None:
            continue
        value, default = getattr(owner, names[-1]), type(owner).model_fields[names[-1]].default
        if not each.concerns(value, default):
            continue
        other = _value(section, each.condition.key.split("."))
        if not each.condition.holds(other) and (names, each.warns) not in found:  # the first says enough
            found.add((names, each.warns))
            yield Broken(".".join(names), value, each, each.condition.key, other)


def warnings_of(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Broken]]:
    """Yield each rule that warns and that a section, or one inside it, breaks, with the dotted key from the section."""
    yield from ((joined(prefix, broken.key), broken) for broken in broken_rules(section) if broken.rule.warns)
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from warnings_of(value, joined(prefix, name))


def _misnamed(section: BaseModel) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        for named in field.metadata:
            value = getattr(section, name)
            if isinstance(named, Named) and value not in named.names and not all(value.rpartition(":")):
                known = ", ".join(named.names)
                yield f"{name}={value} is none of {known}, and not of the form module:name or file.py:name"


@cache
def _methods(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the methods that are rules, bases first."""
    found = (
        name
        for kind in reversed(schema.__mro__)
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and hasattr(value, "is_rule")
    )
    return tuple(dict.fromkeys(found))


@cache
def _rules(schema: type[BaseModel]) -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """Return the path of each key with a rule whose condition is on a key of `schema`, and the rule."""
    return tuple(
        (names, each)
        for names, each, inside in _all_rules(schema)
        if (first := each.condition.key.split(".")[0]) in schema.model_fields and first not in inside
    )


def _all_rules(schema: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], Rule, frozenset[str]]]:
    """Yield each rule of a schema and the sections in it, with the keys of the sections inside `schema` around it."""
    for name, field in schema.model_fields.items():
        for each in field.metadata:
            if isinstance(each, Rule):
                yield (name,), each, frozenset()
        if (inner := section_of(field.annotation)) is not None:
            for names, each, inside in _all_rules(inner):
                yield (name, *names), each, inside | inner.model_fields.keys()


def _value(section: BaseModel | None, names: tuple[str, ...] | list[str]) -> Any:
    """Return the value of a key; None if a section on the way is null."""
    value: Any = section
    for name in names:
        value = None if value is None else getattr(value, name)
    return value


def said(value: Any) -> str:
    """Return a value as a recipe writes it, a text without quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value == int(value) else str(value)
