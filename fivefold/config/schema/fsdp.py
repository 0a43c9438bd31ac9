"""Settings of the FSDP engine."""

from __future__ import annotations

from typing import Literal

from fivefold.config.schema.fields import Dtype, Positive, Section


class FSDPOptimizerFields(Section):
    """Formats and place of Adam's moments. Master weights are the float32 shards themselves, which stay on the GPU.

    The learning rate, the betas and the other hyper-parameters are in `actor.optimizer`.
    """

    exp_avg_dtype: Dtype = "float32"
    """Dtype in which Adam's first moment is stored; bfloat16 is rounded stochastically, so that its mean is right."""
    exp_avg_sq_dtype: Dtype = "float32"
    """Dtype in which Adam's second moment is stored, like `exp_avg_dtype`."""
    state_on: Literal["device", "host"] = "device"
    """Where the moments are: on the GPU, or in pinned host memory, from which each update streams them through the GPU
    in buckets. The results are the same bit for bit."""


class FSDPConfig(Section):
    """Settings that only the FSDP engine reads."""

    recompute: Literal["none", "full"] = "none"
    """Which activations the backward pass computes again: none, or those of whole layers."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights behind its forward pass, and gather them again for its backward pass; false:
    keep them until then, which takes the memory of the whole model and saves one exchange."""
    logprob_chunk_size: Positive = 1024
    """Number of tokens whose logits [chunk, vocabulary / tp] exist at one time."""
    optimizer: FSDPOptimizerFields = FSDPOptimizerFields()
