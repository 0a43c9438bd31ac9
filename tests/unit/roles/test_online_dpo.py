"""Online DPO: who is paired, and that the update has the gradient of DPO's loss by the weights of each update."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fivefold.algorithms.advantages.pairs import best_and_worst
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.metrics import Metric
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.state import AlgorithmState
from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.scores import Score
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.types import Prompt, Sample, StopReason
from fivefold.update.compose import policy_update
from fivefold.update.step import Prepared, Skips, StepOutcome, UpdateState

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
N_TOKENS = 3
REWARDS = (0.0, 1.0, 0.5, 0.5, 0.25, 0.75)
"""Two groups of three; their pairs are 1 with 0, and 5 with 4."""
LOGPROBS = np.array([-2.0, -3.5, -1.0, -2.5, -4.0, -6.0])
REFERENCE = np.array([-2.5, -3.0, -1.0, -2.0, -4.5, -5.0])
BETA = 0.3


class Told(Actor):
    """Tells log-probs of whole completions, which are lower by 1 times its number after each update."""

    def __init__(self) -> None:
        self.batches: list[RemoteBatch] = []
        self.losses: list[PolicyLoss] = []

    @property
    def logprobs_N(self) -> npt.NDArray[np.float64]:
        return LOGPROBS - len(self.batches) * np.arange(6)

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        return ()

    def sums(self, batch: RemoteBatch, what: Score) -> npt.NDArray[np.float64]:
        return self.logprobs_N[batch.scalars["number"].astype(int)]

    def update(self, batch: RemoteBatch, loss: Any, change: Any = None) -> UpdateResult:
        self.batches.append(batch)
        self.losses.append(loss)
        return UpdateResult({"lr": Metric(1.0)}, skipped=False)


class Fixed(FrozenModel):
    """Tells the reference's log-probs."""

    def __init__(self) -> None:
        pass

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        raise AssertionError("nothing reads the log-probs of its tokens")

    def sums(self, batch: RemoteBatch, what: Score) -> npt.NDArray[np.float64]:
        return REFERENCE[batch.scalars["number"].astype(int)]


def run(*overrides: str, reasons: tuple[StopReason, ...] = ("stop",) * 6) -> tuple[Told, Prepared, StepOutcome]:
    own = ["algorithm=online_dpo", f"actor.kl_ctl={BETA}", "actor.ppo_n_minibatches=1", *overrides]
    recipe = load_recipe(QUICKSTART, own, TrainRecipe)
    actor = Told()
    models = Models(actor, frozen={"ref": Fixed()})
    update = policy_update(recipe, models, PhaseTimers(), find_shape("package:tiny-moe"))
    prompts = [Prompt(i, "?", (1,), "") for i in range(2)]
    samples = [
        Sample(prompts[i // 3], "", reasons[i], 4, N_TOKENS, (0, 0), {"r": reward}) for i, reward in enumerate(REWARDS)
    ]
    batch = RemoteBatch(np.full(6, N_TOKENS + 1), np.full(6, N_TOKENS), ())
    batch = batch.with_scalars(number=np.arange(6, dtype=np.float32))
    before = UpdateState(AlgorithmState.of(recipe.actor), {"actor": Skips()})
    prepared = update.prepare(1, samples, batch, (), before)
    return actor, prepared, update.run(prepared)


def trained(batch: RemoteBatch) -> dict[int, float]:
    """Return the advantage of each completion that is trained on, by its number."""
    pairs = zip(batch.scalars["number"].astype(int).tolist(), batch.scalars["advantages"].tolist(), strict=True)
    return {number: advantage for (number, advantage), n in zip(pairs, batch.trained_N, strict=True) if n}


def by_autograd(pairs: list[tuple[int, int]], logprobs_N: npt.NDArray[np.float64], loss: Any) -> dict[int, float]:
    """Return -N dL/ds of the completions of `pairs`, by their numbers."""
    scores_N = torch.from_numpy(logprobs_N.copy()).requires_grad_()
    margins = [(scores_N[c] - REFERENCE[c]) - (scores_N[r] - REFERENCE[r]) for c, r in pairs]
    torch.stack([loss(margin) for margin in margins]).mean().backward()
    return {i: -2 * len(pairs) * float(scores_N.grad[i]) for pair in pairs for i in pair}


def sigmoid_loss(margin: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(-BETA * margin))


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ((), sigmoid_loss),
        (("actor.advantage_kwargs.label_smoothing=0.1",), lambda m: 0.9 * sigmoid_loss(m) + 0.1 * sigmoid_loss(-m)),
        (("actor.advantage_kwargs.loss_type=hinge",), lambda m: torch.relu(1 - BETA * m)),
        (("actor.advantage_kwargs.loss_type=ipo",), lambda m: (m - 1 / (2 * BETA)) ** 2),
    ],
)
def test_each_update_weighs_the_best_and_the_worst_by_its_own_weights(options: tuple[str, ...], loss: Any) -> None:
    actor, prepared, _ = run("actor.ppo_epochs=2", *options)
    pairs = [(1, 0), (5, 4)]
    for number, batch in enumerate(actor.batches):
        logprobs_N = LOGPROBS - number * np.arange(6)
        assert trained(batch) == pytest.approx(by_autograd(pairs, logprobs_N, loss), rel=1e-5), number
        assert len(batch) == 4, "what is not trained on does not travel"
    margins = [(LOGPROBS[c] - REFERENCE[c]) - (LOGPROBS[r] - REFERENCE[r]) for c, r in pairs]
    assert prepared.metrics["pairs"] == 2
    assert prepared.metrics["pairs/margin"] == pytest.approx(BETA * sum(margins) / 2)
    assert prepared.metrics["pairs/loss"] == pytest.approx(sum(float(loss(torch.tensor(m))) for m in margins) / 2)


