"""Why a recipe cannot set some parameters of PyTorch's FSDP2 and AdamW, and which key to use instead.

A recipe may write under `actor.fsdp` what the schema declares there. Every other parameter of `fully_shard`,
`MixedPrecisionPolicy` and `AdamW` is here, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

_LAYOUT = "the layout decides it: set backend"
_PROGRAM = "it is an object of the running program, not a setting"
_FUSED = "the update is always PyTorch's fused kernel, on buckets of the state"

REFUSED: Mapping[str, Mapping[str, str]] = {
    "fully_shard": {
        "module": "each layer is a unit, and the embedding and the output layer are one together",
        "mesh": _LAYOUT,
        "dp_mesh_dims": _LAYOUT,
        "shard_placement_fn": "parameters are always sharded by rows, on which checkpoints rely",
        "ignored_params": "all parameters are sharded",
        "offload_policy": "set offload beside fsdp for the time in which the model does not work, or "
        "optimizer.state_on=host for the moments; shards that the optimizer updates stay on the GPU",
    },
    "MixedPrecisionPolicy": {
        "param_dtype": "the number format of the whole model decides it: set dtype",
        "output_dtype": "log-probs are always computed in float32",
        "cast_forward_inputs": "hidden states have the model's number format already",
    },
    "AdamW": {
        "params": _PROGRAM,
        "lr": "set optimizer.lr beside fsdp",
        "betas": "set optimizer.beta1 and beta2 beside fsdp",
        "eps": "set optimizer.eps beside fsdp",
        "weight_decay": "set optimizer.weight_decay beside fsdp",
        "amsgrad": "Megatron-Core's Adam has no such variant, and both engines train to the same numbers",
        "maximize": "losses are minimised",
        "foreach": _FUSED,
        "fused": _FUSED,
        "capturable": _FUSED,
        "differentiable": _FUSED,
    },
}
"""The reason for each parameter of PyTorch's functions and classes that a recipe cannot set."""
