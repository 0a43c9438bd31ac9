"""Writes the fields of Megatron-Core's configuration classes to the file of the installed release.

    python scripts/megatron_fields.py

The file is in fivefold/families/megatron_fields/. Run it with every supported release after an update of Megatron-Core;
then say in fivefold/config/ what becomes of each new field.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.families.megatron_release import installed_release

CLASSES = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


def text() -> str:
    """Return the text of the whole file."""
    table = {
        config.__name__: {
            field.name: {"type": _type(field.type), "default": _default(field)} for field in dataclasses.fields(config)
        }
        for config in CLASSES
    }
    return json.dumps(table, indent=1) + "\n"


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("torch.dtype", "dtype")


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default
    if value is dataclasses.MISSING:
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__name__", value)


if __name__ == "__main__":
    installed_release().fields_file.write_text(text(), encoding="utf-8")
