"""What takes the place of keys that Megatron-Core and other frameworks have and a recipe has not."""

from __future__ import annotations

from fivefold.config.megatron_names import REFUSED

_IN_TOKENS = "micro-batches have a token budget: set mb_spec.max_tokens_per_mb"
_INFER = (
    "passes without gradients have a token budget: set mb_spec.max_tokens_per_infer_mb of a model that is trained, and "
    "mb_spec.max_tokens_per_mb of another"
)
_RECOMPUTED = "set megatron.recompute, or fsdp.recompute"
_LAYOUT = "the layout decides it: set backend"
_OTHERS: dict[str, str] = {
    "gradient_accumulation_steps": "set ppo_n_minibatches, the updates of a step; " + _IN_TOKENS,
    "per_device_train_batch_size": _IN_TOKENS,
    "ppo_micro_batch_size_per_gpu": _IN_TOKENS,
    "infer_batch_size": _INFER,
    "log_prob_micro_batch_size_per_gpu": _INFER,
    "gradient_checkpointing": _RECOMPUTED,
    "enable_gradient_checkpointing": _RECOMPUTED,
    "disable_gradient_checkpointing": _RECOMPUTED,
    "param_offload": "set offload.params of the role",
    "grad_offload": "set offload.grads of the role",
    "optimizer_offload": "set offload.optimizer of the role",
    "use_mbridge": "set megatron.bridge_type to mbridge",
    "override_transformer_config": "its keys are those of megatron.transformer",
    "grad_clip": "set optimizer.gradient_clipping",
    "strategy": _LAYOUT,
    "strategy_args": _LAYOUT,
}
"""Keys of AReaL, ROLL, siiRL, verl and Trinity-RFT, by their last word."""


def in_its_place(key: str) -> str | None:
    """Return what to do in the place of an unknown key that Megatron-Core or another framework has."""
    section, _, name = key.rpartition(".")
    if section.rpartition(".")[2] == "megatron":
        for owner, reasons in REFUSED.items():
            if name in reasons:
                return f"{name} of Megatron-Core's {owner} cannot be set in a recipe: {reasons[name]}"
    return _OTHERS.get(name)
