"""What sources hand on to the engine and to the processes: arguments of its command line, and environment variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_conversion import convert_text, convert_words

from fivefold_import.framework import Framework

ROLL = """
pretrain: some/model
actor_infer:
  device_mapping: list(range(0,8))
  strategy_args:
    strategy_name: {engine}
    strategy_config: {config}
"""
BLOCKS: list[tuple[Framework, str]] = [
    ("verl", "actor_rollout_ref.rollout.engine_kwargs.{engine}."),
    ("siirl", "actor_rollout_ref.rollout.engine_kwargs.{engine}."),
    ("areal", "{engine}."),
    ("trinity", "explorer.rollout_model."),
]
"""What precedes the engine's own options in the keys of a framework."""


def words(framework: Framework, engine: str) -> list[str]:
    """Return a minimal source whose rollout is an engine's."""
    match framework:
        case "areal":
            return ["actor.path=some/model", f"rollout.backend={engine}:d8", "actor.backend=fsdp:d8"]
        case "trinity":
            return ["model.model_path=some/model", "algorithm.algorithm_type=grpo"]
        case _:
            return ["actor_rollout_ref.model.path=some/model", f"actor_rollout_ref.rollout.name={engine}"]


@pytest.mark.parametrize(("framework", "prefix"), BLOCKS)
def test_options_of_the_engine_become_arguments(framework: Framework, prefix: str) -> None:
    at = prefix.format(engine="vllm")
    options = [f"{at}block_size=16", f"{at}enforce_eager=true", f"{at}max_model_len=4096", f"{at}mm_cache_gb=0"]
    conversion = convert_words(framework, *words(framework, "vllm"), *options, f"{at}tensor_parallelism_x=2")
    assert conversion.recipe["rollout.server_args"] == ["--block-size=16", "--enforce-eager"]
    assert conversion[f"{at}block_size"].to == "rollout.server_args"
    for name in ("max_model_len", "mm_cache_gb"):
        assert conversion[f"{at}{name}"].outcome == "implied"
    assert f"{at}tensor_parallelism_x" in conversion.unsupported()


@pytest.mark.parametrize(
    ("engine", "options", "arguments"),
    [
        ("vllm", {"enable_prefix_caching": False, "enforce_eager": False}, ["--no-enable-prefix-caching"]),
        ("vllm", {"compilation_config": {"mode": 3}}, ["--compilation-config.mode=3"]),
        ("vllm", {"cudagraph_capture_sizes": [1, 8]}, ["--cudagraph-capture-sizes=[1, 8]"]),
        ("sglang", {"enable_prefix_caching": False, "enforce_eager": True, "max_num_batched_tokens": 8192},
         ["--disable-radix-cache", "--disable-cuda-graph"]),
        ("sglang", {"attention_backend": "fa3", "disable_overlap": True, "enable_mixed": False},
         ["--attention-backend=fa3", "--disable-overlap"]),
    ],
)  # fmt: skip
def test_an_option_is_written_as_its_engine_has_it(
    tmp_path: Path, engine: str, options: dict[str, Any], arguments: list[str]
) -> None:
    text = ROLL.format(engine=engine, config=json.dumps(options))
    assert convert_text("roll", tmp_path, text).recipe["rollout.server_args"] == arguments


def test_options_of_another_engine_have_no_effect() -> None:
    at = "actor_rollout_ref.rollout.engine_kwargs."
    conversion = convert_words("verl", *words("verl", "sglang"), f"{at}vllm.block_size=16", f"{at}sglang.chunk=2")
    assert conversion.recipe["rollout.server_args"] == ["--chunk=2"]
    assert conversion[f"{at}vllm.block_size"].outcome == "implied"
    embedded = convert_words("verl", *words("verl", "hf"), "actor_rollout_ref.rollout.enforce_eager=true")
    assert "rollout.server_args" not in embedded.recipe
    assert embedded["actor_rollout_ref.rollout.enforce_eager"].outcome == "implied"


def test_verls_rollout_is_quantized_by_vllm_alone() -> None:
    key = "actor_rollout_ref.rollout.quantization"
    conversion = convert_words("verl", *words("verl", "vllm"), f"{key}=fp8")
    assert conversion.recipe["rollout.quantization"] == "fp8_per_block"
    for engine, kind in (("sglang", "fp8"), ("vllm", "torchao")):
        conversion = convert_words("verl", *words("verl", engine), f"{key}={kind}")
        assert "rollout.quantization" not in conversion.recipe
        assert key in conversion.unsupported()


