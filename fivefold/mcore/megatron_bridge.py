"""Weights through NVIDIA's package megatron-bridge (`actor.megatron.bridge_type=megatron-bridge`).

Its public interface, `AutoBridge`, walks over the parameters of a model of Megatron-Core and finds out from the classes
of their modules how each is cut. `_Model` is such a tree of modules around our parameters, without a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fivefold.bridge.groups import ShardGroups
from fivefold.families.shape import ModelShape
from fivefold.mcore.foreign_bridge import ForeignBridge, layer_numbers, presented


class MegatronBridge(ForeignBridge):
    """Loads Hugging Face folders and exports weights with megatron-bridge."""

    name = "megatron-bridge"

    def __init__(self, shape: ModelShape, folder: Path, megatron: TransformerConfig) -> None:
        """Take the model of a folder, and its configuration.

        Raises:
            ValueError: megatron-bridge is not installed, cannot be imported, or has no such model.
        """
        super().__init__(shape)
        self._megatron = megatron
        auto_bridge = _auto_bridge()
        try:
            self._theirs = auto_bridge.from_hf_pretrained(str(folder))
        except ValueError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"megatron-bridge cannot read a model of the family {shape.family} ({reason}): set bridge_type to "
                "fivefold"
            ) from error

    def _fill(self, parameters: Mapping[str, Tensor], folder: Path, groups: ShardGroups) -> None:
        if max(groups.tp_size, groups.etp_size) > 1 and not torch.cuda.is_available():
            # Gloo takes the columns of a matrix, which are not contiguous, for its first elements.
            raise ValueError(
                "megatron-bridge mixes up the columns of matrices when it scatters them over CPU processes with tensor "
                "parallelism: set bridge_type to fivefold"
            )
        self._theirs.load_hf_weights([self._model(parameters)], str(folder))

    def _exported(self, parameters: Mapping[str, Tensor], groups: ShardGroups) -> Iterator[tuple[str, Tensor]]:
        for item in self._theirs.export_hf_weights([self._model(parameters)], show_progress=False):
            yield item.param_name, item.weight

    def _model(self, parameters: Mapping[str, Tensor]) -> _Model:
        return _Model(parameters, self._megatron, tied=self._shape.tied_embeddings)


def _auto_bridge() -> Any:
    """Return megatron-bridge's class `AutoBridge`.

    Raises:
        ValueError: the package, or one that it imports, is missing.
    """
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        missing = error.name or str(error)
        if missing == "megatron.bridge":
            problem = "is not installed here: run pip install megatron-bridge"
        else:
            problem = f"cannot be imported without {missing} ({error}): install that"
        raise ValueError(
            f"bridge_type=megatron-bridge loads weights with the package megatron-bridge, which {problem}, or set "
            "bridge_type to fivefold, which needs neither"
        ) from error
    return AutoBridge


class _Part(nn.Module):
    """A module that owns parameters, which are all cut alike."""

    tensor_model_parallel = False
    partition_dim = -1


class TELayerNormColumnParallelLinear(_Part):
    """A linear layer and the norm before it; megatron-bridge knows by the name of the class which of the two is cut."""


class _Layer(MegatronModule):
    """A layer and its place in the whole model."""

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        super().__init__(config)
        self.layer_number = layer_number


class _Model(GPTModel):
    """Parameters of one rank as megatron-bridge expects them in a model over TransformerEngine."""

    def __init__(self, parameters: Mapping[str, Tensor], config: TransformerConfig, *, tied: bool) -> None:
        # The modules of GPT are not built: only their names and classes matter.
        nn.Module.__init__(self)
        self.config = config
        self.share_embeddings_and_output_weights = tied
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(_Layer(config, layer + 1) for layer in layer_numbers(parameters))
        views = list(presented(parameters))
        normed = {name.removesuffix("layer_norm_weight") for name, *_ in views if name.endswith("layer_norm_weight")}
        for name, view, cut_dim in views:
            path, _, own = name.rpartition(".")
            kind = TELayerNormColumnParallelLinear if f"{path}." in normed else _Part
            owner = self._owner(path.split("."), kind)
            if own == "expert_bias":
                owner.register_buffer(own, view)
                continue
            owner.register_parameter(own, nn.Parameter(view, requires_grad=False))
            if cut_dim >= 0:
                owner.tensor_model_parallel, owner.partition_dim = True, cut_dim

    def _owner(self, path: list[str], kind: type[_Part]) -> Any:
        """Return the module at `path`, made with those above it where they are missing."""
        module: nn.Module = self
        for depth, name in enumerate(path):
            child = dict(module.named_children()).get(name)
            if child is None:
                child = kind() if depth == len(path) - 1 else nn.Module()
                module.add_module(name, child)
            module = child
        return module
