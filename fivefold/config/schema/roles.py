"""The models of reinforcement learning: actor, reference and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fivefold.config.methods import ADVANTAGES, LOSSES, scored
from fivefold.config.schema.corrections import RolloutCorrectionConfig
from fivefold.config.schema.distillation import DistillConfig
from fivefold.config.schema.engine import (
    MicroBatchConfig,
    OffloadConfig,
    TrainedModelConfig,
)
from fivefold.config.schema.fields import (
    ONE_LINE,
    DeviceList,
    Fraction,
    ModelDtype,
    NonNegative,
    NonNegativeFloat,
    Passes,
    PathText,
    Positive,
    PositiveFloat,
    Section,
)
from fivefold.config.schema.role import Head, Offloadable, RoleConfig
from fivefold.config.schema.rules import (
    Named,
    above_0,
    absent,
    differs,
    equals,
    given,
    needs,
    read_by,
    reads_if,
    rule,
)

Level = Literal["group", "batch", "none"]


class NormConfig(Section):
    """(x - mean) / (std + eps), each over the group of one prompt, over the batch, or not at all."""

    mean_level: Annotated[Level, read_by("advantage", ADVANTAGES, "reward_norm.mean_level")] = "group"
    """Samples over which the mean is taken; `none` subtracts no mean."""
    std_level: Annotated[Level, read_by("advantage", ADVANTAGES, "reward_norm.std_level")] = "group"
    """Samples over which the standard deviation is taken; `none` does not divide."""
    eps: Annotated[PositiveFloat, read_by("advantage", ADVANTAGES, "reward_norm.eps")] = 1e-6
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
    reward_power: Annotated[PositiveFloat, reads_if(equals("reward", "power"))] = 2.0
    """Exponent of `reward: power`."""
    difficulty_key: str | None = None
    """Key of `extra_info` with the difficulty d of a prompt, from 0 to 1, by which its samples weigh 0.5 + 1.5 d; null:
    difficulty does not count."""
    length: bool = False
    """Weight by the length: 1.5 for the shortest sample of the step, 0.5 for the longest, and linear in between."""


_COMPUTES_OLD = "records the pass that computes old log-probs"
_BY_ENTROPY = tuple(name for name, loss in LOSSES.items() if loss.chooses_by in ("entropy", "expected_entropy"))
_READS_ENTROPY = "reads entropies of the plain pass that computes old log-probs"
_SYNCHRONOUS = equals("rollout.max_head_offpolicyness", 0)
_SAMPLES_MORE = "samples further completions with the weights of the step itself"
_OVERLONG = reads_if(equals("overlong_reward_penalty", True), warns=True)
_IN_SUM = reads_if(differs("advantage", "gdpo"))
"""Condition of keys that change the sum of several rewards."""


class ActorConfig(TrainedModelConfig):
    """The model that is trained, and the algorithm that trains it."""

    offload: OffloadConfig = OffloadConfig()
    loss: Annotated[
        str,
        Field(pattern=ONE_LINE),
        Named(tuple(LOSSES), "Class"),
        *(needs(name, differs("recompute_logprob", False), _READS_ENTROPY) for name in _BY_ENTROPY),
        *(needs(name, differs("advantage", "optimal_token_baseline"), _READS_ENTROPY) for name in _BY_ENTROPY),
    ] = "ppo"
    """Policy loss (docs/algorithms.md)."""
    loss_kwargs: dict[str, Any] = {}
    """Options of the loss without a separate key, by name."""
    advantage: Annotated[
        str,
        Field(pattern=ONE_LINE),
        Named(tuple(ADVANTAGES), "function"),
        needs("gae", given("critic", fix="name its model, for example critic.path=${actor.path}"), "needs a critic"),
        needs("remax", _SYNCHRONOUS, _SAMPLES_MORE),
        needs("dpo", above_0("kl_ctl", fix="it is DPO's beta: raise actor.kl_ctl"), "compares with a reference"),
        needs("dpo", equals("kl_in", "pairs", fix="set algorithm=online_dpo"), "takes the reference into its pairs"),
    ] = "grpo"
    """How rewards become advantages (docs/algorithms.md)."""
    advantage_kwargs: dict[str, Any] = {}
    """Options of the advantage without a separate key, by name."""
    credit: Annotated[
        Literal["episode", "turn", "state"],
        reads_if(given("environment", fix="name what plays episodes of several turns, for example environment.game")),
        reads_if(differs("advantage", *scored()), why="is for advantages of whole completions"),
        needs("state", differs("advantage", "gae"), "compares moves without a critic"),
    ] = "episode"
    """What the tokens of one turn of an episode get (docs/agents.md): the advantage of the `episode`; of what is earned
    from the `turn` on; or the episode's plus how the turn compares in the same `state` of the group (GiGPO)."""
    turn_discount: Annotated[Fraction, reads_if(equals("credit", "turn", "state"))] = 1.0
    """Credit by turn or state discounts the reward of each next turn by this factor."""
    state_weight: Annotated[NonNegativeFloat, reads_if(equals("credit", "state"))] = 1.0
    """Weight of the comparison among turns in the same state, next to the episode's advantage."""
    discount: Annotated[
        Fraction,
        read_by("advantage", ADVANTAGES, "discount"),
        reads_if(differs("credit", "turn", fix="set actor.turn_discount")),
    ] = 1.0
    """`advantage: gae` discounts the reward of each next token by this factor (gamma)."""
    gae_lambda: Annotated[
        Fraction, read_by("advantage", ADVANTAGES, "gae_lambda"), reads_if(absent("gae_length_alpha"))
    ] = 1.0
    """`advantage: gae` weights estimates over longer spans by this factor a token, or with `credit: turn` a turn: 1 is
    Monte Carlo, 0 is one step."""
    gae_length_alpha: Annotated[PositiveFloat | None, read_by("advantage", ADVANTAGES, "gae_length_alpha")] = None
    """`advantage: gae` weights by 1 - 1 / (`gae_length_alpha` l) for a completion of l tokens, in place of `gae_lambda`
    (VAPO); null: by `gae_lambda`."""
    whiten_advantages: Annotated[bool | None, needs(True, differs("advantage", "dpo"), "changes its loss")] = None
    """Bring the advantages of a step's trained tokens to mean 0 and standard deviation 1, after a KL penalty in the
    reward; null: with `gae`, `reinforce_pp` and `reinforce_pp_baseline`."""
    whiten_by_source: Annotated[bool, reads_if(differs("advantage", "gae"))] = False
    """Whiten the tokens of each value of the column `data_source` apart from the others."""
    advantage_clip: PositiveFloat | None = None
    """The advantages of tokens are clipped to ± this value, after whitening; null: they are not clipped."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ppo_epochs: Passes = 1
    """Number of times that each sample is trained on in a step."""
    ppo_n_minibatches: Positive = 1
    """Optimizer updates in one pass over a step's samples. The samples of one prompt stay together."""
    eps_clip: Annotated[Fraction, read_by("loss", LOSSES, "eps_clip")] = 0.2
    """Losses that clip do so to ratios below 1 - `eps_clip`."""
    eps_clip_higher: Annotated[NonNegativeFloat | None, read_by("loss", LOSSES, "eps_clip_higher")] = None
    """Losses that clip do so to ratios above 1 + `eps_clip_higher`; null: the same as `eps_clip`."""
    c_clip: Annotated[Annotated[float, Field(gt=1)] | None, read_by("loss", LOSSES, "c_clip")] = None
    """Dual clip (Ye et al. 2020) of `loss: ppo`: largest ratio of tokens with a negative advantage; null: no dual clip.
    With `dppo_tv` and `dppo_kl`: largest weight of any token; null: 20."""
    opsm_delta: NonNegativeFloat | None = None
    """Do not train on sequences of a negative advantage whose mean of log p_old - log p, in nats a token, is above this
    (off-policy sequence masking: DeepSeek-V3.2); null: train on all."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"] = "token_mean"
    """How the losses of tokens become one number: the mean over all tokens (DAPO), the mean over sequences of their
    token means (GRPO) or token sums, or these sums divided by `loss_length` (Dr. GRPO)."""
    loss_length: Annotated[Positive | None, reads_if(equals("loss_aggregation", "sequence_sum_fixed"), warns=True)] = (
        None
    )
    """Tokens by which `sequence_sum_fixed` divides; null: `gconfig.max_new_tokens`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    entropy_target: PositiveFloat | None = None
    """Entropy, in nats per token, below which there is a bonus, whose weight is adapted after each step by
    `entropy_step`, from `entropy_coeff` on (Skywork-OR1); null: the weight is fixed."""
    entropy_step: Annotated[
        PositiveFloat, reads_if(given("entropy_target"), warns=True), reads_if(absent("entropy_decay_steps"))
    ] = 0.005
    """Change of the adapted weight of the entropy after a step: upwards below the target, downwards above it."""
    entropy_decay_steps: Annotated[Positive | None, reads_if(differs("entropy_coeff", 0.0), warns=True)] = None
    """Steps over which the weight of the entropy bonus falls linearly from `entropy_coeff` to 0, in place of being
    adapted by `entropy_step`; a token whose entropy is above `entropy_target` has no bonus. null: the weight does not
    fall."""
    kl_ctl: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model; at 0, no reference model is loaded."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "abs"], reads_if(above_0("kl_ctl"), warns=True)] = "k3"
    """Estimator of the KL divergence, as Schulman names them (http://joschu.net/blog/kl-approx.html); `abs`: the
    absolute value of k1."""
    kl_unbiased: Annotated[bool, reads_if(above_0("kl_ctl")), reads_if(equals("kl_in", "loss"))] = False
    """Multiply the KL term in the loss by p / p_old, with its gradient, so that its gradient is the gradient of the
    divergence (DeepSeek-V3.2)."""
    kl_clip: Annotated[PositiveFloat | None, reads_if(above_0("kl_ctl")), reads_if(equals("kl_in", "loss"))] = None
    """Each token's estimate in the loss is clipped to ± this value, in nats; null: it is not clipped."""
    kl_in: Annotated[
        Literal["loss", "reward", "pairs"],
        reads_if(above_0("kl_ctl"), warns=True),
        needs("pairs", equals("advantage", "dpo"), "is for completions that are compared as pairs"),
    ] = "loss"
    """Add the KL term to the loss, subtract it from each token's reward, or, with `advantage: dpo`, measure pairs by
    the log-ratios of policy and reference, with `kl_ctl` as beta."""
    kl_target: Annotated[
        PositiveFloat | None,
        reads_if(above_0("kl_ctl"), "adapts the weight of the KL term"),
        reads_if(differs("kl_in", "pairs"), "needs a KL term"),
    ] = None
    """KL divergence, in nats per token, towards which `kl_ctl` is adapted after each step (Ziegler et al. 2019);
    null: `kl_ctl` is fixed."""
    kl_horizon: Annotated[Positive, reads_if(given("kl_target"), warns=True)] = 10_000
    """Number of samples over which the adapted `kl_ctl` follows the divergence."""
    positive_nll_coeff: NonNegativeFloat = 0.0
    """Weight of the mean negative log-likelihood of the tokens of completions that count as right, as a further term of
    the loss (VAPO)."""
    distill: DistillConfig = DistillConfig()
    recompute_logprob: bool | None = None
    """Whether the trainer computes the old log-probs; otherwise they are the rollout's. null: only if a step has more
    than one update, or `lora.dropout` makes the first one's log-probs others."""
    prox_logp_method: Annotated[
        Literal["recompute", "loglinear"],
        needs("loglinear", above_0("rollout.max_head_offpolicyness"), "interpolates by the age of samples"),
        needs("loglinear", equals("recompute_logprob", None), "says where old log-probs come from"),
    ] = "recompute"
    """How old log-probs are found in asynchronous training. `recompute`: as `recompute_logprob` says. `loglinear`: they
    lie between the rollout's and the current ones, the nearer to the latter the older the token is (A-3PO); this takes
    no forward pass."""
    router_replay: Annotated[
        Literal["none", "old_logprobs", "rollout", "auto"],
        needs("old_logprobs", differs("recompute_logprob", False), _COMPUTES_OLD),
        needs("old_logprobs", equals("prox_logp_method", "recompute"), _COMPUTES_OLD),
        needs("old_logprobs", differs("advantage", "optimal_token_baseline"), "records a plain pass over the samples"),
    ] = "none"
    """Experts that updates send tokens to. `none`: the routers' own choice. `old_logprobs`: the choice of the pass that
    computes old log-probs (R2). `rollout`: the choice of the rollout's engine (R3), in that pass too. `auto`: `rollout`
    if the model has experts and the engine can tell them, else `none` (docs/megatron.md)."""
    router_replay_min_overlap: Annotated[Fraction, reads_if(differs("router_replay", "none"), warns=True)] = 0.5
    """The run ends if a smaller share of replayed experts are those that the routers would choose: the routes are then
    of other tokens or another model."""
    reward_norm: NormConfig = NormConfig()
    """How `advantage: grpo` normalises rewards (GRPO: group, group; Dr. GRPO: group, none)."""
    reward_scaling: Annotated[float, _IN_SUM] = 1.0
    """Before they become advantages, rewards are changed to (reward + `reward_bias`) * `reward_scaling`."""
    reward_bias: Annotated[float, _IN_SUM] = 0.0
    """Added to every reward before `reward_scaling`."""
    reward_clip: Annotated[PositiveFloat | None, _IN_SUM] = None
    """Scaled rewards are clipped to ± this value; null: they are not clipped."""
    overlong_reward_penalty: bool = False
    """Lower the rewards of completions that come near `gconfig.max_new_tokens`, before they are scaled: from 0 at
    `overlong_tokens` before it, linearly, to -`overlong_penalty_factor` at it (DAPO)."""
    overlong_tokens: Annotated[Positive | None, _OVERLONG] = None
    """Tokens before the limit at which the penalty begins; null: a fifth of `gconfig.max_new_tokens`."""
    overlong_penalty_factor: Annotated[NonNegativeFloat, _OVERLONG] = 1.0
    """Penalty of a completion that reaches the limit, in reward."""
    length_penalty: NonNegativeFloat = 0.0
    """Penalty, in reward, that grows in proportion to a completion's length up to this value at
    `gconfig.max_new_tokens`."""
    sample_weights: SampleWeightsConfig = SampleWeightsConfig()
    mask_truncated: bool = False
    """Do not train on completions that reached `gconfig.max_new_tokens` (DAPO's over-long filtering). Their rewards
    still count in the mean and the standard deviation of their group."""
    group_mean_above: float | None = None
    """Train only on prompts whose completions have a mean reward above this; null: on prompts of any mean."""
    group_mean_below: float | None = None
    """Train only on prompts whose completions have a mean reward below this; null: on prompts of any mean."""
    group_mean_of: Literal["reward", "accuracy"] = "reward"
    """What `group_mean_above` and `group_mean_below` bound: the mean reward, or the share of completions that are
    right."""
    dynamic_sampling: Annotated[bool, needs(True, _SYNCHRONOUS, _SAMPLES_MORE)] = False
    """Replace prompts whose completions all have the same reward by further prompts of the data set (DAPO)."""
    dynamic_sampling_max_rounds: Annotated[
        int, Field(ge=1, le=1000), reads_if(equals("dynamic_sampling", True), warns=True)
    ] = 10
    """Most batches of prompts that are sampled in one step; prompts without signal then fill what is missing."""

    @property
    def has_reference(self) -> bool:
        """Whether a KL divergence from the reference is measured."""
        return self.kl_ctl > 0

    @property
    def compares_group(self) -> bool:
        """Whether the advantage compares the completions of a group; a user's own counts as one that does not."""
        if self.advantage == "grpo":
            return "group" in (self.reward_norm.mean_level, self.reward_norm.std_level)
        return self.advantage in ADVANTAGES and ADVANTAGES[self.advantage].compares

    @property
    def replays(self) -> bool:
        """As `router_replay` says."""
        return self.router_replay != "none"

    @property
    def epochs(self) -> int:
        """Times that a step trains on each of its samples."""
        return self.ppo_epochs

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.ppo_epochs * self.ppo_n_minibatches

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """As `offload` says."""
        return self.offload.by_part

    @property
    def moves_from_old(self) -> bool:
        """Whether updates compute other log-probs than a pass before them: from the second one on, or by dropout."""
        return self.updates_per_step > 1 or (self.lora is not None and self.lora.dropout > 0)

    @property
    def whitens(self) -> bool:
        """Whether advantages are brought to mean 0 and standard deviation 1 over the tokens of a step."""
        if self.whiten_advantages is None:
            return self.advantage in ADVANTAGES and ADVANTAGES[self.advantage].whitens
        return self.whiten_advantages

    @rule
    def _sources(self) -> Iterator[str]:
        if self.whiten_by_source and not self.whitens:
            yield "whiten_by_source=true has no effect, because advantages are not whitened: set whiten_advantages=true"

    @rule
    def _group_means(self) -> Iterator[str]:
        above, below = self.group_mean_above, self.group_mean_below
        if self.group_mean_of != "reward" and above is None and below is None:
            yield f"group_mean_of={self.group_mean_of} has no effect: set group_mean_above or group_mean_below"
        if above is not None and below is not None and above >= below:
            yield (
                f"group_mean_above={above} is not below group_mean_below={below}, so that no prompt would be trained: "
                "lower group_mean_above, or raise group_mean_below"
            )

    @rule
    def _entropy(self) -> Iterator[str]:
        if self.entropy_target is not None and self.entropy_coeff < 0:
            yield (
                f"entropy_coeff={self.entropy_coeff} is below 0, where an adapted weight never is: raise it, or drop "
                "entropy_target"
            )


