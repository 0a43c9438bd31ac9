"""Who turns Hugging Face's weights into Megatron-Core's, and back for the rollout: `actor.megatron.bridge_type`.

fivefold          `fivefold.bridge.bridge.Bridge`
mbridge           the package mbridge, through its public interface, on parameters under the names that it knows
megatron-bridge   the package megatron-bridge, in the same way
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.bridge.bridge import Bridge
from fivefold.config.schema.engine import EngineConfig
from fivefold.families.shape import ModelShape
from fivefold.mcore.mbridge import MBridge
from fivefold.mcore.megatron_bridge import MegatronBridge


def build_bridge(config: EngineConfig, shape: ModelShape, folder: Path, megatron: TransformerConfig) -> Bridge:
    """Return the bridge of the recipe for the model in `folder`, whose configuration is `megatron`.

    Raises:
        ValueError: the bridge's package is not installed or cannot be imported, or has no such model.
    """
    match config.megatron.bridge_type:
        case "mbridge":
            return MBridge(shape, folder, getattr(torch, config.dtype))
        case "megatron-bridge":
            return MegatronBridge(shape, folder, megatron)
    return Bridge(shape)
