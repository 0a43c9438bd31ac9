"""Keys and values of the rows being decoded, in buffers that are written in place.

transformers' DynamicCache copies the whole cache for each token, and needs a group's prompt computed for each of its
completions. Here a token writes one column, a prompt is computed once and written to all its rows, and finished rows
leave.

    buffer of a layer, [rows, kv heads, capacity, head dim]     prompts end at the same column (left padding)

    row 0    . p p p | r r r r _ _
    row 1    p p p p | r r r r _ _          .  padding, masked      _  free
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

_GROWTH = 64
"""Free columns to begin with, and to add when they are used up. Attention reads all columns each step, so one copy in
64 steps is noise; and no memory is held for the tokens of answers that end early."""


class RowCache(Cache):
    """The cache of one wave of rows; hand it to a transformers model as `past_key_values`.

    Before each forward, `begin_prompts` or `begin_token` says what the forward brings.
    """

    def __init__(self, n_rows: int, prompt_length: int) -> None:
        """
        Args:
            n_rows: rows to decode.
            prompt_length: tokens of the longest prompt.
        """
        super().__init__(layers=[])
        self.length = prompt_length
        """Columns in use, the current forward's included."""
        self._n_rows = n_rows
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._target: tuple[slice, Tensor] | None = None

    def begin_prompts(self, rows: slice, source: Tensor) -> None:
        """The next forward computes prompts for `rows`: row `rows.start + i` takes prompt `source[i]` of its batch."""
        self._target = (rows, source)

    def begin_token(self) -> None:
        """The next forward appends one token to every row."""
        self._target = None
        if self.length == self._keys[0].shape[2]:
            self._replace_buffers(_grown)
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those at the indices `rows` (int64)."""
        self._replace_buffers(lambda buffer: buffer.index_select(0, rows))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns what the new queries may see: prompts alone, or all columns."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._target is not None:
            rows, source = self._target
            columns = slice(self.length - key_states.shape[2], self.length)
            keys[rows, :, columns] = key_states[source]
            values[rows, :, columns] = value_states[source]
            return key_states, value_states
        keys[:, :, self.length - 1] = key_states[:, :, 0]
        values[:, :, self.length - 1] = value_states[:, :, 0]
        return keys[:, :, : self.length], values[:, :, : self.length]

    def _replace_buffers(self, successor: Callable[[Tensor], Tensor]) -> None:
        # One at a time: the old and the new cache as a whole would not fit side by side.
        for buffers in (self._keys, self._values):
            for layer in range(len(buffers)):
                buffers[layer] = successor(buffers[layer])

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros: padding is masked, but 0 weight times an uninitialised NaN would still be NaN.
        return states.new_zeros(self._n_rows, states.shape[1], self.length + _GROWTH, states.shape[3])


def _grown(buffer: Tensor) -> Tensor:
    return torch.cat([buffer, buffer.new_zeros(*buffer.shape[:2], _GROWTH, buffer.shape[3])], dim=2)
