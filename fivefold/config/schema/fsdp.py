"""The section `fsdp`: settings that only the FSDP engine reads, and PyTorch's own parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.limits import MOST_DEVICES, MOST_LAYERS
from fivefold.config.schema.fields import Dtype, LibraryFields, Positive

Layers = Annotated[int, Field(ge=0, le=MOST_LAYERS)]


class TorchParameters(LibraryFields):
    """Parameters of one of PyTorch's functions or classes."""

    library = "PyTorch"


class FSDPMixedPrecision(TorchParameters):
    """Parameters of PyTorch's `MixedPrecisionPolicy`."""

    owner = "MixedPrecisionPolicy"

    reduce_dtype: Dtype = "float32"
    """Dtype in which the gradients of a micro-batch are summed over ranks. Over micro-batches they are summed in
    float32."""


class FSDPOptimizerFields(TorchParameters):
    """Parameters of PyTorch's `AdamW`, and formats and place of Adam's moments.

    Master weights are the float32 shards themselves, which stay on the GPU. The learning rate, the betas and the other
    hyper-parameters are in `actor.optimizer`.
    """

    owner = "AdamW"
    added = frozenset({"decoupled_weight_decay", "exp_avg_dtype", "exp_avg_sq_dtype", "state_on"})

    decoupled_weight_decay: bool = True
    """true: AdamW; false: `actor.optimizer.weight_decay` is an L2 penalty inside Adam."""
    exp_avg_dtype: Dtype = "float32"
    """Dtype in which Adam's first moment is stored; bfloat16 is rounded stochastically, so that its mean is right."""
    exp_avg_sq_dtype: Dtype = "float32"
    """Dtype in which Adam's second moment is stored, like `exp_avg_dtype`."""
    state_on: Literal["device", "host"] = "device"
    """Where the moments are: on the GPU, or in pinned host memory, from which each update streams them through the GPU
    in buckets. The results are the same bit for bit."""


class FSDPConfig(TorchParameters):
    """Settings that only the FSDP engine reads: parameters of PyTorch's `fully_shard`, and others."""

    owner = "fully_shard"
    added = frozenset(
        {
            "use_deterministic_algorithms",
            "recompute",
            "forward_prefetch",
            "backward_prefetch",
            "logprob_chunk_size",
            "logprob_recompute",
            "optimizer",
        }
    )

    use_deterministic_algorithms: bool = False
    """Use kernels and collectives whose results are the same bit for bit in every run, in the rollout's embedded engine
    too; they are slower."""

    recompute: Literal["none", "full"] = "none"
    """Which activations the backward pass computes again: none, or the activations of whole layers."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2, le=MOST_DEVICES)] = True
    """Free each layer's gathered weights after its forward pass, and gather them again for its backward pass; false:
    keep them until then, which takes the memory of the whole model and saves one exchange. A number n, which divides
    the ranks over which weights are sharded: keep a share of 1 / n, which is gathered among n neighbours."""
    forward_prefetch: Layers = 0
    """Layers whose weights are gathered ahead of the layer that computes, in the forward pass. At 0, PyTorch gathers
    the next layer as soon as the host comes to it, which is enough where the host is ahead of the GPU."""
    backward_prefetch: Layers = 0
    """The same in the backward pass, where PyTorch gathers one layer ahead at 0."""
    mp_policy: FSDPMixedPrecision = FSDPMixedPrecision()
    logprob_chunk_size: Positive = 1024
    """Number of tokens whose logits [chunk, vocabulary / tp] exist at one time."""
    logprob_recompute: bool = True
    """Compute the logits again in the backward pass; false: keep the logits of all trained tokens of a micro-batch, 4
    bytes for each token and row of the vocabulary / tp, which spares one of the four products of the output layer."""
    optimizer: FSDPOptimizerFields = FSDPOptimizerFields()
