"""The recipes of `fivefold dpo` and `fivefold rm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fivefold.config.schema.data import DPODatasetConfig, DPORowsConfig, PreferenceDatasetConfig, PreferenceRowsConfig
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.role import Head
from fivefold.config.schema.roles import FrozenReferenceConfig
from fivefold.config.schema.supervised import SupervisedConfig


class DPOModelConfig(TrainedModelConfig):
    """The model that is trained, and the loss that trains it."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "kto"] = "sigmoid"
    """Loss: `sigmoid` (DPO), `hinge` (SLiC), `ipo` or `kto` (docs/preferences.md)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the distance to the reference: beta of DPO and KTO, tau of IPO."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose answers are assumed to be swapped (conservative DPO), with `loss_type: sigmoid`."""
    average_log_prob: bool = False
    """Divide the log-prob of an answer by its number of tokens, in `sigmoid`, `hinge` and `ipo`."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the losses of desirable answers in `kto`."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the losses of undesirable answers in `kto`."""

    @property
    def has_reference(self) -> bool:
        """Every loss compares the model with the reference."""
        return True

    @model_validator(mode="after")
    def _check_loss(self) -> DPOModelConfig:
        if self.label_smoothing > 0 and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type}: set loss_type "
                "to sigmoid, or drop label_smoothing"
            )
        if self.loss_type == "kto":
            if self.average_log_prob:
                raise ValueError("average_log_prob=true has no effect with loss_type=kto: drop it")
        elif (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(
                f"desirable_weight and undesirable_weight have no effect with loss_type={self.loss_type}: set "
                "loss_type to kto, or drop them"
            )
        return self


class DPORecipe(SupervisedConfig):
    """A recipe of `fivefold dpo`: training on preferences, without a reward model (docs/preferences.md)."""

    actor: DPOModelConfig
    ref: FrozenReferenceConfig = FrozenReferenceConfig()
    train_dataset: DPODatasetConfig
    valid_dataset: DPORowsConfig | None = None
    """Held-out rows, which are evaluated before and after training; null: there are none."""

    @model_validator(mode="after")
    def _check_rows(self) -> DPORecipe:
        for name, rows in (("train_dataset", self.train_dataset), ("valid_dataset", self.valid_dataset)):
            if rows is not None and rows.label_key is not None and self.actor.loss_type != "kto":
                raise ValueError(
                    f"{name}.label_key={rows.label_key} is for single answers, and actor.loss_type="
                    f"{self.actor.loss_type} compares pairs: set actor.loss_type to kto, or drop label_key"
                )
        if self.actor.loss_type == "kto" and self.train_dataset.batch_size < 2:
            raise ValueError(
                "actor.loss_type=kto compares each answer with those to other prompts of its batch, and "
                f"train_dataset.batch_size={self.train_dataset.batch_size} has none: raise it"
            )
        return self


class RMModelConfig(TrainedModelConfig):
    """The model that becomes a reward model: its output layer is replaced by one score."""

    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around 0 (Eisenstein et al. 2023)."""

    @property
    def head(self) -> Head:
        """One score in place of the output layer."""
        return "score"


class RMRecipe(SupervisedConfig):
    """A recipe of `fivefold rm`: a Bradley-Terry reward model (docs/preferences.md)."""

    actor: RMModelConfig
    train_dataset: PreferenceDatasetConfig
    valid_dataset: PreferenceRowsConfig | None = None
    """Held-out pairs, which are evaluated before and after training; null: there are none."""
