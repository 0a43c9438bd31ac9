"""A recipe's chat template and its variables, in every chat that is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.train import TrainRecipe
from fivefold.rollout.chat_template import ChatTemplate
from tests.unit.data.conftest import CHAT_TEMPLATE, build_tokenizer

ASKED = [{"role": "user", "content": "1+1?"}]
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<off>{% else %}<on>{% endif %}"


def rendered(template: ChatTemplate, own: str | dict[str, str] = CHAT_TEMPLATE, **options: Any) -> str:
    tokenizer = build_tokenizer("$A")
    tokenizer.chat_template = own
    template.apply(tokenizer)
    return str(tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **options))


def recipe(**keys: Any) -> TrainRecipe:
    common = {"experiment_name": "x", "actor": {"path": "a"}, "train_dataset": {"path": "b"}}
    return TrainRecipe.model_validate(common | keys)


@pytest.mark.parametrize(
    "value", [False, None, 3, -2.5, "a \"quote\" and 'one'\n\\ é 🙂", ["x", 1, True], {"a": [None, {"b": "c"}]}]
)
def test_variables_have_the_values_that_an_argument_of_the_template_would_have(value: Any) -> None:
    own = "{% macro inner() %}{{ given }}{% endmacro %}\n{{ given | tojson }}"
    own += "{% for m in messages %}{{ inner() }}{% endfor %}"
    by_argument = rendered(ChatTemplate(), own, given=value)
    assert rendered(ChatTemplate(variables={"given": value}), own) == by_argument


def test_thinking_is_switched_off() -> None:
    keys = recipe(chat_template_kwargs={"enable_thinking": False})
    assert rendered(ChatTemplate.of(keys), THINKING) == "<off>"
    assert rendered(ChatTemplate.of(recipe()), THINKING) == "<on>"
    assert rendered(ChatTemplate.of(keys), {"default": THINKING, "other": "x"}) == "<off>"


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    text = "[{{ messages[0].content }}]"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for given in (text, str(file)):
        assert rendered(ChatTemplate.of(recipe(chat_template=given))) == "[1+1?]"
    with pytest.raises(ValueError, match="is no readable file"):
        ChatTemplate.of(recipe(chat_template=str(tmp_path / "absent.jinja")))


def test_variables_without_a_template_are_refused() -> None:
    with pytest.raises(ValueError, match="sets enable_thinking, but the tokenizer has no chat template: give"):
        rendered(ChatTemplate(variables={"enable_thinking": False}), {})
