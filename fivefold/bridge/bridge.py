"""Weights of one model between Hugging Face files and Megatron-Core parameters, on any layout.

Hugging Face folder ──load──> parameters of every rank ──export──> Hugging Face names and full tensors, streamed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fivefold.bridge.adapters import WithAdapters
from fivefold.bridge.audit import WeightMismatchError, check_files, check_model
from fivefold.bridge.decoder import expected_tensors, mappings
from fivefold.bridge.export import Export, Merge, Rows, over_stages, rows_of
from fivefold.bridge.finite import is_finite, not_finite_error
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.reading import TensorReader, fill
from fivefold.bridge.value_head import WithValueHead
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import OUTPUT, Shape, embedding
from fivefold.observe.progress import counting
from fivefold.weights.stream import Stack
from fivefold.weights.transport import GATHER_BYTES

LOADING = "loading weights"
"""What progress calls it."""
_COMPARED_ROWS = 8192


class Bridge:
    """Loads and exports the weights of a model of the given shape.

    Parameters are named as Megatron-Core names them, with global layer numbers. Every process of the model calls
    `load` and `export` together.

    Args:
        shape: the model.
        seed: seed of new adapters.
        bucket_bytes: most bytes of full tensors that an export holds at one time, unless one parameter is larger.

    Raises:
        ValueError: a family that is not known.
    """

    reads_parts: ClassVar[bool] = True
    """Whether an export reads parameters by `rows`, so that some of them may be elsewhere until then."""

    def __init__(self, shape: ModelShape, *, seed: int = 0, bucket_bytes: int = GATHER_BYTES) -> None:
        self._shape = shape
        self._seed = seed
        self._bucket_bytes = bucket_bytes
        self.mappings: dict[str, WeightMapping] = {mapping.parameter: mapping for mapping in mappings(shape)}
        """The mapping of each parameter of the whole model, by its name, in the model's order."""
        self.merging: Mapping[str, Merge] = {}
        """What merges the adapters of a parameter into it, by the parameter's name."""

    def expected_names(self) -> dict[str, Shape]:
        """Return the names and full shapes of the model's Hugging Face tensors."""
        return expected_tensors(self._shape)

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], source: TensorReader, groups: ShardGroups) -> None:
        """Fill this rank's `parameters` in place from `source`, each in its own dtype and on its own device.

        A critic's value head begins at 0 if `source` lacks it.

        Raises:
            WeightMismatchError: on every rank and before anything is written, unless every parameter can be filled,
                every tensor of `source` is used and all shapes are equal.
            ValueError: on every rank that reads one, naming the tensors that hold NaN or infinite values.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        check_model(self.mappings, over_stages(shapes, groups), groups)
        source = checked_source(self._shape, source)
        if self._shape.adapters is not None:
            source = WithAdapters(source, self._shape, self._seed)
        suspects: dict[str, torch.dtype] = {}
        with counting(LOADING, sum(parameter.nbytes for parameter in parameters.values())) as count:
            for name, parameter in parameters.items():
                mapping = self.mappings[name]
                fill(parameter, mapping, source, groups)
                # The filled parameter is checked, not what was read: one check for all experts, on its device.
                if not is_finite(parameter):
                    suspects |= dict.fromkeys(mapping.sources(), parameter.dtype)
                count(parameter.nbytes)
        if suspects:
            raise not_finite_weights(suspects, source)

    def export(
        self,
        parameters: Mapping[str, Tensor],
        groups: ShardGroups,
        *,
        dtype: torch.dtype | None = None,
        readers: frozenset[int] | None = None,
        rows: Rows = rows_of,
    ) -> Iterable[Stack]:
        """Return what yields every Hugging Face tensor, full, on the ranks that read them; on others, `meta` outlines.

        The experts of a slice that come from one rank are in one stack. `parameters` may hold anything of the
        parameters' names and shapes: weights, gradients, moments. If the embeddings are tied, the first stage's tensor
        is exported. All ranks iterate in lock-step, to the end, and get the same names in the same order. Without
        sharding the tensors are views of `parameters`: copy what has to outlive their next change. Adapters are
        merged into the weights that they adapt.

        Args:
            parameters: this rank's tensors by Megatron name, on a device that the groups can send from.
            groups: this rank's place.
            dtype: what tensors are converted to before they are sent; None leaves them as they are.
            readers: the ranks that read the tensors; None: all.
            rows: what reads rows of a parameter.

        Raises:
            WeightMismatchError: on every rank, unless `parameters` are all of the model's, in their shapes.
        """
        own = {name: mapping for name, mapping in self.mappings.items() if not mapping.is_adapter}
        adapters = self.mappings.keys() - own.keys()
        return Export(
            own,
            {name: tensor for name, tensor in parameters.items() if name not in adapters},
            groups,
            dtype=dtype,
            readers=readers,
            rows=rows,
            bucket_bytes=self._bucket_bytes,
            merging=self.merging,
        )

    def export_adapters(
        self,
        parameters: Mapping[str, Tensor],
        groups: ShardGroups,
        device: torch.device,
        *,
        readers: frozenset[int] | None = None,
    ) -> Iterable[Stack]:
        """Return what yields every matrix of the adapters, as `export` yields weights.

        Args:
            parameters: this rank's tensors by Megatron name.
            groups: this rank's place.
            device: where they are; a stage may have no layer, and so no adapter.
            readers: the ranks that read the matrices; None: all.
        """
        own = {name: mapping for name, mapping in self.mappings.items() if mapping.is_adapter}
        return Export(
            own,
            {name: tensor for name, tensor in parameters.items() if name in own},
            groups,
            dtype=None,
            readers=readers,
            rows=rows_of,
            bucket_bytes=self._bucket_bytes,
            merging={},
            device=device,
        )


def checked_source(shape: ModelShape, source: TensorReader) -> TensorReader:
    """Return the tensors of a model of `shape`, after a check of their names and shapes.

    A value head begins at 0 if `source` lacks it.

    Raises:
        WeightMismatchError: tensors that are missing or unused, or that have another shape.
    """
    if shape.value_head:
        source = WithValueHead(source, shape.hidden, has_bias=shape.value_bias)
    check_files(shape, source)
    if shape.tied_embeddings:
        check_tied_output(shape, source)
    return source


def not_finite_weights(suspects: Mapping[str, torch.dtype], source: TensorReader) -> ValueError:
    """Return the error that names the tensors with NaN or infinite values.

    Args:
        suspects: names of the tensors that may have some, with the dtype to which each is converted.
        source: the tensors.
    """
    # The conversion is repeated, because a finite number may be too large for the parameter's dtype.
    names = [name for name, dtype in suspects.items() if not is_finite(source.read(name).to(dtype))]
    return not_finite_error(
        source.folder, [f"{name} in {source.file(name)}, read as {suspects[name]}" for name in names]
    )


def check_tied_output(shape: ModelShape, source: TensorReader) -> None:
    """Check that a tied output weight, which a file may store a second time, is the embedding.

    Raises:
        WeightMismatchError: the two differ.
    """
    if OUTPUT not in source.names:
        return
    table = embedding(shape)
    n_rows = source.shape(table)[0]
    for start in range(0, n_rows, _COMPARED_ROWS):
        rows = slice(start, min(start + _COMPARED_ROWS, n_rows))
        if not torch.equal(source.read(table, rows), source.read(OUTPUT, rows)):
            raise WeightMismatchError(
                f"the config in {source.folder} ties the output layer to the embedding (tie_word_embeddings), but "
                f"{OUTPUT} differs from {table}; set tie_word_embeddings to false or remove {OUTPUT}"
            )
