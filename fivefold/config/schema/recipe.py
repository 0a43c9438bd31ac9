"""The recipe of any command."""

from __future__ import annotations

from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe

Recipe = TrainRecipe | SFTRecipe | DPORecipe | RMRecipe
