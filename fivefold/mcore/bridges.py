"""Who turns Hugging Face's weights into Megatron-Core's, and back for the rollout: `actor.megatron.bridge_type`.

    fivefold   `fivefold.bridge.bridge.Bridge`
    mbridge    the package mbridge, through its public interface, on parameters under the names that it knows

mbridge reads models built of TransformerEngine's layers, in which a norm belongs to the linear layer behind it and each
expert is a parameter of its own. `_Presented` shows our parameters as such: the tensors are views, so that what mbridge
loads is loaded. The package megatron-bridge is not among them, because it imports TransformerEngine where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fivefold.algorithms.finite import is_finite
from fivefold.bridge.audit import check_model
from fivefold.bridge.bridge import Bridge, checked_source, not_finite_weights
from fivefold.bridge.gather import over_stages
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.mapping import TensorReader, padded_vocab
from fivefold.bridge.megatron_names import layer_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.families.shape import ModelShape

_TIED, _UNTIED = "model.embed_tokens.weight", "lm_head.weight"


def build_bridge(config: EngineConfig, shape: ModelShape, folder: Path) -> Bridge:
    """Return the bridge of the recipe for the model in `folder`.

    Raises:
        ValueError: mbridge is not installed, or has no such model.
    """
    if config.megatron.bridge_type == "mbridge":
        return MBridge(shape, folder, getattr(torch, config.dtype))
    return Bridge(shape)


class MBridge(Bridge):
    """Loads Hugging Face folders and exports weights with mbridge. All else is done by Fivefold's own mappings."""

    def __init__(self, shape: ModelShape, folder: Path, dtype: torch.dtype) -> None:
        """Take the model of a folder.

        Raises:
            ValueError: mbridge is not installed, or has no such model.
        """
        super().__init__(shape)
        if find_spec("mbridge") is None:
            raise ValueError(
                "bridge_type=mbridge loads weights with the package mbridge, which is not installed here: run "
                "pip install 'fivefold[mbridge]', or set bridge_type to fivefold"
            )
        if shape.value_head:
            raise ValueError("bridge_type=mbridge has no value heads: set bridge_type to fivefold")
        from mbridge import AutoBridge

        try:
            self._theirs: Any = AutoBridge.from_pretrained(str(folder))
        except (KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"mbridge cannot read a model of the family {shape.family}: {error!r}; set bridge_type to fivefold"
            ) from error
        _give_own_names(self._theirs)
        self._theirs.dtype = dtype
        # Some configs have no width of a head, which mbridge needs.
        self._theirs.hf_config.head_dim = shape.head_dim
        self._theirs.vocab_size = shape.vocab

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], source: TensorReader, groups: ShardGroups) -> None:
        """Fill this rank's parameters with mbridge if `source` is a Hugging Face folder; see `Bridge.load`.

        Raises:
            ValueError: besides, mbridge has left a parameter unfilled, or does not know one.
        """
        if not isinstance(source, HFWeights):
            super().load(parameters, source, groups)
            return
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        check_model(self._mappings, over_stages(shapes, groups), groups)
        checked_source(self._shape, source)
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        self._pad_vocabulary(groups)
        try:
            self._theirs.load_weights([_Presented(parameters)], str(source.folder))
        except NotImplementedError as error:
            raise ValueError(f"mbridge does not know all parameters: {error}; set bridge_type to fivefold") from error
        self._check_filled(parameters, source)

    def _check_filled(self, parameters: Mapping[str, Tensor], source: TensorReader) -> None:
        """Check that every parameter, which was NaN before, has finite values."""
        left = [name for name, parameter in parameters.items() if not is_finite(parameter)]
        tensors = {tensor: parameters[name].dtype for name in left for tensor in self._mappings[name].sources()}
        if any(not is_finite(source.read(tensor).to(dtype)) for tensor, dtype in tensors.items()):
            raise not_finite_weights(tensors, source)
        if left:
            raise ValueError(
                f"mbridge has left {', '.join(left[:3])}{' and others' if len(left) > 3 else ''} without values: set "
                "bridge_type to fivefold"
            )

    def export(
        self,
        parameters: Mapping[str, Tensor],
        groups: ShardGroups,
        *,
        dtype: torch.dtype | None = None,
        readers: frozenset[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every Hugging Face tensor as mbridge exports it, on all ranks; see `Bridge.export`."""
        self._pad_vocabulary(groups)
        reads = readers is None or torch.distributed.get_rank() in readers
        sent: set[str] = set()
        for name, tensor in self._theirs.export_weights([_Presented(parameters)]):
            # The last stage of a pipeline has a copy of a tied embedding.
            if name not in sent:
                sent.add(name)
                tensor = tensor.detach() if dtype is None else tensor.detach().to(dtype)
                yield name, tensor.contiguous() if reads else tensor.to("meta")

    def _pad_vocabulary(self, groups: ShardGroups) -> None:
        """Tell mbridge how many rows the vocabulary has on all tensor-parallel ranks."""
        self._theirs.make_vocab_size_divisible_by = groups.tp_size
        self._theirs.padded_vocab_size = padded_vocab(self._shape.vocab, groups.tp_size)


class _Presented:
    """Parameters of one rank as mbridge expects a model of Megatron-Core over TransformerEngine to have them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        layers = sorted({layer for name in parameters if (layer := layer_of(name)) is not None})
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=layer + 1) for layer in layers])
        routed = {layer_of(name) for name in parameters if ".mlp.router." in name}
        places = {layer: place for place, layer in enumerate(layers)}
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            layer = layer_of(name)
            local = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{places[layer]}.", 1)
            for theirs, view in _views(local, parameter.detach(), has_experts=layer in routed):
                # mbridge gathers the tensors that have this mark, along this dimension.
                marked: Any = view
                marked.tensor_model_parallel = getattr(parameter, "tensor_model_parallel", False)
                marked.partition_dim = getattr(parameter, "partition_dim", 0) - (parameter.ndim - view.ndim)
                self._tensors[theirs] = view

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name, with the number of a layer among this rank's."""
        return self._tensors

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield those that are trained."""
        return ((name, tensor) for name, tensor in self._tensors.items() if not name.endswith("expert_bias"))


def _views(name: str, parameter: Tensor, *, has_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter under its name in a model of TransformerEngine's layers, or one view for each expert."""
    for ours, theirs in (("experts.weight1", "experts.linear_fc1"), ("experts.weight2", "experts.linear_fc2")):
        if name.endswith(ours):
            prefix = name.removesuffix(ours) + theirs
            yield from ((f"{prefix}.weight{expert}", weight) for expert, weight in enumerate(parameter.unbind()))
            return
    norms = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
    if not has_experts:
        norms["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    for ours, theirs in norms.items():
        if name.endswith(f".{ours}"):
            name = name.removesuffix(ours) + theirs
    yield name, parameter.view_as(parameter)


def _give_own_names(theirs: Any) -> None:
    """Give one of mbridge's objects a table of names of its own.

    Symptom: once a model with tied embeddings was seen, the output layers of all others are not found. Cause: mbridge
    0.15 writes to a table of the class. Remove this when it copies the table.
    """
    table = type(theirs)._DIRECT_MAPPING
    theirs._DIRECT_MAPPING = dict(table)
    if table.get("output_layer.weight") == _TIED:
        table["output_layer.weight"] = _UNTIED
