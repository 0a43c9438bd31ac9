"""Writes a stream of tensors as a Hugging Face model folder, whole or not at all.

    plan ──> folder next to the target, with empty weight files ──> weights ──> configs, tokenizer ──> target

`HFFolder` is everything but the weights; `hf_saver` fills the weight files from several ranks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fivefold.bridge import folder_swap
from fivefold.bridge.decoder import file_tensors, float32_tensors
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.kept import fuses_experts, kept_specs
from fivefold.bridge.shard_files import ShardFiles
from fivefold.bridge.shard_plan import MAX_SHARD_BYTES, ShardPlan, TensorSpec, fused, plan_shards
from fivefold.bridge.weight_files import PROCESSOR_FILES, TOKENIZER_FILES
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.families.sparse_attention import is_of_indexer
from fivefold.json_text import parsed

_LISTED = 5
"""Most tensors that an error names."""
Classified = Literal["Token", "Sequence"]
"""What a model with a value head gives a number: each token (a critic), or the whole sequence (a reward model)."""


def classified(shape: ModelShape) -> Classified | None:
    """Return what a model of `shape` gives a number; None if it is a language model."""
    if not shape.value_head:
        return None
    return "Token" if shape.value_bias else "Sequence"


def tensor_specs(shape: ModelShape, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return dtype and shape of each tensor of a model in `dtype`; routers' offsets are float32 all the same.

    Raises:
        ValueError: a family that is not known.
    """
    precise = float32_tensors(shape)
    return {
        name: TensorSpec(torch.float32 if name in precise else dtype, full)
        for name, full in file_tensors(shape).items()
    }


