"""Megatron-Core's own options, which several frameworks hand on under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.importing.draft import (
    Degree,
    Draft,
    Role,
    Rule,
    flag,
    implied,
    number,
    off,
    one_of,
    only,
    to,
    unsupported,
)

DEGREES: Mapping[str, Degree] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
KERNELS = "Fivefold chooses its kernels itself"
EQUAL_STAGES = "pipeline stages hold equally many layers"
DROPLESS = "no token is ever dropped"
AS_ACTOR = "the reference runs with the actor's options"
CHECKPOINT = "recomputation is switched by actor.megatron.recompute: none, selective or full"

OVERRIDES: Mapping[str, Rule] = {
    "moe_router_dtype": to("actor.megatron.router_dtype", one_of(fp32="fp32", float32="fp32")),
    "moe_token_dispatcher_type": to(
        "actor.megatron.token_dispatcher", one_of(alltoall="alltoall", allgather="allgather")
    ),
    "moe_aux_loss_coeff": to("actor.megatron.transformer.moe_aux_loss_coeff", number),
    "moe_z_loss_coeff": to("actor.megatron.transformer.moe_z_loss_coeff", number),
    "moe_router_load_balancing_type": only(
        "aux_loss", "none", holds="moe_aux_loss_coeff weighs it", otherwise="experts are balanced by the auxiliary loss"
    ),
    "recompute_granularity": implied("only training recomputes"),
    "moe_layer_recompute": implied("only training recomputes"),
    "recompute_modules": unsupported("`selective` recomputes the MLP and MoE activations"),
    "recompute_method": only("uniform", holds="whole layers, one by one", otherwise=CHECKPOINT),
    "recompute_num_layers": only(1, holds="whole layers, one by one", otherwise=CHECKPOINT),
    "distribute_saved_activations": off(CHECKPOINT),
    "sequence_parallel": implied("goes with t > 1"),
    "use_distributed_optimizer": only(
        True, holds="the optimizer is always distributed", otherwise="the optimizer is always distributed"
    ),
    "moe_grouped_gemm": only(True, holds="experts are always grouped", otherwise="experts are always grouped"),
    "moe_permute_fusion": implied(KERNELS),
    "moe_shared_expert_overlap": off("shared experts do not overlap with the exchange of tokens"),
    "moe_enable_deepep": off("tokens travel by all-to-all or all-gather, not by DeepEP"),
    "moe_expert_capacity_factor": unsupported(DROPLESS),
    "moe_pad_expert_input_to_capacity": off(DROPLESS),
    "moe_token_drop_policy": implied(DROPLESS),
    "moe_enable_routing_replay": off("router choices of the rollout are not replayed"),
    "account_for_embedding_in_pipeline_split": off(EQUAL_STAGES),
    "account_for_loss_in_pipeline_split": off(EQUAL_STAGES),
    "num_layers_in_first_pipeline_stage": unsupported(EQUAL_STAGES),
    "num_layers_in_last_pipeline_stage": unsupported(EQUAL_STAGES),
    "pipeline_model_parallel_layout": unsupported(EQUAL_STAGES),
    "mtp_num_layers": off("multi-token prediction is not offered"),
    "variable_seq_lengths": implied("sequences are always packed at their own lengths"),
    "calculate_per_token_loss": implied("actor.loss_aggregation says how the loss is averaged"),
    "overlap_p2p_comm": implied("follows from the pipeline's schedule"),
    "batch_p2p_comm": implied("follows from the pipeline's schedule"),
    "deallocate_pipeline_outputs": implied("activations in flight are kept as the schedule needs them"),
    "transformer_impl": implied(KERNELS),
    "attention_backend": implied(KERNELS),
    "use_flash_attn": implied(KERNELS),
    "apply_rope_fusion": implied(KERNELS),
    "persist_layer_norm": implied(KERNELS),
    "masked_softmax_fusion": implied(KERNELS),
    "bias_activation_fusion": implied(KERNELS),
    "bias_dropout_fusion": implied(KERNELS),
    "gradient_accumulation_fusion": implied(KERNELS),
    "cross_entropy_loss_fusion": implied(KERNELS),
    "bf16": implied("actor.dtype says it"),
    "cuda_graph*": off("CUDA graphs are not captured in training"),
    "fp8*": off("training runs in bfloat16 or float32"),
    "*": unsupported("not among the Megatron-Core options that are carried over"),
}
"""Of TransformerConfig. Degrees of parallelism and the granularity of recomputation are read apart."""

DDP: Mapping[str, Rule] = {
    "overlap_grad_reduce": to("actor.megatron.ddp.overlap_grad_reduce", flag),
    "use_distributed_optimizer": OVERRIDES["use_distributed_optimizer"],
    "grad_reduce_in_fp32": only(
        True, holds="gradients are always reduced in float32", otherwise="gradients are always reduced in float32"
    ),
    "average_in_collective": off("gradients are summed, and divided by global counts"),
    "*": off("not among the options of Megatron-Core's DistributedDataParallelConfig that are carried over"),
}
"""Of DistributedDataParallelConfig."""


def degrees(draft: Draft, role: Role, prefix: str) -> None:
    """Reads the six degrees below `prefix`, those that the source writes."""
    for name, degree in DEGREES.items():
        if draft.writes(prefix + name):
            draft.lay_out(prefix + name, role, degree)


def recompute(draft: Draft, prefix: str, switch: str, is_on: bool) -> None:
    """`recompute_granularity` below `prefix`.

    `switch` is the framework's own key for gradient checkpointing. Where it is off, so is everything below; where it
    is on without a granularity, Megatron-Core recomputes nothing.
    """
    key, moe = prefix + "recompute_granularity", prefix + "moe_layer_recompute"
    granularity = draft.get(key) if is_on else None
    if granularity in ("full", "selective"):
        draft.mapped(key, "actor.megatron.recompute", granularity)
        draft.implied(switch, f"follows from {key}")
        draft.implied(moe, f"follows from {key}")
    elif draft.get(moe) is True and is_on:
        draft.mapped(moe, "actor.megatron.recompute", "selective", "the MoE and MLP activations")
        draft.implied(switch, f"follows from {moe}")
    draft.implied(key, "without gradient checkpointing, nothing is recomputed")
    draft.implied(moe, "nothing is recomputed, as it is by default")
    draft.implied(switch, f"without {key}, Megatron-Core recomputes nothing" if is_on else "off, as it is by default")


def checkpoint_layers(draft: Draft, switch: str, is_on: bool) -> None:
    """The gradient checkpointing of FSDP and DeepSpeed, which recomputes whole layers; `switch` is its key."""
    if is_on:
        draft.mapped(switch, "actor.megatron.recompute", "full", "whole layers are recomputed, as there")
    draft.implied(switch, "off, as it is by default")


def ignore(draft: Draft, section: str) -> None:
    """Megatron-Core's options below `section`, where the source does not train with it."""
    for key in draft.keys(f"{section}*"):
        draft.implied(key, "only Megatron-Core reads it, and the source trains with another engine")
