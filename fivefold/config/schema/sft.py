"""The recipe of `fivefold sft`."""

from __future__ import annotations

from fivefold.config.schema.data import SFTDatasetConfig, SFTRowsConfig
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.supervised import SupervisedConfig


class SFTRecipe(SupervisedConfig):
    """A recipe of `fivefold sft`: supervised fine-tuning, with the loss on the response tokens."""

    actor: TrainedModelConfig
    train_dataset: SFTDatasetConfig
    valid_dataset: SFTRowsConfig | None = None
    """Held-out examples, whose loss is computed as `evaluator` says; null: there are none, unless
    `train_dataset.hold_out` names some."""
