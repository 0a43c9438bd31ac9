"""Tables of keys: what becomes of each key of a framework that no other key decides about.

A framework's tables are in `keys.yaml` of its folder, one for each section of keys:

    trainer:
      use: [common, {megatron.: megatron/transformer}]   # rows of other tables, with what precedes their keys
      when: {enable: true}                               # without this ("*": any value that is switched on), the
      else: only a switched-on trainer reads this        # table's own keys have no effect, for this reason
      to:                                                # mapped: the recipe's key, the conversion, the framework's
        nnodes: [cluster.n_nodes, whole, 1]              # default (~: none), a note
        output: [cluster.fileroot, text, ~, OWN_OUTPUTS]
      implied:                                           # holds in Fivefold anyway: a reason by key, or keys by reason,
        should_*: it follows from saver and stats        # which may be a name in `reasons`
        KERNELS: [use_torch_compile, use_liger]
      off: {val_only: use `fivefold eval`}               # implied if switched off, else unsupported
      unsupported: {sampler.*: prompts are drawn in order}
      only: {device: [[cuda, cpu], runs on both]}        # implied for these values, else unsupported (third: why)
      unknown: {"*": the trainer}                        # every other option
      code:                                              # a rule that is written in Python, or one that a function
        logger: trackers                                 # returns for some arguments
        resume_mode: [resumes, trainer.save_freq]
      defaults: {adv_estimator: gae}                     # of keys that are converted together with others

Of several patterns that match a key, the longest one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fivefold.config.yaml_reader import read_yaml
from fivefold_import import (
    agents,
    algorithms,
    checkpoints,
    corrections,
    critic,
    reasons,
    rules,
    serving,
    settings,
    speculation,
    values,
    variables,
)
from fivefold_import.draft import Draft, Rule
from fivefold_import.values import Convert, one_of

FOLDER = Path(__file__).parent
SHARED = {
    **vars(rules),
    **vars(settings),
    **vars(checkpoints),
    **vars(corrections),
    **vars(algorithms),
    **vars(agents),
    **vars(serving),
    **vars(speculation),
    **vars(variables),
}
"""The rules that all frameworks' tables can name."""


@dataclass(frozen=True)
class Condition:
    """Another key has one of some values; if not, a key has no effect."""

    key: str
    values: Sequence[Any]
    """The values; `*` stands for all that are switched on."""
    otherwise: str
    """Why the key has no effect."""

    def holds(self, draft: Draft) -> bool:
        """Return whether the other key has one of the values."""
        value = draft.get(self.key)
        is_on = "*" in self.values and value is not None and not rules.is_among(value, rules.SWITCHED_OFF)
        return is_on or rules.is_among(value, self.values)


@dataclass(frozen=True)
class Row:
    """What becomes of a key, or of the keys of a pattern."""

    rule: Rule | None
    """None: the key is converted together with others."""
    default: Any = None
    """The framework's default; None if it has none."""
    conditions: tuple[Condition, ...] = ()

    def __call__(self, draft: Draft, source: str) -> None:
        """Give `source` its entry."""
        for condition in self.conditions:
            if not condition.holds(draft):
                return draft.implied(source, condition.otherwise)
        return self.rule(draft, source) if self.rule is not None else None


@dataclass(frozen=True)
class Table:
    """Rows by key or pattern of keys."""

    rows: Mapping[str, Row] = field(default_factory=dict)

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules of the keys that are converted on their own, by key or pattern."""
        return {key: row for key, row in self.rows.items() if row.rule is not None}

    @property
    def defaults(self) -> dict[str, Any]:
        """The framework's defaults, by key."""
        return {key: row.default for key, row in self.rows.items() if row.default is not None}

    def __or__(self, other: Table) -> Table:
        """Return the rows of both tables; a row of `other` replaces one of the same key, or its default alone."""
        defaults = {key: row.default for key, row in other.rows.items() if row.rule is None and key in self.rows}
        changed = {key: replace(self.rows[key], default=default) for key, default in defaults.items()}
        return Table({**self.rows, **other.rows, **changed})

    def under(self, *sections: str) -> Table:
        """Return the rows for keys that begin with any of `sections`."""
        return Table({section + key: _below(row, section) for section in sections for key, row in self.rows.items()})

    def below(self, section: str) -> Table:
        """Return the rows for keys that begin with `section`, which is left out."""
        return Table({key.removeprefix(section): row for key, row in self.rows.items() if key.startswith(section)})

    def bare(self) -> Table:
        """Return the rows without the framework's defaults."""
        return Table({key: replace(row, default=None) for key, row in self.rows.items()})

    def only_if(self, holds: Callable[[Draft, str], bool], otherwise: str) -> Table:
        """Return the rows, without defaults, for keys that have an effect only if `holds`, and else are implied."""

        def wrap(rule: Rule) -> Rule:
            return lambda draft, key: rule(draft, key) if holds(draft, key) else draft.implied(key, otherwise)

        return self.wrapped(wrap)

    def wrapped(self, wrap: Callable[[Rule], Rule]) -> Table:
        """Return a table, without defaults, of the rules that `wrap` makes of the rows' rules."""
        return Table(
            {key: Row(wrap(row.rule), conditions=row.conditions) for key, row in self.rows.items() if row.rule}
        )


