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
from fivefold.bridge.reading import TensorReader, WithFurther
from fivefold.bridge.weight_files import survey
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import VALUE_BIAS, VALUE_WEIGHT


class WithValueHead(WithFurther):
    """The tensors of a model, and a value head if they lack one, or have it under another name.

    Args:
        source: the tensors in the files.
        hidden: width of the hidden state.
        has_bias: whether the head has a bias.
    """

    def __init__(self, source: TensorReader, hidden: int, *, has_bias: bool = True) -> None:
        head: dict[str, tuple[int, ...]] = {VALUE_WEIGHT: (1, hidden)}
        if has_bias:
            head[VALUE_BIAS] = (1,)
        self._aliases = {new: old for old, new in VALUE_ALIASES.items() if old in source.names}
        super().__init__(
            source,
            {
                name: source.shape(self._aliases[name]) if name in self._aliases else shape
                for name, shape in head.items()
                if name not in source.names
            },
        )

    def _origin(self, name: str) -> str:
        return self._source.file(self._aliases[name]) if name in self._aliases else "a new value head"

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        if name in self._aliases:
            return self._source.read(self._aliases[name], *index)
        return torch.zeros(self._further[name])[index]


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
