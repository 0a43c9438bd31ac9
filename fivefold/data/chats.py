"""Chat messages of rows: how they are read, and written as the text that a model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.data import RowsConfig
from fivefold.json_text import parsed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_system(messages: Sequence[Mapping[str, Any]], config: RowsConfig) -> Sequence[Mapping[str, Any]]:
    """Return chat messages that begin with the recipe's `system_prompt`, unless they have one already."""
    if config.system_prompt is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def read_messages(prompt: Any) -> Any:
    """Return the chat messages that a text of JSON holds, as CSV files and some data sets have them; else `prompt`."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("["):
        return prompt
    try:
        messages = parsed(prompt)
    except ValueError:
        return prompt
    is_chat = bool(messages) and all(isinstance(m, dict) and m.keys() >= {"role", "content"} for m in messages)
    return messages if is_chat else prompt


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    is_prompt: bool = True,
    continues: bool = False,
) -> str:
    """Return chat messages as a text, with the tokenizer's chat template.

    Args:
        messages: the messages.
        tokenizer: the model's tokenizer.
        where: the row, for error messages.
        is_prompt: whether the text ends with the beginning of an answer; otherwise the last message is the answer.
        continues: whether the last message is the beginning of an answer, which the model continues.

    Raises:
        ValueError: a message without a role or a text, the tokenizer has no chat template, or one that refuses the
            messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise ValueError(
            f"{where}: the prompt is made of chat messages, but the tokenizer of {tokenizer.name_or_path!r} has no "
            "chat template: use a model that has one (an instruct model), or give texts with apply_chat_template=false"
        )
    present = [as_message(message, where) for message in messages]
    options: dict[str, Any] = {
        "add_generation_prompt": is_prompt and not continues,
        "continue_final_message": continues,
    }
    try:
        return str(tokenizer.apply_chat_template(present, tokenize=False, **options))
    # Such as roles in an order that the template refuses, or an answer to continue that it leaves out.
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} refuses the messages ({error}): change them, or "
            "drop the row"
        ) from error


def as_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a chat message as templates read it: its content is one text.

    Raises:
        ValueError: it has no role or no text, or a part of it is no text.
    """
    # Parquet gives all messages of a column the same keys; a template would take the None of a missing key for a value.
    present = {key: value for key, value in message.items() if value is not None}
    role, content = present.get("role"), present.get("content")
    if not isinstance(role, str):
        hint = " (ShareGPT's `from` and `value` are called role and content here)" if "from" in present else ""
        raise ValueError(
            f"{where}: the chat message {message!r:.200} has no role{hint}: give each message a role and a content"
        )
    if isinstance(content, list) and content:
        content = "".join(_text_of(part, where) for part in content)
    if isinstance(content, str):
        return {**present, "content": content}
    if content is None and present.get("tool_calls"):
        return present
    raise ValueError(
        f"{where}: the content of the chat message {message!r:.200} is no text: give a text, or a list of parts "
        '{"type": "text", "text": ...}, or drop the row'
    )


def _text_of(part: Any, where: str) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") != "text":
        raise ValueError(
            f"{where}: a chat message holds the part {part!r:.200}, and only texts are read here: drop the row, or "
            "name the column of images in image_key, which prompts of `fivefold train` may have (docs/vision.md)"
        )
    return text
