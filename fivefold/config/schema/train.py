"""The recipe of `fivefold train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.algorithms import AlgorithmName
from fivefold.config.schema.data import DatasetConfig, ExpertDatasetConfig, PromptRowsConfig, RowsConfig
from fivefold.config.schema.distillation import (
    NamedTeacherConfig,
    TeacherConfig,
    taught_example_problems,
    teacher_problems,
)
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.fields import NAME, ROLE_NAME, Fraction, NonNegative, Positive, PositiveFloat, Sequences
from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.schema.roles import ActorConfig, CriticConfig, ReferenceConfig
from fivefold.config.schema.rollout import GenerationConfig, RolloutConfig
from fivefold.config.schema.rules import above_0, equals, reads_if, rule
from fivefold.config.schema.run import EvaluationsConfig, RunConfig

_SAMPLES = reads_if(equals("greedy", False))


class EvaluatorConfig(EvaluationsConfig):
    """When and how the held-out prompts are evaluated. Sampling keys that are not here have the values of `gconfig`."""

    max_new_tokens: Positive | None = None
    """Most tokens of a completion; null: `gconfig.max_new_tokens`."""
    n_samples: Annotated[Sequences, _SAMPLES] = 1
    """Completions of each held-out prompt; the accuracy is the mean over all of them."""
    greedy: bool = True
    """Always take the most likely token."""
    temperature: Annotated[PositiveFloat, _SAMPLES] = 1.0
    """Temperature of sampling with `greedy: false`."""
    top_p: Annotated[Annotated[float, Field(gt=0, le=1)] | None, _SAMPLES] = None
    """As `gconfig.top_p`; null: its value."""
    top_k: Annotated[NonNegative | None, _SAMPLES] = None
    """As `gconfig.top_k`; null: its value."""
    min_p: Annotated[Fraction | None, _SAMPLES] = None
    """As `gconfig.min_p`; null: its value."""
    n_logged_samples: NonNegative | Literal["all"] = 0
    """Completions of each evaluation that are written to `held_out_samples.jsonl`, the first ones; `all`: every one."""

    def sampling(self, config: GenerationConfig) -> GenerationConfig:
        """Return how held-out prompts are sampled, where `config` is how the others are."""
        own = ("greedy", "temperature", "max_new_tokens", "top_p", "top_k", "min_p")
        given = {name: getattr(self, name) for name in own if getattr(self, name) is not None}
        return config.model_copy(update=given)


class TrainRecipe(RunConfig):
    """A recipe of `fivefold train`: reinforcement learning."""

    algorithm: AlgorithmName = "grpo"
    """Published algorithm: it sets the keys of `actor` that its paper sets, unless the recipe writes them
    (docs/algorithms.md)."""
    allocation_mode: str | None = None
    """Older form of the backends of rollout, actor and reference in one string: `transformers:d1+megatron:d2`."""
    actor: ActorConfig
    ref: Annotated[ReferenceConfig, reads_if(above_0("actor.kl_ctl"))] = ReferenceConfig()
    critic: Annotated[
        CriticConfig | None, reads_if(equals("actor.advantage", "gae", fix="set algorithm=ppo or actor.advantage=gae"))
    ] = None
    teacher: Annotated[
        TeacherConfig | None,
        reads_if(above_0("actor.distill.coeff", fix="set algorithm=distill, or raise actor.distill.coeff")),
    ] = None
    teachers: dict[Annotated[str, Field(pattern=ROLE_NAME)], NamedTeacherConfig] = {}
    """Several teachers in place of `teacher`: each name has a mapping with the same keys, and which prompts it
    teaches."""
    rollout: RolloutConfig = RolloutConfig()
    gconfig: GenerationConfig = GenerationConfig()
    train_dataset: DatasetConfig
    valid_dataset: PromptRowsConfig | None = None
    """Held-out prompts, all evaluated each time; null: there is no evaluation."""
    valid_datasets: dict[Annotated[str, Field(pattern=NAME)], PromptRowsConfig] = {}
    """Several held-out sets in place of `valid_dataset`: each name has a mapping with the same keys. Accuracy and
    reward are reported for each set, and over the prompts of all."""
    expert_dataset: ExpertDatasetConfig | None = None
    """Responses of an expert to learn in addition to the rewards; null: there are none."""
    environment: EnvironmentConfig | None = None
    """What plays episodes of several turns; null: each prompt gets one completion."""
    reward: RewardConfig = RewardConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()

    @property
    def held_out(self) -> dict[str, PromptRowsConfig]:
        """The files of held-out prompts, by the dotted keys of their sections; there may be none."""
        if self.valid_dataset is not None:
            return {"valid_dataset": self.valid_dataset}
        return {f"valid_datasets.{name}": rows for name, rows in self.valid_datasets.items()}

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out prompts."""
        return bool(self.held_out) or self.train_dataset.hold_out > 0

    def most_tokens(self, rows: RowsConfig) -> int:
        """Return the most tokens of an episode of a prompt in `rows`."""
        if self.environment is not None:
            return self.environment.max_length
        sampling = self.gconfig if rows is self.train_dataset else self.evaluator.sampling(self.gconfig)
        longest = rows.max_length + sampling.max_new_tokens
        return longest if sampling.max_tokens is None else min(longest, sampling.max_tokens)

    @property
    def loss_reads_rollout_logprobs(self) -> bool:
        """Whether the loss reads the rollout's log-prob of every token from the first step on."""
        actor = self.actor
        is_asynchronous = self.rollout.max_head_offpolicyness > 0
        return is_asynchronous or actor.recompute_logprob is False or actor.rollout_correction.is_fixed

    @rule
    def _group(self) -> Iterator[str]:
        advantage, compares = self.actor.advantage, self.actor.compares_group
        if self.gconfig.n_samples > 1:
            return
        if advantage == "grpo" and compares:
            yield (
                "gconfig.n_samples is 1, but actor.reward_norm compares the completions of a group, which leaves no "
                "signal: raise gconfig.n_samples, or set actor.reward_norm.mean_level and std_level to batch or none"
            )
        elif compares:
            yield (
                f"gconfig.n_samples is 1, but actor.advantage={advantage} compares the completions of a group, which "
                "leaves no signal: raise gconfig.n_samples, or choose another advantage such as reinforce_pp"
            )
        elif self.actor.dynamic_sampling:
            yield (
                "gconfig.n_samples is 1, but actor.dynamic_sampling looks for groups with different rewards: raise "
                "gconfig.n_samples, or set actor.dynamic_sampling to false"
            )

    @rule
    def _signal(self) -> Iterator[str]:
        if self.gconfig.greedy:
            yield (
                "gconfig.greedy=true gives the same completion every time, which teaches nothing: set it to false "
                "(evaluator.greedy is for the held-out prompts)"
            )
        if self.actor.advantage == "none" and self.actor.distill.coeff == 0 and self.actor.kl_ctl == 0:
            yield (
                "actor.advantage=none trains on no reward, and there is no teacher to learn from: set "
                "actor.distill.coeff and teacher.path, or choose another advantage"
            )

    @rule
    def _teachers(self) -> Iterator[str]:
        yield from teacher_problems(self.actor.distill.coeff, self.teacher, self.teachers)
        if self.expert_dataset is not None and self.expert_dataset.signal == "teacher":
            yield from taught_example_problems(self.actor.distill, self.teachers)

    @rule
    def _environment(self) -> Iterator[str]:
        if self.environment is None:
            if self.reward.is_of_environment:
                yield (
                    "reward.fn=environment is what an environment gives, and there is none: set environment.game or "
                    "environment.agent"
                )
            return
        if not self.environment.gives_rewards and self.reward.is_of_environment:
            yield (
                f"{self.environment.name} are functions, which give no rewards: name a function in reward.fn, or "
                "a class with the method reward in environment.tools"
            )
        if self.environment.gives_rewards and not self.reward.is_of_environment:
            yield (
                f"{self.environment.name} gives rewards, and none of the recipe's is it: set "
                "reward.fn=environment, or give one of reward.rewards fn: environment"
            )
        single = {"actor.advantage=remax": self.actor.advantage == "remax"}
        single["actor.overlong_reward_penalty=true"] = self.actor.overlong_reward_penalty
        for key in (key for key, is_set in single.items() if is_set):
            yield f"{key} is for single completions, and {self.environment.name} plays several turns: drop it"

    @rule
    def _held_out(self) -> Iterator[str]:
        best = self.recover.keep_best
        if self.valid_dataset is not None and self.valid_datasets:
            yield (
                f"valid_dataset and valid_datasets={sorted(self.valid_datasets)} exclude each other: make the first "
                "one of the others"
            )
        if self.held_out and self.train_dataset.hold_out > 0:
            yield (
                f"train_dataset.hold_out={self.train_dataset.hold_out:g} and {', '.join(self.held_out)} exclude each "
                "other: drop one of them"
            )
        if not self.has_held_out and self.evaluator != EvaluatorConfig():
            yield (
                "the section evaluator has no effect without valid_dataset: set valid_dataset.path, or drop evaluator"
            )
        if (most := self.evaluator.max_new_tokens) is not None and most < self.gconfig.min_new_tokens:
            yield (
                f"evaluator.max_new_tokens={most} is below gconfig.min_new_tokens={self.gconfig.min_new_tokens}: "
                "raise the first or lower the second"
            )
        if not self.has_held_out and best is not None and best.startswith("eval/"):
            yield (
                f"recover.keep_best={best} is measured on held-out prompts: set valid_dataset.path, or name a metric "
                "of the training steps, such as reward/mean"
            )

    @rule
    def _room(self) -> Iterator[str]:
        if (most := self.gconfig.max_tokens) is None:
            return
        if self.environment is not None:
            yield f"gconfig.max_tokens={most} is for single completions: environment.max_length bounds episodes"
        sets = {"train_dataset": self.train_dataset, **self.held_out}
        for name, rows in sets.items():
            if rows.max_length >= most:
                yield (
                    f"{name}.max_length={rows.max_length} leaves no room for a completion in "
                    f"gconfig.max_tokens={most}: lower it"
                )

    @rule
    def _whole_groups(self) -> Iterator[str]:
        batches = {"train_dataset": self.train_dataset.batch_size}
        divided = [("train_dataset", "actor", "so that groups stay whole")]
        if self.critic is not None:
            divided.append(("train_dataset", "critic", "so that groups stay whole"))
        if self.expert_dataset is not None:
            batches["expert_dataset"] = self.expert_dataset.batch_size
            divided.append(("expert_dataset", "actor", "so that all updates have as many examples"))
        for data, role, why in divided:
            updates = getattr(self, role).ppo_n_minibatches
            if batches[data] % updates:
                yield (
                    f"{data}.batch_size={batches[data]} must be a multiple of {role}.ppo_n_minibatches={updates}, {why}"
                )

    @rule
    def _rollout_logprobs(self) -> Iterator[str]:
        for key, otherwise in self._readers_of_rollout_logprobs():
            if self.rollout.omits_logprobs:
                yield (
                    f"{key} needs the rollout's log-probs of every token, but rollout.logprob_share="
                    f"{self.rollout.logprob_share} asks for a part of them: drop it, or {otherwise}"
                )
            if altering := self.gconfig.alterations:
                yield (
                    f"{key} needs the model's log-probs of sampled tokens, but with {' and '.join(altering)} the "
                    f"rollout gives log-probs of another distribution: drop {'it' if len(altering) == 1 else 'them'}, "
                    f"or {otherwise}"
                )

    def _readers_of_rollout_logprobs(self) -> Iterator[tuple[str, str]]:
        """Yield what needs the rollout's log-probs of all tokens as the model gives them, and how to do without."""
        actor, stale = self.actor, self.rollout.max_head_offpolicyness
        method = actor.rollout_correction.method
        if actor.recompute_logprob is False:
            yield "actor.recompute_logprob=false", "set it to true"
        if actor.rollout_correction.is_fixed:
            yield f"actor.rollout_correction.method={method}", "set the method to none"
        if actor.prox_logp_method == "loglinear":
            yield "actor.prox_logp_method=loglinear", "set it to recompute"
        if stale and method == "auto" and actor.recompute_logprob is not False:
            yield (
                f"the correction for the age of samples with rollout.max_head_offpolicyness={stale}",
                "set actor.rollout_correction.method to none",
            )

    @rule
    def _replayed(self) -> Iterator[str]:
        corrects = self.actor.rollout_correction.method != "none" or self.actor.recompute_logprob is False
        corrects = corrects or self.actor.advantage == "dpo"  # whose pairs may come from any policy
        if self.rollout.replay_buffer is not None and not corrects:
            yield (
                "rollout.replay_buffer trains on samples of older weights, and with actor.rollout_correction.method="
                "none nothing weighs them by how likely they are now: set the method to auto, or "
                "actor.recompute_logprob=false"
            )

    @rule
    def _old_logprobs(self) -> Iterator[str]:
        actor, correction = self.actor, self.actor.rollout_correction
        if actor.recompute_logprob is False and correction.is_fixed:
            key = f"actor.rollout_correction.method={correction.method}"
            if correction.weight is not None and actor.loss != "reinforce":
                yield (
                    f"{key} weights losses by p / q, but with actor.recompute_logprob=false the ratio p / p_old of "
                    f"actor.loss={actor.loss} is p / q too: set that to null, actor.loss to reinforce, or drop the "
                    "weight"
                )
            if correction.needs_old_logprobs:
                yield (
                    f"{key} compares the rollout's log-probs with the trainer's old ones before an update, but with "
                    "actor.recompute_logprob=false they are the same: set that to null, or the method to none"
                )
        if actor.prox_logp_method == "loglinear" and actor.kl_in == "reward" and actor.kl_ctl > 0:
            yield (
                "actor.kl_in=reward needs old log-probs before the update, which actor.prox_logp_method=loglinear does "
                "not give: set kl_in to loss, or prox_logp_method to recompute"
            )

    @rule
    def _terms(self) -> Iterator[str]:
        actor, most = self.actor, self.gconfig.max_new_tokens
        if actor.overlong_tokens is not None and actor.overlong_tokens > most:
            yield (
                f"actor.overlong_tokens={actor.overlong_tokens} is above gconfig.max_new_tokens={most}: lower the first"
            )
        if actor.kl_ctl > 0 and (actor.kl_in, actor.kl_estimator, actor.kl_unbiased) == ("loss", "k1", False):
            yield (
                "actor.kl_estimator=k1 has no expected gradient as a loss: use k2 or k3, actor.kl_unbiased=true, or "
                "actor.kl_in=reward"
            )
        moves = actor.moves_from_old or actor.recompute_logprob is False or actor.prox_logp_method == "loglinear"
        if actor.opsm_delta is not None and not moves:
            yield (
                f"actor.opsm_delta={actor.opsm_delta} has no effect with one update a step, before which the policy is "
                "the old one: raise actor.ppo_n_minibatches, or set actor.recompute_logprob=false"
            )
