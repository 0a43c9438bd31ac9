"""Writes a stream of tensors as a Hugging Face model folder, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.weight_files import INDEX_FILE, SINGLE_FILE

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.jinja",
    "*.model",
)
"""Patterns of the files that make up a tokenizer."""


def save_hf(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    config_source: str | Path,
    *,
    tokenizer_source: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `weights` as safetensors shards, with a config and a tokenizer.

    The config's dtype becomes that of the weights (of most elements, if they differ). Everything is written to a
    folder beside `folder`, which takes its place at the end; an earlier `folder` is replaced.

    Args:
        folder: the model folder to write.
        weights: names and full tensors, consumed one shard at a time.
        config_source: folder or hub name of the model whose config is written.
        tokenizer_source: folder or hub name of the tokenizer; None for that of `config_source`.
        max_shard_bytes: most bytes of a file, unless a single tensor is larger.

    Raises:
        ValueError: no weights, or a source that is no model folder.
    """
    target = Path(folder).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        dtypes = _write_shards(partial, weights, max_shard_bytes)
        source = resolve_model_folder(config_source)
        _copy_configs(partial, source, dtypes.most_common(1)[0][0])
        _copy_tokenizer(partial, source if tokenizer_source is None else resolve_model_folder(tokenizer_source))
        _swap(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Counter[torch.dtype]:
    """Write the weight files and their index, and return the number of elements of each dtype."""
    shards: list[list[str]] = []
    elements: Counter[torch.dtype] = Counter()
    total_bytes = 0
    shard: dict[str, Tensor] = {}
    shard_bytes = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        save_file(shard, folder / _numbered(len(shards) + 1), metadata={"format": "pt"})
        shards.append(list(shard))
        shard, shard_bytes = {}, 0

    for name, tensor in weights:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
        # A copy: safetensors refuses tensors that share storage, and a view would keep a whole buffer alive.
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        elements[tensor.dtype] += tensor.numel()
    if not shard:
        raise ValueError("save_hf got no weights: the iterator was empty, perhaps because it had been consumed before")
    flush()
    _name_shards(folder, shards, total_bytes)
    return elements


def _numbered(number: int, count: int | None = None) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors" if count else f"model-{number:05d}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the files their final names, which hold their number, and write the index."""
    if len(shards) == 1:
        (folder / _numbered(1)).rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = _numbered(number, len(shards))
        (folder / _numbered(number)).rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _copy_tokenizer(folder: Path, source: Path) -> None:
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, folder / file.name)


def _copy_configs(folder: Path, source: Path, dtype: torch.dtype) -> None:
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} holds no config.json; config_source must be a Hugging Face model folder")
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    config = json.loads((source / "config.json").read_text())
    # transformers renamed `torch_dtype` to `dtype`; old and new versions read the old name.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"torch_dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)
