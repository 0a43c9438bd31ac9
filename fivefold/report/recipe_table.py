"""The keys of a run's recipe next to the defaults of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fivefold.config.keys import flattened
from fivefold.config.load import kind_of

NO_DEFAULT = "(must be given)"
UNKNOWN = "(not a key of this version)"


def with_defaults(recipe: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each key of a resolved recipe with its value and the default of the schema."""
    kind = kind_of(dict(recipe))
    return [(key, value, _default(kind, key)) for key, value in flattened(recipe)]


def _default(schema: type[BaseModel], key: str) -> Any:
    """Return the default of a dotted key; inside a section that is left out by default, the section's own default."""
    name, _, inner = key.partition(".")
    field = schema.model_fields.get(name)
    if field is None:
        return UNKNOWN
    if inner and (section := _section(field.annotation)) is not None:
        return _default(section, inner)
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return NO_DEFAULT
    if isinstance(default, BaseModel):
        default = default.model_dump()
    for part in inner.split(".") if inner else ():
        default = default.get(part) if isinstance(default, Mapping) else None
    return default


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
