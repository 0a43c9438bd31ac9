"""Data sets: their rows and the batches of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from fivefold.config.schema.fields import ONE_LINE, Fraction, NonNegative, NonNegativeFloat, PathText, Positive, Section
from fivefold.config.schema.rules import Named, absent, differs, equals, given, reads_if, rule

SAMPLERS = ("epochs", "easy_to_hard", "replay")
"""Values of `sampler`, besides users' own."""


PROMPT = "{prompt}"
"""What stands for a prompt in `prompt_template`."""


class RowsConfig(Section):
    """Where prompts come from, and how they are read."""

    path: PathText | Annotated[list[PathText], Field(min_length=1)]
    """Parquet, JSONL, JSON or CSV file, folder of such files, `datasets` name, `modelscope:<name>` or `package:<name>`
    (docs/data.md); or a list of several, which are read one after another."""
    reader: Annotated[str | None, Field(pattern=r"^[^\x00-\x1f\x7f]+:\w+$")] = None
    """Your own function that reads each path, as `module:function` or `file.py:function`: it is called with the path
    and `split`, and yields rows, a mapping of columns each; null: Fivefold reads the path."""
    reader_kwargs: Annotated[dict[str, Any], reads_if(given("reader"))] = {}
    """Further keyword arguments of the function."""
    split: str | None = None
    """Split of a `datasets`, ModelScope or package name, or of a folder whose files are named after splits; null:
    `train`."""
    max_length: Positive = 1024
    """Most tokens of a prompt; longer prompts are dropped, and their number is reported."""
    limit: Positive | None = None
    """Use only this many of the first rows; null: all."""
    prompt_key: Annotated[str, reads_if(absent("messages_key"))] = "prompt"
    """Column of the prompt: a text, or a list of chat messages, also as a text of JSON."""
    answer_key: str | None = None
    """Column of the ground truth; null: the field `ground_truth` of the column `reward_model`."""
    apply_chat_template: bool | None = None
    """Whether the tokenizer's chat template is applied; null: to chat messages, not to texts."""
    continue_final_message: bool = False
    """Whether a chat that ends with the beginning of an answer is continued from there; otherwise it is refused."""
    system_prompt: Annotated[str | None, Field(min_length=1)] = None
    """Message of the system that every chat begins with, unless it has one; null: none is added."""
    image_key: str | None = None
    """Column of images, for a model that sees them (docs/vision.md): a file's path or bytes, an image of `datasets`, or
    a list; null: prompts are texts."""
    min_pixels: Annotated[Positive | None, reads_if(given("image_key"))] = None
    """Fewest pixels that an image is resized to; null: as the model's image processor says."""
    max_pixels: Annotated[Positive | None, reads_if(given("image_key"))] = None
    """Most pixels that an image is resized to, which bounds its tokens; null: as the model's image processor says."""

    @rule
    def _pixels(self) -> Iterator[str]:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            yield f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}: lower it"


class AskedRowsConfig(RowsConfig):
    """Prompts in separate columns."""

    prompt_template: Annotated[str | None, Field(min_length=1), reads_if(absent("messages_key"))] = None
    """A text with `{prompt}`, in whose place each prompt of the data comes; null: prompts stay as they are. It is for
    prompts that are texts."""

    @rule
    def _template(self) -> Iterator[str]:
        if self.prompt_template is not None and PROMPT not in self.prompt_template:
            yield f"prompt_template has no {PROMPT}, so every prompt would be the same: write it into the text"


class PromptRowsConfig(AskedRowsConfig):
    """Prompts to complete."""

    truncation: Literal["drop", "left", "right", "error"] = "drop"
    """What becomes of prompts with more than `max_length` tokens. `drop`: they are left out, and their number is
    reported. `left`, `right`: they lose their first or last tokens. `error`: the run does not start."""

    @rule
    def _images(self) -> Iterator[str]:
        if self.image_key is not None and self.truncation in ("left", "right"):
            yield f"truncation={self.truncation} would cut images apart: set it to drop or error"


class BatchesConfig(Section):
    """How rows are distributed over training steps."""

    batch_size: Positive = 32
    """Rows in one training step."""
    shuffle: bool = True
    """Draw a new order in every epoch; false: always the order of the data set."""


class DividedConfig(BatchesConfig):
    """How rows are distributed over training steps and held-out ones."""

    hold_out: NonNegativeFloat = 0.0
    """Rows that are not trained on, drawn by the recipe's `seed`: below 1 their share, from 1 on their number. They are
    evaluated in place of `valid_dataset`."""

    @rule
    def _whole_rows(self) -> Iterator[str]:
        if self.hold_out > 1 and self.hold_out % 1:
            yield f"hold_out={self.hold_out:g} is neither a share below 1 nor a whole number of rows: give one of them"


