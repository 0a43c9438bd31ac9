"""Settings of the FSDP engine."""

from __future__ import annotations

from typing import Literal

from fivefold.config.schema.fields import Positive, Section


class FSDPConfig(Section):
    """Settings that only the FSDP engine reads."""

    recompute: Literal["none", "full"] = "none"
    """Which activations the backward pass computes again: none, or those of whole layers."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights behind its forward pass, and gather them again for its backward pass; false:
    keep them until then, which takes the memory of the whole model and saves one exchange."""
    logprob_chunk_size: Positive = 1024
    """Number of tokens whose logits [chunk, vocabulary / tp] exist at one time."""
