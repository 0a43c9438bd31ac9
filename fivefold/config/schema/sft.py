"""The recipe of `fivefold sft`."""

from __future__ import annotations

from fivefold.config.schema.data import SFTDatasetConfig, SFTRowsConfig
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.supervised import SupervisedConfig


class SFTModelConfig(EngineConfig):
    """The model that is fine-tuned."""

    optimizer: OptimizerConfig = OptimizerConfig()


class SFTRecipe(SupervisedConfig):
    """A recipe of `fivefold sft`: supervised fine-tuning, with the loss on the response tokens."""

    actor: SFTModelConfig
    train_dataset: SFTDatasetConfig
    valid_dataset: SFTRowsConfig | None = None
    """Held-out examples, whose loss is computed before and after training; null: there are none."""
