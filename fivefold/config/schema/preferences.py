"""The recipes of `fivefold dpo` and `fivefold rm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.schema.data import DPODatasetConfig, DPORowsConfig, PreferenceDatasetConfig, PreferenceRowsConfig
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.fields import NonNegativeFloat, PositiveFloat
from fivefold.config.schema.role import Head
from fivefold.config.schema.roles import FrozenReferenceConfig
from fivefold.config.schema.rules import equals, reads_if, rule
from fivefold.config.schema.supervised import SupervisedConfig

_WITH_REFERENCE = ("sigmoid", "hinge", "ipo", "kto")
_OF_PAIRS = ("sigmoid", "hinge", "ipo", "cpo", "simpo", "orpo")


class DPOModelConfig(TrainedModelConfig):
    """The model that is trained, and the loss that trains it."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "kto", "cpo", "simpo", "orpo"] = "sigmoid"
    """Loss: `sigmoid` (DPO), `hinge` (SLiC), `ipo`, `kto`, or without a reference `cpo`, `simpo` or `orpo`
    (docs/preferences.md)."""
    beta: PositiveFloat = 0.1
    """Weight of the distance to the reference: beta of DPO and KTO, tau of IPO. Without a reference: beta of CPO, beta
    of SimPO (2 to 10 in its paper), lambda of ORPO."""
    simpo_gamma: Annotated[NonNegativeFloat, reads_if(equals("loss_type", "simpo"))] = 0.5
    """Margin that `simpo` asks of beta times the difference of the average log-probs."""
    nll_weight: Annotated[NonNegativeFloat | None, reads_if(equals("loss_type", *_OF_PAIRS))] = None
    """Weight of the negative log-likelihood of the chosen answers, which is added to the loss (RPO, arXiv 2404.19733);
    null: 1 in `cpo` and `orpo`, else 0."""
    nll_aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum"], reads_if(equals("loss_type", *_OF_PAIRS))
    ] = "token_mean"
    """What that likelihood is: the mean over the tokens of all chosen answers, the mean over answers of the mean over
    each one's tokens, or the mean over answers of their sums."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), reads_if(equals("loss_type", "sigmoid"))] = 0.0
    """Share of the pairs whose answers are assumed to be swapped (conservative DPO), with `loss_type: sigmoid`."""
    average_log_prob: Annotated[bool, reads_if(equals("loss_type", "sigmoid", "hinge", "ipo"))] = False
    """Divide the log-prob of an answer by its number of tokens, in `sigmoid`, `hinge` and `ipo`."""
    desirable_weight: Annotated[PositiveFloat, reads_if(equals("loss_type", "kto"))] = 1.0
    """Factor of the losses of desirable answers in `kto`."""
    undesirable_weight: Annotated[PositiveFloat, reads_if(equals("loss_type", "kto"))] = 1.0
    """Factor of the losses of undesirable answers in `kto`."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the reference."""
        return self.loss_type in _WITH_REFERENCE

    @property
    def compares_averages(self) -> bool:
        """Whether answers are compared by log-probs per token."""
        return self.average_log_prob or self.loss_type in ("simpo", "orpo")

    @property
    def weight_of_nll(self) -> float:
        """As `nll_weight` says."""
        if self.nll_weight is None:
            return float(self.loss_type in ("cpo", "orpo"))
        return self.nll_weight


class DPORecipe(SupervisedConfig):
    """A recipe of `fivefold dpo`: training on preferences, without a reward model (docs/preferences.md)."""

    actor: DPOModelConfig
    ref: Annotated[FrozenReferenceConfig, reads_if(equals("actor.loss_type", *_WITH_REFERENCE))] = (
        FrozenReferenceConfig()
    )
    train_dataset: DPODatasetConfig
    valid_dataset: DPORowsConfig | None = None
    """Held-out rows, which are evaluated as `evaluator` says; null: there are none, unless `train_dataset.hold_out`
    names some."""

    @rule
    def _pairs(self) -> Iterator[str]:
        if self.actor.loss_type == "kto" and self.train_dataset.batch_size < 2:
            yield (
                "actor.loss_type=kto compares each answer with those to other prompts of its batch, and "
                f"train_dataset.batch_size={self.train_dataset.batch_size} has none: raise it"
            )


class RMModelConfig(TrainedModelConfig):
    """The model that becomes a reward model: its output layer is replaced by one score."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
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
    """Held-out pairs, which are evaluated as `evaluator` says; null: there are none, unless `train_dataset.hold_out`
    names some."""
