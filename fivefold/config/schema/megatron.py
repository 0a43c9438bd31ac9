"""The section `megatron`: settings that only the Megatron-Core engine reads, and Megatron-Core's own fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from fivefold.config.schema.fields import Dtype, Fraction, LibraryFields, NonNegativeFloat, PathText, Positive, Section
from fivefold.config.schema.rules import OfPart, equals, given, needs, reads_if, rule

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
Kernels = Literal["fivefold", "te"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]

_STAGES = "pipeline_model_parallel_layout"


class MegatronFields(LibraryFields):
    """Fields of one of Megatron-Core's configuration classes."""

    library = "Megatron-Core"


_EXPERTS = OfPart("is_moe", "experts")


class MegatronTransformerFields(MegatronFields):
    """Fields of Megatron-Core's `TransformerConfig`, handed on under their own names.

    The model's config and the layout decide the fields that are not here; to set one is an error that names the key to
    use instead, or says why the field has no effect.
    """

    owner = "TransformerConfig"

    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first pipeline stage, all its virtual stages together; null: see `pipeline_model_parallel_layout`.
    """
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last pipeline stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage, which then has a layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer as a layer of the last stage."""
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    """Layers of every (virtual) stage, as in `Et*11|(t*12|)*6t*11L`: E is the embedding, t a layer, L the output layer.
    null: as equal as can be; where layers do not divide, the middle stages have one more than the ends."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, reads_if(equals("recompute", "full"))] = None
    """With `recompute: full`: `uniform` recomputes all layers, in blocks of `recompute_num_layers`; `block` recomputes
    the first `recompute_num_layers` layers of each (virtual) stage, one by one. null: `uniform`."""
    recompute_num_layers: Annotated[Positive | None, reads_if(equals("recompute", "full"))] = None
    """Layers of `recompute_method`; null: 1."""
    recompute_modules: Annotated[list[RecomputeModule] | None, reads_if(equals("recompute", "selective"))] = None
    """With `recompute: selective`: the modules that are computed again. null: `mlp` and, in models with experts, `moe`.
    """
    moe_layer_recompute: Annotated[bool, _EXPERTS] = False
    """Compute MoE layers again in the backward pass, as `recompute: selective` with `recompute_modules: [moe]` does."""
    moe_router_load_balancing_type: Balancing | list[Balancing] = "aux_loss"
    """Over what the router's load-balancing loss is taken: `aux_loss`, a micro-batch; `seq_aux_loss`, each sequence;
    `global_aux_loss`, the micro-batches of all replicas so far in the mini-batch; `none`. Or a list of several."""
    moe_aux_loss_coeff: Annotated[NonNegativeFloat | list[NonNegativeFloat], _EXPERTS] = 0.0
    """Weight of the load-balancing loss, or of each in the list; at 0, only the policy loss trains the router."""
    moe_z_loss_coeff: Annotated[NonNegativeFloat | None, _EXPERTS] = None
    """Weight of the router's z-loss (Zoph et al. 2022); null: no z-loss."""
    moe_router_num_groups: Annotated[Positive | None, _EXPERTS, reads_if(given("moe_router_group_topk"))] = None
    """Equal groups of experts; a token visits only `moe_router_group_topk` of them. null: no
    groups. An engine that generates has groups only if the model's config.json has them."""
    moe_router_group_topk: Annotated[Positive | None, reads_if(given("moe_router_num_groups"))] = None
    """Groups of experts that a token may visit."""
    moe_router_bias_update_rate: Annotated[Fraction, OfPart("router_bias", "offsets of router scores")] = 0.0
    """Balance experts without a loss (Wang et al. 2024): after each update, the offset of an expert that got more
    tokens than the mean falls by this, and the offset of an expert that got fewer rises. At 0, offsets stay as the
    model's files have them. Only models whose routers have such offsets can have it."""
    moe_router_force_load_balancing: Annotated[bool, _EXPERTS] = False
    """Route tokens at random, so that experts have equal loads. It is for measuring speed: the model learns nothing."""
    moe_deepep_num_sms: Positive = 20
    """With `token_dispatcher: flex`: multiprocessors of the GPU that DeepEP takes for the exchange."""
    moe_shared_expert_overlap: Annotated[
        bool,
        OfPart("shared_expert_ffn_hidden", "shared experts"),
        needs(True, equals("token_dispatcher", "alltoall"), "overlaps with an all-to-all"),
    ] = False
    """Compute shared experts on a separate stream while tokens travel to the other experts and back. It needs
    expert parallelism, or slices of experts on several ranks."""
    bias_activation_fusion: bool = False
    """Compute the activation of dense MLPs and shared experts in one kernel, which saves memory."""
    deallocate_pipeline_outputs: bool = False
    """Free what a pipeline stage has sent to the next one; the backward pass needs only its graph."""
    batch_p2p_sync: bool = True
    """Wait for the device after stages have exchanged tensors; without virtual stages."""
    microbatch_group_size_per_vp_stage: Positive | None = None
    """With virtual stages: micro-batches that one of them computes before the next one's turn, a multiple of the
    pipeline's stages; null: as many as stages. Where there are fewer, it computes all of them."""
    clone_scatter_output_in_embedding: bool = True
    """With tensor parallelism: copy this rank's part of the embeddings, so that the whole can be freed."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Sum the partial products of bfloat16 matrix products in float32; it holds for all models of the process."""

    @rule
    def _balancing(self) -> Iterator[str]:
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(kinds, list) != isinstance(weights, list) or (
            isinstance(kinds, list) and isinstance(weights, list) and len(kinds) != len(weights)
        ):
            yield (
                f"moe_router_load_balancing_type={kinds} and moe_aux_loss_coeff={weights} must both be one value, or "
                "lists of the same length"
            )
        if isinstance(kinds, list) and len(set(kinds)) < len(kinds):
            yield f"moe_router_load_balancing_type={kinds} names a loss twice: keep one"
        if kinds == "none" and weights:
            yield f"moe_aux_loss_coeff={weights} is the weight of a loss, and there is none: set it to 0"

    @rule
    def _stages(self) -> Iterator[str]:
        ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        groups = [[name for name in names if getattr(self, name)] for names in (ends, counted, (_STAGES,))]
        written = [group[0] for group in groups if group]
        if len(written) > 1:
            yield f"{' and '.join(written)} both say how layers are divided over stages: keep one"