def _below(row: Row, section: str) -> Row:
    return replace(row, conditions=tuple(replace(one, key=section + one.key) for one in row.conditions))


def read_tables(
    name: str, own: Mapping[str, Any], others: Mapping[str, Mapping[str, Table]] | None = None
) -> dict[str, Table]:
    """Return the tables of a framework's `keys.yaml`, or of the file `<name>.yaml`, by name.

    Args:
        name: the framework's folder, or the file without its suffix.
        own: the framework's own rules, which `code` names, besides `SHARED`.
        others: tables of other files, by the word before the slash in `use`.

    Raises:
        ValueError: a table has an unknown part, or names something that does not exist.
    """
    file = FOLDER / name / "keys.yaml" if (FOLDER / name).is_dir() else FOLDER / f"{name}.yaml"
    tables: dict[str, Table] = {}
    for title, parts in read_yaml(file.read_text(encoding="utf-8"), str(file), takes_any_key=True).items():
        try:
            tables[title] = _table(parts, {"": tables, **(others or {})}, own)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}: table {title}: {error!r}") from error
    return tables


def _table(parts: Mapping[str, Any], tables: Mapping[str, Mapping[str, Table]], names: Mapping[str, Any]) -> Table:
    used = Table()
    for item in parts.get("use", ()):
        for section, named in item.items() if isinstance(item, dict) else [("", item)]:
            owner, _, title = named.rpartition("/")
            used |= tables[owner][title].under(section)
    conditions = tuple(
        Condition(key, value if isinstance(value, list) else [value], _reason(parts["else"]))
        for key, value in parts.get("when", {}).items()
    )
    rows: dict[str, Row] = {}
    for part, content in parts.items():
        if part not in ("use", "when", "else", "defaults"):
            for key, row in _rows(part, content, names):
                if key in rows:
                    raise ValueError(f"{key} is there twice")
                rows[key] = row
    own = Table({key: replace(row, conditions=conditions) for key, row in rows.items()})
    return used | own | Table({key: Row(None, default) for key, default in parts.get("defaults", {}).items()})


def _rows(part: str, content: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one part of a table."""
    if part in BY_REASON:
        for left, right in content.items():
            keys, reason = (right, left) if isinstance(right, list) else ([left], right)
            yield from ((key, Row(BY_REASON[part](_reason(reason)))) for key in keys)
    elif part == "code":
        for key, cell in content.items():
            name, *arguments = cell if isinstance(cell, list) else [cell]
            rule = {**SHARED, **names}[name]
            yield key, Row(rule(*arguments) if isinstance(cell, list) else rule)
    elif part == "only":
        for key, (accepted, holds, *otherwise) in content.items():
            yield key, Row(rules.only(*accepted, holds=_reason(holds), otherwise=_reason(*otherwise or [None])))
    else:
        n_before_default, rule = MAPPED[part]
        for key, cells in content.items():
            before, (default, *note) = cells[:n_before_default], cells[n_before_default:]
            yield key, Row(rule(key, *before, *map(_reason, note)), default)


def _reason(text: str | None) -> Any:
    """Return a reason: the one that `reasons` has under the name `text`, or the text itself."""
    return getattr(reasons, text) if text and text.isidentifier() and text.isupper() else text


def _conversion(cell: str | Mapping[str, Any]) -> Convert:
    """Return a conversion: one of `values` by its name, or a look-up of names."""
    return getattr(values, cell) if isinstance(cell, str) else one_of(**cell)


BY_REASON: Mapping[str, Callable[[str], Rule]] = {
    "implied": rules.implied,
    "unsupported": rules.unsupported,
    "off": rules.off,
    "unknown": rules.unknown,
}
"""Parts whose rows have a reason alone."""
MAPPED: Mapping[str, tuple[int, Callable[..., Rule]]] = {
    "to": (2, lambda key, to, convert, note="": rules.to(to, _conversion(convert), note)),
    "same": (1, lambda key, convert: rules.to(key, _conversion(convert))),
    "steps": (1, lambda key, to: rules.every_steps(to)),
    "switch": (2, lambda key, to, off: rules.if_on(to, _reason(off))),
    "critic": (2, lambda key, to, convert: critic.only_with_critic(to, _conversion(convert))),
    "path": (1, lambda key, to: settings.paths(to)),
}
"""Parts whose rows map a key, each with the number of cells before the default, and what makes its rule of them."""
