"""Sections whose keys are settings of a library, under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from fivefold.config.schema.fields import Section


class LibraryFields(Section):
    """Settings of a class or function of a library."""

    library: ClassVar[str]
    """Name of the library."""
    refused: ClassVar[Mapping[str, Mapping[str, str]]]
    """The reason for each setting of the library that a recipe cannot set, by class or function."""
    owner: ClassVar[str]
    """Name of the class or function."""
    added: ClassVar[frozenset[str]] = frozenset()
    """Keys of the section that are not settings of it."""

    @model_validator(mode="before")
    @classmethod
    def _explain_refused(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        reasons = cls.refused[cls.owner]
        problems = [
            f"{name} of {cls.library}'s {cls.owner} cannot be set in a recipe: {reasons[name]}"
            for name in values
            if name in reasons
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return values
