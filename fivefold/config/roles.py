"""The roles of a run, one row each. Launch, layout, plan, checks and offload go over the rows of a recipe.

rollout   generates
actor     trains
ref       frozen; in the actor's processes unless it is placed; may follow the actor
critic    trains, with a value head
reward    frozen, with the head of its weight files
teacher   frozen
judge     frozen, and generates

A role that a recipe lacks is no row. Each of several teachers is a separate role, `teacher-<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fivefold.config.schema.engine import EngineConfig, TrainedModelConfig
from fivefold.config.schema.fields import Section
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rewards import JudgeConfig
from fivefold.config.schema.roles import FrozenReferenceConfig
from fivefold.config.schema.rollout import RolloutConfig
from fivefold.config.schema.train import TrainRecipe

S = TypeVar("S", bound=Section)
RoleSection = EngineConfig | FrozenReferenceConfig | RolloutConfig | JudgeConfig


@dataclass(frozen=True)
class RoleSpec:
    """A role that a recipe may have."""

    name: str
    """Its name in layouts, logs and messages."""
    key: str
    """Dotted key of its section."""
    kind: str = ""
    """The name of the row that it is one of several roles of; empty: it is the only one."""
    generates: bool = False
    scores_samples: bool = False
    """Whether it scores samples while the rollout generates others."""
    has_own_tokens: bool = False
    """Whether it reads texts, with its own tokenizer; others read the actor's tokens."""
    host: str | None = None
    """The role in whose processes it lives unless it is placed; None: it always has its own."""
    state: str = ""
    """Folder of a checkpoint with its state, if that changes."""
    absent: str = "the recipe has no {name}: set {key}.path, or drop it"
    """What a message says of a layout for the role if the recipe lacks it."""
    is_used: Callable[[Recipe], bool] = lambda _: True
    """Whether a recipe that has the section uses the role."""

    @property
    def row(self) -> str:
        """Name of its row."""
        return self.kind or self.name


TEACHER = "teacher"
"""Name of the role of a single teacher, and with `-<name>` of each of several."""


class _Rows(dict[str, RoleSpec]):
    """The rows by name; a name with a dash is one of several roles of a row."""

    def __missing__(self, name: str) -> RoleSpec:
        kind, dash, own = name.partition("-")
        if kind != TEACHER or not dash:
            raise KeyError(name)
        return replace(self[kind], name=name, key=f"teachers.{own}", kind=kind)


ROLES: Mapping[str, RoleSpec] = _Rows(
    (spec.name, spec)
    for spec in (
        RoleSpec("rollout", "rollout", generates=True),
        RoleSpec("actor", "actor", state="trainer"),
        RoleSpec(
            "ref",
            "ref",
            host="actor",
            state="reference",
            absent="nothing compares the actor with a reference model, so none is loaded; drop it",
            is_used=lambda recipe: recipe.actor.has_reference,
        ),
        RoleSpec("critic", "critic", state="critic"),
        RoleSpec("reward", "reward.model", scores_samples=True),
        RoleSpec(TEACHER, "teacher"),
        RoleSpec("judge", "reward.judge", generates=True, has_own_tokens=True),
    )
)


@dataclass(frozen=True)
class Role:
    """A role of a recipe."""

    spec: RoleSpec
    section: RoleSection

    @property
    def name(self) -> str:
        """Its name in layouts, logs and messages."""
        return self.spec.name

    @property
    def trained(self) -> TrainedModelConfig | None:
        """The section of a role that trains; None of others."""
        return self.section if isinstance(self.section, TrainedModelConfig) else None

    @property
    def path(self) -> str | None:
        """Its model; None: the actor's."""
        return None if isinstance(self.section, RolloutConfig) else self.section.path


def roles_of(recipe: Recipe) -> dict[str, Role]:
    """Return the roles of a recipe by name."""
    sections = {name: _section(recipe, spec.key) for name, spec in ROLES.items() if spec.is_used(recipe)}
    if isinstance(recipe, TrainRecipe):
        sections |= {f"{TEACHER}-{name}": section for name, section in recipe.teachers.items()}
    return {name: Role(ROLES[name], section) for name, section in sections.items() if section is not None}


def is_base_of_host(recipe: Recipe, role: Role) -> bool:
    """Return whether a frozen role that lives with the actor is the actor without its adapters: no second model."""
    section = role.section
    if recipe.actor.lora is None or role.spec.host != "actor" or not isinstance(section, FrozenReferenceConfig):
        return False
    has_own_form = section.dtype not in (None, recipe.actor.dtype) or section.mb_spec is not None
    return section.path is None and section.backend is None and not has_own_form


def trained_models(recipe: Recipe) -> dict[str, TrainedModelConfig]:
    """Return the sections of the roles that train, by role."""
    return {name: role.trained for name, role in roles_of(recipe).items() if role.trained is not None}


def model_paths(recipe: Recipe) -> dict[str, str]:
    """Return the paths of all models but the actor's, by role; a reference without `ref.path` has the actor's."""
    paths = {name: role.path for name, role in roles_of(recipe).items() if name != "actor"}
    return {name: path for name, path in paths.items() if path is not None}


def with_paths(recipe: S, paths: Mapping[str, str]) -> S:
    """Return a recipe in which the models of the roles in `paths` have other paths."""
    for role, path in paths.items():
        recipe = _with(recipe, [*ROLES[role].key.split("."), "path"], path)
    return recipe


def _section(recipe: Recipe, key: str) -> RoleSection | None:
    section: Section | None = recipe
    for name in key.split("."):
        section = getattr(section, name) if section is not None and name in type(section).model_fields else None
    assert section is None or isinstance(section, RoleSection)
    return section


def _with(section: S, names: list[str], value: object) -> S:
    """Return a section in which the key of these names has another value."""
    first, *rest = names
    if not rest:
        return section.model_copy(update={first: value})
    inner = getattr(section, first)
    if isinstance(inner, Mapping):  # several roles by name
        changed = {**inner, rest[0]: _with(inner[rest[0]], rest[1:], value)}
        return section.model_copy(update={first: changed})
    return section.model_copy(update={first: _with(inner, rest, value)})
