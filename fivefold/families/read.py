"""Model shapes from config.json files: `load_shape` for engines, `find_shape` for plans.

A plan needs sizes only, so `find_shape` also takes models whose sizes ship with Fivefold, by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.paths import PACKAGE_PREFIX, resolve_model_path, user_path
from fivefold.config.text_files import read_text
from fivefold.families.hf_config import HFConfig
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.json_text import parsed

SHAPES = Path(__file__).parent / "shapes"
_VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat|Exp))?(-(\d{4}|v\d\.\d))?$", re.IGNORECASE)
"""What is added to a model's name where it was trained further, such as `-Instruct-2507`."""
_POSITIONS = {
    r"qwen2(\.5)?-.+-instruct": 32_768,
    r"qwen3-.+-base": 32_768,
    r"qwen3-.+-2507": 262_144,
    r"kimi-k2-.+-0905": 262_144,
}
"""Positions of such models by their name, where they differ from the model with the shorter name."""


def read_shape(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Return the shape that a parsed `config.json` describes, in the spelling of transformers 4 or 5.

    Args:
        config: the parsed file.
        name: what tables call the model.

    Raises:
        ValueError: a family or feature that is not implemented, or a key that is missing or inconsistent.
    """
    family = find_family(config.get("model_type"))
    return replace(family.read(HFConfig(config, family.defaults)), name=name)


def load_shape(path: str | Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face folder, for an engine.

    Raises:
        ValueError: no `config.json` there, one that is not JSON, or a model that is not supported.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: a model folder in Hugging Face format holds a config.json")
    return read_shape(_parse(file), Path(path).name)


def find_shape(model: str) -> ModelShape:
    """Return the shape of `model`, for a plan.

    Args:
        model: a name that ships (`Qwen3-8B`, `Qwen/Qwen3-8B`), a model folder, `package:<name>`, or a `config.json`. A
            variant that was trained further (`Qwen3-8B-Base`, `Qwen2.5-7B-Instruct`) has the sizes of its model.

    Raises:
        ValueError: nothing of that name, or a model whose sizes cannot be read.
    """
    file = _config_file(model)
    shape = read_shape(_parse(file), file.parent.name if file.name == "config.json" else file.stem)
    variant = _plain_name(model) if file.parent == SHAPES else ""
    positions = next((count for name, count in _POSITIONS.items() if re.fullmatch(name, variant)), shape.max_positions)
    return replace(shape, max_positions=positions)


def has_only_sizes(model: str) -> bool:
    """Return whether nothing is known of a model but the sizes that ship with Fivefold.

    Raises:
        ValueError: nothing of that name.
    """
    return _config_file(model).parent == SHAPES


def is_quantized(folder: Path) -> bool:
    """Return whether a folder has a config.json that says that the weights are quantized.

    Raises:
        ValueError: the file is not JSON.
    """
    file = folder / "config.json"
    return file.is_file() and bool(_parse(file).get("quantization_config"))


def find_config(model: str) -> dict[str, Any]:
    """Return the parsed `config.json` of `model`, which has a name as `find_shape` takes it.

    Raises:
        ValueError: nothing of that name, or a file that is not JSON.
    """
    return _parse(_config_file(model))


def _config_file(model: str) -> Path:
    file = user_path(resolve_model_path(model) if model.startswith(PACKAGE_PREFIX) else model)
    if file.is_dir():
        file /= "config.json"
    return file if file.is_file() else _shipped(model)


def _shipped(model: str) -> Path:
    """Return the file with the sizes of a model that ships."""
    name = _plain_name(model)
    files = {path.stem.lower(): path for path in sorted(SHAPES.glob("*.json"))}
    # The version of a model may look like the version of a variant.
    if name not in files:
        name = _VARIANT.sub("", name)
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name, files, n=1, cutoff=0.5)
    give = f"did you mean {files[near[0]].stem}? Give" if near else "give"
    raise ValueError(
        f"no shape is known for the model {model!r}: {give} a model folder, its config.json, "
        f"or one of {', '.join(path.stem for path in files.values())}"
    )


def _plain_name(model: str) -> str:
    """Return a model's name without its owner, in lower case."""
    return model.rsplit("/", 1)[-1].lower().removeprefix("meta-")


def _parse(file: Path) -> dict[str, Any]:
    text = read_text(file, str(file))
    try:
        config = parsed(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; a model's configuration is an object")
    return config
