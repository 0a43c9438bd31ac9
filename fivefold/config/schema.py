"""The recipe: every key, its type, its rule and its default, each declared once.

A key that is not declared here is an error. Rules that need two keys stand in the validators below; rules that
need the model's shape or the layout stand in `fivefold.families.check`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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
    n_nodes: Annotated[int, Field(ge=1, le=16384)] = 1
    """Machines in the run."""
    n_gpus_per_node: Annotated[int, Field(ge=0, le=256)] = 8
    """GPUs used on each machine. 0: every worker is a CPU process (gloo)."""
    fileroot: str = "runs"
    """Outputs go to `<fileroot>/<experiment_name>/<trial_name>/`."""


class SchedulerConfig(Section):
    type: Literal["local", "ray"] = "local"
    """`local`: start Ray on this machine for this run alone. `ray`: join the cluster at `address`."""
    address: str = "auto"
    """Address of the Ray cluster to join with `type: ray` (`auto`, or host:port)."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time, in seconds, that one phase may take, on a worker or with the rewards, before the run ends with an
    error."""

    @model_validator(mode="after")
    def _check_address(self) -> SchedulerConfig:
        if self.type == "local" and self.address != "auto":
            raise ValueError(
                f"address={self.address} is that of a cluster to join, but type=local starts Ray for this run alone: "
                "set type to ray, or drop address"
            )
        return self


class OptimizerConfig(Section):
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's decoupled weight decay; norms and biases are exempt."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    warmup_steps_proportion: Fraction = 0.0
    """Share of all optimizer steps spent on a linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.0
    """Where the decay leads, as a share of `lr`: it is reached one step after the last, as in torch's schedules."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerConfig:
        if self.min_lr_ratio > 0 and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} is the end of a decay, but lr_scheduler_type=constant has none: "
                "set lr_scheduler_type to linear or cosine, or drop min_lr_ratio"
            )
        return self


class MicroBatchConfig(Section):
    max_tokens_per_mb: Positive = 8192
    """Most tokens in one micro-batch, counted over its context-parallel shards. A longer sequence gets its own."""
    n_mbs: Positive = 1
    """Fewest micro-batches a data-parallel rank splits a mini-batch into."""


class TransformerFields(Section):
    """Of Megatron-Core's TransformerConfig, by its own names: those that mean something to Fivefold's modules."""

    moe_aux_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router's load-balancing loss. 0: the router stays where pre-training and the policy loss put it."""
    moe_z_loss_coeff: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's z-loss (Zoph et al. 2022)."""


class DDPFields(Section):
    """Of Megatron-Core's DistributedDataParallelConfig, by its own names."""

    bucket_size: Positive | None = None
    """Parameters whose gradients are reduced in one collective. None: Megatron-Core's own choice."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients during the backward pass. None: on GPUs with data parallelism."""


class AdamFields(Section):
    """Of Megatron-Core's OptimizerConfig, by its own names."""

    decoupled_weight_decay: bool = True
    """AdamW; false: weight decay is an L2 penalty within Adam."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of the query and key norms too."""


class MegatronConfig(Section):
    bridge_type: Literal["fivefold"] = "fivefold"
    """The weight bridge between Hugging Face and Megatron-Core names."""
    use_deterministic_algorithms: bool = False
    """Bit-reproducible kernels, at some cost in speed."""
    virtual_pipeline_parallel_size: Positive = 1
    """Model chunks on each pipeline stage (interleaved 1F1B); the `v` of a layout says the same."""
    router_dtype: Literal["model", "fp32"] = "fp32"
    """Dtype of the router's matmul; its softmax is in float32 either way."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts. Both are dropless."""
    logprob_chunk_size: Positive = 1024
    """Tokens whose logits [chunk, vocabulary / tp] exist at one time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, the MLP/MoE activations, or whole layers."""
    transformer: TransformerFields = TransformerFields()
    ddp: DDPFields = DDPFields()
    optimizer: AdamFields = AdamFields()


class EngineConfig(Section):
    """A model, and how it is laid out over processes."""

    path: str
    """Hugging Face folder, hub name, or `package:<name>` for a model that ships with Fivefold."""
    backend: str = "megatron:d1"
    """Backend and layout, for example `megatron:d2p2t2c2e2` or `megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)`."""
    device_mapping: str | list[NonNegative] | None = None
    """GPUs of the ranks, counted through over the nodes: `0-31`, `[0, 2, 4]`, `list(range(0,32))`. Every role has a
    list, or none; roles whose lists overlap take turns. None: as the backends and `colocate` say."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of weights and activations. Gradients, moments and master weights are float32."""
    init_from_scratch: bool = False
    """Random weights (seeded) in place of the checkpoint's; `path` then needs only a config and a tokenizer."""
    mb_spec: MicroBatchConfig = MicroBatchConfig()
    megatron: MegatronConfig = MegatronConfig()


