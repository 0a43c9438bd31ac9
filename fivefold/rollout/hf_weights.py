"""A transformers model's parameters under the names that Hugging Face *files* give them.

transformers 5 keeps a layer's experts fused in memory; files, and the tensors that arrive from the actor, keep one
tensor an expert. A file's tensor is then a slice of a parameter:

    file     model.layers.3.mlp.experts.7.gate_proj.weight  [F, H]
    memory   model.layers.3.mlp.experts.gate_up_proj        [E, 2F, H]     slice [7, :F]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.bridge.finite import is_finite
from fivefold.families.family import MLPNames
from fivefold.families.registry import FAMILIES
from fivefold.families.sigmoid_experts import is_router_offset

_EXPERTS = ".mlp.experts."
"""What stands between a layer and the name of its fused experts, in memory."""
_ROUTER = ".mlp.gate.weight"
"""How the name of a router's weight ends, in memory."""
_N_NAMED = 8
"""Names spelled out in an error before it counts the rest."""


@dataclass(frozen=True)
class FileTensor:
    """Where the tensor of a file lies in memory."""

    parameter: Tensor
    index: tuple[int | slice, ...] = ()

    def view(self) -> Tensor:
        """Return the tensor, which shares memory with the parameter."""
        return self.parameter.detach()[self.index] if self.index else self.parameter.detach()


def file_tensors(model: PreTrainedModel) -> dict[str, FileTensor]:
    """Return every tensor of the model's file, by name. A tied output layer has none: it is the embedding.

    Raises:
        ValueError: fused experts in a family whose files' names are not known.
    """
    model_type = model.config.model_type
    moe = FAMILIES[model_type].moe if model_type in FAMILIES else None
    tensors: dict[str, FileTensor] = {}
    for name, parameter in _weights(model):
        layer, is_expert, matrix = name.partition(_EXPERTS)
        if is_expert and moe is None:
            known = ", ".join(family.model_type for family in FAMILIES.values() if family.moe is not None)
            raise ValueError(
                f"model_type {model_type!r} has experts whose names in files are not known; known are those of {known}"
            )
        if moe is None:
            tensors[name] = FileTensor(parameter)
        elif is_expert:
            tensors.update(_split_experts(parameter, layer, matrix, moe.expert))
        elif name.endswith(_ROUTER):
            tensors[f"{name.removesuffix(_ROUTER)}.{moe.router}"] = FileTensor(parameter)
        else:
            tensors[name] = FileTensor(parameter)
    return tensors


def not_finite(model: PreTrainedModel) -> list[str]:
    """Return the names in files of the tensors that hold NaN or infinite values.

    A parameter is checked once, whole; only one that holds such values is looked at tensor by tensor.

    Raises:
        ValueError: as `file_tensors` does, if there are such values.
    """
    suspects = {id(parameter) for _, parameter in _weights(model) if not is_finite(parameter)}
    if not suspects:
        return []
    return [
        name
        for name, tensor in file_tensors(model).items()
        if id(tensor.parameter) in suspects and not is_finite(tensor.view())
    ]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the offsets of the routers' scores, which are buffers, by name in memory."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if is_router_offset(name))


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


@torch.no_grad()
def receive_weights(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the model in place, cast to its dtype and device.

    Raises:
        ValueError: as `audited` does, after the whole iterator is consumed.
    """
    for name, tensor in audited(tensors, weights):
        tensors[name].view().copy_(tensor)


def audited(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield those of `weights` that fit, and check at the end that every tensor came exactly once.

    The whole iterator is consumed before anything is reported, because collectives that other ranks take part in may
    stand behind it.

    Raises:
        ValueError: naming every tensor that is missing, unknown, sent twice, or of the wrong shape.
    """
    problems: dict[str, list[str]] = {"missing": [], "unknown": [], "sent twice": [], "wrong shape": []}
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in tensors:
            problems["unknown"].append(name)
            continue
        if name in seen:
            problems["sent twice"].append(name)
        seen.add(name)
        wanted = tensors[name].view().shape
        if wanted != tensor.shape:
            problems["wrong shape"].append(f"{name} {tuple(tensor.shape)}, wanted {tuple(wanted)}")
            continue
        yield name, tensor
    problems["missing"] = [name for name in tensors if name not in seen]
    if any(problems.values()):
        raise ValueError(
            f"the weights do not fit the rollout model, which wants each of its {len(tensors)} tensors exactly once: "
            + "; ".join(_describe(problem, names) for problem, names in problems.items() if names)
        )


def _describe(problem: str, names: list[str]) -> str:
    shown = ", ".join(names[:_N_NAMED])
    rest = len(names) - _N_NAMED
    return f"{problem}: {shown}" + (f" and {rest} more" if rest > 0 else "")
