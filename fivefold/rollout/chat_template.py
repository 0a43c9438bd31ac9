"""A recipe's own chat template, and the variables that it gives to templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.config.paths import user_path
from fivefold.config.schema.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGNS = ("{{", "{%")
"""Texts with one of these are templates, and others are names of files."""


@dataclass(frozen=True)
class ChatTemplate:
    """What becomes of a tokenizer's chat template."""

    text: str | None = None
    """A template in place of the tokenizer's own; None: its own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Values of the template's variables, of the types of JSON."""

    @classmethod
    def of(cls, recipe: RunConfig) -> ChatTemplate:
        """Return a recipe's; a file is read here, so that other machines need not have it.

        Raises:
            ValueError: the file cannot be read.
        """
        given = recipe.chat_template
        if given is None or any(sign in given for sign in _SIGNS):
            return cls(given, recipe.chat_template_kwargs)
        try:
            text = user_path(given).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template={given!r:.200} is no readable file ({error}), and has no {{{{ or {{% of a template: "
                "give the path of a Jinja file, or the template itself"
            ) from error
        return cls(text, recipe.chat_template_kwargs)

    def apply(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give a tokenizer the template. Its variables become part of it, so that all who use it need not know them.

        Raises:
            ValueError: there are variables, and neither the recipe nor the tokenizer has a template.
        """
        template = tokenizer.chat_template if self.text is None else self.text
        if self.variables and not template:
            raise ValueError(
                f"chat_template_kwargs sets {', '.join(self.variables)}, but the tokenizer has no chat template: give "
                "one by chat_template, or drop chat_template_kwargs"
            )
        if isinstance(template, str):
            tokenizer.chat_template = self._with_variables(template)
        elif template:
            tokenizer.chat_template = {name: self._with_variables(one) for name, one in template.items()}

    def _with_variables(self, template: str) -> str:
        # Python writes texts, numbers, lists and mappings as Jinja does. The + keeps a line break that follows.
        return "".join(f"{{% set {name} = {value!r} +%}}" for name, value in self.variables.items()) + template
