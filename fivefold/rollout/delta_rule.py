"""Which functions compute the gated delta rule of transformers' models."""

from __future__ import annotations

import inspect
import sys

from transformers import PreTrainedModel

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def use_torch_delta_rule(model: PreTrainedModel) -> None:
    """Make all models of the same family compute the delta rule with transformers' own functions in torch.

    Symptom: where the package fla is installed, prompts fail on CPUs, and deterministic mode has no effect on them.
    Cause: transformers replaces its functions, when they are defined, by the package's, whose Triton kernels need a GPU
        and are chosen by their speed. It asks neither for the device nor for the mode.
    Instead: the functions under their decorators. Models without them stay as they are.
    Remove this when transformers chooses by the device and the mode of each call.
    """
    module = sys.modules[type(model).__module__]
    for name in _RULES:
        if hasattr(module, name):
            setattr(module, name, inspect.unwrap(getattr(module, name)))
