"""The recipe: every key with its type, its rule, its default and its documentation, each declared once.

A key that is not declared here is an error. Rules that need two keys are in the validators below; rules that need the
model's shape or the layout are in `fivefold.families.check`. `docs/recipe.md` is generated from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fivefold.config.duration import parse_duration
from fivefold.config.limits import LARGEST, LARGEST_SEED, MOST_DEVICES, MOST_PASSES, MOST_SECONDS, MOST_SEQUENCES
from fivefold.config.presets import ADVANTAGES, LOSSES, Algorithm, Correction

ONE_LINE = r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s][^\x00-\x1f\x7f]*$"
"""Pattern of a text in one line that is not blank."""
NAME = r"^\w[\w.-]*$"
"""Pattern of a name that is the name of a folder too."""

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Sequences = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
Passes = Annotated[int, Field(ge=1, le=MOST_PASSES)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float32", "bfloat16"]
PathText = Annotated[str, Field(pattern=ONE_LINE)]
DeviceList = str | list[NonNegative]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=MOST_SECONDS)]
"""A time in seconds; a recipe may write it as a text such as `3h55m`."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced into other types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class ClusterConfig(Section):
    """The machines of the run."""

    n_nodes: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    """Number of machines."""
    n_gpus_per_node: Annotated[int, Field(ge=0, le=256)] = 8
    """GPUs that are used on each machine; 0 runs every worker as a CPU process (gloo)."""
    host_memory_gib: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Memory of each machine in GiB (2^30 bytes), which `fivefold plan` then compares with what it counts; null: it
    does not."""
    fileroot: PathText = "runs"
    """Folder of all outputs; a run writes to `<fileroot>/<experiment_name>/<trial_name>/`."""

    @model_validator(mode="after")
    def _check_size(self) -> ClusterConfig:
        if (n_gpus := self.n_nodes * self.n_gpus_per_node) > MOST_DEVICES:
            raise ValueError(
                f"n_nodes={self.n_nodes} with n_gpus_per_node={self.n_gpus_per_node} are {n_gpus:,} GPUs, and at most "
                f"{MOST_DEVICES:,} can be laid out: lower one of the two"
            )
        return self


class SchedulerConfig(Section):
    """How worker processes are started."""

    type: Literal["local", "ray"] = "local"
    """`local` starts Ray on this machine for this run alone; `ray` joins the cluster at `address`."""
    address: str = "auto"
    """Address of the Ray cluster to join with `type: ray`: `auto`, or host:port."""
    wait_s: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 60.0
    """Seconds to wait, with `type: ray`, for nodes that the cluster lacks and for devices that other jobs hold."""
    timeout_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 1800.0
    """Seconds that one phase may take, on a worker or with the rewards, before the run ends with an error."""

    @model_validator(mode="after")
    def _check_address(self) -> SchedulerConfig:
        if self.type == "local" and self.address != "auto":
            raise ValueError(
                f"address={self.address} names a cluster to join, but type=local starts Ray for this run alone: "
                "set type to ray, or drop address"
            )
        return self


class OptimizerConfig(Section):
    """Hyper-parameters of AdamW and of its learning-rate schedule, whichever engine trains.

    Fields that only Megatron-Core's optimizer has are in `actor.megatron.optimizer`.
    """

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's weight decay; norms and biases are exempt. It is decoupled from the gradient unless
    `actor.megatron.optimizer.decoupled_weight_decay` is false."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    warmup_steps_proportion: Fraction = 0.0
    """Share of all optimizer steps spent on a linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of `lr`. As in torch's schedules, the end is one step after the
    last one."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 switches clipping off."""

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerConfig:
        if self.min_lr_ratio > 0 and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} is the end of a decay, but lr_scheduler_type=constant has none: "
                "set lr_scheduler_type to linear or cosine, or drop min_lr_ratio"
            )
        return self


class MicroBatchConfig(Section):
    """How a mini-batch is split into the micro-batches of one forward and backward pass each."""

    max_tokens_per_mb: Positive = 8192
    """Most tokens in one micro-batch, summed over its context-parallel shards. A longer sequence has a micro-batch to
    itself."""
    n_mbs: Sequences = 1
    """Fewest micro-batches that a data-parallel rank splits a mini-batch into."""


class MegatronTransformerFields(Section):
    """Fields of Megatron-Core's `TransformerConfig`, handed on under their own names.

    Only fields that the recipe may choose are here; the model's config and the layout decide all others.
    """

    moe_aux_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router's load-balancing loss; at 0, only the policy loss trains the router."""
    moe_z_loss_coeff: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's z-loss (Zoph et al. 2022); null: no z-loss."""


