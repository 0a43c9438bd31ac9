"""Losses that compare answers with one another, and what they ask of each answer alone.

Such a loss couples sequences, while an engine's loss never depends on a sequence's neighbours. So an update has two
passes: the first computes the score of each sequence, a sum over its tokens, without gradient; the objective turns all
scores of the mini-batch into the loss, and its derivative by each score; and the second pass minimises the linear loss
with these derivatives as coefficients. It has the gradient of the objective, because

    dL/dtheta = sum over sequences i of dL/dscore_i * dscore_i/dtheta

With policy p and reference p_ref, an answer is compared by

    DPO, SLiC, IPO, KTO    s = log p(answer) - log p_ref(answer)
    CPO                    s = log p(answer)
    SimPO, ORPO            s = log p(answer) / tokens of the answer
    reward model           s = the model's score

and, over the B pairs of a mini-batch, with margin m = s(chosen) - s(rejected) and odds(s) = exp(s) / (1 - exp(s)),

    sigmoid    -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)  DPO (arXiv 2305.18290); e > 0: conservative DPO
    hinge      max(0, 1 - beta m)                                     SLiC (arXiv 2305.10425, as in arXiv 2309.06657)
    ipo        (m - 1 / (2 beta))^2                                   IPO (arXiv 2310.12036, eq. 17)
    cpo        -log sigmoid(beta m)                                   CPO (arXiv 2401.08417, eq. 5)
    simpo      -log sigmoid(beta m - gamma)                           SimPO (arXiv 2405.14734, eq. 6)
    orpo       -beta log sigmoid(log (odds(s chosen) / odds(s rejected)))    ORPO (arXiv 2403.07691, eq. 6)
    reward     -log sigmoid(m) + c (s(chosen) + s(rejected))^2        Bradley-Terry, centred (arXiv 2312.09244)

to which the first six may add a weight times the negative log-likelihood of the chosen answers' tokens.

KTO (arXiv 2402.01306) has single answers y, each desirable or not, instead of pairs:

    desirable      w_d (1 - sigmoid(beta (s(y) - z)))
    undesirable    w_u (1 - sigmoid(beta (z - s(y))))               z = max(0, mean of s over mismatched answers)

where a mismatched answer belongs to another example of the mini-batch, and follows this example's prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from fivefold.config.schema.preferences import DPOModelConfig

Numbers = npt.NDArray[np.float64]


class Objective(Protocol):
    """A loss over the scores of a mini-batch's sequences."""

    def __call__(
        self, scores_N: torch.Tensor, lengths_N: torch.Tensor, reference_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean loss (scalar, with gradient) and metrics.

        Args:
            scores_N: float64 [N]: the model's score of each sequence, its log-prob or a reward model's score.
            lengths_N: float64 [N]: trained tokens of each sequence.
            reference_N: float64 [N]: the reference's log-probs; 0 without a reference.
        """


def derivatives(
    objective: Objective, scores_N: Numbers, lengths_N: npt.NDArray[np.int64], reference_N: Numbers | None = None
) -> tuple[npt.NDArray[np.float32], dict[str, float]]:
    """Return the derivative of the objective by each score, float32 [N], and its metrics with its value as `loss`."""
    leaf_N = torch.from_numpy(scores_N).double().requires_grad_()
    reference = torch.zeros_like(leaf_N) if reference_N is None else torch.from_numpy(reference_N).double()
    loss, metrics = objective(leaf_N, torch.from_numpy(lengths_N).double(), reference)
    (derivatives_N,) = torch.autograd.grad(loss, leaf_N)
    return derivatives_N.float().numpy(), {"loss": loss.item(), **metrics}


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair by how its two answers are scored."""

    loss_type: str
    """As `actor.loss_type` of `fivefold dpo`, but not `kto`."""
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0

    def __call__(self, chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, [B]."""
        difference_B = chosen_B - rejected_B
        margin_B = self.beta * difference_B
        match self.loss_type:
            case "sigmoid":
                smoothing = self.label_smoothing
                return -(1 - smoothing) * logsigmoid(margin_B) - smoothing * logsigmoid(-margin_B)
            case "hinge":
                return (1 - margin_B).clamp(min=0)
            case "ipo":
                return (difference_B - 1 / (2 * self.beta)) ** 2
            case "cpo":
                return -logsigmoid(margin_B)
            case "simpo":
                return -logsigmoid(margin_B - self.simpo_gamma)
            case "orpo":
                return -self.beta * logsigmoid(difference_B - _log_rest(chosen_B) + _log_rest(rejected_B))
            case _:
                raise ValueError(f"loss_type={self.loss_type} does not compare pairs")


@dataclass(frozen=True)
class DirectPreference:
    """A loss of policies over pairs: sequence 2i is the chosen answer of pair i, and 2i + 1 the rejected one."""

    loss: PairLoss
    compares_averages: bool = False
    """Whether answers are compared by log-probs per token."""
    nll_weight: float = 0.0
    """Weight of the negative log-likelihood of the chosen answers."""
    nll_aggregation: str = "token_mean"

    @staticmethod
    def of(config: DPOModelConfig) -> DirectPreference:
        """Return the loss of a recipe."""
        loss = PairLoss(config.loss_type, config.beta, config.label_smoothing, config.simpo_gamma)
        return DirectPreference(loss, config.compares_averages, config.weight_of_nll, config.nll_aggregation)

    def __call__(
        self, scores_N: torch.Tensor, lengths_N: torch.Tensor, reference_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        compared_N = scores_N - reference_N
        if self.compares_averages:
            compared_N = compared_N / lengths_N
        chosen_B, rejected_B = compared_N.view(-1, 2).unbind(1)
        loss = self.loss(chosen_B, rejected_B).mean()
        metrics = _pair_metrics(self.loss.beta * chosen_B, self.loss.beta * rejected_B)
        if weight := self.nll_weight:
            nll = _nll(scores_N[::2], lengths_N[::2], self.nll_aggregation)
            return loss + weight * nll, metrics | {"nll/chosen": nll.item()}
        return loss, metrics


def _nll(logprobs_B: torch.Tensor, lengths_B: torch.Tensor, aggregation: str) -> torch.Tensor:
    """Return the negative log-likelihood of answers as one number."""
    match aggregation:
        case "sequence_mean":
            return -(logprobs_B / lengths_B).mean()
        case "sequence_sum":
            return -logprobs_B.mean()
        case _:
            return -logprobs_B.sum() / lengths_B.sum()


@dataclass(frozen=True)
class BradleyTerry:
    """The loss of a reward model over pairs, in the order of `DirectPreference`."""

    center: float
    """Weight of the squared sum of a pair's scores."""

    def __call__(
        self, scores_N: torch.Tensor, lengths_N: torch.Tensor, reference_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        chosen_B, rejected_B = scores_N.view(-1, 2).unbind(1)
        loss_B = -logsigmoid(chosen_B - rejected_B) + self.center * (chosen_B + rejected_B) ** 2
        return loss_B.mean(), _pair_metrics(chosen_B, rejected_B)


@dataclass(frozen=True)
class KahnemanTversky:
    """KTO over B answers, which are the first B sequences; the others are mismatched, and are not trained."""

    config: DPOModelConfig
    desirable_B: tuple[bool, ...]
    """Whether each answer is desirable."""

    def __call__(
        self, scores_N: torch.Tensor, lengths_N: torch.Tensor, reference_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        config, n = self.config, len(self.desirable_B)
        is_desirable_B = torch.tensor(self.desirable_B)
        ratios_N = scores_N - reference_N
        score_B, point = ratios_N[:n], ratios_N[n:].detach().mean().clamp(min=0)
        distance_B = config.beta * (score_B - point)
        # The sign turns the formula of desirable answers into the one of undesirable answers.
        better_B = torch.where(is_desirable_B, distance_B, -distance_B)
        weight_B = torch.where(is_desirable_B, config.desirable_weight, config.undesirable_weight)
        loss = (weight_B * (1 - torch.sigmoid(better_B))).mean()
        rewards_B = config.beta * score_B.detach()
        metrics = {
            "accuracy": _share_above_0(better_B),
            "kl": point.item(),
            "reward/desirable": _mean(rewards_B[is_desirable_B]),
            "reward/undesirable": _mean(rewards_B[~is_desirable_B]),
        }
        return loss, {name: value for name, value in metrics.items() if value is not None}


def _log_rest(logprob_B: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(logprob)): finite for answers whose every token is certain to the last bit, too."""
    return torch.log(-torch.expm1(logprob_B.clamp(max=-1e-12)))


def _pair_metrics(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> dict[str, float]:
    margin_B = chosen_B - rejected_B
    return {
        "accuracy": _share_above_0(margin_B),
        "margin": margin_B.mean().item(),
        "reward/chosen": chosen_B.mean().item(),
        "reward/rejected": rejected_B.mean().item(),
    }


def _share_above_0(values_B: torch.Tensor) -> float:
    """Return the share of values above 0. Those that are 0 count half: before training, policy and reference agree."""
    return (0.5 * (values_B.detach().sign() + 1)).mean().item()


def _mean(values: torch.Tensor) -> float | None:
    """Return the mean; None if there are no values."""
    return values.mean().item() if len(values) else None
