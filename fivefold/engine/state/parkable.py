"""Tensors whose device memory is given back for a while."""

from __future__ import annotations

import torch

from fivefold.weights.pinned import host_zeros


class Parkable:
    """A contiguous tensor that owns its memory. Views of it stay valid, except while it is parked."""

    def __init__(self, tensor: torch.Tensor, *, is_constant: bool = False) -> None:
        """Take the tensor; one that `is_constant` is copied to the host only once."""
        self._is_constant = is_constant
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)
        self._size = self._bytes.untyped_storage().nbytes()
        self._copy: torch.Tensor | None = None
        """The bytes in host memory, pinned if the tensor is on a GPU; None: they have never been copied."""
        self.is_parked = False
        """Whether its values are in host memory alone."""

    def park(self, *, keep_values: bool) -> int:
        """Give the tensor's memory back; otherwise than `keep_values`, its values are lost. Returns the bytes freed.

        The host memory is kept for the next time.
        """
        if self.is_parked:
            return 0
        if keep_values and not (self._is_constant and self._copy is not None):
            if self._copy is None:
                self._copy = host_zeros(self._bytes.numel(), torch.uint8, pinned=self._bytes.is_cuda)
            self._copy.copy_(self._bytes, non_blocking=True)
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
            assert self._copy is not None
            self._bytes.copy_(self._copy, non_blocking=True)
        else:
            self._bytes.zero_()
        return self._size

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of bytes `begin` to `end` of a parked tensor on its device, uint8 [end - begin]."""
        assert self._copy is not None
        copy = torch.empty(end - begin, dtype=torch.uint8, device=self._bytes.device)
        return copy.copy_(self._copy[begin:end], non_blocking=True)