class MegatronDDPFields(MegatronFields):
    """Fields of Megatron-Core's `DistributedDataParallelConfig`, handed on under their own names."""

    owner = "DistributedDataParallelConfig"

    bucket_size: Positive | None = None
    """Number of parameters whose gradients are reduced in one collective; null: Megatron-Core chooses."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients during the backward pass; null: on GPUs, if there is data parallelism."""
    grad_reduce_in_fp32: Annotated[
        bool, needs(False, equals("dtype", "bfloat16"), "keeps gradients in the weights' dtype")
    ] = True
    """Keep and reduce gradients in float32; false: in bfloat16, which takes half of the memory. The sum of the
    micro-batches is then rounded stochastically after each of them, so that it is right on average (by
    TransformerEngine's kernels, to the nearest), and the sum over the ranks once."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to a multiple of 2^16 elements, with which NCCL is fastest."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With `grad_reduce_in_fp32: false`: send gradients in bfloat16, and sum them over the ranks in float32."""


class MegatronOptimizerFields(MegatronFields):
    """Fields of Megatron-Core's `OptimizerConfig` that no other engine has, under their own names, and `state_on`.

    The learning rate, the betas and the other hyper-parameters are in `actor.optimizer`.
    """

    owner = "OptimizerConfig"
    added = frozenset({"state_on"})

    decoupled_weight_decay: bool = True
    """true: AdamW; false: `actor.optimizer.weight_decay` is an L2 penalty inside Adam."""
    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the query and key norms as well."""
    decoupled_lr: NonNegativeFloat | None = None
    """Peak learning rate of the embedding and the output layer; null: the rate of all other weights."""
    decoupled_min_lr: Annotated[NonNegativeFloat | None, reads_if(given("decoupled_lr"))] = None
    """Learning rate of the embedding and the output layer at the end of the decay; null: `decoupled_lr` times
    `actor.optimizer.min_lr_ratio`."""
    exp_avg_dtype: Dtype = "float32"
    """Dtype in which Adam's first moment is stored; bfloat16 is rounded stochastically, so that its mean is right."""
    exp_avg_sq_dtype: Dtype = "float32"
    """Dtype in which Adam's second moment is stored, like `exp_avg_dtype`."""
    store_param_remainders: Annotated[
        bool, needs(True, equals("dtype", "bfloat16"), "stores what bfloat16 weights lack")
    ] = False
    """Store of each float32 master weight only the 16 bits that its bfloat16 weight lacks. It is exact; the weights are
    then rounded to the nearest with ties away from zero, rather than to even."""
    state_on: Literal["device", "host"] = "device"
    """Where master weights and moments are: on the GPU, or in pinned host memory, from which each update streams them
    through the GPU in buckets. The results are the same bit for bit."""


