"""The policy update of a recipe: the parts that its keys switch on, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING

import torch

from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.build import build_advantage, build_policy_loss
from fivefold.algorithms.gae import GAE
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.sample_weights import SampleWeights
from fivefold.algorithms.turn_gae import TurnGAE
from fivefold.config.methods import ADVANTAGES, LOSSES
from fivefold.config.roles import TEACHER
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.scores import Logprobs
from fivefold.families.shape import ModelShape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.types import TRUNCATED
from fivefold.update.critic import Critic
from fivefold.update.expert_examples import ExpertExamples, Imitated
from fivefold.update.loss_parts import AlignedRoutes, EntropyDecay, EntropyTarget
from fivefold.update.policy import AdvantagesOfSamples, CorrectedRollout, OldLogprobs, PolicyUpdate
from fivefold.update.reference import Reference
from fivefold.update.samples import Masked, MaskedGroups, NumberedSequences, WeightedSamples
from fivefold.update.step import Part
from fivefold.update.teacher import Teacher, told
from fivefold.update.token_advantages import ClippedAdvantages, PenaltyInReward, TokenBaselines, WhitenedAdvantages
from fivefold.update.turn_credit import TurnAdvantages, TurnRewards

if TYPE_CHECKING:
    from fivefold.update.teachers import Teachers


def policy_update(
    recipe: TrainRecipe,
    models: Models,
    timers: PhaseTimers,
    shape: ModelShape,
    experts: ExpertExamples | None = None,
    *,
    token_rewards: bool = False,
) -> PolicyUpdate:
    """Return the policy update of a recipe.

    Args:
        recipe: the recipe.
        models: the actor, and the models that the recipe has besides.
        timers: count the time of each phase.
        shape: the actor's model.
        experts: an expert's examples; None: there are none.
        token_rewards: whether rewards may be of single tokens.
    """
    loss = build_policy_loss(recipe.actor, recipe.gconfig)
    shaping = RewardShaping.of(recipe.actor, recipe.gconfig)
    advantage = build_advantage(recipe.actor, recipe.gconfig.n_samples)
    teaching = _teaching(recipe, models, timers, shape.vocab)
    parts = (
        *_marks(recipe, loss, shaping, experts, teaching),
        *_columns(recipe, models, loss, timers),
        *([] if teaching is None else [teaching]),
        *_advantages(recipe, models, advantage, shaping, timers, token_rewards=token_rewards),
        *([] if (limit := recipe.actor.advantage_clip) is None else [ClippedAdvantages(limit)]),
        *_loss_parts(recipe, loss, shape),
    )
    return PolicyUpdate(recipe.actor, models.actor, recipe.seed, shaping, advantage, loss, parts)


def _marks(
    recipe: TrainRecipe,
    loss: PolicyLoss,
    shaping: RewardShaping | None,
    experts: ExpertExamples | None,
    teaching: Teacher | Teachers | None,
) -> Iterator[Part]:
    """Yield what marks whole sequences, before anything is computed of their tokens."""
    actor = recipe.actor
    masked = {*(TRUNCATED if actor.mask_truncated else ()), *(recipe.environment.masked if recipe.environment else ())}
    if masked:
        yield Masked(masked)
    above, below = actor.group_mean_above, actor.group_mean_below
    if above is not None or below is not None:
        of_accuracy = actor.group_mean_of == "accuracy"
        yield MaskedGroups(-inf if above is None else above, inf if below is None else below, of_accuracy)
    if experts is not None or actor.positive_nll_coeff > 0:
        taught = recipe.expert_dataset is not None and recipe.expert_dataset.signal == "teacher"
        yield Imitated(experts, actor.positive_nll_coeff, teaching if taught else None)
    if (weights := SampleWeights.of(actor)) is not None:
        yield WeightedSamples(weights, shaping)
    if loss.before is not None:
        yield NumberedSequences(recipe.seed)


def _columns(recipe: TrainRecipe, models: Models, loss: PolicyLoss, timers: PhaseTimers) -> Iterator[Part]:
    """Yield what computes log-probs of tokens."""
    actor, temperature = recipe.actor, recipe.gconfig.temperature
    # A KL in the reward needs the log-probs of the policy that sampled, as the trainer computes them.
    needed = _penalizes(recipe) or actor.moves_from_old or loss.before is not None
    needed = needed and not loss.old_is_interpolated
    recomputes = needed if actor.recompute_logprob is None else actor.recompute_logprob
    records = actor.router_replay == "old_logprobs"
    if (recomputes or records) and not _has_token_baseline(recipe):  # which brings the old log-probs
        yield OldLogprobs(models.actor, timers, _old_scores(recipe, records=records))
    if (reference := models.frozen.get("ref")) is not None:
        yield Reference(reference, models.actor, temperature, timers, recipe.ref.refresh_steps, actor.kl_in != "pairs")


def _old_scores(recipe: TrainRecipe, *, records: bool) -> Logprobs:
    """Return what the pass before the updates computes of each token."""
    temperature, loss = recipe.gconfig.temperature, LOSSES.get(recipe.actor.loss)
    if loss is None or loss.chooses_by not in ("entropy", "expected_entropy"):
        return Logprobs(temperature, "old_logprobs", records_routes=records)
    from fivefold.engine.entropy_changes import EntropyChanges  # here, because most losses need none

    expected = loss.chooses_by == "expected_entropy"
    return EntropyChanges(temperature, records_routes=records, less_expected=expected)


def _teaching(recipe: TrainRecipe, models: Models, timers: PhaseTimers, vocab: int) -> Teacher | Teachers | None:
    """Return what asks the teachers; None: there are none."""
    if recipe.actor.distill.coeff == 0:
        return None
    what = told(recipe.actor.distill, vocab, recipe.gconfig.temperature)
    if not recipe.teachers:
        return Teacher(models.frozen[TEACHER], what, timers)
    from fivefold.update.teachers import Teachers  # here, because most runs have none

    named = {name: models.frozen[f"{TEACHER}-{name}"] for name in recipe.teachers}
    return Teachers(named, recipe.teachers, what, timers)


def _advantages(
    recipe: TrainRecipe,
    models: Models,
    advantage: Callable[[Scores], torch.Tensor],
    shaping: RewardShaping | None,
    timers: PhaseTimers,
    *,
    token_rewards: bool,
) -> Iterator[Part]:
    """Yield what gives each token its advantage."""
    actor = recipe.actor
    by_token = token_rewards and actor.credit == "episode" and takes_token_rewards(actor.advantage)
    estimator = actor.kl_estimator if _penalizes(recipe) else None
    if recipe.critic is not None:
        gae = GAE(actor.discount, actor.gae_lambda, recipe.critic.gae_lambda, actor.gae_length_alpha)
        if actor.credit == "turn":
            yield TurnRewards(shaping)
            gae = TurnGAE(actor.turn_discount, gae.lam, gae.returns_lam, gae.length_alpha)
        if by_token:
            from fivefold.update.token_rewards import RewardsOfTokens  # here, because most runs have none

            yield RewardsOfTokens(shaping)
        critic = models.further["critic"]
        yield Critic(critic, recipe.critic, gae, actor.whitens, estimator, recipe.seed, timers)
        return
    if _has_token_baseline(recipe):
        zero_tail = actor.advantage_kwargs.get("zero_tail", True)
        yield TokenBaselines(models.actor, recipe.gconfig.temperature, zero_tail, timers)
    elif actor.advantage == "dpo":
        from fivefold.update.pairs import Pairs

        options = {"loss_type": "sigmoid", "label_smoothing": 0.0, **actor.advantage_kwargs}
        yield Pairs(
            models.actor, models.frozen["ref"], **options, temperature=recipe.gconfig.temperature, timers=timers
        )
    elif actor.credit != "episode":
        state_weight = actor.state_weight if actor.credit == "state" else None
        yield TurnAdvantages(advantage, actor.compares_group, actor.turn_discount, state_weight, shaping)
    elif by_token:
        from fivefold.update.token_rewards import TokenReturns

        yield TokenReturns(shaping)
    else:
        yield AdvantagesOfSamples()
    if estimator is not None:
        yield PenaltyInReward(estimator)
    if actor.whitens:
        yield WhitenedAdvantages(models.actor, actor.whiten_by_source)


def takes_token_rewards(advantage: str) -> bool:
    """Return whether an advantage counts rewards of single tokens from each token on."""
    return advantage in ADVANTAGES and ADVANTAGES[advantage].by_token


def _loss_parts(recipe: TrainRecipe, loss: PolicyLoss, shape: ModelShape) -> Iterator[Part]:
    """Yield what changes the loss from step to step."""
    actor, age = recipe.actor, recipe.rollout.oldest
    is_auto = actor.rollout_correction.method == "auto"
    may_correct = (
        is_auto
        and not recipe.rollout.omits_logprobs
        and not recipe.gconfig.alterations
        and actor.recompute_logprob is not False
    )
    if is_auto or age > 0:
        yield CorrectedRollout(
            may_correct,
            age,
            from_start=age > 0 or recipe.rollout.quantization is not None,
            threshold=actor.rollout_correction.auto_threshold,
            tells=not loss.old_is_rollout,
        )
    if actor.entropy_decay_steps is not None:
        yield EntropyDecay(actor.entropy_coeff, actor.entropy_decay_steps, actor.entropy_target)
    elif actor.entropy_target is not None:
        yield EntropyTarget()
    if actor.router_replay != "none":
        yield AlignedRoutes(actor.router_replay_min_overlap, shape.route_bytes)


def _penalizes(recipe: TrainRecipe) -> bool:
    """Return whether a KL penalty is part of the reward."""
    return recipe.actor.kl_in == "reward" and recipe.actor.kl_ctl > 0


def _has_token_baseline(recipe: TrainRecipe) -> bool:
    return recipe.actor.advantage == "optimal_token_baseline"
