"""What the schema says of each key: the text below it in the class of its section.

pydantic can read these texts as it makes a class (`use_attribute_docstrings`), which takes half of the time of the
schema's import, and every process of a run imports it. Only the message for an unknown key has a use for them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def description_of(section: type[BaseModel], key: str) -> str:
    """Return the text below a key in its section, or in that base of the section that has it; empty: there is none."""
    owner = next(base for base in section.__mro__ if key in vars(base).get("__annotations__", {}))
    return _texts(owner).get(key, "")


@cache
def _texts(owner: type) -> Mapping[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
