"""Types of values and the base of every section of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fivefold.config.library_names import REFUSED
from fivefold.config.limits import LARGEST, MOST_PASSES, MOST_SECONDS, MOST_SEQUENCES, MOST_STALENESS
from fivefold.config.schema.rules import check_rules

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
"""Seconds of each unit, in the order in which a text gives them."""
_TEXT = re.compile("".join(rf"(?:(?P<{unit}>[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?){unit})?" for unit in UNITS))


def parse_duration(value: object) -> float:
    """Return the seconds of `3h55m`, `90m`, `45s`, `1d12h`, `1.5h` or of a plain number.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _TEXT.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError(
            f"{value!r:.60} is not a duration: write units from the largest to the smallest, such as 3h55m, 90m or "
            "45s, or a number of seconds"
        )
    return sum(float(match[unit] or 0) * seconds for unit, seconds in UNITS.items())


ONE_LINE = r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s][^\x00-\x1f\x7f]*$"
"""Pattern of a text in one line that is not blank."""

NAME = r"^\w[\w.-]*$"
"""Pattern of a name that is the name of a folder too."""

ROLE_NAME = r"^\w[\w-]*$"
"""Pattern of a name that is part of a role's name."""

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Sequences = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
Passes = Annotated[int, Field(ge=1, le=MOST_PASSES)]
Staleness = Annotated[int, Field(ge=0, le=MOST_STALENESS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
OneLine = Annotated[str, Field(pattern=ONE_LINE)]
PathText = OneLine
DeviceList = str | list[NonNegative]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=MOST_SECONDS)]
"""A time in seconds; a recipe may write it as a text such as `3h55m`."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced into other types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        # pydantic builds the validator of a section when it first has a recipe to check, which workers never have.
        defer_build=True,
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_rules(self)
        return self


class LibraryFields(Section):
    """Settings of a class or a function of a library, under their own names."""

    library: ClassVar[str]
    """Name of the library."""
    owner: ClassVar[str]
    """Name of the class or function."""
    added: ClassVar[frozenset[str]] = frozenset()
    """Keys of the section that are not settings of it."""

    @model_validator(mode="before")
    @classmethod
    def _explain_refused(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        reasons = REFUSED[cls.owner]
        problems = [
            f"{name} of {cls.library}'s {cls.owner} cannot be set in a recipe: {reasons[name]}"
            for name in values
            if name in reasons
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return values
