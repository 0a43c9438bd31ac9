"""A recipe in the making, with the account of what became of every key of its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

Outcome = Literal["mapped", "implied", "unsupported"]
Role = Literal["actor", "rollout", "ref"]
Degree = Literal["tp", "pp", "cp", "vpp", "ep", "etp"]

LEADS_NOWHERE = "this interpolation leads to no plain value"


class Unfit(ValueError):
    """A value that the recipe's key cannot take; the message says what it can."""


@dataclass(frozen=True)
class Entry:
    """What became of one key of the source."""

    key: str
    value: Any
    outcome: Outcome
    to: str = ""
    """The recipe's key, of a mapped one."""
    result: Any = None
    """The value that the recipe's key has got."""
    note: str = ""
    """The reason, of one that is implied or unsupported; what was converted, of a mapped one."""
    is_default: bool = False
    """The source does not write the key: the framework's own default holds, and Fivefold's differs."""


@dataclass
class RolePlan:
    """How the source lays out one role, before it is known whether that fits the devices."""

    backend: str = "megatron"
    shards_weights: bool = False
    """Whether the source trains with FSDP, ZeRO or their like, in whose place Megatron-Core is laid out."""
    degrees: dict[Degree, int] = field(default_factory=dict)
    n_devices: int | None = None
    keys: dict[str, str] = field(default_factory=dict)
    """The keys that say so, each with a note."""
    degree_keys: dict[Degree, str] = field(default_factory=dict)
    """The key that each degree was read from."""
    etp_follows_tp: bool = False
    """Of an expert tensor degree that is not written: whether it is the tensor degree, or else 1."""
    devices: Any = None
    """The list of devices, as the source writes it."""
    devices_key: str = ""
    """The key that says it."""

    def get(self, degree: Degree) -> int:
        """A degree; 1 where the source has none."""
        return self.degrees.get(degree, 1)


Convert = Callable[[Any], Any]
Rule = Callable[["Draft", str], None]


class Draft:
    """Collects recipe values; every key of `values` ends in exactly one entry.

    Args:
        values: the source's keys.
        defaults: what the framework takes for keys that the source leaves out, where Fivefold would take another.
        caveats: by key, what its value depends on and is not known.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], caveats: Mapping[str, str] | None = None
    ) -> None:
        self._values = values
        self._defaults = {key: value for key, value in defaults.items() if key not in values}
        self._caveats = caveats or {}
        self._entries: dict[str, Entry] = {}
        self.recipe: dict[str, Any] = {}
        self.plans: dict[Role, RolePlan] = {}
        self.is_shared: bool | None = None
        """Whether rollout and actor take turns on the same devices; None: not said."""
        self.awaiting: set[str] = set()
        """Keys whose entries depend on the layout: `Dialect.after_layout` gives them."""
        self.notes: list[str] = []

    @property
    def entries(self) -> list[Entry]:
        """In the order of the source, defaults last."""
        return [self._entries[key] for key in (*self._values, *self._defaults) if key in self._entries]

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value that holds in the framework: the source's, else its default, else `otherwise`."""
        value = self._values.get(key, self._defaults.get(key))
        return otherwise if value is None else value

    def read(self, key: str, convert: Convert, otherwise: Any = None) -> Any:
        """The value that holds in the framework, converted: for a key that others depend on.

        Raises:
            ValueError: a value that `convert` refuses.
        """
        try:
            return convert(self.get(key, otherwise))
        except Unfit as error:
            raise ValueError(f"{key}: {error}; correct it there, or give {key}=... as an override") from error

    def keys(self, pattern: str = "*") -> list[str]:
        """The source's keys that match, in order."""
        return [key for key in self._values if fnmatchcase(key, pattern)]

    def writes(self, key: str) -> bool:
        """Whether the source itself gives `key` a value."""
        return self._values.get(key) is not None

    def is_open(self, key: str) -> bool:
        """Whether `key` is in the source (or holds by default) and still has no entry."""
        return (key in self._values or key in self._defaults) and key not in self._entries

    def mapped(self, key: str, to: str, value: Any, note: str = "") -> None:
        """`key` sets the recipe's `to` to `value`; unsupported, if another key has set it to something else."""
        if not self.is_open(key):
            return None
        caveat = self._caveats.get(key, "")
        if caveat and self._values[key] in (None, ""):
            self.unsupported(key, caveat)
            return None
        if "${" in str(value):
            return self.unsupported(key, LEADS_NOWHERE)
        if self.recipe.setdefault(to, value) != value:
            other = next((entry.key for entry in self._setting(to)), "another key")
            return self.unsupported(key, f"{other} sets {to} to {self.recipe[to]!r}")
        return self._settle(key, "mapped", to, "; ".join(filter(None, (note, caveat))))

    def implied(self, key: str, reason: str) -> None:
        """`key` says what holds in Fivefold anyway, or what has no effect."""
        if self.is_open(key):
            self._settle(key, "implied", "", reason)

    def unsupported(self, key: str, reason: str) -> None:
        """`key` asks for what Fivefold does not do."""
        if self.is_open(key):
            self._settle(key, "unsupported", "", reason)

    def demote(self, to: str, reason: str, outcome: Outcome = "unsupported") -> None:
        """Takes the recipe's `to` back: the keys that set it become unsupported, or implied where it has no effect."""
        self.recipe.pop(to, None)
        for entry in self._setting(to):
            self._settle(entry.key, outcome, "", reason)

    def revise(self, to: str, value: Any, reason: str) -> None:
        """Changes the recipe's `to`, and with it the entries of the keys that set it."""
        self.recipe[to] = value
        for entry in self._setting(to):
            self._settle(entry.key, "mapped", to, "; ".join(filter(None, (entry.note, reason))))

    def lay_out(self, key: str, role: Role, degree: Degree, otherwise: int = 1) -> None:
        """`key` gives `role` a degree of parallelism. Its entry follows when the layout is known."""
        plan = self.plans.setdefault(role, RolePlan())
        try:
            plan.degrees[degree] = positive(self.get(key, otherwise))
        except Unfit as error:
            return self.unsupported(key, str(error))
        if self.is_open(key):
            plan.keys[key] = ""
            plan.degree_keys[degree] = key
        return None

    def apply(self, rules: Mapping[str, Rule]) -> None:
        """Gives each key without an entry the one that its rule says; the most specific pattern wins."""
        patterns = sorted((pattern for pattern in rules if "*" in pattern), key=len, reverse=True)
        later = self.awaiting.union(*(plan.keys for plan in self.plans.values()))
        for key in [*self._values, *self._defaults]:
            if not self.is_open(key) or key in later:
                continue
            pattern = key if key in rules else next((one for one in patterns if fnmatchcase(key, one)), None)
            if pattern is not None:
                self._apply(rules[pattern], key)

    def _apply(self, rule: Rule, key: str) -> None:
        value = self.get(key)
        if value is None and key not in self._caveats:
            return self.implied(key, "empty, so the default holds")
        if value == "???":
            return self.unsupported(key, "its value is left to be given (`???`)")
        try:
            rule(self, key)
        except Unfit as error:
            self.unsupported(key, str(error))
        return None

    def finish(self, unknown: str) -> None:
        """Every key of the source that still has no entry becomes unsupported, with `unknown` as the reason."""
        planned = {key for plan in self.plans.values() for key in plan.keys}
        for key in self._values:
            if key not in planned and self._values[key] is None:
                self.implied(key, "empty, so the default holds")
            elif key not in planned:
                self.unsupported(key, unknown)

    def _setting(self, to: str) -> list[Entry]:
        """Entries of the keys that set the recipe's `to`."""
        return [entry for entry in self._entries.values() if entry.to == to]

    def _settle(self, key: str, outcome: Outcome, to: str, note: str) -> None:
        is_default = key not in self._values
        value = self._defaults[key] if is_default else self._values[key]
        self._entries[key] = Entry(key, value, outcome, to, self.recipe.get(to), note, is_default)


