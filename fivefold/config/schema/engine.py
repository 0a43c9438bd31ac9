"""The sections that every trained model has: backend, optimizer, micro-batches and the engine's own fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.schema.fields import (
    DeviceList,
    Fraction,
    ModelDtype,
    NonNegative,
    NonNegativeFloat,
    OneLine,
    PathText,
    Positive,
    PositiveFloat,
    Section,
    Sequences,
)
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.config.schema.role import Offloadable, RoleConfig
from fivefold.config.schema.rules import absent, equals, needs, reads_if, rule

FlashAttention = Literal["flash_attention_2", "flash_attention_4"]
"""Versions of flash attention."""


class OptimizerConfig(Section):
    """Hyper-parameters of AdamW and of its learning-rate schedule, whichever engine trains.

    Fields that only Megatron-Core's optimizer has are in `actor.megatron.optimizer`.
    """

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay; norms and biases are exempt. It is decoupled from the gradient unless
    `decoupled_weight_decay` of `actor.megatron.optimizer` or `actor.fsdp.optimizer` is false."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay after the warm-up. `wsd`: none, but for the last steps, as `decay_steps` and `decay_shape` say
    (warm-up, stable, decay)."""
    cycles: Annotated[Positive, reads_if(equals("lr_scheduler_type", "cosine"))] = 1
    """Times that a cosine decay starts again from `lr`; each decay takes the same number of steps."""
    decay_steps_proportion: Annotated[
        Fraction, reads_if(equals("lr_scheduler_type", "wsd")), reads_if(absent("decay_steps"))
    ] = 0.1
    """Share of all optimizer steps that the decay of `wsd` takes."""
    decay_steps: Annotated[Positive | None, reads_if(equals("lr_scheduler_type", "wsd"))] = None
    """Optimizer updates of the decay of `wsd`, in place of `decay_steps_proportion`; null: as that says."""
    decay_shape: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"], reads_if(equals("lr_scheduler_type", "wsd"))
    ] = "linear"
    """Shape of the decay of `wsd`, as Megatron-Core computes it."""
    warmup_steps_proportion: Annotated[Fraction, reads_if(absent("warmup_steps"))] = 0.0
    """Share of all optimizer steps spent on a linear warm-up from 0."""
    warmup_steps: NonNegative | None = None
    """Optimizer updates of the warm-up, in place of `warmup_steps_proportion`; null: as that says."""
    warmup_start_ratio: Fraction = 0.0
    """Learning rate of the first step of the warm-up as a share of `lr`; 0: the first of n steps has `lr` / n."""
    min_lr_ratio: Annotated[
        Fraction, reads_if(equals("lr_scheduler_type", "linear", "cosine", "wsd"), "is the end of a decay")
    ] = 0.0
    """Learning rate at the end of the decay, as a share of `lr`. As in torch's schedules, the end is one step after the
    last one."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 switches clipping off."""

    @rule
    def _warmup(self) -> Iterator[str]:
        if self.warmup_start_ratio > 0 and not (self.warmup_steps or self.warmup_steps_proportion):
            yield (
                f"warmup_start_ratio={self.warmup_start_ratio:g} has no effect without a warm-up: set warmup_steps or "
                "warmup_steps_proportion, or drop warmup_start_ratio"
            )


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
    dtype: ModelDtype = "bfloat16"
    """Dtype of weights and activations. Gradients, Adam's moments and master weights are float32 unless
    `actor.megatron` or `actor.fsdp` says otherwise. With float16 the loss is scaled (docs/megatron.md)."""
    attn_impl: Annotated[
        FlashAttention,
        needs("flash_attention_4", equals("dtype", "bfloat16"), "is for bfloat16 models on GPUs"),
        needs(
            "flash_attention_4",
            equals("megatron.kernels", "fivefold"),
            "replaces TransformerEngine's own choice of kernels",
        ),
    ] = "flash_attention_2"
    """Attention of bfloat16 models on GPUs: FlashAttention 2, which PyTorch brings, or 4, which is faster on Hopper and
    Blackwell GPUs and needs `pip install fivefold[flash-attention-4]`. Elsewhere PyTorch's other kernels attend."""
    init_from_scratch: Annotated[
        bool, needs(True, equals("megatron.use_dist_checkpointing", False), "starts from random weights")
    ] = False
    """Start from random weights, drawn with `seed`, instead of the checkpoint's; `path` then needs only a config and a
    tokenizer."""
    mb_spec: MicroBatchConfig = MicroBatchConfig()
    megatron: MegatronConfig = MegatronConfig()
    fsdp: FSDPConfig = FSDPConfig()

    @property
    def is_deterministic(self) -> bool:
        """Whether the model's engine computes the same bits in every run."""
        return self.megatron.use_deterministic_algorithms or self.fsdp.use_deterministic_algorithms


class TrainedModelConfig(EngineConfig):
    """A model that is trained."""

    mb_spec: TrainedMicroBatchConfig = TrainedMicroBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Low-rank adapters that are trained in place of the weights; null: all weights are trained."""
    freeze: list[OneLine] = []
    """Weights that are not trained, by Hugging Face name or pattern, such as `["model.embed_tokens.*", "*.mlp.gate.*"]`
    (docs/lora.md#frozen-weights)."""

    @rule
    def _frozen_once(self) -> Iterator[str]:
        if self.freeze and self.lora is not None:
            yield (
                f"freeze={self.freeze} has no effect with lora, which freezes all weights: drop it, or name the layers "
                "that get adapters in lora.targets"
            )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return False

    @property
    def epochs(self) -> int:
        """Times that a step trains on each of its sequences."""
        return 1

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
    """Move the weights, with a reference model's in the same processes, to pinned host memory."""
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
    """A model that is not trained, in its own processes."""

    colocate: Annotated[bool, needs(False, absent("device_mapping"), "gives the model its own devices")] = True
    """Share the actor's devices, in turn; false: have its own devices."""
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

    @rule
    def _untrained(self) -> Iterator[str]:
        strays = ["init_from_scratch"] if self.init_from_scratch else []
        for engine, names in _ONLY_TRAINING.items():
            section = getattr(self, engine)
            strays += [f"{engine}.{name}" for name in names if getattr(section, name) != getattr(type(section)(), name)]
        if strays:
            yield (
                f"{strays[0]} has no effect on a model that is not trained, and starts from the weights of its Hugging "
                f"Face folder: drop {' and '.join(strays)}"
            )
