"""The driver's handle of a reward model, which scores completions in its own micro-batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.engine.values import EndScores
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import RemoteBatch


class RewardModel:
    """Scores sequences: the value of the state behind their end token."""

    def __init__(self, model: FrozenModel, end_token: int) -> None:
        """Take the model's handle, and the end token, which it appends to sequences without one."""
        self.model = model
        self._end_token = end_token

    def scores(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return the score of each sequence: float64 [N]."""
        return self.model.sums(batch, EndScores(self._end_token))
