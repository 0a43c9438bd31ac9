"""The sections that every trained model has: backend, optimizer, micro-batches and the engine's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fivefold.config.schema.fields import (
    DeviceList,
    Dtype,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    Section,
    Sequences,
)
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.config.schema.role import Offloadable, RoleConfig

FlashAttention = Literal["flash_attention_2", "flash_attention_4"]
"""Versions of flash attention."""


class OptimizerConfig(Section):
    """Hyper-parameters of AdamW and of its learning-rate schedule, whichever engine trains.

    Fields that only Megatron-Core's optimizer has are in `actor.megatron.optimizer`.
    """

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's weight decay; norms and biases are exempt. It is decoupled from the gradient unless
    `decoupled_weight_decay` of `actor.megatron.optimizer` or `actor.fsdp.optimizer` is false."""
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
    warmup_steps: NonNegative | None = None
    """Optimizer updates of the warm-up, in place of `warmup_steps_proportion`; null: as that says."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of `lr`. As in torch's schedules, the end is one step after the
    last one."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 switches clipping off."""

    @model_validator(mode="after")
    def _check_warmup(self) -> OptimizerConfig:
        if self.warmup_steps is not None and self.warmup_steps_proportion > 0:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_steps_proportion={self.warmup_steps_proportion} both say "
                "how long the warm-up is: keep one"
            )
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerConfig:
        if self.min_lr_ratio > 0 and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} is the end of a decay, but lr_scheduler_type=constant has none: "
                "set lr_scheduler_type to linear or cosine, or drop min_lr_ratio"
            )
        return self


class MicroBatchConfig(Section):
    """How a mini-batch is split into the micro-batches of one pass each."""

    max_tokens_per_mb: Positive = 8192
    """Most tokens in one micro-batch, summed over its context-parallel shards. A longer sequence has a micro-batch to
    itself."""
    n_mbs: Sequences = 1
    """Fewest micro-batches that a data-parallel rank splits a mini-batch into."""

    @property
    def infer_tokens(self) -> int:
        """Most tokens in a micro-batch of a pass without gradients."""
        return self.max_tokens_per_mb


class TrainedMicroBatchConfig(MicroBatchConfig):
    """How a mini-batch is split into the micro-batches of one pass each, forward and backward or without gradients."""

    max_tokens_per_infer_mb: Positive | None = None
    """Most tokens in one micro-batch of passes without gradients (log-probs, values), which keep no activations; null:
    as `max_tokens_per_mb`."""

    @property
    def infer_tokens(self) -> int:
        """Most tokens in a micro-batch of a pass without gradients."""
        return self.max_tokens_per_infer_mb or self.max_tokens_per_mb


class EngineConfig(RoleConfig):
    """A model, and how it is laid out over processes."""

    path: PathText
    """Hugging Face folder, hub name, or `package:<name>` for a model that ships with Fivefold."""
    backend: str = "megatron:d1"
    """Backend and layout, for example `megatron:d2p2t2c2e2`, `megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)` or `fsdp:d8`
    (docs/layouts.md)."""
    device_mapping: DeviceList | None = None
    """GPUs of the ranks, numbered from 0 over all nodes: `0-31`, `[0, 2, 4]`, `list(range(0,32))`. Every role has a
    list, or none has; roles whose lists overlap take turns. null: the layouts and `rollout.colocate` decide."""
    dtype: Dtype = "bfloat16"
    """Dtype of weights and activations. Gradients, Adam's moments and master weights are float32 unless
    `actor.megatron` or `actor.fsdp` says otherwise."""
    attn_impl: FlashAttention = "flash_attention_2"
    """Attention of bfloat16 models on GPUs: FlashAttention 2, which PyTorch brings, or 4, which is faster on Hopper and
    Blackwell GPUs and needs `pip install fivefold[flash-attention-4]`. Elsewhere PyTorch's other kernels attend."""
    init_from_scratch: bool = False
    """Start from random weights, drawn with `seed`, instead of the checkpoint's; `path` then needs only a config and a
    tokenizer."""
    mb_spec: MicroBatchConfig = MicroBatchConfig()
    megatron: MegatronConfig = MegatronConfig()
    fsdp: FSDPConfig = FSDPConfig()

    @property
    def is_deterministic(self) -> bool:
        """Whether the model's engine computes the same bits in every run."""
        return self.megatron.use_deterministic_algorithms or self.fsdp.use_deterministic_algorithms

    @model_validator(mode="after")
    def _check_precision(self) -> EngineConfig:
        if self.dtype == "float32" and self.attn_impl == "flash_attention_4":
            raise ValueError(
                "attn_impl=flash_attention_4 is for bfloat16 models on GPUs, got dtype=float32: set dtype to bfloat16, "
                "or attn_impl to flash_attention_2"
            )
        if self.megatron.kernels == "te" and self.dtype == "float32":
            raise ValueError(
                "megatron.kernels=te attends in bfloat16 only, got dtype=float32: set dtype to bfloat16, or "
                "megatron.kernels to fivefold"
            )
        if self.megatron.kernels == "te" and self.attn_impl == "flash_attention_4":
            raise ValueError(
                "megatron.kernels=te attends with TransformerEngine's own choice of kernels, got "
                "attn_impl=flash_attention_4: drop attn_impl, or set megatron.kernels to fivefold"
            )
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


class TrainedModelConfig(EngineConfig):
    """A model that is trained."""

    mb_spec: TrainedMicroBatchConfig = TrainedMicroBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return False

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return 1

    @property
    def steps_alone(self) -> int:
        """Training steps at the beginning in which no other role is trained."""
        return 0


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
    (`actor.megatron.optimizer.state_on`, `actor.fsdp.optimizer.state_on`)."""

    @property
    def by_part(self) -> dict[Offloadable, bool | None]:
        """The keys and their values."""
        return {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}


_ONLY_TRAINING = {
    "megatron": ("use_dist_checkpointing", "ddp", "optimizer", "transformer", "recompute"),
    "fsdp": ("optimizer", "recompute", "mp_policy", "backward_prefetch"),
}
"""Keys of each engine's section that only a trained model reads."""


class FrozenModelConfig(EngineConfig):
    """A model that is not trained, in processes of its own."""

    colocate: bool = True
    """Share the actor's devices, in turn; false: have devices of its own."""
    offload: bool | None = None
    """Move the weights to pinned host memory while the model does not work; null: if it shares GPUs."""

    @property
    def takes_turns(self) -> bool | None:
        """Whether the model shares the actor's devices, in turn."""
        return self.colocate

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """The weights: a frozen model has no other state."""
        return {"params": self.offload}

    @model_validator(mode="after")
    def _check_frozen(self) -> FrozenModelConfig:
        strays = ["init_from_scratch"] if self.init_from_scratch else []
        for engine, names in _ONLY_TRAINING.items():
            section = getattr(self, engine)
            strays += [f"{engine}.{name}" for name in names if getattr(section, name) != getattr(type(section)(), name)]
        if strays:
            raise ValueError(
                f"{strays[0]} has no effect on a model that is not trained, and starts from the weights of its Hugging "
                f"Face folder: drop {' and '.join(strays)}"
            )
        if self.device_mapping is not None and not self.colocate:
            raise ValueError("colocate=false and device_mapping both say which devices the model has: keep one")
        return self
