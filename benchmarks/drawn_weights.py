"""Random weights of the distribution that the trainer's have, for a model inside an inference engine."""

from __future__ import annotations

from typing import Any

import torch

INITIALIZER_RANGE = 0.02


def draw_weights(model: torch.nn.Module, _: Any = None) -> None:
    """Draw the weights anew: matrices normal, norms 1. SGLang calls it with a list of tensors as well."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=INITIALIZER_RANGE)
        else:
            parameter.data.fill_(1.0)
