"""Keys and values of the rows being decoded, in buffers that are written in place.

transformers' DynamicCache copies the whole cache for each token, and repeats a prompt's keys for every completion of it.
Here a step writes one column, a group's prompt is computed once and written to all its rows, and finished rows leave.

    buffer of a layer, [rows, kv heads, capacity, head dim]     prompts end at the same column (left padding)

    row 0    . p p p | r r r r _ _
    row 1    p p p p | r r r r _ _          .  padding, masked      _  free
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

_GROWTH = 64
"""Free columns to begin with, and to add when they are used up. Attention reads all columns each step, so one copy in 64
steps is noise; memory is not held for answers that end early."""


class _LayerBuffer(DynamicLayer):
    """One layer's keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._n_rows = 0
        self._prompt_length = 0
        self._target: tuple[slice, Tensor] | None = None

    def reserve(self, n_rows: int, prompt_length: int) -> None:
        self._n_rows, self._prompt_length = n_rows, prompt_length

    def aim(self, rows: slice, source: Tensor) -> None:
        self._target = (rows, source)

    def end_prefill(self) -> None:
        self._target = None
        self.length = self._prompt_length

    def get_seq_length(self) -> int:
        return self.length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._allocate(states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new columns; returns what the new queries may see: the prompts alone, or all columns so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._target is not None:
            rows, source = self._target
            columns = slice(self._prompt_length - key_states.shape[2], self._prompt_length)
            self.keys[rows, :, columns] = key_states[source]
            self.values[rows, :, columns] = value_states[source]
            return key_states, value_states
        if self.length == self.keys.shape[2]:
            self.keys, self.values = _grown(self.keys), _grown(self.values)
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros: attention masks padding, and 0 weight times uninitialised NaN would still be NaN.
        shape = (self._n_rows, states.shape[1], self._prompt_length + _GROWTH, states.shape[3])
        return states.new_zeros(shape)


class RowCache(Cache):
    """The cache of one wave of rows; hand it to a transformers model as `past_key_values`."""

    def __init__(self, n_layers: int, n_rows: int, prompt_length: int) -> None:
        """
        Args:
            n_rows: rows to decode.
            prompt_length: tokens of the longest prompt.
        """
        self._buffers = [_LayerBuffer() for _ in range(n_layers)]
        super().__init__(layers=self._buffers)
        for buffer in self._buffers:
            buffer.reserve(n_rows, prompt_length)

    def begin_prefill(self, rows: slice, source: Tensor) -> None:
        """The next forward computes prompts for `rows`: row `rows.start + i` takes prompt `source[i]` of its batch."""
        for buffer in self._buffers:
            buffer.aim(rows, source)

    def end_prefill(self) -> None:
        """From here on, each forward appends one token to every row."""
        for buffer in self._buffers:
            buffer.end_prefill()

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those at the indices `rows` (int64)."""
        for buffer in self._buffers:
            buffer.keep(rows)


def _grown(buffer: Tensor) -> Tensor:
    return torch.cat([buffer, buffer.new_zeros(*buffer.shape[:2], _GROWTH, buffer.shape[3])], dim=2)
