"""What a run's model and tokenizer contain: a change under the same path is found, and the same content under another.

The data set's fingerprint is in the state of its sampler.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from xxhash import xxh3_128

from fivefold.bridge.weight_files import TOKENIZER_FILES
from fivefold.json_text import read_object

EDGE_BYTES = 2**20
"""Bytes at the beginning and at the end of a weight file by which its content is recognised."""
CONFIG = "config.json"
VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of a config.json that say where a model came from, and not what it is."""


@dataclass(frozen=True)
class Fingerprints:
    """Hexadecimal digests of a run's model and tokenizer."""

    config: str
    """Digest of the model's config.json."""
    weights: str
    """Digest of the ends of the model's weight files; empty for random weights."""
    tokenizer: str
    """Digest of the tokenizer's files."""

    @classmethod
    def of(cls, model: Path, tokenizer: Path, *, from_scratch: bool) -> Self:
        """Read the folders of a model and of a tokenizer.

        Args:
            model: the model's folder, in Hugging Face format.
            tokenizer: the tokenizer's folder; the model's, if it has its own.
            from_scratch: whether the model starts from random weights, so that its weight files do not matter.
        """
        return cls(
            config=config_fingerprint(model),
            weights="" if from_scratch else _of_ends(sorted(model.glob("*.safetensors"))),
            tokenizer=_of_contents(sorted({file for name in TOKENIZER_FILES for file in tokenizer.glob(name)})),
        )

    def differing(self, other: Fingerprints) -> list[str]:
        """Return the names of the fingerprints that `other` has differently."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


def config_fingerprint(model: Path) -> str:
    """Return the digest of the model's config.json, whatever its formatting and the order of its keys.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        config = read_object(model / CONFIG)
    except ValueError as error:
        raise ValueError(f"{model / CONFIG} cannot be read: {error}") from error
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    return xxh3_128(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _of_ends(files: Iterable[Path]) -> str:
    """Return a digest of the names, the sizes, the first and the last bytes of files that are too large to read."""
    hasher = xxh3_128()
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            hasher.update(file.read(EDGE_BYTES))
            file.seek(max(size - EDGE_BYTES, 0))
            hasher.update(file.read())
    return hasher.hexdigest()


def _of_contents(files: Iterable[Path]) -> str:
    hasher = xxh3_128()
    for path in files:
        content = path.read_bytes()
        hasher.update(f"{path.name} {len(content)}\n".encode())
        hasher.update(content)
    return hasher.hexdigest()
