"""Heads turn a model's last hidden states into named predictions for a loss.

    last hidden states [N, hidden] ──head──> {"logprobs": [N], "entropy": [N]} ──engine──> whole sequences ──> loss

A policy's head predicts log-probs over the vocabulary, a critic's head one value for each token, a classifier's head
one number for each class. The engine treats them alike: it scatters their predictions back to whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fivefold.algorithms.distillation import Direction, coarse_divergence
from fivefold.engine.concentration import linear_sum_of_squares
from fivefold.engine.logprobs import LogitChunks, linear_logprobs, linear_logprobs_with_others
from fivefold.engine.top_k import linear_top_k

Predictions = Mapping[str, torch.Tensor]
"""Tensors float32 [N], by name."""


class HeadOptions(Protocol):
    """Options that a head gets from the loss."""

    @property
    def temperature(self) -> float:
        """Temperature that divides the logits."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""


@runtime_checkable
class Distilling(Protocol):
    """A loss that may need the divergence of the model's distributions from a teacher's."""

    @property
    def divergence(self) -> Direction | None:
        """Direction of the divergence; None: it is not needed."""


@dataclass(frozen=True)
class TopKScoring:
    """Options for the most likely tokens at each place, without gradient."""

    temperature: float
    k: int
    entropy_gradient: bool = False


@dataclass(frozen=True)
class SquaresScoring:
    """Options for log-probs with the sum of squared probabilities at each place, without gradient."""

    temperature: float
    entropy_gradient: bool = False


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher says of N places."""

    tokens_NK: torch.Tensor
    """int64: its most likely tokens."""
    logprobs_NK: torch.Tensor
    """float32: their log-probs."""


@dataclass(frozen=True)
class OutputLayer:
    """This rank's part of a model's last layer."""

    weight_VH: torch.Tensor
    """Rows of the vocabulary, or the one row of a value head."""
    bias_V: torch.Tensor | None = None
    """Bias of each row; None if there is none."""


class Head(Protocol):
    """The last part of a model, after its decoder."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the predictions."""

    def predict(
        self, hidden_NH: torch.Tensor, output: OutputLayer, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        """Predict N tokens.

        Args:
            hidden_NH: the hidden state before each token, the same on all tensor-parallel ranks. Its gradient must be
                this rank's part of a sum over the tensor-parallel group.
            output: this rank's part of the output layer.
            targets_N: int64, the tokens to predict.
            options: options of the loss.
        """


@dataclass(frozen=True)
class LogprobHead:
    """A policy's head. It predicts `logprobs` of the tokens, and the `entropy` of the distributions they come from."""

    vocab: int
    """Number of tokens in the vocabulary; further rows of the output layer are filler."""
    chunks: LogitChunks
    """The logits that exist at one time."""
    group: dist.ProcessGroup
    """The tensor-parallel group, over which the vocabulary is sharded."""

    names = ("logprobs", "entropy")

    def predict(
        self, hidden_NH: torch.Tensor, output: OutputLayer, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        logprobs, entropy = linear_logprobs(
            hidden_NH,
            output.weight_VH,
            targets_N,
            temperature=options.temperature,
            entropy_gradient=options.entropy_gradient,
            chunks=self.chunks,
            vocab=self.vocab,
            group=self.group,
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def predict_beside_teacher(
        self,
        hidden_NH: torch.Tensor,
        output: OutputLayer,
        targets_N: torch.Tensor,
        options: HeadOptions,
        teacher: TeacherTokens,
        direction: Direction,
    ) -> Predictions:
        """Predict as `predict` does, and from the same logits the `divergence` from the teacher (`coarse_divergence`).

        Args:
            hidden_NH: the hidden states, as in `predict`.
            output: this rank's part of the output layer.
            targets_N: int64, the tokens to predict.
            options: options of the loss.
            teacher: the teacher's distributions, at the same temperature.
            direction: direction of the divergence.
        """
        logprobs, entropy, logprobs_NK = linear_logprobs_with_others(
            hidden_NH,
            output.weight_VH,
            targets_N,
            teacher.tokens_NK,
            temperature=options.temperature,
            entropy_gradient=options.entropy_gradient,
            chunks=self.chunks,
            vocab=self.vocab,
            group=self.group,
        )
        divergence = coarse_divergence(logprobs_NK, teacher.logprobs_NK, direction)
        return {"logprobs": logprobs, "entropy": entropy, "divergence": divergence}

    def sum_of_squares(self, hidden_NH: torch.Tensor, output: OutputLayer, temperature: float) -> torch.Tensor:
        """Return the sum of squared probabilities over the vocabulary at each place, float32 [N], without gradient."""
        return linear_sum_of_squares(
            hidden_NH,
            output.weight_VH,
            temperature=temperature,
            chunks=self.chunks,
            vocab=self.vocab,
            group=self.group,
        )

    def top_k(self, hidden_NH: torch.Tensor, output: OutputLayer, options: TopKScoring) -> Predictions:
        """Return the most likely tokens of each place and their log-probs, as `top_k_names` calls them.

        Tokens are float32, which is exact up to 2^24.
        """
        tokens_NK, logprobs_NK = linear_top_k(
            hidden_NH,
            output.weight_VH,
            options.k,
            temperature=options.temperature,
            chunks=self.chunks,
            vocab=self.vocab,
            group=self.group,
        )
        rows = torch.cat([tokens_NK.float(), logprobs_NK], 1).T
        return dict(zip(top_k_names(options.k), rows, strict=True))


def top_k_names(k: int) -> tuple[str, ...]:
    """Return the names of the predictions of `LogprobHead.top_k`: the tokens, then their log-probs."""
    return tuple(f"{what}/{place}" for what in ("token", "logprob") for place in range(k))


@dataclass(frozen=True)
class ValueHead:
    """The head of a critic or a reward model. It predicts `values`: what the state before each token is worth.

    Every tensor-parallel rank has the whole head and computes the same values in float32.
    """

    group: dist.ProcessGroup
    """The tensor-parallel group."""

    names = ("values",)

    def predict(
        self, hidden_NH: torch.Tensor, output: OutputLayer, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        hidden_NH = _PartOfSum.apply(hidden_NH, self.group.size())
        bias_V = None if output.bias_V is None else output.bias_V.float()
        values_N1 = torch.nn.functional.linear(hidden_NH.float(), output.weight_VH.float(), bias_V)
        return {"values": values_N1.squeeze(1)}


class _PartOfSum(torch.autograd.Function):
    """Identity whose gradient, the same on all `n` ranks of a group, becomes each rank's part of the sum over them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.n, None


class LogitOptions(Protocol):
    """The keys of an engine's section that say how logits are computed."""

    @property
    def logprob_chunk_size(self) -> int:
        """Tokens whose logits are computed together."""

    @property
    def logprob_recompute(self) -> bool:
        """Whether the backward pass computes the logits again."""


def model_head(vocab: int, section: LogitOptions, group: dist.ProcessGroup, *, is_value: bool) -> Head:
    """Return the head of a model.

    Args:
        vocab: number of tokens in the vocabulary.
        section: the engine's section of the recipe.
        group: the tensor-parallel group.
        is_value: whether it is a value head in place of a policy's.
    """
    if is_value:
        return ValueHead(group)
    return LogprobHead(vocab, LogitChunks(section.logprob_chunk_size, section.logprob_recompute), group)
