"""A transformers model's parameters under their names in Hugging Face files.

transformers 5 fuses a layer's experts in memory; files, and the weights that arrive, have a tensor for each expert. A
file's tensor is then a slice of a parameter:

    file     model.layers.3.mlp.experts.7.gate_proj.weight  [F, H]
    memory   model.layers.3.mlp.experts.gate_up_proj        [E, 2F, H]     slice [7, :F]
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel

from fivefold.bridge.finite import is_finite
from fivefold.families.family import MLPNames
from fivefold.families.registry import FAMILIES, family_in_memory
from fivefold.families.sigmoid_experts import is_router_offset
from fivefold.rollout.hf_weights import FileTensor

_EXPERTS = ".mlp.experts."
"""What stands between a layer and the name of its fused experts, in memory."""


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the offsets of the routers' scores, which are buffers, by name in memory."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if is_router_offset(name))


def file_tensors(model: PreTrainedModel) -> dict[str, FileTensor]:
    """Return every tensor of the model's file, by name. A tied output layer has none: it is the embedding.

    Raises:
        ValueError: fused experts in a family whose names in files are not known.
    """
    model_type = model.config.model_type
    family = family_in_memory(model_type)
    moe = None if family is None else family.moe
    tensors: dict[str, FileTensor] = {}
    for name, parameter in _weights(model):
        layer, is_expert, matrix = name.partition(_EXPERTS)
        if is_expert and moe is None:
            known = ", ".join(family.model_type for family in FAMILIES.values() if family.moe is not None)
            raise ValueError(
                f"model_type {model_type!r} has experts whose names in files are not known; known are {known}"
            )
        if moe is None or moe.joint is not None:
            tensors[name] = FileTensor(parameter)
        elif is_expert:
            tensors.update(_split_experts(parameter, layer, matrix, moe.expert))
        elif name.endswith(router := f".{moe.router_in_memory}.weight"):
            tensors[f"{name.removesuffix(router)}.{moe.router}"] = FileTensor(parameter)
        elif is_router_offset(name):
            tensors[f"{name.removesuffix(moe.bias_in_memory)}{moe.bias}"] = FileTensor(parameter)
        else:
            tensors[name] = FileTensor(parameter)
    return tensors if family is None else {family.in_files(name): tensor for name, tensor in tensors.items()}


def _split_experts(parameter: Tensor, layer: str, matrix: str, names: MLPNames) -> Iterator[tuple[str, FileTensor]]:
    """Yield the matrices of every expert in a fused parameter, which is called `matrix` in memory."""
    half = parameter.shape[1] // 2
    slices: dict[str, tuple[slice, ...]]
    if matrix == "gate_up_proj":
        slices = {names.gate: (slice(0, half),), names.up: (slice(half, None),)}
    elif matrix == "down_proj":
        slices = {names.down: ()}
    else:
        raise ValueError(
            f"{layer}{_EXPERTS}{matrix} is not one of the fused experts `gate_up_proj` and `down_proj`: this version "
            "of transformers keeps experts in another way"
        )
    for expert in range(parameter.shape[0]):
        for name, rows in slices.items():
            yield f"{layer}.{name.format(expert=expert)}", FileTensor(parameter, (expert, *rows))


def not_finite(model: PreTrainedModel) -> list[str]:
    """Return the names in files of the tensors that hold NaN or infinite values.

    It checks each parameter once, whole, and tensor by tensor only those that hold such values.

    Raises:
        ValueError: as `file_tensors`, if there are such values.
    """
    suspects = {id(parameter) for _, parameter in _weights(model) if not is_finite(parameter)}
    if not suspects:
        return []
    return [
        name
        for name, tensor in file_tensors(model).items()
        if id(tensor.parameter) in suspects and not is_finite(tensor.view())
    ]
