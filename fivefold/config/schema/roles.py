"""The models of reinforcement learning: actor, reference and critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fivefold.config.algorithms import CorrectionName
from fivefold.config.methods import ADVANTAGES, LOSSES
from fivefold.config.schema.engine import (
    FrozenModelConfig,
    MicroBatchConfig,
    OffloadConfig,
    TrainedModelConfig,
)
from fivefold.config.schema.fields import (
    ONE_LINE,
    DeviceList,
    Dtype,
    Fraction,
    Named,
    NonNegative,
    Passes,
    PathText,
    Positive,
    Section,
)
from fivefold.config.schema.role import Head, Offloadable, RoleConfig


class NormConfig(Section):
    """(x - mean) / (std + eps), each over the group of one prompt, over the batch, or not at all."""

    mean_level: Literal["group", "batch", "none"] = "group"
    """Samples over which the mean is taken; `none` subtracts no mean."""
    std_level: Literal["group", "batch", "none"] = "group"
    """Samples over which the standard deviation is taken; `none` does not divide."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""


Filtration = Literal["power", "max_min", "max_random"]
"""Rules by which PF-PPO weighs samples by their rewards."""


class SampleWeightsConfig(Section):
    """Factors of the policy's cost on all tokens of a sample, divided by their mean over the step
    (docs/algorithms.md)."""

    reward: Filtration | None = None
    """Weight by the shaped reward R, as often as policy filtration draws a sample (PF-PPO): in proportion to
    abs(R)^`reward_power`; 1 for the largest and the smallest R of the step, else 0; or 0.4 for the largest, else 0.1.
    null: rewards do not count."""
    reward_power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of `reward: power`."""
    difficulty_key: str | None = None
    """Key of `extra_info` with the difficulty d of a prompt, from 0 to 1, by which its samples weigh 0.5 + 1.5 d; null:
    difficulty does not count."""
    length: bool = False
    """Weight by the length: 1.5 for the shortest sample of the step, 0.5 for the longest, and linear in between."""

    @model_validator(mode="after")
    def _check_power(self) -> SampleWeightsConfig:
        if self.reward_power != 2.0 and self.reward != "power":
            raise ValueError(
                f"reward_power={self.reward_power} has no effect without reward=power: set that, or drop reward_power"
            )
        return self


class RolloutCorrectionConfig(Section):
    """Importance corrections for the difference between the rollout engine, which sampled, and the trainer.

    With w = p_old / q of a token, p_old the trainer's probability before the step and q the rollout's, `weight`
    multiplies losses by w, and `mask` leaves tokens out by w (docs/algorithms.md). With `recompute_logprob: false`, p
    of the update takes the place of p_old.
    """

    method: CorrectionName = "auto"
    """`auto`: `tis` from the step on after one with a `rollout_mismatch_kl` above `auto_threshold`. `none`: no
    correction. `custom`: what the keys below say. Others set the keys below that the recipe does not write."""
    auto_threshold: Annotated[float, Field(ge=0)] = 1e-3
    """KL divergence from rollout to trainer, in nats per token, above which `auto` corrects from then on."""
    weight: Literal["token", "sequence"] | None = None
    """Weight the losses of tokens by w of the token, or by the product of w over its sequence; null: by 1."""
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    """Weights are truncated to this value; null: they are not truncated."""
    weight_floor: Annotated[float, Field(gt=0)] | None = None
    """Smaller weights are raised to this value; null: none are."""
    mask: Literal["token", "sequence", "geometric", "largest", "second_moment"] | None = None
    """Leave out tokens whose w is out of bounds, or whole sequences by the product, the geometric mean or the largest
    of w; `second_moment`: the tokens of the largest (log w)^2, until its mean over a mini-batch is at most `mask_above`
    (M2PO); null: leave out none."""
    mask_by: Literal["ratio", "k2", "k3", "binary_kl"] = "ratio"
    """What `mask` compares with its bounds: w, or a divergence of the token, whose sum, mean or largest value over a
    sequence then counts: (log w)^2 / 2, w - 1 - log w, or that of this token against any other."""
    mask_above: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of `mask`; null: none."""
    mask_below: Annotated[float, Field(ge=0)] | None = None
    """Lower bound of w for `mask`; null: 1 / `mask_above`."""
    veto_below: Annotated[float, Field(gt=0)] | None = None
    """Leave out whole sequences that have a token with a smaller w; null: leave out none."""

    @property
    def is_fixed(self) -> bool:
        """Whether the recipe itself asks for a correction, which then holds from the first step on."""
        return self.method not in ("auto", "none")

    @property
    def has_lower_bound(self) -> bool:
        """Whether `mask` has a lower bound besides the upper one: divergences and second moments have none."""
        return self.mask != "second_moment" and self.mask_by == "ratio"

    @model_validator(mode="after")
    def _check_keys(self) -> RolloutCorrectionConfig:
        keys = ("weight", "mask", "veto_below")
        wanted = [name for name in keys if getattr(self, name) is not None]
        if wanted and not self.is_fixed:
            raise ValueError(
                f"{wanted[0]}={getattr(self, wanted[0])} has no effect with method={self.method}: set method to custom"
            )
        if self.method == "custom" and not wanted:
            raise ValueError(f"method=custom corrects nothing: set one of {', '.join(keys)}, or method to none")
        for name in ("weight_cap", "weight_floor"):
            if self.weight is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect without weight: set that to token or sequence, or "
                    f"drop {name}"
                )
        floor, cap = self.weight_floor, self.weight_cap
        if floor is not None and cap is not None and floor > cap:
            raise ValueError(f"weight_floor={floor} is above weight_cap={cap}: lower the first")
        return self._with_mask()

    def _with_mask(self) -> RolloutCorrectionConfig:
        """Check the keys of the mask."""
        upper, lower = self.mask_above, self.mask_below
        if self.mask is None and (upper is not None or lower is not None or self.mask_by != "ratio"):
            raise ValueError(
                "mask_above, mask_below and mask_by have no effect without mask: set that to token, sequence or "
                "geometric, or drop them"
            )
        if self.mask == "second_moment" and self.mask_by != "ratio":
            raise ValueError(f"mask_by={self.mask_by} has no effect with mask=second_moment: drop mask_by")
        if lower is not None and not self.has_lower_bound:
            raise ValueError(
                f"mask_below={lower} has no effect with mask={self.mask} and mask_by={self.mask_by}, which have an "
                "upper bound only: drop mask_below"
            )
        if self.mask is not None and upper is None and lower is None:
            raise ValueError(f"mask={self.mask} has no bounds: set mask_above")
        if upper is not None and lower is not None and lower > upper:
            raise ValueError(f"mask_below={lower} is above mask_above={upper}: lower the first")
        return self


