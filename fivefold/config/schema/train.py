"""The recipe of `fivefold train`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fivefold.config.algorithms import AlgorithmName
from fivefold.config.methods import ADVANTAGES
from fivefold.config.schema.data import DatasetConfig, ExpertDatasetConfig, RowsConfig
from fivefold.config.schema.fields import Sequences
from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.schema.roles import ActorConfig, CriticConfig, DistillConfig, ReferenceConfig, TeacherConfig
from fivefold.config.schema.rollout import GenerationConfig, RolloutConfig
from fivefold.config.schema.run import PeriodicConfig, RunConfig


class EvaluatorConfig(PeriodicConfig):
    """When and how the held-out prompts are evaluated. They are also evaluated before the first step."""

    n_samples: Sequences = 1
    """Completions of each held-out prompt; the accuracy is the mean over all of them."""
    greedy: bool = True
    """Always take the most likely token."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling with `greedy: false`."""

    @model_validator(mode="after")
    def _check_samples(self) -> EvaluatorConfig:
        if self.greedy and self.temperature != 1.0:
            raise ValueError(
                f"evaluator.temperature={self.temperature} has no effect with greedy=true: set greedy=false, or drop it"
            )
        if self.greedy and self.n_samples > 1:
            raise ValueError(
                f"evaluator.n_samples={self.n_samples} with greedy=true samples the same completion again and again: "
                "set n_samples=1 or greedy=false"
            )
        return self