def save_hf(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    config_source: str | Path,
    *,
    tensors: Mapping[str, TensorSpec] | None = None,
    tokenizer_source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    scores: Classified | None = None,
) -> None:
    """Write `weights` as safetensors shards, with a config and a tokenizer.

    The config gets the dtype of the weights (of most elements, if they differ). Everything is written to a
    folder next to `folder`, which takes its place at the end; an earlier `folder` is replaced. The bytes do not depend
    on the order of `weights`; one tensor is held at a time.

    Args:
        folder: the model folder to write.
        weights: names and full tensors.
        config_source: folder or hub name of the model whose config is written.
        tensors: dtypes and shapes of all weights, in the order in which they lie in the files; None: as the config
            describes them, in the dtype of the first tensor (`tensor_specs`).
        tokenizer_source: folder or hub name of the tokenizer; None: `config_source`.
        max_shard_bytes: most bytes of a file, unless a single tensor is larger.
        scores: what a model with a value head gives a number; None: it is a language model.

    Raises:
        ValueError: weights that do not match `tensors`, a source that is no model folder, or a `folder` that is a
            file.
        OSError: the disk is full, or the file system refuses to write.
    """
    source = resolve_model_folder(config_source)
    if tensors is None:
        tensors, weights = _described(source, weights)
    new = HFFolder(folder, tensors, source, tokenizer_source, max_shard_bytes=max_shard_bytes, scores=scores)
    partial = new.begin()
    try:
        with ShardFiles(partial, new.plan) as files:
            for name, tensor in _fitting(weights, tensors):
                files.write(name, tensor)
            files.sync()
        new.finish(partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class HFFolder:
    """A model folder that is written next to its final place, by one process except for the weights."""

    def __init__(
        self,
        folder: str | Path,
        tensors: Mapping[str, TensorSpec],
        config_source: Path,
        tokenizer_source: str | Path | None,
        *,
        max_shard_bytes: int,
        scores: Classified | None,
    ) -> None:
        """Describe the folder; nothing is written.

        Args:
            folder: where it is to be in the end. If that is a symbolic link, what it points to is replaced.
            tensors: dtypes and shapes of the weights. A language model's folder has besides what `kept_specs` of
                `config_source` says.
            config_source: folder of the model whose config is written.
            tokenizer_source: folder or hub name of the tokenizer; None: `config_source`.
            max_shard_bytes: most bytes of a weight file, unless a single tensor is larger.
            scores: what a model with a value head gives a number, so that its config becomes one for the
                classification of that; None: it is a language model.
        """
        self._kept = kept_specs(config_source) if scores is None else {}
        in_files = fused(tensors) if fuses_experts(config_source) else tensors
        self.plan = plan_shards({**in_files, **self._kept}, max_shard_bytes)
        self._scores = scores
        self.target = Path(os.path.realpath(folder))
        self._source = config_source
        self._tokenizer_source = config_source if tokenizer_source is None else tokenizer_source

    def begin(self) -> Path:
        """Return a new folder next to the target with weight files that have headers and no data yet.

        Whoever calls this removes the folder if it does not come to `finish`.

        Raises:
            ValueError: the target exists and is no folder, or a source is no model folder.
            OSError: there is too little room, or the folder cannot be written.
        """
        if self.target.exists() and not self.target.is_dir():
            raise ValueError(f"{self.target} is a file, and a model is a folder: give another path, or remove the file")
        if not (self._source / "config.json").is_file():
            raise ValueError(f"{self._source} holds no config.json; config_source must be a Hugging Face model folder")
        resolve_model_folder(self._tokenizer_source)  # a tokenizer that is not there is an error before any writing
        partial = begin_folder(self.target, self.plan)
        try:
            self._copy_kept(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return partial

    @property
    def kept_bytes(self) -> int:
        """Bytes of the plan that `begin` writes."""
        return sum(spec.n_bytes for spec in self._kept.values())

    def _copy_kept(self, partial: Path) -> None:
        if self._kept:
            with HFWeights(self._source) as stored, ShardFiles(partial, self.plan) as files:
                for name in self._kept:
                    files.write(name, stored.read(name))
                files.sync()

    def finish(self, partial: Path) -> None:
        """Add the other files to the folder of `begin`, and put it in its place. All weights must be on the disk."""
        if (index := self.plan.index()) is not None:
            name, text = index
            (partial / name).write_text(text)
        further = not all(is_of_indexer(name) for name in self._kept)
        copy_configs(partial, self._source, self.plan.main_dtype, scores=self._scores, predicts_further=further)
        copy_tokenizer(partial, resolve_model_folder(self._tokenizer_source))
        weight_files = {file.name for file in self.plan.files}
        for file in partial.rglob("*"):
            if file.name not in weight_files:
                folder_swap.sync(file)
        folder_swap.commit(partial, self.target)


def begin_folder(target: Path, plan: ShardPlan) -> Path:
    """Return a new folder next to `target` with the weight files of a plan, which have headers and no data yet.

    Raises:
        OSError: there is too little room, or the folder cannot be written.
    """
    partial = folder_swap.begin(target)
    try:
        _require_room(partial, plan.file_bytes)
        with ShardFiles(partial, plan) as files:
            files.create()
            files.sync()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def _described(
    source: Path, weights: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, TensorSpec], Iterable[tuple[str, Tensor]]]:
    """Return the tensors of the model that a config describes, with the dtype of the first weight, and the weights."""
    weights = iter(weights)
    first = next(weights, None)
    if first is None:
        raise ValueError("save_hf got no weights: the iterator was empty, perhaps because it had been consumed before")
    return tensor_specs(load_shape(source), first[1].dtype), chain([first], weights)


def _fitting(weights: Iterable[tuple[str, Tensor]], tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield the `weights` that fit, and check at the end that every tensor came once.

    All of `weights` are consumed before anything is reported, because collectives that other ranks take part in may
    come after them.

    Raises:
        ValueError: some have another shape or dtype than planned, are unknown, came twice or never came.
    """
    missing = dict.fromkeys(tensors)
    problems = []
    for name, tensor in weights:
        if name not in tensors:
            problems.append(f"{name} is not a tensor of the model")
        elif name not in missing:
            problems.append(f"{name} came a second time")
        else:
            del missing[name]
            if (spec := TensorSpec.of(tensor)) == tensors[name]:
                yield name, tensor
            else:
                problems.append(f"{name} is {spec}, and the model has {tensors[name]}")
    problems += [f"{name} is missing" for name in missing]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(
            f"the weights are not the {len(tensors)} tensors of the model, each once: "
            f"{'; '.join(problems[:_LISTED])}{more}"
        )


def _require_room(folder: Path, n_bytes: int) -> None:
    """Check that a file system has room; one that gives its size as 0 does not say.

    Raises:
        OSError: it has less than `n_bytes`.
    """
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < n_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the model needs {n_bytes:,} bytes, and {usage.free:,} are free",
            str(folder.parent),
        )


def copy_tokenizer(folder: Path, source: Path) -> None:
    """Copy the files of the tokenizer in `source` to `folder`."""
    for file in sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def copy_configs(
    folder: Path,
    source: Path,
    dtype: torch.dtype,
    *,
    scores: Classified | None = None,
    predicts_further: bool = False,
) -> None:
    """Copy the configs in `source`, of processors of images too, to `folder`, with `dtype` as the weights' dtype.

    Without `predicts_further`, the folder has no layers for multi-token prediction, and its config says so.

    The config of a model with a value head becomes one for token or sequence classification with one label, and the
    model generates nothing.
    """
    if (source / "generation_config.json").is_file() and scores is None:
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = parsed((source / "config.json").read_text())
    config.pop("quantization_config", None)  # no weights are written quantized
    config.pop("auto_map", None)  # a class of transformers loads the weights, and code files are not copied
    if not predicts_further:
        # Their number has two names.
        config |= dict.fromkeys({"num_nextn_predict_layers", "num_mtp_layers"} & config.keys(), 0)
    # transformers renamed `torch_dtype` to `dtype`; old and new versions read the old name.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"torch_dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    if scores is not None:
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        architectures = config.get("architectures") or []
        config["architectures"] = [re.sub(r"For\w+$", f"For{scores}Classification", name) for name in architectures]
    if scores == "Sequence" and config.get("pad_token_id") in _end_tokens(config):
        # transformers takes the score of the last token that is no padding, which must not be the one before the end
        # token. Without a padding token it scores one sequence at a time, and refuses several.
        config["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _end_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the end-of-sequence tokens of a model's config, which has one, several or none."""
    token = config.get("eos_token_id")
    return token if isinstance(token, list) else [] if token is None else [token]