class NormConfig(Section):
    """(x - mean) / (std + eps), each over the group of one prompt, over the batch, or not at all."""

    mean_level: Literal["group", "batch", "none"] = "group"
    """Over what the mean is taken."""
    std_level: Literal["group", "batch", "none"] = "group"
    """Over what the standard deviation is taken."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""


class ActorConfig(EngineConfig):
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_epochs: Positive = 1
    """Times each sample is trained in a step."""
    ppo_n_minibatches: Positive = 1
    """Optimizer updates in an epoch; whole groups stay together."""
    eps_clip: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """PPO's clip range below 1."""
    eps_clip_higher: Annotated[float, Field(ge=0)] | None = None
    """PPO's clip range above 1; none: the same as `eps_clip`."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip (Ye et al. 2020): bound on the ratio of samples with negative advantage."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Mean over tokens (DAPO), mean over sequences of token means (GRPO) or of token sums (Dr. GRPO)."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    kl_ctl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the reference model; 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL term is added to the loss or subtracted from each token's reward."""
    recompute_logprob: bool | None = None
    """Whether the trainer computes the old log-probs. None: only when a step has more than one update."""
    reward_norm: NormConfig = NormConfig()
    """How rewards become advantages (GRPO: group, group; Dr. GRPO: group, none)."""
    reward_scaling: float = 1.0
    """Rewards are (reward + bias) * scaling, then clipped to ±clip, before they become advantages."""
    reward_bias: float = 0.0
    """The bias of `reward_scaling`."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """The clip of `reward_scaling`; none: no clipping."""


class ReferenceConfig(Section):
    path: str | None = None
    """Reference model; none: the actor's initial weights."""
    backend: str | None = None
    """None: the actor's own layout."""
    device_mapping: str | list[NonNegative] | None = None
    """As `actor.device_mapping`, for a reference with a backend of its own."""


class GenerationConfig(Section):
    n_samples: Positive = 8
    """Completions of each prompt: the group."""
    max_new_tokens: Positive = 1024
    """Longest completion, in tokens."""
    min_new_tokens: NonNegative = 0
    """Tokens before which no end token is sampled."""
    greedy: bool = False
    """Always the most likely token: for `fivefold generate`. Training needs samples."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in sampling and in every log-prob of training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the fewest tokens that together have this probability; 1: all."""
    top_k: NonNegative = 0
    """Sample among the k most likely tokens; 0: all."""
    stop_token_ids: list[NonNegative] = []
    """Stop after any of these, besides the model's own end-of-sequence tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop after any of these texts."""

    @model_validator(mode="after")
    def _check_lengths(self) -> GenerationConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second"
            )
        return self


class RolloutConfig(Section):
    backend: str = "transformers:d1"
    """Engine and replicas: `transformers:d2`, or servers such as `vllm:d4t2` and `sglang:d4t4`."""
    device_mapping: str | list[NonNegative] | None = None
    """As `actor.device_mapping`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: the actor's."""
    max_batch_size: Positive = 256
    """Most sequences that a replica decodes at one time."""
    colocate: bool | None = None
    """Share the actor's devices. None: only if the cluster has too few for both."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of each GPU's memory, what a vLLM or SGLang server takes. None: its usual share, less what others keep there."""
    server_python: str | None = None
    """Python of the environment that has vLLM or SGLang. None: Fivefold's own."""
    server_args: list[str | int | float] = []
    """Further arguments for the server's command line, for example `[--enforce-eager]`."""


class RowsConfig(Section):
    """Where rows come from, and how they are read."""

    path: str
    """Parquet or JSONL file, folder of such files, `datasets` name, or `package:<name>`."""
    split: str | None = None
    """Of a `datasets` or package name, or of a folder whose files are named by splits. None: `train`."""
    max_length: Positive = 1024
    """Longest prompt, in tokens; longer ones are dropped and counted."""
    limit: Positive | None = None
    """Use only the first rows."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    answer_key: str | None = None
    """Column of the ground truth, for plain columns; none: `reward_model.ground_truth`."""
    apply_chat_template: bool | None = None
    """None: for chat messages yes, for texts no."""


class BatchesConfig(Section):
    """How rows are shared out over training steps."""

    batch_size: Positive = 32
    """Rows in a step."""
    shuffle: bool = True
    """A new order every epoch; false: always the order of the rows."""


class DatasetConfig(RowsConfig, BatchesConfig):
    """Prompts to train on."""


class RewardConfig(Section):
    fn: str = "math"
    """`exact_match`, `math` (math-verify), or `module:function` of your own."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments handed to the function."""


