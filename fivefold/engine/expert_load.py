"""Metrics of how evenly tokens are spread over experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fivefold.families.shape import ModelShape


def load_metrics(load_LE: torch.Tensor, moe_layers: Sequence[bool]) -> dict[str, float]:
    """Return how uneven the loads of experts are; nothing if no token was routed.

    Over all layers they are `experts/imbalance` and the like, of layer n `experts/imbalance/layer_<n>`.

    Args:
        load_LE: tokens that each expert of each layer got, [layers, experts].
        moe_layers: which layers have experts.
    """
    layers = [layer for layer, is_moe in enumerate(moe_layers) if is_moe]
    loads_LE = load_LE[layers].double().cpu()
    if not layers or not bool(loads_LE.sum(1).all()):
        return {}
    imbalance_L = (loads_LE.amax(1) / loads_LE.mean(1)).tolist()
    width = len(str(len(moe_layers) - 1))
    return {
        "experts/imbalance": sum(imbalance_L) / len(layers),
        "experts/imbalance/max": max(imbalance_L),
        "experts/dead": float((loads_LE == 0).sum()),
        **{
            f"experts/imbalance/layer_{layer:0{width}}": value for layer, value in zip(layers, imbalance_L, strict=True)
        },
    }


def auxiliary_losses(
    names: Sequence[str], losses_LK: torch.Tensor, load_LE: torch.Tensor, shape: ModelShape
) -> dict[str, float]:
    """Return the mean over tokens and layers of each auxiliary loss that is trained, without its weight.

    Args:
        names: their names.
        losses_LK: sums over the tokens of each layer, [layers, names].
        load_LE: tokens that each expert of each layer got, [layers, experts].
        shape: shape of the model.
    """
    layers = [layer for layer, is_moe in enumerate(shape.moe_layers) if is_moe]
    tokens_L = load_LE[layers].double().sum(1) / shape.top_k
    if not layers or not bool(tokens_L.all()):
        return {}
    means_K = (losses_LK[layers].double() / tokens_L[:, None]).mean(0).tolist()
    return {name: mean for name, mean in zip(names, means_K, strict=True) if mean}