class TrainRecipe(RunConfig):
    """A recipe of `fivefold train`: reinforcement learning."""

    algorithm: AlgorithmName = "grpo"
    """Published algorithm: it sets the keys of `actor` that its paper sets, unless the recipe writes them
    (docs/algorithms.md)."""
    allocation_mode: str | None = None
    """Older form of the backends of rollout, actor and reference in one string: `transformers:d1+megatron:d2`."""
    actor: ActorConfig
    ref: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    gconfig: GenerationConfig = GenerationConfig()
    train_dataset: DatasetConfig
    valid_dataset: RowsConfig | None = None
    """Held-out prompts, all of which are evaluated each time; null: there is no evaluation."""
    expert_dataset: ExpertDatasetConfig | None = None
    """Responses of an expert to learn beside the rewards; null: there are none."""
    reward: RewardConfig = RewardConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()

    @property
    def loss_reads_rollout_logprobs(self) -> bool:
        """Whether the loss reads the rollout's log-prob of every token from the first step on."""
        actor = self.actor
        is_asynchronous = self.rollout.max_head_offpolicyness > 0
        return is_asynchronous or actor.recompute_logprob is False or actor.rollout_correction.is_fixed

    @model_validator(mode="after")
    def _check_group(self) -> TrainRecipe:
        norm, advantage = self.actor.reward_norm, self.actor.advantage
        if self.gconfig.n_samples > 1:
            return self
        if advantage == "grpo" and "group" in (norm.mean_level, norm.std_level):
            raise ValueError(
                "gconfig.n_samples is 1, but actor.reward_norm compares the completions of a group, which leaves no "
                "signal: raise gconfig.n_samples, or set actor.reward_norm.mean_level and std_level to batch or none"
            )
        if advantage in ADVANTAGES and ADVANTAGES[advantage].compares:
            raise ValueError(
                f"gconfig.n_samples is 1, but actor.advantage={advantage} compares the completions of a group, which "
                "leaves no signal: raise gconfig.n_samples, or choose another advantage such as reinforce_pp"
            )
        if self.actor.dynamic_sampling:
            raise ValueError(
                "gconfig.n_samples is 1, but actor.dynamic_sampling looks for groups with different rewards: raise "
                "gconfig.n_samples, or set actor.dynamic_sampling to false"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluator(self) -> TrainRecipe:
        if self.valid_dataset is None and self.evaluator != EvaluatorConfig():
            raise ValueError(
                "the evaluator section has no effect without held-out prompts: set valid_dataset.path, or drop it"
            )
        best = self.recover.keep_best
        if self.valid_dataset is None and best is not None and best.startswith("eval/"):
            raise ValueError(
                f"recover.keep_best={best} is measured on held-out prompts: set valid_dataset.path, or name a metric "
                "of the training steps, such as reward/mean"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> TrainRecipe:
        if self.actor.kl_ctl == 0 and self.ref != ReferenceConfig():
            raise ValueError(
                "actor.kl_ctl is 0, so no reference model is loaded and the ref section has no effect: "
                "raise actor.kl_ctl, or drop ref"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> TrainRecipe:
        coeff = self.actor.distill.coeff
        if coeff > 0 and self.teacher is None:
            raise ValueError(f"actor.distill.coeff={coeff} needs a teacher: name its model, teacher.path")
        if coeff == 0 and self.teacher is not None:
            raise ValueError(
                "actor.distill.coeff is 0, so the teacher section has no effect: set algorithm=distill, or raise "
                "actor.distill.coeff, or drop teacher"
            )
        if coeff == 0 and self.actor.distill != DistillConfig():
            raise ValueError(
                "actor.distill.coeff is 0, so the other keys of actor.distill have no effect: raise it and name "
                "teacher.path, or drop them"
            )
        if self.actor.advantage == "none" and coeff == 0 and self.actor.kl_ctl == 0:
            raise ValueError(
                "actor.advantage=none trains on no reward, and there is no teacher to learn from: set "
                "actor.distill.coeff and teacher.path, or choose another advantage"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> TrainRecipe:
        is_gae, critic = self.actor.advantage == "gae", self.critic
        if is_gae and critic is None:
            raise ValueError(
                "actor.advantage=gae needs a critic: name its model, for example critic.path=${actor.path}, or choose "
                "an advantage without one, such as grpo"
            )
        if critic is None:
            return self
        if not is_gae:
            raise ValueError(
                f"the critic section has no effect with actor.advantage={self.actor.advantage}: set algorithm=ppo or "
                "actor.advantage=gae, or drop critic"
            )
        if self.train_dataset.batch_size % critic.ppo_n_minibatches:
            raise ValueError(
                f"train_dataset.batch_size={self.train_dataset.batch_size} must be a multiple of "
                f"critic.ppo_n_minibatches={critic.ppo_n_minibatches}, so that groups stay whole"
            )
        if critic.device_mapping is not None and not critic.colocate:
            raise ValueError(
                "critic.colocate=false and critic.device_mapping both say which devices the critic has: keep one"
            )
        return self

    @model_validator(mode="after")
    def _check_expert(self) -> TrainRecipe:
        expert, updates = self.expert_dataset, self.actor.ppo_n_minibatches
        if expert is not None and expert.batch_size % updates:
            raise ValueError(
                f"expert_dataset.batch_size={expert.batch_size} must be a multiple of actor.ppo_n_minibatches="
                f"{updates}, so that each update has as many examples"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> TrainRecipe:
        if self.gconfig.greedy:
            raise ValueError(
                "gconfig.greedy=true gives the same completion every time, from which nothing is learnt: set it to "
                "false (evaluator.greedy is for the held-out prompts)"
            )
        if self.actor.recompute_logprob is False and self.rollout.omits_logprobs:
            raise ValueError(
                "actor.recompute_logprob=false takes the old log-probs of every token from the rollout, but "
                f"rollout.logprob_share={self.rollout.logprob_share} asks for those of a part: set "
                "actor.recompute_logprob=true, or drop rollout.logprob_share"
            )
        if self.actor.recompute_logprob is False and self.gconfig.truncates_distribution:
            raise ValueError(
                "actor.recompute_logprob=false takes the old log-probs from the rollout, but with top_p, top_k or "
                "min_new_tokens those belong to a truncated distribution: set it to true, or drop those keys"
            )
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> TrainRecipe:
        correction = self.actor.rollout_correction
        if not correction.is_fixed:
            return self
        key = f"actor.rollout_correction.method={correction.method}"
        if self.actor.recompute_logprob is False:
            if correction.weight is not None and self.actor.loss != "reinforce":
                raise ValueError(
                    f"{key} weights losses by p / q, but with actor.recompute_logprob=false the ratio p / p_old of "
                    f"actor.loss={self.actor.loss} is p / q too: set that to null, actor.loss to reinforce, or drop "
                    "the weight"
                )
            if correction.mask == "second_moment":
                raise ValueError(
                    f"{key} compares the rollout's log-probs with the trainer's old ones before an update, but with "
                    "actor.recompute_logprob=false they are the same: set that to null, or the method to none"
                )
        if self.rollout.omits_logprobs:
            raise ValueError(
                f"{key} needs the rollout's log-probs of every token, but rollout.logprob_share="
                f"{self.rollout.logprob_share} asks for those of a part: drop it, or set the method to none"
            )
        if self.gconfig.truncates_distribution:
            raise ValueError(
                f"{key} compares the rollout's log-probs with the trainer's, but with top_p, top_k or min_new_tokens "
                "those belong to a truncated distribution: drop these keys, or set the method to none"
            )
        return self

    @model_validator(mode="after")
    def _check_interpolation(self) -> TrainRecipe:
        actor = self.actor
        if actor.prox_logp_method == "recompute":
            return self
        key = "actor.prox_logp_method=loglinear"
        if self.rollout.max_head_offpolicyness == 0:
            raise ValueError(
                f"{key} interpolates by the age of samples, of which those of rollout.max_head_offpolicyness=0 have "
                "none: set actor.recompute_logprob=false for the rollout's log-probs, or drop the key"
            )
        if actor.recompute_logprob is not None:
            raise ValueError(f"{key} says where old log-probs come from: drop actor.recompute_logprob")
        if actor.kl_in == "reward" and actor.kl_ctl > 0:
            raise ValueError(f"actor.kl_in=reward needs old log-probs before the update, which {key} does not give")
        if actor.rollout_correction.mask == "second_moment":
            raise ValueError(
                f"actor.rollout_correction.mask=second_moment needs old log-probs before the update, which {key} does "
                "not give"
            )
        if self.rollout.omits_logprobs or self.gconfig.truncates_distribution:
            raise ValueError(
                f"{key} needs the rollout's log-probs of all tokens under the whole distribution: drop "
                "rollout.logprob_share, top_p, top_k and min_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> TrainRecipe:
        rollout, actor = self.rollout, self.actor
        key = f"rollout.max_head_offpolicyness={rollout.max_head_offpolicyness}"
        if rollout.max_head_offpolicyness == 0:
            for name in ("max_concurrent_rollouts", "recompute_kv_cache", "new_tokens_per_chunk"):
                if getattr(rollout, name) is not None:
                    raise ValueError(f"rollout.{name} has no effect with {key}: raise that, or drop rollout.{name}")
            return self
        if actor.dynamic_sampling or actor.advantage == "remax":
            what = "actor.dynamic_sampling" if actor.dynamic_sampling else "actor.advantage=remax"
            raise ValueError(
                f"{what} samples further completions with the weights of the step itself, but with {key} those of the "
                "next steps are sampled ahead: set one of them to its default"
            )
        corrects = actor.rollout_correction.method == "auto" and actor.recompute_logprob is not False
        part = "rollout.logprob_share" if rollout.omits_logprobs else "top_p, top_k or min_new_tokens"
        if corrects and (rollout.omits_logprobs or self.gconfig.truncates_distribution):
            raise ValueError(
                f"{key} corrects losses for the age of the samples, which needs the log-probs of all tokens under the "
                f"whole distribution, and {part} leaves them unknown: drop it, or set "
                "actor.rollout_correction.method to none"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> TrainRecipe:
        actor, most = self.actor, self.gconfig.max_new_tokens
        if actor.overlong_tokens is not None and actor.overlong_tokens > most:
            raise ValueError(
                f"actor.overlong_tokens={actor.overlong_tokens} is above gconfig.max_new_tokens={most}: lower the first"
            )
        if actor.kl_target is not None and actor.kl_ctl == 0:
            raise ValueError(
                f"actor.kl_target={actor.kl_target} adapts actor.kl_ctl, which is 0 and stays 0: give actor.kl_ctl a "
                "first value, or drop actor.kl_target"
            )
        return self

    @model_validator(mode="after")
    def _check_terms(self) -> TrainRecipe:
        actor = self.actor
        in_loss = actor.kl_in == "loss" and actor.kl_ctl > 0
        if in_loss and actor.kl_estimator == "k1" and not actor.kl_unbiased:
            raise ValueError(
                "actor.kl_estimator=k1 has no expected gradient as a loss: use k2 or k3, actor.kl_unbiased=true, or "
                "actor.kl_in=reward"
            )
        if actor.kl_unbiased and not in_loss:
            raise ValueError(
                f"actor.kl_unbiased has no effect with actor.kl_ctl={actor.kl_ctl} and actor.kl_in={actor.kl_in}: "
                "raise the first and set the second to loss, or drop it"
            )
        moves = actor.has_several_updates or actor.recompute_logprob is False or actor.prox_logp_method == "loglinear"
        if actor.opsm_delta is not None and not moves:
            raise ValueError(
                f"actor.opsm_delta={actor.opsm_delta} has no effect with one update a step, before which the policy is "
                "the old one: raise actor.ppo_n_minibatches, or set actor.recompute_logprob=false"
            )
        return self

    @model_validator(mode="after")
    def _check_updates(self) -> TrainRecipe:
        if self.train_dataset.batch_size % self.actor.ppo_n_minibatches:
            raise ValueError(
                f"train_dataset.batch_size={self.train_dataset.batch_size} must be a multiple of "
                f"actor.ppo_n_minibatches={self.actor.ppo_n_minibatches}, so that groups stay whole"
            )
        return self
