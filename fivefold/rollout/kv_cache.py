"""Keys and values of the rows being decoded, and states of gated delta nets, in buffers that are written in place.

transformers' DynamicCache copies the whole cache for each token, and computes a prompt once for each of its
completions. Here a token writes one column, a prompt is computed once and written to all its rows, and finished rows
are dropped.

    buffer of a layer, [rows, kv heads, capacity, head dim]     prompts end at the same column (left padding)

    row 0    . p p p | r r r r _ _
    row 1    p p p p | r r r r _ _          .  padding, masked      _  free

A layer with a sliding window keeps the columns that new tokens may see, and some before them. A gated delta net keeps a
state for each row whatever its length, in `RowStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

_GROWTH = 64
"""Free columns at the beginning, and free columns that are added once these are used up. Attention reads all columns in
each step, so that one copy in 64 steps costs little, and no memory is held for completions that end early."""


class RowCache(Cache):
    """The cache of one wave of rows, which a transformers model takes as `past_key_values`.

    Call `begin_prompts` or `begin_token` before each forward, which tells the cache what the forward computes.
    """

    def __init__(self, n_rows: int, prompt_length: int, windows: Mapping[int, int]) -> None:
        """Create an empty cache; buffers are allocated with the first forward.

        Args:
            n_rows: number of rows to decode.
            prompt_length: tokens of the longest prompt.
            windows: tokens that each token sees in layers with a sliding window, by the layer's index.
        """
        super().__init__(layers=_StatesOfLayers(self))
        self.length = prompt_length
        """Number of columns in use, with the columns of the current forward."""
        self._n_rows = n_rows
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._windows = windows
        self._first: dict[int, int] = {}
        """The column at which each layer's buffers begin: 0, unless the layer has a window."""
        self._convolved, self._recurrent = RowStates(n_rows), RowStates(n_rows)
        """The last inputs of the convolutions [rows, channels, kernel], and states [rows, heads, D, E], by layer."""
        self._target: tuple[slice, Tensor] | None = None

    def begin_prompts(self, rows: slice, source: Tensor) -> None:
        """Let the next forward compute prompts for `rows`: row `rows.start + i` takes prompt `source[i]` of them."""
        self._target = (rows, source)

    def begin_token(self) -> None:
        """Let the next forward append one token to every row."""
        self._target = None
        layer = next(iter(self._keys))
        if self.length == self._first[layer] + self._keys[layer].shape[2]:
            self._move(self.length, self.length)
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except those at the indices `rows` (int64)."""
        self._replace_buffers(lambda buffer, _: buffer.index_select(0, rows))
        for states in (self._convolved, self._recurrent):
            states.keep(rows)

    def join(self, other: RowCache) -> None:
        """Append the rows of `other`. Rows stay aligned at their last column: shorter ones get columns at the left."""
        length = max(self.length, other.length)
        for cache in (self, other):
            cache._move(cache.length, length)
        for own, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for layer in own:
                own[layer] = torch.cat([own[layer], theirs[layer]])
        self._convolved.join(other._convolved)
        self._recurrent.join(other._recurrent)
        self.length = length

    def cut_left(self, columns: int) -> None:
        """Drop the first `columns` columns of all rows, which are padding."""
        self._replace_buffers(lambda buffer, first: buffer[:, :, max(0, columns - first) :].clone())
        self._first = {layer: max(0, first - columns) for layer, first in self._first.items()}
        self.length -= columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return those that the new queries may see.

        Args:
            key_states: float [B, KV, Q, D].
            value_states: float [B, KV, Q, V].
            layer_idx: index of the layer.
            args: ignored.
            kwargs: ignored.

        Returns:
            Keys and values of the new prompts alone, or of all columns of every row that a token may see.
        """
        if layer_idx not in self._keys:
            self._first[layer_idx] = self._first_kept(layer_idx, self.length)
            self._keys[layer_idx] = self._allocate(layer_idx, key_states)
            self._values[layer_idx] = self._allocate(layer_idx, value_states)
        keys, values, first = self._keys[layer_idx], self._values[layer_idx], self._first[layer_idx]
        end = self.length - first
        if self._target is not None:
            rows, source = self._target
            n_kept = min(key_states.shape[2], end)
            keys[rows, :, end - n_kept : end] = key_states[source, :, -n_kept:]
            values[rows, :, end - n_kept : end] = value_states[source, :, -n_kept:]
            return key_states, value_states
        keys[:, :, end - 1] = key_states[:, :, 0]
        values[:, :, end - 1] = value_states[:, :, 0]
        seen = slice(self._first_kept(layer_idx, self.length) - first, end)
        return keys[:, :, seen], values[:, :, seen]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the next forward appends tokens to what the cache holds."""
        return self._target is None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether convolutions keep more inputs than they need; they do not."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a layer's convolution, which the layer changes in place; None before a prompt."""
        return None if self._target is not None else self._convolved[layer_idx]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the last inputs [B, channels, Q] of a convolution over prompts; return all of them.

        `kwargs` has `conv_kernel_size`, how many of them the convolution sees.
        """
        assert self._target is not None, "single tokens change the state in place"
        width: int = kwargs["conv_kernel_size"]
        kept = conv_states[..., -width:]
        self._convolved.store(layer_idx, pad(kept, (width - kept.shape[-1], 0)), self._target)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a layer; None before a prompt."""
        return None if self._target is not None else self._recurrent[layer_idx]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store the state of a layer after new prompts [B, heads, D, E], or after a token in every row."""
        self._recurrent.store(layer_idx, recurrent_states, self._target)
        return recurrent_states

    def _first_kept(self, layer: int, length: int) -> int:
        """Return the first of `length` columns that the last one's token sees in a layer."""
        return max(0, length - self._windows.get(layer, length))

    def _move(self, length: int, target: int) -> None:
        """Put the first `length` columns so that they end at column `target`, with free columns behind them.

        Columns that no window holds any more are dropped.
        """

        def moved(buffer: Tensor, layer: int) -> Tensor:
            kept = self._first_kept(layer, target)
            # The columns that are there, where they will be.
            begin = max(self._first[layer] + target - length, kept)
            successor = buffer.new_zeros(*buffer.shape[:2], target - kept + _GROWTH, buffer.shape[3])
            last = length - self._first[layer]
            successor[:, :, begin - kept : target - kept] = buffer[:, :, last - (target - begin) : last]
            return successor

        for buffers in (self._keys, self._values):
            for layer in buffers:
                buffers[layer] = moved(buffers[layer], layer)
        self._first = {layer: self._first_kept(layer, target) for layer in self._first}

    def _replace_buffers(self, successor: Callable[[Tensor, int], Tensor]) -> None:
        """Replace each layer's buffers by what follows from them and the column at which they begin."""
        # One layer at a time, because the whole old and the whole new cache may not fit side by side.
        for buffers in (self._keys, self._values):
            for layer in buffers:
                buffers[layer] = successor(buffers[layer], self._first[layer])

    def _allocate(self, layer: int, states: Tensor) -> Tensor:
        # Padding is masked, but a weight of 0 times an uninitialised NaN would still be NaN: fill with zeros.
        width = self.length - self._first[layer] + _GROWTH
        return states.new_zeros(self._n_rows, states.shape[1], width, states.shape[3])


