"""Low-rank adapters that are trained in place of a model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.schema.fields import OneLine, PathText, PositiveFloat, Section
from fivefold.config.schema.rules import absent, equals, reads_if

Rank = Annotated[int, Field(ge=1, le=4096)]


class LoraConfig(Section):
    """Low-rank adapters (LoRA) on the model's linear layers, which are trained in place of its weights (docs/lora.md).

    The layers' own weights are frozen: they have no gradients, no optimizer state and no part in checkpoints.
    """

    rank: Rank = 32
    """Rank of the adapters outside of routed experts."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter's matrices is multiplied by this number over its rank."""
    targets: Annotated[list[OneLine], Field(min_length=1)] = ["*"]
    """Layers that have adapters, by name or pattern, such as `[q_proj, v_proj]`; routers never have one."""
    experts: Literal["each", "shared_outer", "none"] = "each"
    """Whether `each` routed expert has separate adapters, or `none`. `shared_outer`: the experts of a layer have in
    common the matrices that see or make hidden states: A of gate and up, B of down."""
    rank_of_experts: Annotated[Rank | None, reads_if(equals("experts", "each", "shared_outer"))] = None
    """Rank of the adapters of each routed expert; null: `rank` divided by the experts that a token visits."""
    use_rslora: bool = False
    """Divide `alpha` by the square root of the rank instead."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability by which each input of an adapter is 0 in training; the others are scaled up. Log-probs before a
    step, the reference and the rollout drop nothing."""
    init: Annotated[Literal["kaiming", "xavier", "gaussian"], reads_if(absent("path"))] = "kaiming"
    """How A is drawn; B is 0. `kaiming`: uniform in +-1 / sqrt(inputs), as PEFT does. `xavier`: normal, with standard
    deviation sqrt(2 / (inputs + rank)), as Megatron-Bridge does. `gaussian`: normal, with 1 / rank."""
    path: PathText | None = None
    """Folder of adapters to begin with, as PEFT writes it, with the same layers and ranks; null: new adapters, which
    change nothing at first."""
