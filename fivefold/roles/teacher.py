"""The driver's handle of a teacher, from which a policy is distilled."""

from __future__ import annotations

from fivefold.config.schema.roles import DistillConfig
from fivefold.engine.distillation import TopK
from fivefold.engine.heads import Logprobs
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch

DEFAULT_TOP_K = 64
"""Tokens of `actor.distill.over: top_k` if the recipe names no number."""


class Teacher:
    """Tells how likely it finds tokens of sequences that the policy has sampled."""

    def __init__(self, model: FrozenModel, config: DistillConfig, vocab: int) -> None:
        """Take the model's handle; `vocab` is the number of tokens in its vocabulary."""
        self._model = model
        self._top_k = top_k_of(config, vocab)

    def score(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the columns that the loss needs of the trained tokens.

        They are `teacher_logprobs`, or `teacher_tokens` and `teacher_token_logprobs`.
        """
        if self._top_k is None:
            return self._model.score(batch, Logprobs(temperature, "teacher_logprobs"))
        return self._model.score(batch, TopK(self._top_k, temperature))


def top_k_of(config: DistillConfig, vocab: int) -> int | None:
    """Return the number of tokens at each place that a teacher tells; None: only the sampled one."""
    tokens = {"sampled": None, "top_k": min(config.top_k or DEFAULT_TOP_K, vocab), "full": vocab}
    return tokens[config.over]