class _StatesOfLayers(list[Any]):
    """An empty list of layers, which gives the states of each, where releases of transformers before 5.24 look."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    def __getitem__(self, layer: Any) -> Any:
        return SimpleNamespace(
            record_past=self._cache.is_recording_past(layer),
            conv_states=[self._cache.get_conv_state(layer)],
            recurrent_states=[self._cache.get_recurrent_state(layer)],
        )


class RowStates:
    """A tensor of fixed size for each row and layer."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._buffers: dict[int, Tensor] = {}

    def __getitem__(self, layer: int) -> Tensor:
        return self._buffers[layer]

    def store(self, layer: int, states: Tensor, target: tuple[slice, Tensor] | None) -> None:
        """Take the states of a layer for the rows of a target, as `begin_prompts` sets it; None: for all rows."""
        if layer not in self._buffers:
            self._buffers[layer] = states.new_empty(self._n_rows, *states.shape[1:])
        rows, source = (slice(None), slice(None)) if target is None else target
        self._buffers[layer][rows] = states[source]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except those at the indices `rows` (int64)."""
        for layer, buffer in self._buffers.items():
            self._buffers[layer] = buffer.index_select(0, rows)

    def join(self, other: RowStates) -> None:
        """Append the rows of `other`."""
        for layer, buffer in self._buffers.items():
            self._buffers[layer] = torch.cat([buffer, other[layer]])
