"""A recipe in the making, with the account of what became of every key of its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.defaults import UNKNOWN, own_default
from fivefold_import.reasons import LEADS_NOWHERE
from fivefold_import.values import Convert, Unfit, positive

Outcome = Literal["mapped", "implied", "unsupported"]
Role = Literal["actor", "rollout", "ref", "critic", "reward", "teacher", "judge"]
Degree = Literal["tp", "pp", "cp", "vpp", "ep", "etp"]

Rule = Callable[["Draft", str], None]
"""Gives one key of the source its entry: called with the draft and the key."""


@dataclass(frozen=True)
class Entry:
    """What became of one key of the source."""

    key: str
    value: Any
    """The source's value, or the framework's default if the source does not write the key."""
    outcome: Outcome
    to: str = ""
    """The recipe's key that a mapped key sets; empty for other outcomes."""
    result: Any = None
    """The value of the recipe's key, for a mapped key."""
    note: str = ""
    """Why a key is implied or unsupported, or how a mapped key was converted."""
    is_default: bool = False
    """True if the source does not write the key, and the framework's default differs from Fivefold's."""


@dataclass
class RolePlan:
    """How the source lays out one role, before it is known whether that fits the devices."""

    backend: str = "megatron"
    degrees: dict[Degree, int] = field(default_factory=dict)
    n_devices: int | None = None
    keys: dict[str, str] = field(default_factory=dict)
    """The source's keys that this plan was read from, each with a note."""
    degree_keys: dict[Degree, str] = field(default_factory=dict)
    """The source's key that each degree was read from."""
    etp_follows_tp: bool = False
    """Whether an expert tensor degree that the source does not write is the tensor degree; if not, it is 1."""
    devices: Any = None
    """The list of devices, as the source writes it."""
    devices_key: str = ""
    """The source's key of the list of devices."""
    has_processes: bool = False
    """Whether a reference or a judge has its own devices; a reference then has its own processes."""

    @property
    def shards_weights(self) -> bool:
        """Whether the role trains with FSDP, in whose place ZeRO is laid out too."""
        return self.backend == "fsdp"

    def get(self, degree: Degree) -> int:
        """Return a degree; 1 if the source gives none."""
        return self.degrees.get(degree, 1)


