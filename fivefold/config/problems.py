"""Problems of a recipe in words that a person can act on: key, value, rule, nearest known key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fivefold.config.keys import known_keys, nearest_keys, options_of, section_of
from fivefold.config.library_names import in_its_place
from fivefold.config.other_names import meaning_of
from fivefold.config.schema.fields import NAME, ONE_LINE
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rules import RuleErrors
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe

MOST_PROBLEMS = 50
"""Most problems that are listed; the others are counted."""

TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with its own keys",
}
"""The type that each of pydantic's type errors asks for, in words."""

PATTERNS = {
    NAME: "must consist of letters, digits, `_`, `.` and `-`, and begin with neither `.` nor `-`",
    ONE_LINE: "must be a text in one line that is not blank",
}
"""What each pattern of the schema asks for, in words."""

WRITTEN = {
    "int_type": re.compile(r"[-+]?[0-9]{1,100}"),
    "float_type": re.compile(r"[-+]?(\.[0-9]+|[0-9]{1,100}(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    "bool_type": re.compile(r"[Tt]rue|TRUE|[Ff]alse|FALSE"),
}
"""For the types that have no quotes in YAML, how a value of each is written."""

SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""Words that older versions of YAML, or other languages, have for true and false."""

COMMANDS: dict[type[Recipe], str] = {
    TrainRecipe: "fivefold train",
    SFTRecipe: "fivefold sft",
    DPORecipe: "fivefold dpo",
    RMRecipe: "fivefold rm",
}
"""The command that reads recipes of each kind."""


class RecipeError(ValueError):
    """A recipe that cannot be run; `problems` holds one line for each problem."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"- {problem}" for problem in self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the known word nearest to `word`; an empty text if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_key(key: str, value: Any, schema: type[BaseModel]) -> str:
    """Return the line for a key that the schema does not have."""
    line = f"{key}={show(value)}: unknown key"
    others = [f"`{command}`" for other, command in COMMANDS.items() if other is not schema and key in known_keys(other)]
    if others:
        return f"{line}; it belongs to a recipe of {' or '.join(others)}"
    for instead in (in_its_place(key), meaning_of(key, set(known_keys(schema)))):
        if instead is not None:
            return f"{line}; {instead}"
    nearest = nearest_keys(key, schema)
    return f"{line}; did you mean {' or '.join(nearest)}?" if nearest else line


def unknown_keys(error: ValidationError) -> Iterator[str]:
    """Yield the keys among pydantic's errors that the schema does not have."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "extra_forbidden":
            yield ".".join(map(str, detail["loc"]))


def problems_of(error: ValidationError, schema: type[BaseModel]) -> Iterator[str]:
    """Yield one line for each of pydantic's errors, and one for each rule that a section breaks.

    The errors of one value with several types have the same line.
    """
    return (line for _, line in located_problems(error, schema))


def located_problems(error: ValidationError, schema: type[BaseModel]) -> Iterator[tuple[ErrorDetails, str]]:
    """Yield the lines of `problems_of`, each with pydantic's error that it describes."""
    details = error.errors(include_url=False)
    for detail in details:
        fault = detail.get("ctx", {}).get("error")
        if isinstance(fault, RuleErrors):
            yield from ((detail, line) for line in fault.lines(".".join(map(str, detail["loc"]))))
        else:
            yield detail, _line(detail, details, schema)


def _line(detail: ErrorDetails, details: Sequence[ErrorDetails], schema: type[BaseModel]) -> str:
    depth = _union_depth(detail["loc"], schema)
    if depth is None:
        return _described(".".join(str(part) for part in detail["loc"] if part != "[key]"), detail, schema)
    alternatives = [other for other in details if other["loc"][:depth] == detail["loc"][:depth]]
    key = ".".join(map(str, detail["loc"][:depth]))
    # pydantic tries every type; the user meant the one whose check got further than the type itself.
    closest = [
        each
        for each in alternatives
        if len(each["loc"]) > depth + 1 or each["type"] not in TYPES.keys() | {"literal_error"}
    ]
    if not closest and any(each["type"] in TYPES for each in alternatives):
        names = " or ".join(TYPES.get(each["type"]) or each["ctx"]["expected"] for each in alternatives)
        return f"{key}={show(detail['input'])}: must be {names}, not {_kind_of(detail['input'])}"
    nearest = detail if detail in closest or not closest else closest[0]
    return _described(".".join([key, *map(str, nearest["loc"][depth + 1 :])]), nearest, schema)


def _union_depth(location: Sequence[int | str], schema: type[BaseModel]) -> int | None:
    """Return how many parts of `location` lead to a value of several types, which pydantic tries in turn, or None."""
    annotation: Any = schema
    for depth, part in enumerate(location):
        if sum(option is not type(None) for option in options_of(annotation)) > 1:
            return depth
        section = section_of(annotation)
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is None:
            return None
        annotation = field.annotation
    return None


def _described(key: str, detail: ErrorDetails, schema: type[BaseModel]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return unknown_key(key, value, schema)
    if kind == "missing":
        return f"{key}: missing; every recipe needs it"
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{key}: {message}" if key else message
    line = f"{key}={show(value)}: {_rule(detail)}"
    if kind == "greater_than" and key.rpartition(".")[2] == "temperature":
        line += "; greedy=true takes the most likely token"
    return line


def _rule(detail: ErrorDetails) -> str:
    """Return what the value must be, and, for a wrong type, how to write it."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    bounds = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "greater than")}
    bounds |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
    if kind in bounds:
        limit, words = bounds[kind]
        return f"must be {words} {_number(context[limit])}"
    if kind == "literal_error":
        options = [option.strip("'") for option in context["expected"].replace(" or ", ", ").split(", ")]
        return f"must be {context['expected']}{did_you_mean(str(value).lower().replace('-', '_'), options)}"
    if kind == "string_pattern_mismatch":
        return PATTERNS[context["pattern"]]
    if kind == "finite_number":
        return "must be a finite number"
    if kind not in TYPES:
        return detail["msg"]
    return f"must be {TYPES[kind]}, not {_kind_of(value)}{_writing_hint(kind, value)}"


def _number(value: float) -> str:
    """Return a bound with commas between thousands: 32,768, 0.5."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _writing_hint(kind: str, value: Any) -> str:
    """Return how to write the value that is most likely meant, if it was only written wrongly."""
    if kind == "string_type" and isinstance(value, (int, float)):
        return f'; quote it: "{value}"'
    if kind not in WRITTEN or not isinstance(value, str):
        return ""
    if WRITTEN[kind].fullmatch(value):
        return "; if it is one, drop the quotes"
    if kind == "bool_type" and value.lower() in SWITCHES:
        return f"; write {SWITCHES[value.lower()]}"
    digits = value.replace("_", "")
    return f"; write {digits}" if WRITTEN[kind].fullmatch(digits) else ""


def _kind_of(value: Any) -> str:
    if value is None:
        return "empty"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a fraction",
        str: "a text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


def show(value: Any) -> str:
    """Return a value as YAML writes it, shortened to fit a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
