"""The training half of a step: from rewarded samples to new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.advantages.compute import Outcomes, compute_advantages
from fivefold.algorithms.batch_steps import InTurn
from fivefold.algorithms.build import build_advantage, build_policy_loss
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.gae import Moments, Whitening
from fivefold.algorithms.imitation import Imitation
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.algorithms.losses.covariance import NUMBER, sequence_numbers
from fivefold.algorithms.metrics import effective_share
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.sample_weights import SAMPLE_WEIGHT, SampleWeights
from fivefold.algorithms.state import AlgorithmState
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.energies import Energies
from fivefold.engine.heads import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.teacher import Teacher
from fivefold.roles.trainer_worker import BatchChange
from fivefold.types import Columns, Prompt, Sample
from fivefold.update.baselines import with_token_advantages
from fivefold.update.critic import CriticUpdate
from fivefold.update.expert_examples import RIGHT, ExpertExamples, with_imitation
from fivefold.update.updates import SkipGuard, make_updates


class PolicyUpdate:
    """Computes advantages and old log-probs, and makes the optimizer steps of one training step."""

    def __init__(
        self,
        recipe: TrainRecipe,
        actor: Actor,
        reference: FrozenModel | None,
        timers: PhaseTimers,
        critic: CriticUpdate | None = None,
        teacher: Teacher | None = None,
        experts: ExpertExamples | None = None,
    ) -> None:
        self._config = config = recipe.actor
        self._seed = recipe.seed
        self._actor = actor
        self._reference = reference
        self._critic = critic
        self._teacher = teacher
        self.experts = experts
        """The expert's examples; None: there are none."""
        self._timers = timers
        self._temperature = recipe.gconfig.temperature
        self._refresh_steps = recipe.ref.refresh_steps
        self._base_loss = build_policy_loss(config, recipe.gconfig)
        self._shaping = RewardShaping.of(config, recipe.gconfig)
        self._sample_weights = SampleWeights.of(config)
        self._advantage = build_advantage(config, recipe.gconfig.n_samples)
        self._has_token_baseline = config.advantage == "optimal_token_baseline"
        self._whitens = config.whitens
        self._penalized = config.kl_in == "reward" and config.kl_ctl > 0
        self._change: BatchChange | None = None
        self._may_correct = (
            config.rollout_correction.method == "auto"
            and not recipe.rollout.omits_logprobs
            and not recipe.gconfig.truncates_distribution
            and config.recompute_logprob is not False
        )
        # Weights that sampled some steps ago differ from the trained ones for certain.
        self._max_age = recipe.rollout.max_head_offpolicyness
        self._always_corrects = self._max_age > 0
        self.state = AlgorithmState.of(config)
        self.guard = SkipGuard()
        self.given: Sequence[Columns] = ()
        """Responses of the expert that each pass of the last step trained on besides its samples."""
        self.news: str | None = None
        """What the user should know of the last step; None: nothing."""
        # A KL in the reward needs the log-probs of the policy that sampled, as the trainer computes them.
        needed = self._penalized or config.has_several_updates or self._base_loss.before is not None
        needed = needed and not self._base_loss.old_is_interpolated
        recomputes = needed if config.recompute_logprob is None else config.recompute_logprob
        # A baseline of tokens comes with the old log-probs.
        self._recomputes = recomputes and not self._has_token_baseline

    def prepare(
        self, samples: Sequence[Sample], batch: RemoteBatch, greedy: Sequence[Sample] = ()
    ) -> tuple[RemoteBatch, dict[str, float]]:
        """Return `batch`, the samples' sequences, with advantages and log-probs; and metrics of rewards, advantages.

        Args:
            samples: the step's samples, with rewards.
            batch: their sequences.
            greedy: the greedy sample of each prompt, if the advantage compares with it.
        """
        advantages = compute_advantages(
            _outcomes(samples), self._shaping, self._advantage, _outcomes(greedy) if greedy else None
        )
        batch, weighted = self._weighted(self._marked(batch, samples), samples)
        if self._critic is not None:
            batch = self._critic.values(batch)
        batch = self._with_logprobs(batch)
        kl = KLInReward(self.state.kl_ctl, self._config.kl_estimator) if self._penalized else None
        values_N, metrics = advantages.advantages_N.numpy(), advantages.metrics | weighted
        if self._critic is not None:
            batch, whitening, own = self._critic.advantages(batch.with_scalars(rewards=values_N), kl)
            self._change = None if whitening is None else whitening.applied
            return batch, metrics | own
        if self._has_token_baseline:
            batch, moments = self._with_token_advantages(batch, values_N, samples)
            metrics |= {"advantage/mean": moments.mean, "advantage/std": moments.std}
        else:
            batch = batch.with_scalars(advantages=values_N)
        self._change = self._change_of(batch, kl)
        return batch, metrics

    def _marked(self, batch: RemoteBatch, samples: Sequence[Sample]) -> RemoteBatch:
        """Return `batch` with what its loss must know of whole sequences."""
        if self._config.mask_truncated:
            batch = batch.untrained([i for i, sample in enumerate(samples) if sample.finish_reason == "length"])
        if self._config.positive_nll_coeff > 0:
            is_right = [sample.is_right for sample in samples]
            batch = batch.with_scalars(**{RIGHT: np.array(is_right, dtype=np.float32)})
        return batch

    def _weighted(self, batch: RemoteBatch, samples: Sequence[Sample]) -> tuple[RemoteBatch, dict[str, float]]:
        """Return `batch` with the samples' weights in the loss, and a metric, if the recipe weighs them."""
        if self._sample_weights is None:
            return batch, {}
        lengths_N = torch.tensor([sample.n_sampled for sample in samples])
        rewards_N = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        if self._shaping is not None:
            rewards_N = self._shaping(rewards_N, lengths_N)
        weights_N = self._sample_weights(rewards_N, [sample.prompt for sample in samples], lengths_N)
        weighted = batch.with_scalars(**{SAMPLE_WEIGHT: weights_N.float().numpy()})
        return weighted, {"sample_weights/ess": effective_share(float(weights_N.mean()), float((weights_N**2).mean()))}

    def _with_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """Return `batch` with the log-probs of old policy, reference and teacher, as far as they are needed."""
        if self._recomputes:
            with self._timers.phase("old log-probs"):
                batch = batch.with_pieces(self._actor.score(batch, Logprobs(self._temperature, "old_logprobs")))
        if self._reference is not None:
            with self._timers.phase("reference"):
                batch = batch.with_pieces(self._reference.score(batch, Logprobs(self._temperature, "ref_logprobs")))
        if self._teacher is not None:
            with self._timers.phase("teacher"):
                batch = batch.with_pieces(self._teacher.score(batch, self._temperature))
        return batch

    def _with_token_advantages(
        self, batch: RemoteBatch, rewards_N: npt.NDArray[np.float32], samples: Sequence[Sample]
    ) -> tuple[RemoteBatch, Moments]:
        """Return `batch` with advantages of each token and with the old log-probs that come with them."""
        with self._timers.phase("old log-probs"):
            energies = self._actor.score(batch, Energies(self._temperature))
        with self._timers.phase("advantages"):
            groups = [sample.prompt.index for sample in samples]
            zero_tail = self._config.advantage_kwargs.get("zero_tail", True)
            return with_token_advantages(batch.with_pieces(energies), energies, rewards_N, groups, zero_tail=zero_tail)

    def _change_of(self, batch: RemoteBatch, kl: KLInReward | None) -> BatchChange | None:
        """Return what happens to the advantages of tokens before they are trained on."""
        changes: list[BatchChange] = [] if kl is None else [kl.subtracted]
        if self._whitens:
            moments = self._actor.advantage_moments(batch, InTurn(tuple(changes)))
            changes.append(Whitening(moments.mean, moments.std).applied)
        return InTurn(tuple(changes)) if changes else None

    def _told(self, mismatch: float) -> str:
        """Return what the user is told of a mismatch that asks for a correction."""
        threshold = self._config.rollout_correction.auto_threshold
        found = f"rollout and trainer disagree by {mismatch:.2g} nats a token, more than {threshold:g}"
        if self._may_correct:
            return f"{found}: from the next step on, losses are weighted (TIS, docs/algorithms.md)"
        return f"{found}; to correct it, the log-probs of all tokens are needed: drop rollout.logprob_share"

    @property
    def corrects(self) -> bool:
        """Whether the next update's loss is corrected because rollout and trainer disagree."""
        return (self.state.corrects_rollout or self._always_corrects) and self._may_correct

    @property
    def loss(self) -> PolicyLoss:
        """The loss of the next update, with what the algorithm's state says."""
        loss = self._base_loss
        if loss.kl_coeff:
            loss = replace(loss, kl_coeff=self.state.kl_ctl)
        if self._config.entropy_target is not None:
            loss = replace(loss, entropy_coeff=self.state.entropy_bonus)
        if self.corrects:
            loss = replace(loss, correction=RolloutCorrection.automatic())
        if self.experts is not None:
            return replace(loss, imitation=self.experts.imitation)
        return replace(loss, imitation=Imitation()) if self._config.positive_nll_coeff > 0 else loss

    def _with_imitation(self, batch: RemoteBatch, loss: PolicyLoss) -> RemoteBatch:
        """Return a mini-batch with the expert's examples and the weights of given responses, if they are trained on."""
        if loss.imitation is None:
            return batch
        expert = None if self.experts is None else self.experts.next()
        return with_imitation(batch, loss.normalizer(batch.totals()), expert, self._config.positive_nll_coeff)

    @property
    def problem(self) -> str | None:
        """Why the run is to end, as the updates have shown; None: it goes on."""
        critic = None if self._critic is None else self._critic.guard.problem
        return critic or self.guard.problem

    def run(self, batch: RemoteBatch, groups: Sequence[int], step: int) -> dict[str, float]:
        """Make the updates of all epochs and mini-batches of a step. Returns the averages of their metrics.

        Args:
            batch: the batch that `prepare` returned.
            groups: the group of each of its sequences.
            step: the training step, from which the random split into mini-batches is seeded.
        """
        metrics: dict[str, float] = {}
        self.given = ()
        if self._critic is not None:
            metrics = self._critic.run(batch, groups, step)
            if self._critic.is_warming_up(step) or self.problem is not None:
                return metrics
        if self.experts is not None:
            self.experts.draw(step)
            self.given = self.experts.parts
        loss, change = self.loss, self._change
        if self._always_corrects:
            loss = replace(loss, version=step - 1, max_age=self._max_age)
        if loss.before is not None:
            batch = batch.with_scalars(**{NUMBER: sequence_numbers(f"{self._seed}-{step}", len(batch))})
        averages = make_updates(
            self._config,
            groups,
            lambda epoch: f"{self._seed}-{step}-{epoch}",
            lambda indices: self._actor.update(self._with_imitation(batch.select(indices), loss), loss, change),
            self.guard,
            step,
        )
        if self.problem is not None:
            return metrics | averages
        if self._config.kl_ctl > 0:
            averages["kl_ctl"] = self.state.kl_ctl
        if self._config.entropy_target is not None:
            averages["entropy_coeff"] = self.state.entropy_bonus
        if self.experts is not None:
            averages["imitation_weight"] = self.experts.weight
        corrected = self.state.corrects_rollout or self._always_corrects
        self.state = self.state.after(self._config, averages, len(batch))
        if self._reference is not None and self._refresh_steps is not None and step % self._refresh_steps == 0:
            with self._timers.phase("reference"):
                self._reference.follow(self._actor)
        self.news = None
        if self.state.corrects_rollout and not corrected and not loss.old_is_rollout:
            self.news = self._told(averages["rollout_mismatch_kl"])
        return metrics | averages


def _outcomes(samples: Sequence[Sample]) -> Outcomes:
    weights = samples[0].weights
    return Outcomes(
        [sample.reward for sample in samples],
        [sample.prompt.index for sample in samples],
        [sample.n_sampled for sample in samples],
        [sample.rewards for sample in samples] if weights else (),
        weights,
    )


def check_prompts(recipe: TrainRecipe, prompts: Sequence[Prompt]) -> None:
    """Check the data of a recipe's loss.

    Raises:
        ValueError: a prompt lacks what its samples are weighted by.
    """
    if (weights := SampleWeights.of(recipe.actor)) is not None:
        weights.difficulties(prompts)
