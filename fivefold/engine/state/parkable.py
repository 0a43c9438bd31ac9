"""Tensors whose device memory is given back for a while."""

from __future__ import annotations

import torch

_CHUNK_BYTES = 2**27
"""Pinned memory is allocated in powers of two, so a copy is in chunks of this size; only the last wastes some."""


class Parkable:
    """A contiguous tensor that owns its memory. Views of it stay valid, except while it is parked."""

    def __init__(self, tensor: torch.Tensor, *, is_constant: bool = False) -> None:
        """Take the tensor; one that `is_constant` is copied to the host only once."""
        self._is_constant = is_constant
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)
        self._size = self._bytes.untyped_storage().nbytes()
        self._chunks: list[torch.Tensor] = []
        self.is_parked = False
        """Whether its values are in host memory alone."""

    def park(self, *, keep_values: bool) -> int:
        """Give the tensor's memory back; otherwise than `keep_values`, its values are lost. Returns the bytes freed.

        The pinned host memory is kept for the next time.
        """
        if self.is_parked:
            return 0
        if keep_values and not (self._is_constant and self._chunks):
            for start, chunk in self._host_chunks():
                chunk.copy_(self._bytes[start : start + chunk.numel()], non_blocking=True)
            if self._bytes.is_cuda:
                torch.cuda.current_stream().synchronize()
        self._bytes.untyped_storage().resize_(0)
        self.is_parked = True
        return self._size

    def fetch(self, *, keep_values: bool) -> int:
        """Allocate the tensor's memory again, with its values, or with zeros. Returns the bytes allocated."""
        if not self.is_parked:
            return 0
        self._bytes.untyped_storage().resize_(self._size)
        self.is_parked = False
        if keep_values:
            for start, chunk in self._host_chunks():
                self._bytes[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
        else:
            self._bytes.zero_()
        return self._size

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of bytes `begin` to `end` of a parked tensor on its device, uint8 [end - begin]."""
        copy = torch.empty(end - begin, dtype=torch.uint8, device=self._bytes.device)
        for start, chunk in self._host_chunks():
            first, last = max(begin, start), min(end, start + chunk.numel())
            if first < last:
                copy[first - begin : last - begin].copy_(chunk[first - start : last - start], non_blocking=True)
        return copy

    def _host_chunks(self) -> list[tuple[int, torch.Tensor]]:
        """Return the chunks of the copy in pinned host memory, each with its first byte."""
        total = self._bytes.numel()
        starts = range(0, total, _CHUNK_BYTES)
        if not self._chunks:
            self._chunks = [
                torch.empty(
                    min(_CHUNK_BYTES, total - start), dtype=torch.uint8, device="cpu", pin_memory=self._bytes.is_cuda
                )
                for start in starts
            ]
        return list(zip(starts, self._chunks, strict=True))