def test_the_policy_loss_with_these_advantages_has_the_gradient_of_dpo() -> None:
    actor, _, _ = run()
    (batch,), (loss,) = actor.batches, actor.losses
    order = batch.scalars["number"].astype(int)
    token_T = torch.from_numpy(np.repeat(LOGPROBS[order] / N_TOKENS, N_TOKENS)).requires_grad_()
    fields = {"advantages": torch.from_numpy(np.repeat(batch.scalars["advantages"], N_TOKENS))}
    ones_T = torch.ones_like(token_T)
    inputs = LossInputs({"logprobs": token_T, "entropy": ones_T}, ones_T, (N_TOKENS,) * 4, fields)
    total, _ = replace(loss)(inputs)
    (total / loss.normalizer(batch.totals())).backward()
    again_T = token_T.detach().clone().requires_grad_()
    ratio = again_T.view(4, N_TOKENS).sum(1) - torch.from_numpy(REFERENCE[order])
    at = {number: place for place, number in enumerate(order)}
    margins = torch.stack([ratio[at[1]] - ratio[at[0]], ratio[at[5]] - ratio[at[4]]])
    sigmoid_loss(margins).mean().backward()
    torch.testing.assert_close(token_T.grad, again_T.grad, rtol=1e-5, atol=1e-7)


def test_a_completion_that_is_not_trained_on_is_in_no_pair() -> None:
    reasons: tuple[StopReason, ...] = ("stop", "length", "stop", "length", "length", "stop")
    actor, prepared, _ = run("actor.mask_truncated=true", reasons=reasons)
    assert sorted(trained(actor.batches[0])) == [0, 2], "2 is the best of those that ended, and 5 is alone"
    assert prepared.metrics["pairs"] == 1


def test_a_step_without_a_pair_trains_on_nothing() -> None:
    actor, prepared, outcome = run("actor.mask_truncated=true", reasons=("length",) * 6)
    assert prepared.metrics["pairs"] == 0
    assert trained(actor.batches[0]) == {}
    assert outcome.problem is None


def test_rewards_that_differ_by_rounding_make_no_pair() -> None:
    assert best_and_worst([0.1 + 0.2, 0.3, 5.0, 5.0], [0, 0, 1, 1], [True] * 4) == []
    assert best_and_worst([2.0, math.pi, -1.0], [7, 7, 7], [True] * 3) == [(1, 2)]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.kl_ctl=0", "raise actor.kl_ctl"),
        ("actor.kl_in=loss", "takes the reference into its pairs"),
        ("actor.advantage=grpo", "is for completions that are compared as pairs"),
        ("actor.whiten_advantages=true", "changes its loss"),
        ("actor.kl_target=0.1", "needs a KL term"),
        ("gconfig.n_samples=1", "compares the completions of a group"),
    ],
)
def test_what_does_not_fit_is_refused(override: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        load_recipe(QUICKSTART, ["algorithm=online_dpo", override], TrainRecipe)


def test_smoothing_is_of_one_loss() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 is for loss_type=sigmoid"):
        run("actor.advantage_kwargs={label_smoothing: 0.1, loss_type: ipo}")