class DistillConfig(Section):
    """How the actor is drawn towards the model of the section `teacher`, on its own samples (docs/distillation.md)."""

    coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the teacher; at 0, no teacher is loaded."""
    over: Literal["sampled", "top_k", "full"] = "sampled"
    """Tokens over which the divergence is taken at each place: the sampled one, as an advantage; the teacher's `top_k`
    and all others as one; or the whole vocabulary."""
    direction: Literal["reverse", "forward"] = "reverse"
    """`reverse`: KL(actor || teacher), the only one for `over: sampled`. `forward`: KL(teacher || actor)."""
    top_k: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of tokens for `over: top_k`; null: 64."""

    @model_validator(mode="after")
    def _check_keys(self) -> DistillConfig:
        if self.over == "sampled" and self.direction == "forward":
            raise ValueError(
                "direction=forward needs the teacher's probabilities of more than the sampled token: set over to top_k "
                "or full, or direction to reverse"
            )
        if self.top_k is not None and self.over != "top_k":
            raise ValueError(f"top_k={self.top_k} has no effect with over={self.over}: set over=top_k, or drop top_k")
        return self


class TeacherConfig(FrozenModelConfig):
    """The model that `actor.distill` draws the actor towards; it must have the actor's tokens."""


class ActorConfig(TrainedModelConfig):
    """The model that is trained, and the algorithm that trains it."""

    offload: OffloadConfig = OffloadConfig()
    loss: Annotated[str, Field(pattern=ONE_LINE), Named(tuple(LOSSES), "Class")] = "ppo"
    """Policy loss (docs/algorithms.md)."""
    loss_kwargs: dict[str, Any] = {}
    """Options of the loss that have no key of their own, by name."""
    advantage: Annotated[str, Field(pattern=ONE_LINE), Named(tuple(ADVANTAGES), "function")] = "grpo"
    """How rewards become advantages (docs/algorithms.md)."""
    advantage_kwargs: dict[str, Any] = {}
    """Options of the advantage that have no key of their own, by name."""
    discount: Fraction = 1.0
    """`advantage: gae` discounts the reward of each next token by this factor (gamma)."""
    gae_lambda: Fraction = 1.0
    """`advantage: gae` weights estimates over longer spans by this factor a token: 1 is Monte Carlo, 0 is one step."""
    gae_length_alpha: Annotated[float, Field(gt=0)] | None = None
    """`advantage: gae` weights by 1 - 1 / (`gae_length_alpha` l) for a completion of l tokens, in place of `gae_lambda`
    (VAPO); null: by `gae_lambda`."""
    whiten_advantages: bool | None = None
    """Bring the advantages of a step's trained tokens to mean 0 and standard deviation 1, after a KL penalty in the
    reward; null: with `gae`, `reinforce_pp` and `reinforce_pp_baseline`."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ppo_epochs: Passes = 1
    """Number of times that each sample is trained on in a step."""
    ppo_n_minibatches: Positive = 1
    """Optimizer updates in one pass over a step's samples. The samples of one prompt stay together."""
    eps_clip: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Losses that clip do so to ratios below 1 - `eps_clip`."""
    eps_clip_higher: Annotated[float, Field(ge=0)] | None = None
    """Losses that clip do so to ratios above 1 + `eps_clip_higher`; null: the same as `eps_clip`."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip (Ye et al. 2020) of `loss: ppo`: largest ratio of tokens with a negative advantage; null: no dual clip.
    With `dppo_tv` and `dppo_kl`: largest weight of any token; null: 20."""
    opsm_delta: Annotated[float, Field(ge=0)] | None = None
    """Do not train on sequences of a negative advantage whose mean of log p_old - log p, in nats a token, is above this
    (off-policy sequence masking: DeepSeek-V3.2); null: train on all."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"] = "token_mean"
    """How the losses of tokens become one number: the mean over all tokens (DAPO), the mean over sequences of their
    token means (GRPO) or token sums, or these sums divided by `loss_length` (Dr. GRPO)."""
    loss_length: Positive | None = None
    """Tokens by which `sequence_sum_fixed` divides; null: `gconfig.max_new_tokens`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Entropy, in nats per token, below which there is a bonus, whose weight is adapted after each step by
    `entropy_step`, from `entropy_coeff` on (Skywork-OR1); null: the weight is fixed."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Change of the adapted weight of the entropy after a step: upwards below the target, downwards above it."""
    kl_ctl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference model; at 0, no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL divergence, as Schulman names them (http://joschu.net/blog/kl-approx.html); `abs`: the
    absolute value of k1."""
    kl_unbiased: bool = False
    """Multiply the KL term in the loss by p / p_old, with its gradient, so that the gradient is that of the divergence
    (DeepSeek-V3.2)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from each token's reward."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL divergence, in nats per token, towards which `kl_ctl` is adapted after each step (Ziegler et al. 2019);
    null: `kl_ctl` is fixed."""
    kl_horizon: Positive = 10_000
    """Number of samples over which the adapted `kl_ctl` follows the divergence."""
    positive_nll_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean negative log-likelihood of the tokens of completions that count as right, as a further term of
    the loss (VAPO)."""
    distill: DistillConfig = DistillConfig()
    recompute_logprob: bool | None = None
    """Whether the trainer computes the old log-probs; otherwise they are the rollout's. null: only if a step has more
    than one update."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """How old log-probs are found in asynchronous training. `recompute`: as `recompute_logprob` says. `loglinear`: they
    lie between the rollout's and the current ones, the nearer to the latter the older the token is (A-3PO); this takes
    no forward pass."""
    reward_norm: NormConfig = NormConfig()
    """How `advantage: grpo` normalises rewards (GRPO: group, group; Dr. GRPO: group, none)."""
    reward_scaling: float = 1.0
    """Before they become advantages, rewards are changed to (reward + `reward_bias`) * `reward_scaling`."""
    reward_bias: float = 0.0
    """Added to every reward before `reward_scaling`."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Scaled rewards are clipped to ± this value; null: they are not clipped."""
    overlong_reward_penalty: bool = False
    """Lower the rewards of completions that come near `gconfig.max_new_tokens`, before they are scaled: from 0 at
    `overlong_tokens` before it, linearly, to -`overlong_penalty_factor` at it (DAPO)."""
    overlong_tokens: Positive | None = None
    """Tokens before the limit at which the penalty begins; null: a fifth of `gconfig.max_new_tokens`."""
    overlong_penalty_factor: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a completion that reaches the limit, in reward."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Penalty, in reward, that grows in proportion to a completion's length up to this value at
    `gconfig.max_new_tokens`."""
    sample_weights: SampleWeightsConfig = SampleWeightsConfig()
    mask_truncated: bool = False
    """Do not train on completions that reached `gconfig.max_new_tokens` (DAPO's over-long filtering). Their rewards
    still count in the mean and the standard deviation of their group."""
    dynamic_sampling: bool = False
    """Replace prompts whose completions all have the same reward by further prompts of the data set (DAPO)."""
    dynamic_sampling_max_rounds: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most batches of prompts that are sampled in one step; prompts without signal then fill what is missing."""

    @property
    def has_reference(self) -> bool:
        """Whether a KL divergence from the reference is measured."""
        return self.kl_ctl > 0

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.ppo_epochs * self.ppo_n_minibatches

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """As `offload` says."""
        return self.offload.by_part

    @property
    def has_several_updates(self) -> bool:
        """Whether a step has more than one update, so that the policy moves away from the old one."""
        return self.updates_per_step > 1

    @property
    def whitens(self) -> bool:
        """Whether advantages are brought to mean 0 and standard deviation 1 over the tokens of a step."""
        if self.whiten_advantages is None:
            return self.advantage in ADVANTAGES and ADVANTAGES[self.advantage].whitens
        return self.whiten_advantages

    @model_validator(mode="after")
    def _check_methods(self) -> ActorConfig:
        for key, name, known in (("loss", self.loss, LOSSES), ("advantage", self.advantage, ADVANTAGES)):
            if name not in known and not all(name.rpartition(":")):
                raise ValueError(
                    f"{key}={name} is none of {', '.join(known)}, and not of the form module:name or file.py:name"
                )
        if self.gae_length_alpha is not None and self.gae_lambda != 1.0:
            raise ValueError(
                f"gae_lambda={self.gae_lambda} has no effect with gae_length_alpha={self.gae_length_alpha}: drop one"
            )
        if self.entropy_target is not None and self.entropy_coeff < 0:
            raise ValueError(
                f"entropy_coeff={self.entropy_coeff} is below 0, where an adapted weight never is: raise it, or drop "
                "entropy_target"
            )
        shapes = (self.reward_bias, self.reward_scaling, self.reward_clip) != (0.0, 1.0, None)
        if self.advantage == "gdpo" and shapes:
            raise ValueError(
                "advantage=gdpo normalises each reward by itself, so that reward_bias, reward_scaling and reward_clip "
                "have no effect: drop them"
            )
        return self


class FrozenReferenceConfig(RoleConfig):
    """The frozen model with which `fivefold dpo` compares answers.

    `mb_spec` is null unless it is written: micro-batches are then those of the actor.
    """

    path: PathText | None = None
    """Model folder, hub name or `package:<name>`; null: the actor's initial weights."""
    backend: str | None = None
    """Backend and layout of processes of its own; null: it lives in the actor's processes, in the actor's layout."""
    device_mapping: DeviceList | None = None
    """GPUs of its ranks, written like `actor.device_mapping`; it needs a `ref.backend`."""
    dtype: Dtype | None = None
    """Dtype of its weights and activations; null: `actor.dtype`."""
    mb_spec: MicroBatchConfig | None = None
    offload: bool = False
    """Move its weights to pinned host memory while it does not work. Those of a reference in the actor's processes go
    with the actor's in any case."""

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """The weights: a frozen model has no other state."""
        return {"params": self.offload}

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.device_mapping is not None and self.backend is None:
            raise ValueError(
                f"ref.device_mapping={self.device_mapping} has no effect without ref.backend, for the reference "
                "model is then in the actor's processes: give it a backend of its own, or drop ref.device_mapping"
            )
        return self


class ReferenceConfig(FrozenReferenceConfig):
    """The model from which `actor.kl_ctl` measures the KL divergence; it is not trained, and may follow the actor.

    `mb_spec` is null unless it is written: micro-batches are then those of the actor.
    """

    refresh_every: Positive | None = None
    """Replace its weights by the actor's after every this many steps; null: never, or with `ema_decay` after every
    step."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Let it follow the actor as a moving average: when it is refreshed, it keeps this share of its weights, and the
    rest comes from the actor's; null: a refresh copies the actor's."""

    @property
    def refresh_steps(self) -> int | None:
        """Steps from one refresh of its weights to the next; None: they stay as they are."""
        return 1 if self.refresh_every is None and self.ema_decay is not None else self.refresh_every

    @property
    def follows(self) -> float | None:
        """Share of its weights that it keeps at a refresh; None: it stays as it is."""
        return None if self.refresh_steps is None else self.ema_decay or 0.0


class CriticConfig(TrainedModelConfig):
    """The model that learns what states are worth, for `actor.advantage: gae` (docs/critic.md).

    It has the layers of `critic.path`, and a value head in place of the output layer, which begins at 0 if the folder
    has none.
    """

    colocate: bool = True
    """Share the actor's devices, in turn; false: have devices of its own."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the critic's GPUs while it does not work; null: all of it, if it shares them with another role."""
    gae_lambda: Fraction | None = None
    """Weight of longer estimates in the returns that the critic learns (VC-PPO, VAPO: 1); null: that of the actor's
    advantages."""
    warmup_steps: NonNegative = 0
    """Training steps at the beginning in which only the critic is trained, and the actor stays as it is."""
    ppo_epochs: Passes = 1
    """Number of times that each sample is trained on in a step."""
    ppo_n_minibatches: Positive = 1
    """Optimizer updates in one pass over a step's samples. The samples of one prompt stay together."""
    eps_clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Farthest that the updates of a step may move a value; null: as far as they do."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """How the errors of tokens become one number, as in `actor.loss_aggregation`."""

    @property
    def head(self) -> Head:
        """A value head, which begins at 0 if the weight files have none."""
        return "value"

    @property
    def takes_turns(self) -> bool | None:
        """Whether the critic shares the actor's devices, in turn."""
        return self.colocate

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """As `offload` says."""
        return self.offload.by_part

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.ppo_epochs * self.ppo_n_minibatches

    @property
    def steps_alone(self) -> int:
        """Training steps at the beginning in which the actor is not trained."""
        return self.warmup_steps