class FrozenReferenceConfig(RoleConfig):
    """The frozen model with which `fivefold dpo` compares answers.

    `mb_spec` is null unless it is written: it then has the actor's micro-batches.
    """

    path: PathText | None = None
    """Model folder, hub name or `package:<name>`; null: the actor's initial weights."""
    backend: str | None = None
    """Backend and layout of separate processes; null: it lives in the actor's processes, in the actor's layout."""
    device_mapping: Annotated[DeviceList | None, reads_if(given("backend"))] = None
    """GPUs of its ranks, written like `actor.device_mapping`; it needs a `ref.backend`."""
    dtype: ModelDtype | None = None
    """Dtype of its weights and activations; null: `actor.dtype`."""
    mb_spec: MicroBatchConfig | None = None
    offload: bool = False
    """Move its weights to pinned host memory while it does not work. The weights of a reference in the actor's
    processes move with the actor's in any case."""

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """The weights: a frozen model has no other state."""
        return {"params": self.offload}


class ReferenceConfig(FrozenReferenceConfig):
    """The model from which `actor.kl_ctl` measures the KL divergence; it is not trained, and may follow the actor.

    `mb_spec` is null unless it is written: it then has the actor's micro-batches.
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

    colocate: Annotated[bool, needs(False, absent("device_mapping"), "gives the model its own devices")] = True
    """Share the actor's devices, in turn; false: have its own devices."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the critic's GPUs while it does not work; null: all of it, if it shares them with another role."""
    gae_lambda: Fraction | None = None
    """Weight of longer estimates in the returns that the critic learns (VC-PPO, VAPO: 1); null: the weight in the
    actor's advantages."""
    warmup_steps: NonNegative = 0
    """Training steps at the beginning in which only the critic is trained, and the actor stays as it is."""
    ppo_epochs: Passes = 1
    """Number of times that each sample is trained on in a step."""
    ppo_n_minibatches: Positive = 1
    """Optimizer updates in one pass over a step's samples. The samples of one prompt stay together."""
    eps_clip: PositiveFloat | None = 0.5
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
    def epochs(self) -> int:
        """Times that a step trains on each of its samples."""
        return self.ppo_epochs

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.ppo_epochs * self.ppo_n_minibatches

    @property
    def steps_alone(self) -> int:
        """Training steps at the beginning in which the actor is not trained."""
        return self.warmup_steps