# Conversions of values


def whole(value: Any) -> int:
    """A whole number; 4.0 is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value % 1:
        raise Unfit(f"{value!r} is not a whole number")
    return int(value)


def positive(value: Any) -> int:
    """A whole number from 1 on."""
    if whole(value) < 1:
        raise Unfit(f"{value!r} is not a whole number from 1 on")
    return int(value)


def number(value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"{value!r} is not a number")
    return float(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Unfit(f"{value!r} is neither true nor false")
    return value


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise Unfit(f"{value!r} is not a text")
    return value


def one_of(**names: Any) -> Convert:
    """The value that stands for one of the source's names; `-` in a name is written `_`."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_").lower()
        if name not in names:
            raise Unfit(f"{value!r} is not offered; there are {', '.join(names)}")
        return names[name]

    return convert


# Rules


def to(key: str, convert: Convert, note: str = "") -> Rule:
    """The source's key becomes the recipe's `key`."""

    def rule(draft: Draft, source: str) -> None:
        draft.mapped(source, key, convert(draft.get(source)), note)

    return rule


def every_steps(key: str) -> Rule:
    """Every so many steps; 0 and less mean never."""

    def rule(draft: Draft, source: str) -> None:
        steps = whole(draft.get(source))
        if steps > 0:
            draft.mapped(source, key, steps)
        else:
            draft.implied(source, "switched off, as it is by default")

    return rule


def implied(reason: str) -> Rule:
    """Holds anyway, whatever the value."""
    return lambda draft, source: draft.implied(source, reason)


def unsupported(reason: str) -> Rule:
    """Not done, whatever the value."""
    return lambda draft, source: draft.unsupported(source, reason)


def only(*accepted: Any, holds: str, otherwise: str) -> Rule:
    """Holds anyway for the accepted values; not done for others."""

    def rule(draft: Draft, source: str) -> None:
        value = draft.get(source)
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            draft.implied(source, holds)
        else:
            draft.unsupported(source, otherwise)

    return rule


def off(reason: str) -> Rule:
    """Not done; a key that is switched off, empty or 0 asks for nothing."""
    return only(False, 0, -1, "", [], {}, "none", "None", "disabled", holds="switched off", otherwise=reason)


def under(prefix: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The same rules for keys that begin with `prefix`."""
    return {prefix + pattern: rule for pattern, rule in rules.items()}


def for_each(prefixes: Iterable[str], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The same rules below several prefixes."""
    return {pattern: rule for prefix in prefixes for pattern, rule in under(prefix, rules).items()}
