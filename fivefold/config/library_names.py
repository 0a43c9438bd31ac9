"""Names of Megatron-Core, PyTorch and other frameworks that a recipe does not have, and what to set instead.

A recipe may write under `megatron.transformer`, `.ddp`, `.optimizer` and `fsdp` what the schema declares there. Every
other field that Megatron-Core's classes have in one of the supported releases, and every other parameter of
`fully_shard`, `MixedPrecisionPolicy` and `AdamW`, is here with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

_LAYOUT = "the layout decides it: set backend"
_DTYPE = "the number format of the whole model decides it: set dtype"
_MODEL = "it describes the model: the config.json at path decides it"
_WEIGHTS = "every weight comes from path, or is drawn by Fivefold with init_from_scratch"
_PROGRAM = "it is an object of the running program, not a setting"
_KERNELS = "Fivefold's own kernels do this part, and do not read it"
_TRANSFORMER_ENGINE = "only TransformerEngine's modules read it, and with kernels=te it is untried"
_INFERENCE = "only Megatron-Core's inference reads it; rollout.backend generates"
_DROPLESS = "no token is ever dropped, because the log-probs of rollout and training would then differ"
_NO_NOISE = "the forward pass has no noise, so that log-probs are the same on every layout and in every pass"
_UNREAD = "Megatron-Core reads it in no module that is in use"
_GRAPHS = "CUDA graphs need batches of one shape, and sequences are packed at their own lengths"
_OVERLAP = "its plans interleave Megatron-Core's own layers and loss over padded batches; here, tokens are packed"
_DELAY = "only TransformerEngine's linear layers can postpone the gradients, which is untried"
_DISTRIBUTED = "the optimizer's state is always divided over data-parallel ranks, in one instance"
_FSDP = "it belongs to Megatron-Core's own FSDP, which is not in use"
_ADAM = "the optimizer is AdamW"
_ON_HOST = "set optimizer.state_on=host, which moves all of the optimizer's state to pinned host memory"
_SKIPPED = "a step whose gradient is not finite is skipped, counted and explained, and ends the run only if it repeats"
_ACTIVATIONS = "only TransformerEngine's modules move activations to the host, and it is untried: set recompute"
_FUSED = "the update is always PyTorch's fused kernel, on buckets of the state"
_SHARDED_WEIGHTS = "weights that are gathered at each use are untried: set t in backend"
_TE_ALONE = "only TransformerEngine's modules read it, and kernels=te is not for the releases that have it"
_NOT_BY_DEEPEP = "token_dispatcher=flex exchanges tokens by DeepEP alone"
_SCHEDULED = "it follows from the pipeline's schedule, which the v of backend decides"


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_TRANSFORMER: dict[str, str] = {
    **_each(
        _LAYOUT,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size moe_extended_tp",
    ),
    **_each(
        _SHARDED_WEIGHTS,
        "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
        "expert_gtp_weight_remat_size",
    ),
    "virtual_pipeline_model_parallel_size": "set virtual_pipeline_parallel_size, or v in backend",
    "sequence_parallel": "it is on where backend has tensor parallelism, and off elsewhere",
    **_each(_DTYPE, "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp32_residual_connection"),
    "deterministic_mode": "set use_deterministic_algorithms",
    "recompute_granularity": "set recompute: none, selective or full",
    "distribute_saved_activations": "tensor parallelism always divides the saved activations, by sequence parallelism",
    "num_microbatches_with_partial_activation_checkpoints": "every micro-batch is recomputed alike: set recompute",
    "moe_router_dtype": "set router_dtype",
    **_each("set token_dispatcher", "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend"),
    "variable_seq_lengths": "it follows from token_dispatcher",
    **_each(
        "log-probs are computed in chunks of tokens: set logprob_chunk_size",
        "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    ),
    **_each(_SCHEDULED, "overlap_p2p_comm batch_p2p_comm"),
    "overlap_p2p_comm_warmup_flush": "with it, Megatron-Core 0.16.1 hangs in a pass without gradients",
    "pipeline_model_parallel_comm_backend": "GPUs communicate through NCCL, CPU processes through gloo",
    "use_ring_exchange_p2p": "it needs a build of PyTorch that NVIDIA does not publish",
    **_each(
        _WEIGHTS,
        "perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std "
        "embedding_init_method embedding_init_method_std init_model_with_meta_device",
    ),
    **_each(
        _PROGRAM,
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
        "_cpu_offloading_context quant_recipe moe_grad_scale_func mtp_grad_scale_func "
        "experimental_attention_variant_loss_scale_func",
    ),
    **_each(
        _MODEL,
        "num_layers mtp_num_layers mtp_loss_scaling_factor mtp_standalone hidden_size num_attention_heads "
        "num_query_groups ffn_hidden_size kv_channels layernorm_epsilon layernorm_zero_centered_gamma "
        "add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value "
        "num_moe_experts rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm "
        "attention_output_gate multi_latent_attention no_rope_freq softmax_scale softmax_type "
        "apply_residual_connection_post_layernorm experimental_attention_variant dsa_indexer_n_heads "
        "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq "
        "moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_enable_expert_bias "
        "moe_apply_probs_on_input moe_latent_size mrope_section is_hybrid_model "
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path "
        "heterogeneous_block_specs hetereogenous_dist_checkpoint use_fused_weighted_squared_relu "
        "mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern dsa_indexer_topk_freq "
        "dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved dsa_indexer_rotate_activation "
        "dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 "
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
        "mup_attn_scale_power moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size",
    ),
    **_each(_NO_NOISE, "hidden_dropout attention_dropout moe_input_jitter_eps"),
    **_each(
        _DROPLESS,
        "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
        "moe_expert_rank_capacity_factor",
    ),
    **_each(
        _KERNELS,
        "attention_backend attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion "
        "bias_dropout_fusion persist_layer_norm memory_efficient_layer_norm apply_rope_fusion fused_single_qkv_rope "
        "gradient_accumulation_fusion moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion "
        "transformer_impl defer_embedding_wgrad_compute wgrad_deferral_limit dsa_kernel_backend "
        "mamba_training_ssm_states_dtype",
    ),
    **_each(
        _TRANSFORMER_ENGINE,
        "use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
        "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs "
        "tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend "
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel cp_comm_type "
        "activation_func_fp8_input_store qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit fp8 "
        "fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen "
        "use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe fp4_param fp4_quantizer_factory "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_fusion "
        "disable_parameter_transpose_cache use_te_activation_func symmetric_ar_type",
    ),
    **_each(
        _TE_ALONE,
        "fused_residual_rmsnorm use_transformer_engine_op_fuser fp8_output_proj use_grouped_gemm_for_shared_expert "
        "use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias moe_paged_stash "
        "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu",
    ),
    "flash_attention_version": "set attn_impl next to megatron",
    **_each(
        _OVERLAP,
        "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream",
    ),
    **_each(_DELAY, "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad"),
    **_each(
        _ACTIVATIONS,
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "cpu_offloading_retain_pinned_cpu_buffers delta_offload_bytes_across_pp_ranks activation_offload_fraction "
        "fine_grained_offloading_max_inflight_offloads",
    ),
    **_each(
        _GRAPHS,
        "enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps "
        "external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules delay_offload_until_cuda_graph",
    ),
    **_each(
        _INFERENCE,
        "flash_decode batch_invariant_mode inference_rng_tracker inference_sampling_seed "
        "use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill "
        "inference_cuda_graph_scope nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels "
        "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
        "inference_moe_token_dispatcher_type moe_pad_experts_for_cuda_graph_inference",
    ),
    **_each(_UNREAD, "async_tensor_model_parallel_allreduce test_mode barrier_with_L1_time"),
    "calculate_per_token_loss": "losses are summed over tokens and divided by global counts: set loss_aggregation",
    "moe_router_topk_limited_devices": "Megatron-Core replaced it by moe_router_num_groups and moe_router_group_topk",
    "moe_enable_routing_replay": "routes are replayed by actor.router_replay",
    "moe_per_layer_logging": "metrics.jsonl always has the load of experts by layer",
    "config_logger_dir": "the run's folder has the whole configuration in engine.yaml",
    "moe_flex_dispatcher_num_sms": "it is the newer name of moe_deepep_num_sms: set that",
    **_each(
        _NOT_BY_DEEPEP,
        "moe_hybridep_num_sms moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs "
        "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
        "moe_ncclep_static_shape moe_ncclep_zero_copy",
    ),
    "moe_router_quantile_balancing_ema": "quantile balancing gathers the routers' scores of whole batches, filler "
    "included: set moe_router_load_balancing_type or moe_router_bias_update_rate",
    "moe_router_force_biased": "set moe_router_force_load_balancing to measure speed without a router's choices",
    "mlp_chunks_for_training": "set recompute=selective with mlp or moe in recompute_modules, which keeps less",
}

_DDP: dict[str, str] = {
    **_each(_DISTRIBUTED, "use_distributed_optimizer num_distributed_optimizer_instances"),
    **_each(
        "weights are sent to the rollout right after a step, before an overlapped gather would have filled them",
        "overlap_param_gather align_param_gather",
    ),
    **_each(_SKIPPED, "check_for_nan_in_grad check_for_large_grads"),
    "average_in_collective": "gradients are summed, then divided by global counts",
    "num_buckets": "set bucket_size",
    "param_name_patterns_for_fp32_local_accumulation": "all gradients have one dtype: set grad_reduce_in_fp32",
    **_each(_TE_ALONE, "fp4_param_gather"),
    **_each(_TRANSFORMER_ENGINE, "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache"),
    **_each(
        _FSDP,
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion "
        "suggested_communication_unit_size preserve_fp32_weights fsdp_double_buffer outer_dp_sharding_strategy "
        "fsdp_manual_registration fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync "
        "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
        "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer",
    ),
    **_each(
        "it needs an allocator that Megatron-Core compiles while it runs", "nccl_ub disable_symmetric_registration"
    ),
    "delay_wgrad_compute": _DELAY,
}

_OPTIMIZER: dict[str, str] = {
    "lr": "set optimizer.lr next to megatron",
    "min_lr": "set optimizer.min_lr_ratio next to megatron",
    "weight_decay": "set optimizer.weight_decay next to megatron",
    "adam_beta1": "set optimizer.beta1 next to megatron",
    "adam_beta2": "set optimizer.beta2 next to megatron",
    "adam_eps": "set optimizer.eps next to megatron",
    "clip_grad": "set optimizer.gradient_clipping next to megatron",
    **_each(
        _DTYPE + ", float32, bfloat16 or float16, whose loss is scaled as docs/megatron.md says",
        "fp16 bf16 params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    "use_precision_aware_optimizer": "the formats of the state can be chosen without it: exp_avg_dtype and so on",
    "main_grads_dtype": "set ddp.grad_reduce_in_fp32",
    "main_params_dtype": "master weights are float32, in whole or as store_param_remainders",
    **_each(
        _ADAM,
        "optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode "
        "muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_nesterov "
        "muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta "
        "soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 "
        "adaptive_muon_eps",
    ),
    **_each(_DISTRIBUTED, "use_distributed_optimizer use_layer_wise_distributed_optimizer"),
    "grad_norm_skip_threshold": "a step whose gradient is finite is never skipped: set optimizer.gradient_clipping",
    "optimizer_cuda_graph": _FUSED,
    **_each(_DDP["overlap_param_gather"], "overlap_param_gather overlap_param_gather_with_optimizer_step"),
    **_each(
        _ON_HOST,
        "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    ),
    **_each(_TRANSFORMER_ENGINE, "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag"),
    **_each(_UNREAD, "log_num_zeros_in_grad barrier_with_L1_time"),
    "timers": _PROGRAM,
    "config_logger_dir": _TRANSFORMER["config_logger_dir"],
}

REFUSED: Mapping[str, Mapping[str, str]] = {
    "TransformerConfig": _TRANSFORMER,
    "DistributedDataParallelConfig": _DDP,
    "OptimizerConfig": _OPTIMIZER,
    "fully_shard": {
        "module": "each layer is a unit, and the embedding and the output layer are one together",
        "mesh": _LAYOUT,
        "dp_mesh_dims": _LAYOUT,
        "shard_placement_fn": "parameters are always sharded by rows, on which checkpoints rely",
        "ignored_params": "all parameters are sharded",
        "offload_policy": "set offload next to fsdp for the time in which the model does not work, or "
        "optimizer.state_on=host for the moments; shards that the optimizer updates stay on the GPU",
    },
    "MixedPrecisionPolicy": {
        "param_dtype": "the number format of the whole model decides it: set dtype",
        "output_dtype": "log-probs are always computed in float32",
        "cast_forward_inputs": "hidden states have the model's number format already",
    },
    "AdamW": {
        "params": _PROGRAM,
        "lr": "set optimizer.lr next to fsdp",
        "betas": "set optimizer.beta1 and beta2 next to fsdp",
        "eps": "set optimizer.eps next to fsdp",
        "weight_decay": "set optimizer.weight_decay next to fsdp",
        "amsgrad": "Megatron-Core's Adam has no such variant, and both engines train to the same numbers",
        "maximize": "losses are minimised",
        "foreach": _FUSED,
        "fused": _FUSED,
        "capturable": _FUSED,
        "differentiable": _FUSED,
    },
}
"""The reason for each setting that a recipe cannot have, by the class or the function of the library."""

_IN_TOKENS = "micro-batches have a token budget: set mb_spec.max_tokens_per_mb"
_INFER = (
    "passes without gradients have a token budget: set mb_spec.max_tokens_per_infer_mb of a model that is trained, and "
    "mb_spec.max_tokens_per_mb of another"
)
_RECOMPUTED = "set megatron.recompute, or fsdp.recompute"
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
    "override_transformer_config": "its keys belong to megatron.transformer",
    "grad_clip": "set optimizer.gradient_clipping",
    "strategy": _LAYOUT,
    "strategy_args": _LAYOUT,
}
"""Keys of AReaL, ROLL, siiRL, verl and Trinity-RFT, by their last word."""


def in_its_place(key: str) -> str | None:
    """Return what to do in the place of an unknown key that Megatron-Core or another framework has."""
    section, _, name = key.rpartition(".")
    if section.rpartition(".")[2] == "megatron":
        for owner in ("TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"):
            if name in (reasons := REFUSED[owner]):
                return f"{name} of Megatron-Core's {owner} cannot be set in a recipe: {reasons[name]}"
    return _OTHERS.get(name)