def test_environment_variables_go_to_the_processes_that_have_them(tmp_path: Path) -> None:
    text = (
        "pretrain: some/model\nsystem_envs: {NCCL_DEBUG: INFO, USE_MODELSCOPE: '1', HF_TOKEN: hidden, RANK: '3'}\n"
        "actor_train: {system_envs: {NVTE_FLASH_ATTN: '1', CUDA_DEVICE_MAX_CONNECTIONS: 1}}\n"
        "actor_infer: {system_envs: {VLLM_USE_DEEP_GEMM: false}}\n"
    )
    conversion = convert_text("roll", tmp_path, text)
    variables = {key.removeprefix("scheduler.environment."): value for key, value in conversion.recipe.items()
                 if key.startswith("scheduler.environment")}  # fmt: skip
    assert variables == {
        "all.NCCL_DEBUG": "INFO",
        "actor.CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "rollout.VLLM_USE_DEEP_GEMM": "0",
    }
    for key in ("system_envs.USE_MODELSCOPE", "actor_train.system_envs.NVTE_FLASH_ATTN"):
        assert conversion[key].outcome == "implied"
    assert {"system_envs.HF_TOKEN", "system_envs.RANK"} <= conversion.unsupported()


def test_the_schedule_wsd_keeps_its_decay() -> None:
    at = "actor_rollout_ref.actor.optim."
    base = words("verl", "vllm")
    wsd = convert_words("verl", *base, f"{at}lr_decay_style=WSD", f"{at}lr_wsd_decay_steps=30")
    keys = ("lr_scheduler_type", "decay_steps", "decay_shape")
    # Megatron-Core's default shape is not Fivefold's.
    assert [wsd.recipe.get(f"actor.optimizer.{key}") for key in keys] == ["wsd", 30, "exponential"]
    cosine = convert_words("verl", *base, f"{at}lr_decay_style=cosine", f"{at}lr_wsd_decay_steps=30")
    assert cosine[f"{at}lr_wsd_decay_steps"].outcome == "implied"
    flags = ["lr_decay_style=WSD", "lr_wsd_decay_style=minus_sqrt", "lr_wsd_decay_iters=30"]
    slime = convert_words("slime", "hf_checkpoint=some/model", *flags)
    assert [slime.recipe.get(f"actor.optimizer.{key}") for key in keys] == ["wsd", 30, "minus_sqrt"]


def test_daposs_punishment_ends_at_the_longest_response() -> None:
    base = [*words("verl", "vllm"), "reward_model.reward_manager=dapo", "data.max_response_length=2048"]
    key = "reward_model.reward_kwargs.max_resp_len"
    assert convert_words("verl", *base, f"{key}=2048")[key].outcome == "implied"
    assert key in convert_words("verl", *base, f"{key}=4096").unsupported()


def test_a_reference_in_the_actors_processes_moves_with_the_actor() -> None:
    kl = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.strategy=fsdp"]
    key = "actor_rollout_ref.ref.fsdp_config.param_offload"
    conversion = convert_words("verl", *words("verl", "vllm"), *kl, f"{key}=true")
    assert conversion[key].outcome == "implied"
    assert "ref.offload" not in conversion.recipe


@pytest.mark.parametrize(("value", "outcome"), [("false", "implied"), ("true", "unsupported")])
def test_a_replica_has_no_copies_of_attention_by_an_option_of_the_engine(value: str, outcome: str) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang.enable_dp_attention"
    assert convert_words("verl", *words("verl", "sglang"), f"+{key}={value}")[key].outcome == outcome


