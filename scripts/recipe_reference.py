"""Generates docs/recipe.md, tables of all keys of a recipe, from the schema: `python scripts/recipe_reference.py`."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fivefold.config.keys import description_of, section_of
from fivefold.config.limits import LARGEST
from fivefold.config.problems import COMMANDS
from fivefold.config.schema.fields import Duration
from fivefold.config.schema.rules import Named, OfPart, OfServers, Rule
from fivefold.config.schema.run import RunConfig
from fivefold.config.schema.train import TrainRecipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"
INTRODUCTION = f"""\
# The recipe: every key

`python scripts/recipe_reference.py` generates this page from `fivefold/config/schema/`. A key without a default is
required. An unknown key is an error, and so is a value that breaks a key's rule. A whole number is at most {LARGEST:,}
where no other bound is given. Sections that several roles or commands have alike
stand here once. A run writes its resolved recipe, with every key, to `recipe.yaml` in its folder.

On the command line, `a.b=c` sets a key. The new value takes the place of the old one: `reward.kwargs.x=1` sets one key
of a mapping, `reward.kwargs={{x: 1}}` replaces the mapping, and `reward.kwargs={{}}` clears it. A mapping or a section
that is null, in the file or on the command line, has its default.

In a value, `${{a.b}}` stands for another key's value and `${{oc.env:NAME}}` for an environment variable. Values without
quotes are read as in YAML 1.2: `8`, `0x1f`, `0.5` and `1e-5` are numbers, `true` and `false` are written in full, and
all else is text, such as `yes`, `1_000` and `12:30:45`.
"""


Printed = dict[object, tuple[str, str]]
"""Command and key of each section and each table that stands on the page."""


@dataclass(frozen=True)
class Section:
    """A section of a recipe: equal ones have the same keys with the same meaning, wherever they are."""

    note: str
    rows: tuple[tuple[str, ...], ...]
    """Cells of the section's own keys, the first of them the key without the section's."""
    sections: tuple[tuple[str, str, Section], ...]
    """Name, condition and content of each section in it."""

    @staticmethod
    def of(schema: type[BaseModel], known: frozenset[str]) -> Section:
        """Return a section.

        Args:
            schema: the section.
            known: the keys of it and of the sections around it, which conditions may name.
        """
        fields = schema.model_fields
        inner = {name: section for name, field in fields.items() if (section := section_of(field.annotation))}
        return Section(
            " ".join((schema.__doc__ or "").split()),
            tuple(
                _cells(name, field, description_of(schema, name), known)
                for name, field in fields.items()
                if name not in inner
            ),
            tuple(
                (name, _conditions(fields[name], known), Section.of(each, known | each.model_fields.keys()))
                for name, each in inner.items()
            ),
        )


CHOSEN = (
    "experiment_name", "trial_name", "seed", "total_train_steps", "algorithm",
    "cluster.n_nodes", "cluster.n_gpus_per_node", "scheduler.type",
    "actor.path", "actor.backend", "actor.dtype", "actor.mb_spec.max_tokens_per_mb", "actor.ppo_n_minibatches",
    "actor.eps_clip", "actor.eps_clip_higher", "actor.kl_ctl", "actor.loss_aggregation", "actor.advantage",
    "actor.loss", "actor.dynamic_sampling", "actor.overlong_reward_penalty",
    "actor.optimizer.lr", "actor.optimizer.lr_scheduler_type", "actor.optimizer.warmup_steps_proportion",
    "actor.optimizer.weight_decay", "actor.optimizer.gradient_clipping",
    "actor.megatron.recompute",
    "actor.megatron.bridge_type",
    "actor.megatron.optimizer.state_on",
    "actor.rollout_correction.method", "ref.path", "critic.path", "teacher.path",
    "rollout.backend", "rollout.max_head_offpolicyness", "rollout.max_batch_size", "rollout.server_args",
    "gconfig.n_samples", "gconfig.max_new_tokens", "gconfig.temperature", "gconfig.top_p", "gconfig.stop",
    "train_dataset.path", "train_dataset.batch_size", "train_dataset.prompt_key", "train_dataset.answer_key",
    "train_dataset.max_length", "valid_dataset.path", "evaluator.freq_steps",
    "reward.fn", "reward.kwargs", "saver.freq_steps", "recover.mode", "recover.freq_secs", "stats.trackers",
)  # fmt: skip
"""Keys of `fivefold train` that recipes set most."""


def page() -> str:
    """Return the text of the whole page."""
    printed: Printed = {}
    chosen = "\n".join(["| key | default | |\n|---|---|---|", *map(_chosen_row, CHOSEN), ""])
    recipes = (line for schema, command in COMMANDS.items() for line in _recipe(f"`{command}`", schema, printed))
    return "\n".join([INTRODUCTION, "## The keys that matter\n", chosen, *recipes])


def _chosen_row(key: str) -> str:
    """Return the row of a key of `fivefold train` in the table of those that matter, with its first sentence."""
    *sections, name = key.split(".")
    schema: type[BaseModel] = TrainRecipe
    for section in sections:
        inner = section_of(schema.model_fields[section].annotation)
        assert inner is not None
        schema = inner
    cells = _cells(name, schema.model_fields[name], description_of(schema, name), frozenset())
    # Some descriptions begin with the values, each with its meaning.
    ends = "[.;]" if cells[-1].startswith("`") else "[.;:]"
    sentence = re.split(rf"(?<={ends}) ", cells[-1])[0].rstrip(";:.").replace("|", "\\|")
    return f"| `{key}` | {cells[2]} | {sentence} |"


def _recipe(title: str, schema: type[RunConfig], printed: Printed) -> Iterator[str]:
    yield f"## {title}\n"
    section = Section.of(schema, frozenset(schema.model_fields))
    yield from _content(title, "", section, printed)


def _content(title: str, key: str, section: Section, printed: Printed) -> Iterator[str]:
    """Yield the table of a section's own keys, what stands above of the sections in it, and the others.

    Args:
        title: the command.
        key: the section's dotted key; empty for the whole recipe.
        section: the section.
        printed: what stands on the page already.
    """
    prefix = f"{key}." if key else ""
    command, first = printed.setdefault(section.rows, (title, key))
    if section.rows and (command, first) != (title, key):
        yield f"It has the keys of {f'[`{first}`](#{_anchor(first)})' if first else command}.\n"
    elif section.rows:
        yield "| key | values | default | read with | |\n|---|---|---|---|---|"
        yield from (_row(prefix, cells) for cells in section.rows)
        yield ""
    for name, conditions, _ in section.sections:
        if conditions:
            yield f"`{prefix}{name}` is read with {conditions}.\n"
    inner = [(f"{prefix}{name}", each) for name, _, each in section.sections]
    if above := [(own, printed[each][1]) for own, each in inner if each in printed]:
        links = [f"[`{other}`](#{_anchor(other)})" for _, other in above]
        names = [
            link if own == other else f"`{own}` as {link}" for (own, other), link in zip(above, links, strict=True)
        ]
        yield f"As above: {', '.join(names)}.\n"
    for own, each in inner:
        if each not in printed:
            printed[each] = (title, own)
            yield f"### {own}\n"
            if each.note:
                yield f"{each.note}\n"
            yield from _content(title, own, each, printed)


def _anchor(key: str) -> str:
    """Return where the heading of a section is found."""
    return key.replace(".", "")


def _cells(name: str, field: FieldInfo, description: str, known: frozenset[str]) -> tuple[str, ...]:
    default = "required" if field.is_required() else f"`{_written(field.default)}`"
    return name, _values(field), default, _conditions(field, known), " ".join(description.split())


def _row(prefix: str, cells: tuple[str, ...]) -> str:
    name, *others = cells
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{prefix}{name}`", *others)) + " |"


def _conditions(field: FieldInfo, known: frozenset[str]) -> str:
    """Return what a key, or one of its values, is read with: other keys, models with a part, servers."""
    rules = (each for each in field.metadata if isinstance(each, Rule))
    texts = [
        "".join(f"`{_written(value)}`: " for value in each.values) + str(each.condition)
        for each in rules
        if each.condition.key.split(".")[0] in known
    ]
    return "; ".join([*texts, *(str(each) for each in field.metadata if isinstance(each, OfPart | OfServers))])


def _values(field: FieldInfo) -> str:
    named = next((each for each in field.metadata if isinstance(each, Named)), None)
    if named is not None:
        names = ", ".join(f"`{name}`" for name in named.names)
        return f"{names}, or your own as `module:{named.own}` or `file.py:{named.own}` (docs/extending.md)"
    kind, rules = _kind(field.annotation)
    bounds = [*_bounds(field.metadata), *rules]
    return f"{kind}, {' and '.join(bounds)}" if bounds else kind


def _kind(annotation: Any) -> tuple[str, list[str]]:
    """Return a type in words, and the bounds that its annotation holds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation == Duration:
        return "seconds or a text such as `3h55m`", ["> 0"]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments), []
    if origin in (Union, types.UnionType):
        kinds = [_kind(argument) for argument in arguments if argument is not type(None)]
        null = ["null"] if type(None) in arguments else []
        return " or ".join([*(kind for kind, _ in kinds), *null]), [rule for _, rules in kinds for rule in rules]
    if hasattr(annotation, "__metadata__"):
        kind, rules = _kind(arguments[0])
        return kind, [*rules, *(bound for info in annotation.__metadata__ for bound in _bounds(info.metadata))]
    if origin is list:
        kind, rules = _kind(arguments[0])
        return " ".join(["list of", kind.replace("text", "texts").replace("number", "numbers"), *rules]), []
    if origin is dict:
        return "mapping", []
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}[annotation.__name__], []


def _bounds(metadata: list[Any]) -> Iterator[str]:
    """Yield the bounds of a number, except for the one that the introduction tells of all whole numbers."""
    signs = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    for rule in metadata:
        name = type(rule).__name__
        if name in signs and (bound := getattr(rule, name.lower())) != LARGEST:
            yield f"{signs[name]} {bound:,}"


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