class DatasetConfig(PromptRowsConfig, DividedConfig):
    """Prompts to train on."""

    source_weights: Annotated[dict[str, NonNegativeFloat], reads_if(equals("sampler", "epochs"))] = {}
    """Weights of the values of the column `data_source`: each source gets the share of its weight in every batch, as
    near as whole prompts allow, and all its prompts come once before any comes again. All sources must be named; empty:
    prompts come as often as they are in the data set."""
    sampler: Annotated[str, Field(pattern=ONE_LINE), Named(SAMPLERS, "Class")] = "epochs"
    """What chooses the prompts of each step: `epochs` (each prompt once before any comes again), `easy_to_hard` (a
    curriculum by pass rate) or `replay` (prompts that were not answered correctly come again)."""
    sampler_kwargs: Annotated[dict[str, Any], reads_if(differs("sampler", "epochs"))] = {}
    """Options of the sampler without a separate key, by name (docs/algorithms.md)."""

    @rule
    def _weights(self) -> Iterator[str]:
        if self.source_weights and not any(self.source_weights.values()):
            yield f"source_weights={self.source_weights} are all 0: raise one of them"


class SFTRowsConfig(AskedRowsConfig):
    """Prompts, each with the response to learn."""

    input_key: Annotated[str | None, reads_if(absent("messages_key"))] = None
    """Column of a text that follows the prompt on a new line, as Alpaca's `input`; rows in which it is empty have the
    prompt alone. null: there is none. It is for prompts that are texts."""
    response_key: Annotated[str, reads_if(absent("messages_key"))] = "response"
    """Column of the response, a text or a list of chat messages, also as a text of JSON; the end-of-sequence token is
    appended to it."""
    messages_key: str | None = None
    """Column of whole conversations, which end with an answer of the assistant; null: prompt and response have separate
    columns."""
    mask_history: Annotated[bool, reads_if(given("messages_key"))] = False
    """With `messages_key`, learn the last answer of a conversation alone; false: all answers of the assistant but one
    that nothing precedes. Where the chat template writes an earlier answer otherwise than a last one, as Qwen3's does,
    which drops its thoughts, that answer is a separate example, with what comes before it."""
    max_length: Positive = 1024
    """Most tokens of an example: prompt, response and end token. Longer examples are dropped, and their number is
    reported."""


class SFTDatasetConfig(SFTRowsConfig, DividedConfig):
    """Examples to train on."""


class ExpertDatasetConfig(SFTRowsConfig, BatchesConfig):
    """Responses of an expert whose likelihood is a term of the loss, in addition to the rewards (docs/algorithms.md).

    `batch_size` examples are part of each training step, spread over its updates.
    """

    weight: Fraction = 0.1
    """Share of the loss, mu: the loss is (1 - mu) times the policy loss, plus mu times the examples' mean negative
    log-likelihood."""
    final_weight: Fraction | None = None
    """mu after `warmup_steps` and `decay_steps`; null: `weight`."""
    warmup_steps: NonNegative = 0
    """Training steps in which mu rises from 0 to `weight`."""
    decay_steps: Annotated[NonNegative, reads_if(given("final_weight"))] = 0
    """Training steps in which mu then falls from `weight` to `final_weight`, as half a cosine."""
    signal: Literal["likelihood", "teacher"] = "likelihood"
    """What is learned of the responses: `likelihood`, the tokens themselves, or `teacher`, the distributions of the
    teachers of all prompts at their tokens. The examples' part of the loss is then mu times `actor.distill.coeff` times
    the mean divergence from the teachers, so that 1 - mu is the share of the student's own samples (GKD's lambda)."""
    token_weight: Annotated[Literal["one", "p", "phi"], reads_if(equals("signal", "likelihood"))] = "one"
    """Factor of each token's negative log-likelihood: 1, its probability p, or p (1 - p) (CHORD)."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of an update's examples, or over the examples of their token means."""

    @property
    def last_weight(self) -> float:
        """mu at the end of its schedule."""
        return self.weight if self.final_weight is None else self.final_weight

    @rule
    def _answer(self) -> Iterator[str]:
        if self.answer_key is not None:
            yield f"answer_key={self.answer_key!r} has no use here: set response_key, the text to learn"
        if self.image_key is not None:
            yield f"image_key={self.image_key!r}: an expert's prompts are read as texts alone: drop it"


class PreferenceRowsConfig(RowsConfig):
    """Pairs of answers to a prompt, one of them preferred (docs/preferences.md)."""

    chosen_key: str = "chosen"
    """Column of the preferred answer: a text, or a list of chat messages, with or without the prompt, also as a text of
    JSON."""
    rejected_key: str = "rejected"
    """Column of the other answer, in the same form."""
    max_length: Positive = 1024
    """Most tokens of a prompt with an answer and its end token. Pairs with a longer one are dropped, and their number
    is reported."""


class PreferenceDatasetConfig(PreferenceRowsConfig, DividedConfig):
    """Pairs to train on."""


class DPORowsConfig(PreferenceRowsConfig):
    """Pairs of answers to a prompt; with `actor.loss_type: kto` also single answers, each with a label."""

    response_key: str = "response"
    """Column of a single answer, with `label_key`."""
    label_key: Annotated[str | None, reads_if(equals("actor.loss_type", "kto"), "is for single answers")] = None
    """Column that says whether a single answer is desirable, true or false (1 or 0), for `actor.loss_type: kto`; null:
    rows are pairs."""


class DPODatasetConfig(DPORowsConfig, DividedConfig):
    """Pairs or single answers to train on."""