class MegatronConfig(Section):
    """Settings that only the Megatron-Core engine reads."""

    bridge_type: Literal["fivefold", "mbridge", "megatron-bridge"] = "fivefold"
    """What loads a Hugging Face folder into Megatron-Core's parameters, and turns them into Hugging Face's for the
    rollout: Fivefold itself, or the package mbridge or megatron-bridge, which must be installed (megatron-bridge needs
    TransformerEngine as well). The weights are the same bit for bit."""
    kernels: Annotated[
        Kernels,
        needs("te", equals("dtype", "bfloat16"), "attends in bfloat16 only"),
        needs("te", equals("use_deterministic_algorithms", False), "does not promise the same bits in every run"),
    ] = "fivefold"
    """What the layers are built of: PyTorch's kernels and Fivefold's own, or (`te`) the modules of TransformerEngine,
    which must be installed (docs/megatron.md). Checkpoints and weights are the same with both."""
    use_dist_checkpointing: Annotated[bool, needs(True, given("dist_checkpointing_path"), "reads a checkpoint")] = False
    """Read the weights from the Megatron-Core checkpoint at `dist_checkpointing_path`; `actor.path` then needs only a
    config and a tokenizer."""
    dist_checkpointing_path: Annotated[PathText | None, reads_if(equals("use_dist_checkpointing", True))] = None
    """Folder of a checkpoint in Megatron-Core's format `torch_dist`, or Megatron-LM's folder of several, whose newest
    is read (docs/converting.md)."""
    use_deterministic_algorithms: bool = False
    """Use kernels and collectives whose results are the same bit for bit in every run, in the rollout's embedded engine
    too; they are slower."""
    virtual_pipeline_parallel_size: Positive = 1
    """Model chunks on each pipeline stage (interleaved 1F1B); the same as the `v` of a layout."""
    router_dtype: Annotated[Literal["model", "fp32", "fp64"], OfPart("is_moe", "experts", warns=True)] = "fp32"
    """Dtype of the router's matmul, and so of the scores by which it chooses experts: the model's, float32 or float64.
    The router's softmax is in float32 anyway, as Megatron-Core computes it. The embedded engine and FSDP have
    transformers' routers, whose matmul is in the model's dtype."""
    token_dispatcher: Annotated[
        Literal["alltoall", "allgather", "flex"],
        OfPart("is_moe", "experts", warns=True),
        needs("flex", equals("router_dtype", "fp32", "fp64"), "sends probabilities in float32"),
    ] = "alltoall"
    """How tokens come to their experts: by all-to-all, by all-gather, or (`flex`) by DeepEP's kernels, which have to be
    installed. None drops tokens."""
    logprob_chunk_size: Positive = 1024
    """Number of tokens whose logits [chunk, vocabulary / tp] exist at one time."""
    logprob_recompute: bool = True
    """Compute the logits again in the backward pass; false: keep the logits of all trained tokens of a micro-batch, 4
    bytes for each token and row of the vocabulary / tp, which spares one of the four products of the output layer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations the backward pass computes again: none, some modules, or whole layers
    (`transformer.recompute_modules`, `transformer.recompute_method`)."""
    transformer: MegatronTransformerFields = MegatronTransformerFields()
    ddp: MegatronDDPFields = MegatronDDPFields()
    optimizer: MegatronOptimizerFields = MegatronOptimizerFields()

    @rule
    def _recomputing(self) -> Iterator[str]:
        fields = self.transformer
        if fields.recompute_modules == []:
            yield "transformer.recompute_modules is empty: name modules, or set recompute to none"
        if fields.moe_layer_recompute and (self.recompute == "full" or fields.recompute_modules is not None):
            yield (
                "transformer.moe_layer_recompute=true is a word for recompute=selective with "
                f"transformer.recompute_modules=[moe], and recompute={self.recompute} or recompute_modules says "
                "something else: drop moe_layer_recompute, and add moe to recompute_modules"
            )

    @rule
    def _norms(self) -> Iterator[str]:
        if self.kernels == "te" and "layernorm" in (self.transformer.recompute_modules or ()):
            yield (
                "transformer.recompute_modules has layernorm, and with kernels=te norms are parts of the linear layers "
                "after them: drop layernorm, or set kernels to fivefold"
            )

    @property
    def recompute_granularity(self) -> Literal["none", "selective", "full"]:
        """Which activations are computed again, `transformer.moe_layer_recompute` included."""
        return "selective" if self.transformer.moe_layer_recompute else self.recompute

    def recompute_modules(self, *, is_moe: bool) -> tuple[RecomputeModule, ...]:
        """Return the modules that are computed again in a model with or without experts; none unless selectively."""
        if self.recompute_granularity != "selective":
            return ()
        chosen = self.transformer.recompute_modules
        if chosen is not None:
            return tuple(dict.fromkeys(chosen))
        dense: tuple[RecomputeModule, ...] = () if self.recompute == "none" else ("mlp",)
        return ("moe", *dense) if is_moe else dense
