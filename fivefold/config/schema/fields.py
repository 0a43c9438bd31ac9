"""Types of values and the base of every section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fivefold.config.duration import parse_duration
from fivefold.config.limits import LARGEST, MOST_PASSES, MOST_SECONDS, MOST_SEQUENCES, MOST_STALENESS

ONE_LINE = r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s][^\x00-\x1f\x7f]*$"
"""Pattern of a text in one line that is not blank."""

NAME = r"^\w[\w.-]*$"
"""Pattern of a name that is the name of a folder too."""

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Sequences = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
Passes = Annotated[int, Field(ge=1, le=MOST_PASSES)]
Staleness = Annotated[int, Field(ge=0, le=MOST_STALENESS)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float32", "bfloat16"]
PathText = Annotated[str, Field(pattern=ONE_LINE)]
DeviceList = str | list[NonNegative]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=MOST_SECONDS)]
"""A time in seconds; a recipe may write it as a text such as `3h55m`."""


@dataclass(frozen=True)
class Named:
    """Marks a text that is one of some names, or that names a user's own code."""

    names: tuple[str, ...]
    own: Literal["Class", "function"]
    """What the user's own code is."""


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
