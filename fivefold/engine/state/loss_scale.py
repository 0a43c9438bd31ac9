"""The factor of the loss of a float16 model, which keeps small gradients of activations above zero.

float16 has no numbers between 0 and 6e-8, and none above 65504. The loss of an update is multiplied by a power of two,
and the gradient divided by it. The factor is halved after an update whose gradient overflowed, which changes no weight,
and doubled after many that did not (https://arxiv.org/abs/1710.03740, section 3.2).
"""

from __future__ import annotations

import torch

FIRST = 65_536.0
"""Factor of the first update, as torch's and DeepSpeed's."""
GROWS_AFTER = 1000
"""Updates without an overflow after which it is doubled."""
MOST = 2.0**32


class LossScale:
    """The factor of the next update's loss; all ranks have the same one."""

    def __init__(self, *, is_needed: bool) -> None:
        """Begin; a model that needs no factor has 1 for ever."""
        self.is_needed = is_needed
        self.value = FIRST if is_needed else 1.0
        self._clean = 0

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the scale for a model of `dtype`."""
        return cls(is_needed=dtype == "float16")

    @property
    def shown(self) -> float | None:
        """The factor; None of a model that needs none."""
        return self.value if self.is_needed else None

    def after(self, *, is_finite: bool) -> None:
        """Choose the next factor after an update."""
        if not self.is_needed:
            return
        self._clean = self._clean + 1 if is_finite else 0
        if not is_finite:
            self.value = max(1.0, self.value / 2)
        elif self._clean == GROWS_AFTER:
            self.value, self._clean = min(MOST, self.value * 2), 0

    def saved(self) -> torch.Tensor:
        """Return what a training state keeps of it, float64 [2]."""
        return torch.tensor([self.value, self._clean], dtype=torch.float64)

    def restore(self, saved: torch.Tensor) -> None:
        """Continue from what `saved` returned."""
        self.value, self._clean = float(saved[0]), int(saved[1])
