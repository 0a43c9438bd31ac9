"""Which Hugging Face tensors each parameter of a transformers model is made of.

transformers names parameters in memory as its files do, except that it keeps all experts of a layer in one parameter,
and gives the routers of all families one name:

    files    model.layers.3.mlp.experts.7.gate_proj.weight  [F, H]
    memory   model.layers.3.mlp.experts.gate_up_proj        [E, 2F, H]

Adapters have the names that PEFT writes; adapters of experts are fused too:

    files    model.layers.3.mlp.experts.7.gate_proj.lora_A.weight  [R, H]
    memory   model.layers.3.mlp.experts.adapters.gate_proj.A       [E, R, H]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.bridge.mapping import WeightMapping, mapping_of
from fivefold.families.adapters import MATRICES, Matrix, find_adapter, layer_of
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import WeightTensor, joint_name, tensors


def mappings(shape: ModelShape) -> dict[str, WeightMapping]:
    """Return the mapping of each parameter by its name in memory, in the model's order.

    Raises:
        ValueError: a family that is not known.
    """
    return {mapping.parameter: mapping for mapping in _mappings(shape)}


def _mappings(shape: ModelShape) -> Iterator[WeightMapping]:
    family = find_family(shape.family)
    moe = family.moe
    routers = {} if moe is None else {moe.router: f"{moe.router_in_memory}.weight", moe.bias: moe.bias_in_memory}
    by_name = {tensor.name: tensor for tensor in tensors(shape)}
    for tensor in by_name.values():
        layer = f"model.layers.{tensor.layer}."
        in_file = family.in_files(layer)
        if tensor.n_experts is None and tensor.shared_by is None:
            own = tensor.name.removeprefix(in_file)
            # A bias follows its weight, as in a module of transformers.
            if not own.endswith(".bias"):
                yield mapping_of(layer + routers[own] if own in routers else family.in_memory(tensor.name), tensor)
            if (bias := by_name.get(tensor.name.removesuffix(".weight") + ".bias")) is not None:
                yield mapping_of(family.in_memory(bias.name), bias)
        elif tensor.is_joint:
            yield mapping_of(joint_name(tensor.name), tensor)
        elif moe is not None and tensor.name == in_file + moe.expert.gate:
            yield mapping_of(f"{layer}mlp.experts.gate_up_proj", tensor, by_name[in_file + moe.expert.up])
        elif moe is not None and tensor.name == in_file + moe.expert.down:
            yield mapping_of(f"{layer}mlp.experts.down_proj", tensor)
        if tensor.n_experts is not None:
            yield from _adapters(f"{layer}mlp.experts", tensor, by_name)


def _adapters(experts: str, weight: WeightTensor, by_name: Mapping[str, WeightTensor]) -> Iterator[WeightMapping]:
    """Yield the mappings of the adapters of one weight of all experts, whose module is `experts`."""
    for matrix in MATRICES:
        if (tensor := find_adapter(by_name, weight.name, matrix)) is not None:
            yield mapping_of(expert_adapter(experts, str(layer_of(weight.name)), matrix), tensor)


def expert_adapter(experts: str, layer: str, matrix: Matrix) -> str:
    """Return the name in memory of a matrix of the adapters of all experts of a layer.

    Args:
        experts: name of the experts' module.
        layer: name of the adapted layer in each expert, such as `gate_proj`.
        matrix: the matrix.
    """
    return f"{experts}.adapters.{layer}.{matrix}"