def test_experts_are_spread_over_all_ranks_of_a_replica_or_not(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout."
    for engine, degree, expected in (("vllm", 4, ["--enable-expert-parallel"]), ("sglang", 4, ["--ep-size=4"])):
        given = [*words("verl", engine), f"{rollout}tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"]
        conversion = convert_words("verl", *given, f"{rollout}expert_parallel_size={degree}")
        assert conversion.recipe["rollout.server_args"] == expected
        for other in (
            [f"{rollout}expert_parallel_size=2"],
            [f"{rollout}expert_parallel_size=4", f"{rollout}data_parallel_size=2"],
        ):
            assert f"{rollout}expert_parallel_size" in convert_words("verl", *given, *other).unsupported()
        alone = convert_words("verl", *given, f"{rollout}expert_parallel_size=1")
        assert f"{rollout}expert_parallel_size" not in alone.unsupported()
        assert "rollout.server_args" not in alone.recipe
    given = [f"{rollout}name=trtllm", f"{rollout}tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"]
    slices = f"+{rollout}moe_tensor_parallel_size"
    sliced = convert_words("verl", *given, f"{rollout}expert_parallel_size=2", f"{slices}=2")
    assert sliced.unsupported() == set()
    assert sliced.recipe["rollout.server_args"] == ["--enable-expert-parallel"]
    assert len(convert_words("verl", *given, f"{rollout}expert_parallel_size=2", f"{slices}=4").unsupported()) == 2
    switch = "explorer.rollout_model.enable_expert_parallel"
    assert convert_words("trinity", f"{switch}=true").recipe["rollout.server_args"] == ["--enable-expert-parallel"]
    assert convert_words("trinity", f"{switch}=false")[switch].outcome == "implied"


def test_samples_of_steps_and_evaluations_are_logged_as_verl_says() -> None:
    given = [*words("verl", "vllm"), "data.val_files=a.parquet"]
    some = convert_words("verl", *given, "trainer.log_val_generations=10", "trainer.rollout_data_dir=out")
    assert some.recipe["evaluator.n_logged_samples"] == 10
    assert some.recipe["stats.n_logged_samples"] == "all"
    every = convert_words("verl", *given, "trainer.validation_data_dir=out", "trainer.log_val_generations=0")
    assert every.recipe["evaluator.n_logged_samples"] == "all"
    assert not some.unsupported() | every.unsupported()


def test_rounds_of_dynamic_sampling_are_counted_in_batches_that_are_trained() -> None:
    given = [
        *words("verl", "vllm"),
        "data.train_batch_size=512",
        "data.gen_batch_size=1536",
        "actor_rollout_ref.rollout.n=4",
    ]
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=10"]
    conversion = convert_words("verl", *given, *filtered)
    assert conversion.recipe["actor.dynamic_sampling_max_rounds"] == 30
    assert "data.gen_batch_size" not in conversion.unsupported()
    assert "data.gen_batch_size" in convert_words("verl", *given).unsupported()


def test_kernels_for_weights_in_fp8_are_environment_variables_as_in_nemo_rl() -> None:
    section = "policy.generation.vllm_cfg."
    given = ["policy.model_name=some/model", "grpo.num_prompts_per_step=8", f"{section}use_deep_gemm=true"]
    variable = "scheduler.environment.rollout.VLLM_USE_DEEP_GEMM"
    recipe = convert_words("nemo_rl", *given, f"{section}precision=fp8").recipe
    assert (recipe[variable], recipe[f"{variable}_E8M0"]) == ("1", "0")
    other = convert_words("nemo_rl", *given, f"{section}precision=bfloat16")
    assert variable not in other.recipe
    assert f"{section}use_deep_gemm" not in other.unsupported()


def test_copies_of_the_attention_become_ranks_of_a_replica_with_spread_experts() -> None:
    at, cluster = "actor_rollout_ref.rollout.", ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    copies = (f"{at}name=vllm", f"{at}tensor_model_parallel_size=2", f"{at}data_parallel_size=4")
    model = "actor_rollout_ref.model.path="
    moe = convert_words("verl", *cluster, *copies, f"{model}Qwen/Qwen3-30B-A3B", f"{at}expert_parallel_size=8")
    assert moe.unsupported() == set()
    assert moe.recipe["rollout.backend"] == "vllm:d2t8"
    assert "--enable-expert-parallel" in moe.recipe["rollout.server_args"]
    assert "whole" in moe[f"{at}data_parallel_size"].note
    dense = convert_words("verl", *cluster, *copies, f"{model}Qwen/Qwen3-8B")
    assert (dense.recipe["rollout.backend"], dense[f"{at}data_parallel_size"].outcome) == ("vllm:d8t2", "implied")
    wide = convert_words("verl", *cluster, *copies[:2], f"{model}Qwen/Qwen3-30B-A3B", f"{at}data_parallel_size=8")
    assert wide.unsupported() == {f"{at}data_parallel_size"}


def test_options_of_mindspeed_have_no_effect() -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_rmsnorm"
    assert convert_words("verl", f"{key}=True")[key].outcome == "implied"