class MegatronDDPFields(Section):
    """Fields of Megatron-Core's `DistributedDataParallelConfig`, handed on under their own names."""

    bucket_size: Positive | None = None
    """Number of parameters whose gradients are reduced in one collective; null: Megatron-Core chooses."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients during the backward pass; null: on GPUs, if there is data parallelism."""
    grad_reduce_in_fp32: bool = True
    """Keep and reduce gradients in float32; false: in the weights' dtype, so that in bfloat16 the sum of the
    micro-batches is rounded after each of them."""


class MegatronOptimizerFields(Section):
    """Fields of Megatron-Core's `OptimizerConfig` that no other engine has, under their own names, and `state_on`.

    The learning rate, the betas and the other hyper-parameters are in `actor.optimizer`.
    """

    decoupled_weight_decay: bool = True
    """true: AdamW; false: `actor.optimizer.weight_decay` is an L2 penalty inside Adam."""
    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the query and key norms as well."""
    exp_avg_dtype: Dtype = "float32"
    """Dtype in which Adam's first moment is stored; bfloat16 is rounded stochastically, so that its mean is right."""
    exp_avg_sq_dtype: Dtype = "float32"
    """Dtype in which Adam's second moment is stored, like `exp_avg_dtype`."""
    store_param_remainders: bool = False
    """Store of each float32 master weight only the 16 bits that its bfloat16 weight lacks. It is exact; the weights are
    then rounded to the nearest with ties away from zero, rather than to even."""
    state_on: Literal["device", "host"] = "device"
    """Where master weights and moments are: on the GPU, or in pinned host memory, from which each update streams them
    through the GPU in buckets. The results are the same bit for bit."""


class MegatronConfig(Section):
    """Settings that only the Megatron-Core engine reads."""

    bridge_type: Literal["fivefold"] = "fivefold"
    """The weight bridge between Hugging Face and Megatron-Core names."""
    use_dist_checkpointing: bool = False
    """Read the weights from the Megatron-Core checkpoint at `dist_checkpointing_path`; `actor.path` then needs only a
    config and a tokenizer."""
    dist_checkpointing_path: PathText | None = None
    """Folder of a checkpoint in Megatron-Core's format `torch_dist`, or Megatron-LM's folder of several, of which the
    newest is read (docs/converting.md)."""
    use_deterministic_algorithms: bool = False
    """Use kernels whose results are the same bit for bit in every run; they are slower."""
    virtual_pipeline_parallel_size: Positive = 1
    """Model chunks on each pipeline stage (interleaved 1F1B); the same as the `v` of a layout."""
    router_dtype: Literal["model", "fp32"] = "fp32"
    """Dtype of the router's matmul: the model's, or float32. The router's softmax is in float32 either way."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Collective that brings tokens to their experts. Neither drops tokens."""
    logprob_chunk_size: Positive = 1024
    """Number of tokens whose logits [chunk, vocabulary / tp] exist at one time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations the backward pass computes again: none, those of MLP and MoE, or those of whole layers."""
    transformer: MegatronTransformerFields = MegatronTransformerFields()
    ddp: MegatronDDPFields = MegatronDDPFields()
    optimizer: MegatronOptimizerFields = MegatronOptimizerFields()

    @model_validator(mode="after")
    def _check_checkpoint(self) -> MegatronConfig:
        if self.use_dist_checkpointing and self.dist_checkpointing_path is None:
            raise ValueError(
                "use_dist_checkpointing=true reads a checkpoint, but dist_checkpointing_path names none: set it to the "
                "checkpoint's folder, or use_dist_checkpointing to false"
            )
        if self.dist_checkpointing_path is not None and not self.use_dist_checkpointing:
            raise ValueError(
                f"dist_checkpointing_path={self.dist_checkpointing_path} is not read while use_dist_checkpointing is "
                "false: set that to true, or drop the path"
            )
        return self


