"""Data sets: their rows and the batches of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fivefold.config.schema.fields import PathText, Positive, Section


class RowsConfig(Section):
    """Where prompts come from, and how they are read."""

    path: PathText
    """Parquet, JSONL, JSON or CSV file, folder of such files, `datasets` name, or `package:<name>`."""
    split: str | None = None
    """Split of a `datasets` or package name, or of a folder whose files are named after splits; null: `train`."""
    max_length: Positive = 1024
    """Most tokens of a prompt; longer prompts are dropped, and their number is reported."""
    limit: Positive | None = None
    """Use only this many of the first rows; null: all."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    answer_key: str | None = None
    """Column of the ground truth; null: the field `ground_truth` of the column `reward_model`."""
    apply_chat_template: bool | None = None
    """Whether the tokenizer's chat template is applied; null: to chat messages, not to texts."""


class BatchesConfig(Section):
    """How rows are distributed over training steps."""

    batch_size: Positive = 32
    """Rows in one training step."""
    shuffle: bool = True
    """Draw a new order in every epoch; false: always the order of the data set."""


class DatasetConfig(RowsConfig, BatchesConfig):
    """Prompts to train on."""

    source_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Weights of the values of the column `data_source`: each source gets the share of its weight in every batch, as
    near as whole prompts allow, and all its prompts come once before any comes again. All sources must be named; empty:
    prompts come as often as they are in the data set."""

    @model_validator(mode="after")
    def _check_weights(self) -> DatasetConfig:
        if self.source_weights and not any(self.source_weights.values()):
            raise ValueError(f"source_weights={self.source_weights} are all 0: raise one of them")
        return self


class SFTRowsConfig(RowsConfig):
    """Prompts, each with the response to learn."""

    response_key: str = "response"
    """Column of the response; the end-of-sequence token is appended to it."""
    max_length: Positive = 1024
    """Most tokens of an example: prompt, response and end token. Longer examples are dropped, and their number is
    reported."""


class SFTDatasetConfig(SFTRowsConfig, BatchesConfig):
    """Examples to train on."""


class PreferenceRowsConfig(RowsConfig):
    """Pairs of answers to a prompt, of which one was preferred (docs/preferences.md)."""

    chosen_key: str = "chosen"
    """Column of the preferred answer: a text, or a list of chat messages, with or without those of the prompt."""
    rejected_key: str = "rejected"
    """Column of the other answer, in the same form."""
    max_length: Positive = 1024
    """Most tokens of a prompt with an answer and its end token. Pairs with a longer one are dropped, and their number
    is reported."""


class PreferenceDatasetConfig(PreferenceRowsConfig, BatchesConfig):
    """Pairs to train on."""


class DPORowsConfig(PreferenceRowsConfig):
    """Pairs of answers to a prompt; with `actor.loss_type: kto` also single answers, each with a label."""

    response_key: str = "response"
    """Column of a single answer, with `label_key`."""
    label_key: str | None = None
    """Column that says whether a single answer is desirable, true or false, for `actor.loss_type: kto`; null: rows are
    pairs."""


class DPODatasetConfig(DPORowsConfig, BatchesConfig):
    """Pairs or single answers to train on."""