class Draft:
    """Collects the recipe's values, and ends with exactly one entry for each key of the source.

    A dialect gives entries with `mapped`, `implied` and `unsupported`, and with `apply` for all keys that a rule table
    covers. The first entry of a key counts: a later call for the same key does nothing.

    Args:
        values: the source's keys and values.
        defaults: the framework's table of defaults, as `fivefold_import.defaults` describes it.
        caveats: for some keys, what their value depends on that is not known here.
        schema: the kind of recipe that is drafted.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        caveats: Mapping[str, str] | None = None,
        schema: type[Recipe] = TrainRecipe,
    ) -> None:
        self._values = values
        self.schema = schema
        """The kind of recipe that is drafted."""
        self._defaults: dict[str, Any] = {}
        self._caveats = caveats or {}
        self._entries: dict[str, Entry] = {}
        self.recipe: dict[str, Any] = {}
        """The recipe's values by dotted key."""
        self.plans: dict[Role, RolePlan] = {}
        self.is_shared: bool | None = None
        """Whether rollout and actor take turns on the same devices; None if the source does not say."""
        self.awaiting: set[str] = set()
        """Keys whose entries depend on the layout: `Dialect.after_layout` gives them their entries."""
        self.notes: list[str] = []
        """Notes that belong to no single key."""
        self.other_loss = ""
        """The source's `key=value` that asks for another loss than PPO's; empty if it trains with PPO's."""
        self.written: Mapping[str, str] = {}
        """The names that the source has for keys that were read by another name."""
        self.unknown_defaults: list[str] = []
        """Keys that the source does not write, and whose default in its framework is not known here."""
        self.problems: list[str] = []
        """What is wrong with the source or the recipe: parts that were not read, and what a plan would refuse."""
        self.assume(defaults)

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Take the framework's defaults for keys that the source does not write; earlier ones stay.

        A section that the source writes as one value, such as an interpolation that leads nowhere, has no defaults.
        """
        written = tuple(f"{key}." for key, value in self._values.items() if value not in (None, {}))
        for key, value in defaults.items():
            if key in self._values or key in self._defaults or value is None or key.startswith(written):
                continue
            if value is UNKNOWN:
                self.unknown_defaults.append(key)
            else:
                self._defaults[key] = value

    @property
    def compares_with_reference(self) -> bool:
        """Whether the recipe has a reference model, for DPO or for a KL term."""
        return self.schema is DPORecipe or bool(self.recipe.get("actor.kl_ctl"))

    @property
    def entries(self) -> list[Entry]:
        """The entries in the order of the source, with defaults last, by the names that the source has."""
        found = [self._entries[key] for key in (*self._values, *self._defaults) if key in self._entries]
        return [replace(entry, key=self.written.get(entry.key, entry.key)) for entry in found]

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value that the framework would use: the source's, else its default, else `otherwise`."""
        value = self._values.get(key, self._defaults.get(key))
        return otherwise if value is None else value

    def read(self, key: str, convert: Convert, otherwise: Any = None) -> Any:
        """Return the converted value that the framework would use, for a key that other keys depend on.

        Raises:
            ValueError: `convert` refuses the value; without it, the keys that depend on it cannot be converted.
        """
        try:
            return convert(self.get(key, otherwise))
        except Unfit as error:
            reason = self._why_empty(key) or f"{error}; correct it there"
            raise ValueError(f"{key}: {reason}, or give {key}=... as an override") from error

    def keys(self, pattern: str = "*") -> list[str]:
        """Return the source's keys that match `pattern`, in order."""
        return [key for key in self._values if fnmatchcase(key, pattern)]

    def writes(self, key: str) -> bool:
        """Return whether the source itself gives `key` a value."""
        return self._values.get(key) is not None

    def caveat(self, key: str) -> str:
        """Return what the value of `key` depends on that is not known here; empty: nothing."""
        return self._caveats.get(key, "")

    def is_open(self, key: str) -> bool:
        """Return whether `key` is in the source, or holds by default, and has no entry yet."""
        return (key in self._values or key in self._defaults) and key not in self._entries

    def target(self, to: str) -> str:
        """Return the key of the recipe that rules call `to`."""
        return to

    def sets(self, key: str, to: str, value: Any, note: str = "") -> None:
        """Set the recipe's `to` to `value`, and map `key` to it if the source or the framework's defaults have it."""
        self.recipe[self.target(to)] = value
        self.mapped(key, to, value, note)

    def mapped(self, key: str, to: str, value: Any, note: str = "") -> None:
        """Set the recipe's `to` to `value`; `key` is unsupported if another key has set `to` to something else.

        What the source writes comes before the framework's defaults, and a default that is also Fivefold's is left out.
        """
        to = self.target(to)
        if not self.is_open(key):
            return None
        if key not in self._values:
            return self._map_default(key, to, value, note)
        caveat = self._caveats.get(key, "")
        if empty := self._why_empty(key):
            return self.unsupported(key, empty)
        if "${" in str(value):
            return self.unsupported(key, LEADS_NOWHERE)
        if self.recipe.setdefault(to, value) != value:
            others = self._setting(to)
            if not others or not all(entry.is_default for entry in others):
                other = others[0].key if others else "another key"
                return self.unsupported(key, f"{other} sets {to} to {self.recipe[to]!r}")
            self.recipe[to] = value
            for entry in others:
                self._settle(entry.key, "implied", "", f"{key} sets {to}")
        return self._settle(key, "mapped", to, "; ".join(filter(None, (note, caveat))))

    def _map_default(self, key: str, to: str, value: Any, note: str) -> None:
        if value == own_default(to, self.schema):
            self.implied(key, "it is Fivefold's default too")
        elif self.recipe.setdefault(to, value) == value:
            self._settle(key, "mapped", to, note)
        else:
            self.implied(key, f"another key sets {to}")

    def implied(self, key: str, reason: str) -> None:
        """Report that `key` holds in Fivefold anyway, or has no effect."""
        if self.is_open(key):
            self._settle(key, "implied", "", reason)

    def unsupported(self, key: str, reason: str) -> None:
        """Report that `key` asks for something that Fivefold does not do."""
        if self.is_open(key):
            self._settle(key, "unsupported", "", reason)

    def all_implied(self, pattern: str, reason: str) -> None:
        """Report that the source's keys that match `pattern` hold in Fivefold anyway, or have no effect."""
        for key in self.keys(pattern):
            self.implied(key, reason)

    def all_unsupported(self, pattern: str, reason: str) -> None:
        """Report that the source's keys that match `pattern` ask for something that Fivefold does not do."""
        for key in self.keys(pattern):
            self.unsupported(key, reason)

    def demote(self, to: str, reason: str, outcome: Outcome = "unsupported") -> None:
        """Remove the recipe's `to`; the keys that set it become unsupported, or implied where `to` has no effect."""
        self.recipe.pop(to, None)
        for entry in self._setting(to):
            self._settle(entry.key, outcome, "", reason)

    def revise(self, to: str, value: Any, reason: str) -> None:
        """Change the value of the recipe's `to`, and the entries of the keys that set it."""
        self.recipe[to] = value
        for entry in self._setting(to):
            self._settle(entry.key, "mapped", to, "; ".join(filter(None, (entry.note, reason))))

    def lay_out(self, key: str, role: Role, degree: Degree, otherwise: int = 1) -> None:
        """Read one of `role`'s degrees of parallelism from `key`, whose entry follows once the layout is known."""
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
        """Give each key without an entry the one that its rule says; the longest pattern that matches wins."""
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
            return self.implied(key, "the key is empty, so the default holds")
        if value == "???":
            return self.unsupported(key, "the source leaves its value open (`???`)")
        try:
            rule(self, key)
        except Unfit as error:
            self.unsupported(key, self._why_empty(key) or str(error))
        return None

    def _why_empty(self, key: str) -> str:
        """Return what the value of `key` depends on, if it is empty for that; else an empty text."""
        return self._caveats.get(key, "") if self._values.get(key) in (None, "") else ""

    def finish(self, unknown: str) -> None:
        """Make every key of the source that still has no entry unsupported, with `unknown` as the reason."""
        planned = {key for plan in self.plans.values() for key in plan.keys}
        for key in self._values:
            if key not in planned and self._values[key] is None:
                self.implied(key, "the key is empty, so the default holds")
            elif key not in planned:
                self.unsupported(key, unknown)

    def _setting(self, to: str) -> list[Entry]:
        """Return the entries of the keys that set the recipe's `to`."""
        return [entry for entry in self._entries.values() if entry.to == to]

    def _settle(self, key: str, outcome: Outcome, to: str, note: str) -> None:
        is_default = key not in self._values
        value = self._defaults[key] if is_default else self._values[key]
        self._entries[key] = Entry(key, value, outcome, to, self.recipe.get(to), note, is_default)
