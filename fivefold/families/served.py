"""The adapters of a model as an inference server takes them: which layers have some, and of what form.

Servers compute several layers in one and want adapters of all of them or of none. A layer next to one that is trained
gets adapters that are 0.

    q_proj  k_proj  v_proj                  layers of one module that see the same inputs
    gate_proj  up_proj  down_proj           all layers of a routed expert
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from fivefold.families.adapters import AdapterShape, layer_of
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import WeightTensor, tensors

EXPERTS = "experts"
"""What stands for the layers of all routed experts among `ServedAdapters.modules`."""


@dataclass(frozen=True)
class ServedAdapters:
    """What a server has to know when it starts. It is pickled."""

    shape: AdapterShape
    """The adapters that are trained."""
    rank: int
    """Largest rank of a layer."""
    modules: tuple[str, ...]
    """Names of the layers outside of routed experts that have adapters, such as `q_proj`, and `EXPERTS` if those do."""
    projections: tuple[str, ...]
    """Names of all layers that have adapters, also in routed experts."""

    @staticmethod
    def of(shape: ModelShape) -> ServedAdapters:
        """Return what a server has to know of the adapters of a model, which has some."""
        weights = served_weights(shape)
        ranks = [tensor.shape[0] for tensor in served_matrices(shape) if tensor.name.endswith("lora_A.weight")]
        modules = {EXPERTS if weight.n_experts else str(layer_of(weight.name)) for weight in weights}
        projections = {str(layer_of(weight.name)) for weight in weights}
        return ServedAdapters(adapters_of(shape), max(ranks), tuple(sorted(modules)), tuple(sorted(projections)))


def served_weights(shape: ModelShape) -> list[WeightTensor]:
    """Return the weights that have adapters in a server: those that are trained, and those that it computes with them.

    Args:
        shape: the model with its adapters.
    """
    adapted = {tensor.adapts for tensor in tensors(shape)}
    own = [tensor for tensor in tensors(replace(shape, adapters=None)) if _may_have(tensor, adapters_of(shape))]
    together = {_together(tensor) for tensor in own if tensor.name in adapted}
    return [tensor for tensor in own if _together(tensor) in together]


def served_matrices(shape: ModelShape) -> list[WeightTensor]:
    """Return the matrices of all adapters in a server, trained or 0, as `tensors` has them."""
    wanted = {weight.name for weight in served_weights(shape)}
    everywhere = replace(shape, adapters=replace(adapters_of(shape), targets=("*",)))
    return [tensor for tensor in tensors(everywhere) if tensor.adapts in wanted]


def sent_matrices(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """Return name and shape of each matrix that a trainer sends."""
    return {name: tensor.shape for tensor in tensors(shape) if tensor.adapts for name in tensor.names}


def adapters_of(shape: ModelShape) -> AdapterShape:
    """Return the adapters of a model, which has some."""
    assert shape.adapters is not None, "the model has no adapters"
    return shape.adapters


def _may_have(tensor: WeightTensor, adapters: AdapterShape) -> bool:
    anywhere = replace(adapters, targets=("*",))
    return anywhere.rank_of(tensor.name, of_expert=tensor.n_experts is not None) is not None


def _together(tensor: WeightTensor) -> tuple[str, object]:
    """Return what is the same for two weights whose layers a server computes in one."""
    module, _, _ = tensor.name.removesuffix(".weight").rpartition(".")
    return module, None if tensor.n_experts else (tensor.cut, tensor.shape[1])


def room_elements(shape: ModelShape, rank: int, ranks: int) -> int:
    """Return the elements of the room that each of `ranks` tensor-parallel ranks of a server makes for adapters.

    Args:
        shape: the model with its adapters.
        rank: rank of all layers in the server.
        ranks: tensor-parallel ranks.
    """
    total = 0
    for weight in served_weights(shape):
        rows, columns = weight.shape
        rows, columns = (
            rows // (ranks if weight.cut == "rows" else 1),
            columns // (ranks if weight.cut == "columns" else 1),
        )
        total += rank * (rows + columns) * (weight.n_experts or 1)
    return total


def file_elements(shape: ModelShape) -> int:
    """Return the elements of all matrices of a server's adapters, with a copy for each expert of those they share."""
    return sum(prod(tensor.shape) * len(tensor.names_in_peft) for tensor in served_matrices(shape))