class EngineConfig(Section):
    """A model, and how it is laid out over processes."""

    path: PathText
    """Hugging Face folder, hub name, or `package:<name>` for a model that ships with Fivefold."""
    backend: str = "megatron:d1"
    """Backend and layout, for example `megatron:d2p2t2c2e2` or `megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)`
    (docs/layouts.md)."""
    device_mapping: DeviceList | None = None
    """GPUs of the ranks, numbered from 0 over all nodes: `0-31`, `[0, 2, 4]`, `list(range(0,32))`. Every role has a
    list, or none has; roles whose lists overlap take turns. null: the layouts and `rollout.colocate` decide."""
    dtype: Dtype = "bfloat16"
    """Dtype of weights and activations. Gradients, Adam's moments and master weights are float32 unless
    `actor.megatron` says otherwise."""
    init_from_scratch: bool = False
    """Start from random weights, drawn with `seed`, instead of the checkpoint's; `path` then needs only a config and a
    tokenizer."""
    mb_spec: MicroBatchConfig = MicroBatchConfig()
    megatron: MegatronConfig = MegatronConfig()

    @model_validator(mode="after")
    def _check_precision(self) -> EngineConfig:
        if self.dtype == "float32" and self.megatron.optimizer.store_param_remainders:
            raise ValueError(
                "megatron.optimizer.store_param_remainders=true stores what bfloat16 weights lack, and dtype=float32 "
                "weights lack nothing: set dtype to bfloat16, or store_param_remainders to false"
            )
        if self.dtype == "float32" and not self.megatron.ddp.grad_reduce_in_fp32:
            raise ValueError(
                "megatron.ddp.grad_reduce_in_fp32=false keeps gradients in the weights' dtype, and dtype=float32 is no "
                "other than with true: set dtype to bfloat16, or grad_reduce_in_fp32 to true"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> EngineConfig:
        if self.init_from_scratch and self.megatron.use_dist_checkpointing:
            raise ValueError(
                "init_from_scratch=true starts from random weights, and megatron.use_dist_checkpointing=true from a "
                "checkpoint's: set one of them to false"
            )
        return self


class NormConfig(Section):
    """(x - mean) / (std + eps), each over the group of one prompt, over the batch, or not at all."""

    mean_level: Literal["group", "batch", "none"] = "group"
    """Samples over which the mean is taken; `none` subtracts no mean."""
    std_level: Literal["group", "batch", "none"] = "group"
    """Samples over which the standard deviation is taken; `none` does not divide."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""


class OffloadConfig(Section):
    """What leaves the actor's GPUs while a rollout generates on them.

    Each key: true, false, or null to let the plan decide: gradients always leave, the others if the rollout would
    otherwise not hold `rollout.max_batch_size` sequences.
    """

    params: bool | None = None
    """Move the weights, and those of a reference model in the same processes, to pinned host memory."""
    grads: bool | None = None
    """Free the gradient buffers, which are empty then."""
    optimizer: bool | None = None
    """Move the optimizer's state to pinned host memory, unless it is there anyway
    (`actor.megatron.optimizer.state_on`)."""


class RolloutCorrectionConfig(Section):
    """Importance corrections for the difference between the rollout engine, which sampled, and the trainer.

    With w = p_old / q of a token, p_old the trainer's probability before the step and q the rollout's, `weight`
    multiplies losses by w, and `mask` leaves tokens out by w (docs/algorithms.md).
    """

    method: Correction = "auto"
    """`auto`: `tis` from the step on after one with a `rollout_mismatch_kl` above `auto_threshold`. `none`: no
    correction. `custom`: what the keys below say. Others set the keys below that the recipe does not write."""
    auto_threshold: Annotated[float, Field(ge=0)] = 1e-3
    """KL divergence from rollout to trainer, in nats per token, above which `auto` corrects from then on."""
    weight: Literal["token", "sequence"] | None = None
    """Weight the losses of tokens by w of the token, or by the product of w over its sequence; null: by 1."""
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    """Weights are truncated to this value; null: they are not truncated."""
    mask: Literal["token", "sequence", "geometric"] | None = None
    """Leave out tokens whose w is out of bounds, or whole sequences by the product or the geometric mean of w; null:
    leave out none."""
    mask_above: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of `mask`; null: none."""
    mask_below: Annotated[float, Field(ge=0)] | None = None
    """Lower bound of `mask`; null: 1 / `mask_above`."""
    veto_below: Annotated[float, Field(gt=0)] | None = None
    """Leave out whole sequences that have a token with a smaller w; null: leave out none."""

    @property
    def is_fixed(self) -> bool:
        """Whether the recipe itself asks for a correction, which then holds from the first step on."""
        return self.method not in ("auto", "none")

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
        if self.weight is None and self.weight_cap is not None:
            raise ValueError(
                f"weight_cap={self.weight_cap} has no effect without weight: set that to token or "
                "sequence, or drop weight_cap"
            )
        upper, lower = self.mask_above, self.mask_below
        if self.mask is None and (upper is not None or lower is not None):
            raise ValueError(
                "mask_above and mask_below have no effect without mask: set that to token, "
                "sequence or geometric, or drop the bounds"
            )
        if self.mask is not None and upper is None and lower is None:
            raise ValueError(f"mask={self.mask} has no bounds: set mask_above")
        if upper is not None and lower is not None and lower > upper:
            raise ValueError(f"mask_below={lower} is above mask_above={upper}: lower the first")
        return self


class ActorConfig(EngineConfig):
    """The model that is trained, and the algorithm that trains it."""

    optimizer: OptimizerConfig = OptimizerConfig()
    offload: OffloadConfig = OffloadConfig()
    loss: Annotated[str, Field(pattern=ONE_LINE)] = "ppo"
    """Policy loss: `ppo`, `reinforce`, `gspo`, `gmpo`, `cispo`, `sapo`, `topr`, `clip_cov`, `kl_cov`, `kimi`, `cpgd`,
    `dppo_tv`, `dppo_kl` (docs/algorithms.md), or your own as `module:Class` or `file.py:Class` (docs/extending.md)."""
    loss_kwargs: dict[str, Any] = {}
    """Options of the loss that have no key of their own, by name."""
    advantage: Annotated[str, Field(pattern=ONE_LINE)] = "grpo"
    """How rewards become advantages: `grpo` (as `reward_norm` says), `rloo`, `reinforce_pp`, `reinforce_pp_baseline`,
    `remax`, `opo`, `gpg`, `pass_at_k`, `pass_at_k_best`, `asymre`, `opmd`, `gae`, or your own as
    `module:function` or `file.py:function`."""
    advantage_kwargs: dict[str, Any] = {}
    """Options of the advantage that have no key of their own, by name."""
    discount: Fraction = 1.0
    """`advantage: gae` discounts the reward of each next token by this factor (gamma)."""
    gae_lambda: Fraction = 1.0
    """`advantage: gae` weights estimates over longer spans by this factor a token: 1 is Monte Carlo, 0 is one step."""
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
    """Dual clip (Ye et al. 2020): largest ratio of tokens with a negative advantage; null: no dual clip."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"] = "token_mean"
    """How the losses of tokens become one number: the mean over all tokens (DAPO), the mean over sequences of their
    token means (GRPO) or token sums, or these sums divided by `loss_length` (Dr. GRPO)."""
    loss_length: Positive | None = None
    """Tokens by which `sequence_sum_fixed` divides; null: `gconfig.max_new_tokens`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    kl_ctl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference model; at 0, no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence, as Schulman names them (http://joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from each token's reward."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL divergence, in nats per token, towards which `kl_ctl` is adapted after each step (Ziegler et al. 2019);
    null: `kl_ctl` is fixed."""
    kl_horizon: Positive = 10_000
    """Number of samples over which the adapted `kl_ctl` follows the divergence."""
    recompute_logprob: bool | None = None
    """Whether the trainer computes the old log-probs; otherwise they are the rollout's. null: only if a step has more
    than one update."""
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
    mask_truncated: bool = False
    """Do not train on completions that reached `gconfig.max_new_tokens` (DAPO's over-long filtering). Their rewards
    still count in the mean and the standard deviation of their group."""
    dynamic_sampling: bool = False
    """Replace prompts whose completions all have the same reward by further prompts of the data set (DAPO)."""
    dynamic_sampling_max_rounds: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most batches of prompts that are sampled in one step; prompts without signal then fill what is missing."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are brought to mean 0 and standard deviation 1 over the tokens of a step."""
        if self.whiten_advantages is None:
            return self.advantage in ("gae", "reinforce_pp", "reinforce_pp_baseline")
        return self.whiten_advantages

    @model_validator(mode="after")
    def _check_methods(self) -> ActorConfig:
        for key, name, known in (("loss", self.loss, LOSSES), ("advantage", self.advantage, ADVANTAGES)):
            if name not in known and not all(name.rpartition(":")):
                raise ValueError(
                    f"{key}={name} is none of {', '.join(known)}, and not of the form module:name or file.py:name"
                )
        return self


class ReferenceConfig(Section):
    """The frozen model from which `actor.kl_ctl` measures the KL divergence."""

    path: PathText | None = None
    """Model folder, hub name or `package:<name>`; null: the actor's initial weights."""
    backend: str | None = None
    """Backend and layout of processes of its own; null: it lives in the actor's processes, in the actor's layout."""
    device_mapping: DeviceList | None = None
    """GPUs of its ranks, written like `actor.device_mapping`; it needs a `ref.backend`."""


class CriticConfig(EngineConfig):
    """The model that learns what states are worth, for `actor.advantage: gae` (docs/critic.md).

    It has the layers of `critic.path`, and a value head in place of the output layer, which begins at 0 if the folder
    has none.
    """

    colocate: bool = True
    """Share the actor's devices, in turn; false: have devices of its own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    offload: OffloadConfig = OffloadConfig()
    """What leaves the critic's GPUs while it does not work; null: all of it, if it shares them with another role."""
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


class GenerationConfig(Section):
    """How completions are sampled."""

    n_samples: Sequences = 8
    """Completions of each prompt; together they are the prompt's group."""
    max_new_tokens: Positive = 1024
    """Most tokens of a completion."""
    min_new_tokens: NonNegative = 0
    """Fewest tokens of a completion: before them, no end token and no stop token is sampled."""
    greedy: bool = False
    """Always take the most likely token. It is for `fivefold generate`; training needs samples."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, both in sampling and in every log-prob that training computes."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that together have this probability; 1: among all."""
    top_k: NonNegative = 0
    """Sample among this many of the most likely tokens; 0: among all."""
    stop_token_ids: list[NonNegative] = []
    """A completion ends after any of these tokens, as after the model's own end-of-sequence tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """A completion ends after any of these texts."""

    @property
    def truncates_distribution(self) -> bool:
        """Whether some tokens cannot be sampled, so that log-probs of the sampling distribution are not the model's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_new_tokens > 0

    @model_validator(mode="after")
    def _check_lengths(self) -> GenerationConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second"
            )
        return self


class RolloutConfig(Section):
    """The engine that generates, and where it runs."""

    backend: str = "transformers:d1"
    """Engine and layout: `transformers:d2`, or a server such as `vllm:d4t2` (docs/rollout.md)."""
    device_mapping: DeviceList | None = None
    """GPUs of the replicas, written like `actor.device_mapping`."""
    dtype: Dtype | None = None
    """Dtype of the engine's weights; null: `actor.dtype`."""
    max_batch_size: Sequences = 256
    """Most sequences that one replica decodes at one time."""
    colocate: bool | None = None
    """Share the actor's devices, in turn; null: only if the cluster has too few devices for both."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each GPU's memory that a server takes; null: its usual share, less what other roles keep there."""
    server_python: PathText | None = None
    """Python program of the environment in which the server is installed; null: Fivefold's own."""
    server_args: list[str | int | float] = []
    """Further arguments of the server's command line, for example `[--enforce-eager]`."""
    seeded: bool = False
    """Send a server a seed with each training request. It costs vLLM a quarter of its speed, and its completions still
    depend on the batch. The embedded engine is always seeded, and so is an evaluation that samples."""
    logprob_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a step's prompts for which a server is asked for the log-probs of sampled tokens, which cost vLLM up to
    40% of its speed. `rollout_mismatch` is measured over this share."""
    weight_transport: Literal["auto", "ipc", "nccl", "folder"] = "auto"
    """How weights reach the engine: `folder` (through host memory), `ipc` (CUDA IPC, on shared GPUs), `nccl` (between
    GPUs). `auto`: for vLLM, the fastest that the placement allows; for other engines, `folder`."""
    verify_weights: bool = False
    """Compare a checksum of the weights that arrived with one of those that were sent, at every update."""


class RowsConfig(Section):
    """Where prompts come from, and how they are read."""

    path: PathText
    """Parquet, JSONL, JSON or CSV file, folder of such files, `datasets` name, or `package:<name>`."""
    split: str | None = None
    """Split of a `datasets` or package name, or of a folder whose files are named after splits; null: `train`."""
    max_length: Positive = 1024
    """Most tokens of a prompt; longer prompts are dropped, and their number is reported."""
    limit: Positive | None = None
    """Use only this many of the first rows; null: all."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    answer_key: str | None = None
    """Column of the ground truth; null: the field `ground_truth` of the column `reward_model`."""
    apply_chat_template: bool | None = None
    """Whether the tokenizer's chat template is applied; null: to chat messages, not to texts."""


class BatchesConfig(Section):
    """How rows are distributed over training steps."""

    batch_size: Positive = 32
    """Rows in one training step."""
    shuffle: bool = True
    """Draw a new order in every epoch; false: always the order of the data set."""


class DatasetConfig(RowsConfig, BatchesConfig):
    """Prompts to train on."""


class OneRewardConfig(Section):
    """A function that judges completions."""

    fn: str = "math"
    """`exact_match`, `math` (math-verify), `judge` (a model behind a URL), `code` (tests in a sandbox), or your own
    function as `module:function` or `file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the function."""


class WeightedRewardConfig(OneRewardConfig):
    """One of several rewards."""

    weight: float = 1.0
    """Factor of this reward in the sum that is trained on; it may be negative."""
    data_sources: list[str] | None = None
    """Values of the column `data_source` whose prompts this reward is for; null: all prompts."""


class RewardConfig(OneRewardConfig):
    """The function that judges completions, or several of them in `rewards`."""

    rewards: dict[Annotated[str, Field(pattern=NAME)], WeightedRewardConfig] = {}
    """Several rewards in place of `fn`: each name has a mapping with the keys `fn`, `kwargs`, `weight` (1) and
    `data_sources` (null: all)."""
    accuracy_of: str | None = None
    """Name of the one of `rewards` by which a completion counts as right; null, or where it is not for the prompt: the
    first one that is."""

    @model_validator(mode="after")
    def _check_rewards(self) -> RewardConfig:
        if self.rewards and (self.fn, self.kwargs) != ("math", {}):
            raise ValueError(
                f"fn={self.fn} with kwargs={self.kwargs} and rewards={sorted(self.rewards)} exclude each other: make "
                "the function one of rewards, or drop rewards"
            )
        if self.accuracy_of is not None and self.accuracy_of not in self.rewards:
            raise ValueError(
                f"accuracy_of={self.accuracy_of} is none of rewards={sorted(self.rewards)}: name one of them, or drop "
                "it"
            )
        if "source" in self.rewards:
            raise ValueError(
                "rewards.source has the name of the metrics of data sources, reward/source/*: choose another name"
            )
        for name, reward in self.rewards.items():
            if reward.data_sources == []:
                raise ValueError(
                    f"rewards.{name}.data_sources=[] leaves the reward no prompt: name data sources, or set null"
                )
        return self


class PeriodicConfig(Section):
    """An action that is done now and then, and always after the last step.

    The frequencies do not exclude each other: the action is due as soon as one of them says so.
    """

    freq_steps: Positive | None = None
    """Number of steps from one time to the next; null: steps are not counted."""
    freq_epochs: Passes | None = None
    """Number of passes over the data set from one time to the next; null: passes are not counted."""
    freq_secs: Duration | None = None
    """Time since the start or the last time, in seconds or as `15m`, after which the end of a step is the next time;
    null: time is not measured."""


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


class SaverConfig(PeriodicConfig):
    """When the weights are saved as a Hugging Face folder, besides after the last step."""

    max_to_keep: Positive | None = 1
    """1: each time replaces `weights/`. Otherwise, each time has a folder of its own, such as `weights/step-000010/`,
    of which this many of the newest are kept; null: all are."""


class RecoverConfig(PeriodicConfig):
    """Checkpoints of the whole run, from which the same command goes on after an interruption (docs/recovery.md).

    A checkpoint is written after the last step too, and when the run is interrupted by Ctrl-C or SIGTERM.
    """

    mode: PathText = "auto"
    """`auto`: go on from the newest checkpoint in the run's folder, if there is one. `disabled`: write no checkpoints,
    and read none. Otherwise: the folder of a checkpoint, or of a run whose newest checkpoint is meant, to start from.
    """
    freq_secs: Duration | None = 900.0
    """Time since the start or the last checkpoint, in seconds or as `15m`, after which the end of a step is the next
    time; null: time is not measured."""
    max_to_keep: Positive = 2
    """Number of the newest checkpoints that are kept; older ones are deleted once a newer one is complete."""
    keep_best: Annotated[str, Field(pattern=ONE_LINE)] | None = None
    """Name of a metric, such as `eval/accuracy`: the checkpoint with its largest value is kept as well; null: only the
    newest are kept."""
    verify: bool = True
    """Compare the checksum of every file before a run goes on from a checkpoint; false: compare only the sizes."""
    write_attempts: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of attempts at writing a checkpoint, after which a run that cannot write one ends with an error."""
    save_before: Duration | None = None
    """Time since the start of the command, such as `3h55m`, before which the run writes a checkpoint and exits with
    code 130, for queues with a time limit; null: there is no limit."""
    accept_changes: list[Annotated[str, Field(pattern=ONE_LINE)]] = []
    """Keys or sections of the recipe that may differ from the checkpoint's although they decide what the run is, such
    as `[train_dataset, seed]`."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.mode != "disabled"


class StatsConfig(Section):
    """Records of every step, besides its metrics."""

    tensorboard: bool = True
    """Write every step's metrics as TensorBoard events too."""
    n_logged_samples: NonNegative = 4
    """Completions of each step that are written to `samples.jsonl`."""
    shown_samples_freq_steps: Positive | None = 10
    """Steps after which the best and the worst completion of a step are shown on the screen, as after the first step.
    None: none are shown."""

    def shows_samples(self, step: int) -> bool:
        """Return whether samples of step `step`, counted from 1, are shown."""
        every = self.shown_samples_freq_steps
        return every is not None and (step == 1 or step % every == 0)


class RunConfig(Section):
    """The keys of every kind of recipe."""

    experiment_name: Annotated[str, Field(pattern=NAME)]
    """Name of the experiment: the outer folder of its runs' outputs."""
    trial_name: Annotated[str, Field(pattern=NAME)] = "trial-0"
    """Name of this run: the inner folder of its outputs."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1
    """Seed of all random choices: the order of rows, sampling, random weights."""
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tokenizer_path: PathText | None = None
    """Folder or hub name of the tokenizer; null: `actor.path`."""
    total_train_epochs: Positive = 1
    """Number of passes over the data set."""
    total_train_steps: Positive | None = None
    """Number of training steps; null: as many as `total_train_epochs` take."""
    stats: StatsConfig = StatsConfig()
    saver: SaverConfig = SaverConfig()
    recover: RecoverConfig = RecoverConfig()

    def n_steps(self, steps_per_epoch: int) -> int:
        """Return the number of training steps, with so many in a pass over the data set."""
        return self.total_train_steps or self.total_train_epochs * steps_per_epoch

    @model_validator(mode="after")
    def _check_accepted_changes(self) -> RunConfig:
        for key in self.recover.accept_changes:
            if not _is_key(type(self), key):
                raise ValueError(
                    f"recover.accept_changes has {key!r}, which is no key of this recipe: name a key such as "
                    "train_dataset.path, or a section such as train_dataset"
                )
        return self


def _is_key(schema: type[BaseModel], key: str) -> bool:
    """Return whether a dotted key is a section or a value of `schema`."""
    name, _, inner = key.partition(".")
    field = schema.model_fields.get(name)
    if field is None or not inner:
        return field is not None
    sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
    return any(issubclass(kind, BaseModel) and _is_key(kind, inner) for kind in sections)


class TrainRecipe(RunConfig):
    """A recipe of `fivefold train`: reinforcement learning."""

    algorithm: Algorithm = "grpo"
    """Published algorithm: it sets the keys of `actor` that its paper sets, unless the recipe writes them
    (docs/algorithms.md)."""
    allocation_mode: str | None = None
    """Older form of the backends of rollout, actor and reference in one string: `transformers:d1+megatron:d2`."""
    actor: ActorConfig
    ref: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    gconfig: GenerationConfig = GenerationConfig()
    train_dataset: DatasetConfig
    valid_dataset: RowsConfig | None = None
    """Held-out prompts, all of which are evaluated each time; null: there is no evaluation."""
    reward: RewardConfig = RewardConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()

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
        if advantage in ("rloo", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "pass_at_k_best", "opmd"):
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
        if self.ref.device_mapping is not None and self.ref.backend is None:
            raise ValueError(
                f"ref.device_mapping={self.ref.device_mapping} has no effect without ref.backend, for the reference "
                "model is then in the actor's processes: give it a backend of its own, or drop ref.device_mapping"
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
    def _check_sampling(self) -> TrainRecipe:
        if self.gconfig.greedy:
            raise ValueError(
                "gconfig.greedy=true gives the same completion every time, from which nothing is learnt: set it to "
                "false (evaluator.greedy is for the held-out prompts)"
            )
        if self.actor.recompute_logprob is False and self.rollout.logprob_share < 1:
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
            raise ValueError(
                f"{key} compares the rollout's log-probs with the trainer's old ones, but with "
                "actor.recompute_logprob=false they are the same: set that to null, or the method to none"
            )
        if self.rollout.logprob_share < 1:
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
    def _check_updates(self) -> TrainRecipe:
        if self.actor.kl_in == "loss" and self.actor.kl_ctl > 0 and self.actor.kl_estimator == "k1":
            raise ValueError(
                "actor.kl_estimator=k1 has no expected gradient as a loss: use k2 or k3, or actor.kl_in=reward"
            )
        if self.train_dataset.batch_size % self.actor.ppo_n_minibatches:
            raise ValueError(
                f"train_dataset.batch_size={self.train_dataset.batch_size} must be a multiple of "
                f"actor.ppo_n_minibatches={self.actor.ppo_n_minibatches}, so that groups stay whole"
            )
        return self


class SFTRowsConfig(RowsConfig):
    """Prompts, each with the response to learn."""

    response_key: str = "response"
    """Column of the response; the end-of-sequence token is appended to it."""
    max_length: Positive = 1024
    """Most tokens of an example: prompt, response and end token. Longer examples are dropped, and their number is
    reported."""


class SFTDatasetConfig(SFTRowsConfig, BatchesConfig):
    """Examples to train on."""


class SFTModelConfig(EngineConfig):
    """The model that is fine-tuned."""

    optimizer: OptimizerConfig = OptimizerConfig()


class SFTRecipe(RunConfig):
    """A recipe of `fivefold sft`: supervised fine-tuning, with the loss on the response tokens."""

    actor: SFTModelConfig
    train_dataset: SFTDatasetConfig
    valid_dataset: SFTRowsConfig | None = None
    """Held-out examples, whose loss is computed before and after training; null: there are none."""


class PreferenceRowsConfig(RowsConfig):
    """Pairs of answers to a prompt, of which one was preferred (docs/preferences.md)."""

    chosen_key: str = "chosen"
    """Column of the preferred answer: a text, or a list of chat messages, with or without those of the prompt."""
    rejected_key: str = "rejected"
    """Column of the other answer, in the same form."""
    max_length: Positive = 1024
    """Most tokens of a prompt with an answer and its end token. Pairs with a longer one are dropped, and their number
    is reported."""


class PreferenceDatasetConfig(PreferenceRowsConfig, BatchesConfig):
    """Pairs to train on."""


class DPORowsConfig(PreferenceRowsConfig):
    """Pairs of answers to a prompt; with `actor.loss_type: kto` also single answers, each with a label."""

    response_key: str = "response"
    """Column of a single answer, with `label_key`."""
    label_key: str | None = None
    """Column that says whether a single answer is desirable, true or false, for `actor.loss_type: kto`; null: rows are
    pairs."""


class DPODatasetConfig(DPORowsConfig, BatchesConfig):
    """Pairs or single answers to train on."""


class DPOModelConfig(EngineConfig):
    """The model that is trained, and the loss that trains it."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto"] = "sigmoid"
    """Loss: `sigmoid` (DPO), `hinge` (SLiC), `ipo` or `kto` (docs/preferences.md)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the distance to the reference: beta of DPO and KTO, tau of IPO."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose answers are assumed to be swapped (conservative DPO), with `loss_type: sigmoid`."""
    average_log_prob: bool = False
    """Divide the log-prob of an answer by its number of tokens, in `sigmoid`, `hinge` and `ipo`."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the losses of desirable answers in `kto`."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the losses of undesirable answers in `kto`."""

    @model_validator(mode="after")
    def _check_loss(self) -> DPOModelConfig:
        if self.label_smoothing > 0 and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type}: set loss_type "
                "to sigmoid, or drop label_smoothing"
            )
        if self.loss_type == "kto":
            if self.average_log_prob:
                raise ValueError("average_log_prob=true has no effect with loss_type=kto: drop it")
        elif (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(
                f"desirable_weight and undesirable_weight have no effect with loss_type={self.loss_type}: set "
                "loss_type to kto, or drop them"
            )
        return self


class DPOReferenceConfig(Section):
    """The frozen model that answers are compared with. It lives in the actor's processes, in the actor's layout."""

    path: PathText | None = None
    """Model folder, hub name or `package:<name>`; null: the actor's initial weights."""


class DPORecipe(RunConfig):
    """A recipe of `fivefold dpo`: training on preferences, without a reward model (docs/preferences.md)."""

    actor: DPOModelConfig
    ref: DPOReferenceConfig = DPOReferenceConfig()
    train_dataset: DPODatasetConfig
    valid_dataset: DPORowsConfig | None = None
    """Held-out rows, which are evaluated before and after training; null: there are none."""

    @model_validator(mode="after")
    def _check_rows(self) -> DPORecipe:
        for name, rows in (("train_dataset", self.train_dataset), ("valid_dataset", self.valid_dataset)):
            if rows is not None and rows.label_key is not None and self.actor.loss_type != "kto":
                raise ValueError(
                    f"{name}.label_key={rows.label_key} is for single answers, and actor.loss_type="
                    f"{self.actor.loss_type} compares pairs: set actor.loss_type to kto, or drop label_key"
                )
        if self.actor.loss_type == "kto" and self.train_dataset.batch_size < 2:
            raise ValueError(
                "actor.loss_type=kto compares each answer with those to other prompts of its batch, and "
                f"train_dataset.batch_size={self.train_dataset.batch_size} has none: raise it"
            )
        return self


class RMModelConfig(EngineConfig):
    """The model that becomes a reward model: its output layer is replaced by one score."""

    optimizer: OptimizerConfig = OptimizerConfig()
    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around 0 (Eisenstein et al. 2023)."""


class RMRecipe(RunConfig):
    """A recipe of `fivefold rm`: a Bradley-Terry reward model (docs/preferences.md)."""

    actor: RMModelConfig
    train_dataset: PreferenceDatasetConfig
    valid_dataset: PreferenceRowsConfig | None = None
    """Held-out pairs, which are evaluated before and after training; null: there are none."""


Recipe = TrainRecipe | SFTRecipe | DPORecipe | RMRecipe
