"""Sources for other tasks than reinforcement learning: those that a command does are imported, others are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dialect_conversion import convert_text, convert_words

from fivefold.config.schema.train import TrainRecipe
from fivefold_import.framework import Framework

SFT, DPO, RM, RL = "fivefold sft", "fivefold dpo", "fivefold rm", "fivefold train"
DISTILLATION, EVALUATION = "distillation", "evaluation"
TOLD: list[tuple[Framework, str, str]] = [
    ("areal", "actor: {path: m}\ntrain_dataset: {path: d, type: sft}\n", SFT),
    ("areal", "model: {path: m, backend: fsdp}\ntrain_dataset: {path: d}\n", SFT),
    ("areal", "python3 examples/math/gsm8k_sft.py --config x actor.path=m", SFT),
    ("areal", "actor: {path: m, beta: 0.1}\ntrain_dataset: {path: d, type: dpo}\n", DPO),
    ("areal", "actor: {path: m, is_critic: true}\n", RM),
    ("areal", "actor: {path: m, is_critic: false}\ntrain_dataset: {path: d, type: rl}\n", RL),
    ("areal", "python3 /sft/examples/gsm8k_grpo.py actor.path=m", RL),
    ("roll", "pretrain: m\nsft_train: {training_args: {learning_rate: 1e-5}}\n", SFT),
    ("roll", "pretrain: m\npipeline: sft\n", SFT),
    ("roll", "pretrain: m\nchosen_key: c\nrejected_key: r\nipo: false\n", DPO),
    ("roll", "pretrain: m\nactor_train: {model_args: {dtype: bf16}}\n", RL),
    ("trinity", "algorithm: {algorithm_type: sft}\n", SFT),
    ("trinity", "algorithm: {algorithm_type: DPO}\n", DPO),
    ("trinity", "algorithm: {algorithm_type: grpo}\nmode: both\n", RL),
    ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer data.x=1 # python3", SFT),
    ("verl", "data: {train_files: a}\nmodel: {partial_pretrain: m}\noptim: {lr: 1e-5}\n", SFT),
    ("verl", "python3 -m verl.trainer.main_ppo distillation.enabled=False actor_rollout_ref.model.path=sft-model", RL),
]
REFUSED: list[tuple[Framework, str, str, str]] = [
    ("areal", "actor: {path: m, self_distillation: {teacher_update_rate: 0.05}}\n", DISTILLATION, "self_distillation"),
    ("roll", "student_pretrain: m\nteacher: {model_args: {dtype: bf16}}\n", DISTILLATION, "student_pretrain=m"),
    ("roll", "pretrain: m\nstudent: {device_mapping: '0-7'}\n", DISTILLATION, "student.device_mapping"),
    ("trinity", "algorithm: {algorithm_type: sdpo}\n", DISTILLATION, "algorithm_type=sdpo"),
    ("trinity", "mode: bench\n", EVALUATION, "mode=bench"),
    ("verl", "python3 -m verl.trainer.main_generation data.path=x", EVALUATION, "verl.trainer.main_generation"),
    ("verl", "python3 -m recipe.spin.main_spin trainer.nnodes=1", "self-play", "recipe.spin.main_spin"),
    ("verl", "python3 -m recipe.sppo.main_sppo trainer.nnodes=1", "SPPO", "recipe.sppo.main_sppo"),
    ("verl", "python3 -m recipe.prime.main_prime trainer.nnodes=1", "PRIME", "recipe.prime.main_prime"),
    ("verl", "python3 -m recipe.flowrl.main_flowrl trainer.nnodes=1", "FlowRL", "recipe.flowrl.main_flowrl"),
    ("verl", "python3 -m verl.experimental.vla.main_ppo trainer.nnodes=1", "images", "verl.experimental.vla.main_ppo"),
    ("verl", "python3 -m verl.trainer.main_diffusion trainer.nnodes=1", "images", "verl.trainer.main_diffusion"),
    ("roll", "actor_train: {model_args: {model_type: diffusion_module}}\n", "images", "model_type=diffusion_module"),
    ("siirl", "python3 -m siirl.main_dag dag.workflow_type=embodied", "images", "dag.workflow_type=embodied"),
    ("siirl", "data: {prompt_dict_keys: [question]}\n", "supervised fine-tuning", "data.prompt_dict_keys"),
]


def test_the_recipe_is_for_the_command_that_does_the_sources_task(tmp_path: Path) -> None:
    for framework, text, command in TOLD:
        assert convert_text(framework, tmp_path, text).report.command == command, text


@pytest.mark.parametrize(("framework", "text", "task", "found"), REFUSED)
def test_a_task_that_no_command_does_is_refused_by_what_tells_it(
    framework: Framework, text: str, task: str, found: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=rf"{task}.*{re.escape(found)}.*reinforcement learning.*fivefold (train|eval|sft|dpo)"
    ):
        convert_text(framework, tmp_path, text)


def test_the_model_of_areals_first_releases_is_read_by_its_later_name() -> None:
    words = [
        "model.path=Qwen/Qwen3-1.7B",
        "tokenizer_path=${model.path}",
        "model.backend=fsdp:d4",
        "train_dataset.path=d",
    ]
    recipe = convert_words("areal", *words).recipe
    assert (recipe["actor.path"], recipe["actor.backend"]) == ("Qwen/Qwen3-1.7B", "fsdp:d4")


def test_torchruns_processes_of_verl_count_before_the_trainers_keys(tmp_path: Path) -> None:
    keys = "-m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-4B data.train_files=a # python3"
    for flags, gpus in (("--nnodes=2 --nproc_per_node=4", 4), ("", 8)):
        recipe = convert_text("verl", tmp_path, f"torchrun {flags} {keys}").recipe
        assert (recipe["cluster.n_gpus_per_node"], recipe["actor.backend"]) == (gpus, "fsdp:d8"), flags


def test_the_rows_of_a_step_that_cannot_be_counted_are_unsupported() -> None:
    section = "sft_train.training_args."
    conversion = convert_words("roll", "pretrain=m", f"{section}gradient_accumulation_steps=4")
    assert "set train_dataset.batch_size" in conversion[f"{section}gradient_accumulation_steps"].note


def test_folders_of_a_users_own_do_not_tell_the_task(tmp_path: Path) -> None:
    text = "python3 /home/prime/eval/main_ppo.py trainer.nnodes=1"
    assert convert_text("verl", tmp_path, text).report.schema is TrainRecipe


def test_rows_of_instruction_and_input_and_states_on_the_host_are_converted(tmp_path: Path) -> None:
    keys = "prompt_key: instruction\nquery_key: input\nresponse_key: output\ntrack_with: ml_tracker\n"
    tuned = convert_text("roll", tmp_path, f"pretrain: m\n{keys}sft_train: {{data_args: {{file_name: a.json}}}}\n")
    assert tuned.unsupported() == set()
    names = ("prompt_key", "input_key", "response_key")
    assert [tuned.recipe[f"train_dataset.{name}"] for name in names] == ["instruction", "input", "output"]
    config = "strategy_args: {strategy_name: megatron_train, strategy_config: {moe_shared_expert_overlap: true}}"
    own = "is_offload_optimizer_states_in_train_step: true\nchosen_key: chosen\n"
    pairs = convert_text("roll", tmp_path, f"pretrain: Qwen/Qwen3-30B-A3B\n{own}actor_train: {{{config}}}\n")
    assert pairs.unsupported() == set()
    assert pairs.recipe["actor.megatron.optimizer.state_on"] == "host"
    overlap = "actor_train.strategy_args.strategy_config.moe_shared_expert_overlap"
    assert (pairs[overlap].outcome, pairs[overlap].note) == ("implied", "the model has no shared experts")