class PeriodicConfig(Section):
    """Something that is done every so many steps, and after the last one in any case."""

    freq_steps: Positive | None = None
    """None: after the last step only."""

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether it is to be done after step `step`, counted from 1."""
        return step == total_steps or (self.freq_steps is not None and step % self.freq_steps == 0)


class EvaluatorConfig(PeriodicConfig):
    """Accuracy on the held-out prompts, which is also taken before the first step."""

    n_samples: Positive = 1
    """Completions of each held-out prompt; accuracy is the mean over all of them."""
    greedy: bool = True
    """Always the most likely token."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling, with `greedy: false`."""

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
    """The weights, written over the earlier ones: an interrupted run leaves those of the last time."""


class StatsConfig(Section):
    tensorboard: bool = True
    """Also write every step's metrics as TensorBoard events."""
    n_logged_samples: NonNegative = 4
    """Generations of each step written to `samples.jsonl`."""


class RunConfig(Section):
    """What every kind of recipe has."""

    experiment_name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """What the runs are about: the outer folder of their outputs."""
    trial_name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "trial-0"
    """This run: the inner folder."""
    seed: NonNegative = 1
    """Decides all random choices: the order of rows, sampling, random weights."""
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tokenizer_path: str | None = None
    """None: `actor.path`."""
    stats: StatsConfig = StatsConfig()
    saver: SaverConfig = SaverConfig()


class TrainRecipe(RunConfig):
    """`fivefold train`: reinforcement learning."""

    allocation_mode: str | None = None
    """Older, single-string form of `rollout.backend` and `actor.backend`: `transformers:d1+megatron:d2`."""
    actor: ActorConfig
    ref: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    gconfig: GenerationConfig = GenerationConfig()
    train_dataset: DatasetConfig
    valid_dataset: RowsConfig | None = None
    """Held-out prompts, all of them evaluated each time; none: no evaluation."""
    reward: RewardConfig = RewardConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    total_train_epochs: Positive = 1
    """Times the data set is read."""
    total_train_steps: Positive | None = None
    """Stop after so many steps; none: after `total_train_epochs`."""

    @model_validator(mode="after")
    def _check_group(self) -> TrainRecipe:
        norm = self.actor.reward_norm
        if self.gconfig.n_samples == 1 and "group" in (norm.mean_level, norm.std_level):
            raise ValueError(
                "gconfig.n_samples is 1, but actor.reward_norm compares the completions of a group, which leaves no "
                "signal: raise gconfig.n_samples, or set actor.reward_norm.mean_level and std_level to batch or none"
            )
        if self.valid_dataset is None and self.evaluator != EvaluatorConfig():
            raise ValueError(
                "the evaluator section has no effect without held-out prompts: set valid_dataset.path, or drop it"
            )
        self._check_reference()
        if self.gconfig.greedy:
            raise ValueError(
                "gconfig.greedy=true gives the same completion every time, from which nothing is learnt: set it to "
                "false (evaluator.greedy is for the held-out prompts)"
            )
        if self.actor.kl_in == "loss" and self.actor.kl_ctl > 0 and self.actor.kl_estimator == "k1":
            raise ValueError(
                "actor.kl_estimator=k1 has no expected gradient as a loss: use k2 or k3, or actor.kl_in=reward"
            )
        cut = self.gconfig.top_p < 1 or self.gconfig.top_k > 0 or self.gconfig.min_new_tokens > 0
        if self.actor.recompute_logprob is False and cut:
            raise ValueError(
                "actor.recompute_logprob=false takes the old log-probs from the rollout, but with top_p, top_k or "
                "min_new_tokens those are of a distribution that was cut off: let the trainer compute them"
            )
        if self.train_dataset.batch_size % self.actor.ppo_n_minibatches:
            raise ValueError(
                f"train_dataset.batch_size={self.train_dataset.batch_size} must be a multiple of "
                f"actor.ppo_n_minibatches={self.actor.ppo_n_minibatches}, so that groups stay whole"
            )
        return self

    def _check_reference(self) -> None:
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


class SFTRowsConfig(RowsConfig):
    """Prompts with the responses to learn."""

    response_key: str = "response"
    """Column of the text to learn; the end-of-sequence token is appended."""
    max_length: Positive = 1024
    """Longest example, in tokens: prompt, response and end token. Longer ones are dropped and counted."""


class SFTDatasetConfig(SFTRowsConfig, BatchesConfig):
    """Examples to train on."""


class SFTModelConfig(EngineConfig):
    optimizer: OptimizerConfig = OptimizerConfig()


class SFTRecipe(RunConfig):
    """`fivefold sft`: supervised fine-tuning, loss on the response tokens."""

    actor: SFTModelConfig
    train_dataset: SFTDatasetConfig
    valid_dataset: SFTRowsConfig | None = None
    """Held-out examples, whose loss is computed before and after; none: it is not."""
    total_train_epochs: Positive = 1
    """Times the data set is read."""
    total_train_steps: Positive | None = None
    """Stop after so many steps; none: after `total_train_epochs`."""


Recipe = TrainRecipe | SFTRecipe
