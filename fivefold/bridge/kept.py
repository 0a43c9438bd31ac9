"""Tensors of a model's folder that are not trained, which a folder that is written has unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fivefold.bridge.hf_reader import DTYPES
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.bridge.weight_files import survey
from fivefold.families.family import Family
from fivefold.families.registry import FAMILIES
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import kept_tensors
from fivefold.json_text import parsed

_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of the names of layers for multi-token prediction that are copies of tensors of the model itself."""


def kept_specs(source: Path) -> dict[str, TensorSpec]:
    """Return dtype and shape of the tensors that a language model trained from the folder `source` keeps as they are.

    Nothing is kept of a folder without weights.
    """
    file = source / "config.json"
    config = parsed(file.read_text()) if file.is_file() else {}
    model_type, n_layers = config.get("model_type"), config.get("num_hidden_layers", 0)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    # Quantized tensors would need the scales that no folder is written with.
    if family is None or not (family.kept or family.predicts_further) or config.get("quantization_config"):
        return {}
    return {
        name: TensorSpec(DTYPES[tensor.dtype], tensor.shape)
        for name, tensor in survey(source).tensors.items()
        if family.keeps(name, n_layers) and tensor.dtype in DTYPES
    }


def fuses_experts(source: Path) -> bool:
    """Return whether folders of the model in `source` have the matrices of all experts of a layer in two tensors."""
    file = source / "config.json"
    family = FAMILIES.get(parsed(file.read_text()).get("model_type", "")) if file.is_file() else None
    return family is not None and family.moe is not None and family.moe.are_fused


def draft_files(folder: Path) -> dict[str, list[str]]:
    """Return the tensors in a model's folder that draft tokens for its rollout, by the path of their file.

    They are those for multi-token prediction, without the copies of the embedding and the output layer that some files
    have: servers use the policy's.

    Raises:
        ValueError: there are none, or they are quantized.
    """
    config = parsed((folder / "config.json").read_text())
    family, n_layers = FAMILIES.get(config.get("model_type", "")), config.get("num_hidden_layers", 0)
    files = _by_file(
        folder,
        lambda name: family is not None and family.is_further(name, n_layers) and not name.endswith(_SHARED),
    )
    if not files:
        raise ValueError(
            f"{folder} has no weights for multi-token prediction that are not quantized, with which "
            "rollout.speculative.method=mtp drafts tokens: name a folder with them, or drop rollout.speculative"
        )
    return files


def tower_files(folder: Path) -> dict[str, list[str]]:
    """Return the tensors of the vision tower in a model's folder, by the path of their file."""
    prefix = tower_prefix(folder)
    return _by_file(folder, lambda name: name.startswith(prefix))


def tower_prefix(folder: Path) -> str:
    """Return what precedes the names of a vision tower's tensors in the files of a folder."""
    family = FAMILIES.get(parsed((folder / "config.json").read_text()).get("model_type", ""))
    return Family.tower if family is None else family.tower


def _by_file(folder: Path, wants: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return some of the tensors that a language model keeps, by the path of their file."""
    stored, files = survey(folder), dict[str, list[str]]()
    for name in filter(wants, kept_specs(folder)):
        files.setdefault(str(folder / stored.file(name)), []).append(name)
    return files


def check_kept(folder: Path, shape: ModelShape) -> None:
    """Check that a folder has the tensors that a model of `shape`, whose weights come from elsewhere, keeps from it.

    Raises:
        ValueError: some are missing, or have another shape.
    """
    found = kept_specs(folder)
    lacking = [name for name, full in kept_tensors(shape).items() if name not in found or found[name].shape != full]
    if lacking:
        raise ValueError(
            f"{folder} lacks {lacking[0]} of the model's shape, and {len(lacking) - 1} more tensors of indexers, which "
            f"are not trained and which {shape.family} has unchanged in what is written: name a folder with weights "
            "that are not quantized"
        )


def check_tower(folder: Path) -> None:
    """Check that a folder has the weights of a vision tower.

    Raises:
        ValueError: it has none.
    """
    prefix = tower_prefix(folder)
    if not any(name.startswith(prefix) for name in survey(folder).tensors):
        raise ValueError(
            f"{folder} has no weights of a vision tower ({prefix}*), without which the model sees no images: give the "
            "folder of the whole model, or drop image_key"
        )
