"""Weights through the package mbridge (`actor.megatron.bridge_type=mbridge`), by its public interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import padded_vocab
from fivefold.families.shape import ModelShape
from fivefold.mcore.foreign_bridge import ForeignBridge, layer_numbers, presented

_TIED, _UNTIED = "model.embed_tokens.weight", "lm_head.weight"


class MBridge(ForeignBridge):
    """Loads Hugging Face folders and exports weights with mbridge."""

    name = "mbridge"

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

    def _fill(self, parameters: Mapping[str, Tensor], folder: Path, groups: ShardGroups) -> None:
        self._pad_vocabulary(groups)
        try:
            self._theirs.load_weights([_Model(parameters)], str(folder))
        except NotImplementedError as error:
            raise ValueError(f"mbridge does not know all parameters: {error}; set bridge_type to fivefold") from error

    def _exported(self, parameters: Mapping[str, Tensor], groups: ShardGroups) -> Iterator[tuple[str, Tensor]]:
        self._pad_vocabulary(groups)
        yield from self._theirs.export_weights([_Model(parameters)])

    def _pad_vocabulary(self, groups: ShardGroups) -> None:
        """Tell mbridge how many rows the vocabulary has on all tensor-parallel ranks."""
        self._theirs.make_vocab_size_divisible_by = groups.tp_size
        self._theirs.padded_vocab_size = padded_vocab(self._shape.vocab, groups.tp_size)


class _Model:
    """Parameters of one rank as mbridge expects a model of Megatron-Core over TransformerEngine to have them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        layers = layer_numbers(parameters)
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=layer + 1) for layer in layers])
        self._tensors: dict[str, Tensor] = {}
        for name, view, cut_dim in presented(parameters):
            # mbridge gathers the tensors that have this mark, along this dimension.
            marked: Any = view
            marked.tensor_model_parallel, marked.partition_dim = cut_dim >= 0, cut_dim
            self._tensors[name] = view

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name, with the number of a layer among this rank's."""
        return self._tensors

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield those that are trained."""
        return ((name, tensor) for name, tensor in self._tensors.items() if not name.endswith("expert_bias"))


def _give_own_names(theirs: Any) -> None:
    """Give one of mbridge's objects its own table of names.

    Symptom: once a model with tied embeddings was seen, the output layers of all others are not found. Cause: mbridge
    0.15 writes to a table of the class. Remove this when it copies the table.
    """
    table = type(theirs)._DIRECT_MAPPING
    theirs._DIRECT_MAPPING = dict(table)
    if table.get("output_layer.weight") == _TIED:
        table["output_layer.weight"] = _UNTIED
