"""Reads a model with a value head from any folder: the head is there, is there under another name, or begins at 0.

folder of a critic             score.weight, score.bias    as they are
folder of a reward model       score.weight                as it is; the bias of a critic begins at 0
folder of a critic of TRL      v_head.summary.*            under the names above
folder of a language model     neither                     zeros, so that every value is 0 at first
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.decoder import VALUE_ALIASES
from fivefold.bridge.reading import TensorReader
from fivefold.bridge.weight_files import survey
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import VALUE_BIAS, VALUE_WEIGHT


class WithValueHead:
    """The tensors of a model, and a value head if they lack one.

    Args:
        source: the tensors in the files.
        hidden: width of the hidden state.
        has_bias: whether the head has a bias.
    """

    def __init__(self, source: TensorReader, hidden: int, *, has_bias: bool = True) -> None:
        self._source = source
        self._stored = {new: old for old, new in VALUE_ALIASES.items() if old in source.names}
        self._stored |= {name: name for name in (VALUE_WEIGHT, VALUE_BIAS) if name in source.names}
        self._new: dict[str, tuple[int, ...]] = {VALUE_WEIGHT: (1, hidden)}
        if has_bias:
            self._new[VALUE_BIAS] = (1,)

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._source.folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, the value head included."""
        return self._source.names | self._new.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._new[name] if self._is_new(name) else self._source.shape(self._stored.get(name, name))

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return "a new value head" if self._is_new(name) else self._source.file(self._stored.get(name, name))

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name`, or the part of it that `index` selects along its first dimensions."""
        if self._is_new(name):
            return torch.zeros(self._new[name])[index or slice(None)]
        return self._source.read(self._stored.get(name, name), *index)

    def _is_new(self, name: str) -> bool:
        return name in self._new and name not in self._stored


def with_stored_head(shape: ModelShape, folder: Path) -> ModelShape:
    """Return the shape of a reward model: `shape` with the value head in the weight files of `folder`.

    Raises:
        ValueError: the files have no value head.
    """
    names = survey(folder).names
    stored = names | {VALUE_ALIASES[name] for name in names & VALUE_ALIASES.keys()}
    if VALUE_WEIGHT not in stored:
        raise ValueError(
            f"{folder} holds no reward model: it has neither {VALUE_WEIGHT}, as a model for sequence or token "
            f"classification with one label, nor {next(iter(VALUE_ALIASES))}, as TRL's models with a value head; "
            "`fivefold rm` trains one"
        )
    return shape.as_critic() if VALUE_BIAS in stored else shape.as_reward_model()
