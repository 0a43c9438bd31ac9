"""Losses and advantages that users write, outside the package: they are imported, tried out at the start, and called.

A loss travels to the workers by name, so that its class need not be one that can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from fivefold.algorithms.batch_steps import BatchStep
from fivefold.algorithms.loss import Sums, Surrogate
from fivefold.algorithms.losses.covariance import NUMBER
from fivefold.algorithms.sequences import PolicyTokens, Sequences
from fivefold.batch import Batch
from fivefold.config.user_code import load_user_object, user_traceback

NO_FIELDS: Mapping[str, torch.Tensor] = MappingProxyType({})


def load(key: str, name: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function or class that the recipe's `key` names.

    Raises:
        ValueError: it cannot be imported, or cannot be called.
    """
    found = load_user_object(key, name, folder)
    if not callable(found):
        raise ValueError(f"{key}={name!r} is a {type(found).__name__}, which cannot be called")
    return cast(Callable[..., Any], found)


@dataclass(frozen=True)
class UserLoss:
    """A user's class with its options."""

    name: str
    folder: str
    """Working folder of the command, in which the module is searched for."""
    options: Mapping[str, Any]

    @staticmethod
    def of(name: str, options: Mapping[str, Any]) -> UserLoss:
        """Return the loss, after it was tried out on a small batch.

        Raises:
            ValueError: the class does not do what `Surrogate` says.
        """
        loss = UserLoss(name, str(Path.cwd()), options)
        _try_out(name, loss)
        return loss

    @cached_property
    def _loss(self) -> Surrogate:
        kind = load("actor.loss", self.name, Path(self.folder))
        return cast(Surrogate, kind(**self.options))

    @property
    def before(self) -> BatchStep | None:
        """What the user's loss computes over a whole mini-batch first; None: nothing."""
        return cast(BatchStep | None, getattr(self._loss, "before", None))

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        return self._loss(tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without the instance, which need not be one that can be pickled."""
        return UserLoss, (self.name, self.folder, self.options)


def _try_out(name: str, loss: UserLoss) -> None:
    key = f"actor.loss={name!r}"
    try:
        fields = _fields_before(loss)
        both, alone = (_tokens(lengths, fields) for lengths in ([2, 3], [2]))
        cost_T, metrics = loss(both)
        alone_T, _ = loss(alone)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shown = user_traceback(error, [str(Path(__file__).parent)])
        raise ValueError(f"{key} failed on a batch of two sequences:\n{shown}") from error
    if not isinstance(cost_T, torch.Tensor) or cost_T.shape != (5,):
        found = tuple(cost_T.shape) if isinstance(cost_T, torch.Tensor) else type(cost_T).__name__
        raise ValueError(
            f"{key} returned {found} for 5 tokens: return a tensor with the cost of each token, and a dict"
        )
    if not isinstance(metrics, dict):
        raise ValueError(f"{key} returned a {type(metrics).__name__} in the place of a dict of metrics")
    if not cost_T.requires_grad:
        raise ValueError(f"{key} returned costs without a gradient: compute them from tokens.logprobs_T")
    (gradient_T,) = torch.autograd.grad(cost_T.sum(), both.logprobs_T)
    if not (cost_T.isfinite().all() and gradient_T.isfinite().all()):
        raise ValueError(f"{key} returned costs or gradients that are not finite, for finite log-probs")
    if not torch.allclose(cost_T[:2], alone_T):
        raise ValueError(
            f"{key}: the costs of a sequence depend on the sequences around it, so the gradient would depend on the "
            "split into micro-batches: compute means over tokens.sequences, not over all tokens"
        )


def _fields_before(loss: UserLoss) -> Mapping[str, torch.Tensor]:
    """Return the fields of the two sequences after what the loss computes over a whole mini-batch."""
    tokens = _tokens([2, 3])
    fields = {
        "old_logprobs": tokens.old_logprobs_T,
        "advantages": tokens.advantages_T,
        NUMBER: torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]),
    }
    batch = Batch((2, 3), torch.zeros(5, dtype=torch.int64), torch.ones(5), fields)
    return NO_FIELDS if loss.before is None else loss.before(batch, lambda own: [own]).fields


def _tokens(lengths: list[int], fields: Mapping[str, torch.Tensor] = NO_FIELDS) -> PolicyTokens:
    total = sum(lengths)
    logprobs_T = -torch.linspace(0.5, 2.5, 5)[:total]
    sequences = Sequences.of(torch.ones(total), lengths)
    advantages_T = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])[:total]
    old_T = logprobs_T - torch.tensor([0.1, -0.2, 0.3, -0.1, 0.0])[:total]
    own = {name: values_T[:total] for name, values_T in fields.items()}
    return PolicyTokens(logprobs_T.clone().requires_grad_(), old_T, advantages_T, sequences, own)
