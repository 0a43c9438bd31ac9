"""Sources that are not for reinforcement learning are refused, with what tells their task."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dialect_conversion import convert_text

from fivefold.importing.framework import Framework

SFT, DPO, DISTILLATION = "supervised fine-tuning", "preference optimisation", "distillation"
CASES: list[tuple[Framework, str, str, str]] = [
    ("areal", "actor: {path: m}\ntrain_dataset: {path: d, type: sft}\n", SFT, "train_dataset.type=sft"),
    ("areal", "model: {path: m, backend: fsdp}\ntrain_dataset: {path: d}\n", SFT, "model.path=m"),
    ("areal", "actor: {path: m}\nbeta: 0.1\ntrain_dataset: {path: d, type: dpo}\n", DPO, "train_dataset.type=dpo"),
    ("areal", "actor: {path: m, is_critic: true}\n", "a reward model", "actor.is_critic=True"),
    ("areal", "actor: {path: m, self_distillation: {teacher_update_rate: 0.05}}\n", DISTILLATION, "self_distillation"),
    ("areal", "python3 examples/math/gsm8k_sft.py --config x actor.path=m", SFT, "examples/math/gsm8k_sft.py"),
    ("roll", "pretrain: m\nsft_train: {training_args: {learning_rate: 1e-5}}\n", SFT, "sft_train.training_args"),
    ("roll", "pretrain: m\nchosen_key: c\nrejected_key: r\nipo: false\n", DPO, "chosen_key=c"),
    ("roll", "student_pretrain: m\nteacher: {model_args: {dtype: bf16}}\n", DISTILLATION, "student_pretrain=m"),
    ("roll", "pretrain: m\nstudent: {device_mapping: '0-7'}\n", DISTILLATION, "student.device_mapping"),
    ("roll", "pretrain: m\npipeline: sft\n", SFT, "pipeline=sft"),
    ("trinity", "algorithm: {algorithm_type: sft}\n", SFT, "algorithm_type=sft"),
    ("trinity", "algorithm: {algorithm_type: DPO}\n", DPO, "algorithm_type=DPO"),
    ("trinity", "algorithm: {algorithm_type: jsd}\n", DISTILLATION, "algorithm_type=jsd"),
    ("trinity", "mode: bench\n", "evaluation", "mode=bench"),
    ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer data.x=1 # python3", SFT, "verl.trainer.fsdp_sft_trainer"),
    ("verl", "python3 -m verl.trainer.main_generation data.path=x", "evaluation", "verl.trainer.main_generation"),
    (
        "verl",
        "data: {train_files: a}\nmodel: {partial_pretrain: m}\noptim: {lr: 1e-5}\n",
        SFT,
        "model.partial_pretrain=m",
    ),
    ("siirl", "data: {prompt_dict_keys: [question]}\n", SFT, "data.prompt_dict_keys"),
]


@pytest.mark.parametrize(("framework", "text", "task", "found"), CASES)
def test_another_task_is_refused_by_what_tells_it(
    framework: Framework, text: str, task: str, found: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{task}.*{re.escape(found)}.*reinforcement learning") as caught:
        convert_text(framework, tmp_path, text)
    assert ("fivefold sft" in str(caught.value)) is (task == SFT)


def test_reinforcement_learning_is_not_taken_for_another_task(tmp_path: Path) -> None:
    cases: list[tuple[Framework, str]] = [
        ("areal", "actor: {path: m, is_critic: false}\ntrain_dataset: {path: d, type: rl}\n"),
        ("areal", "python3 /sft/examples/gsm8k_grpo.py actor.path=m"),
        ("roll", "pretrain: m\nactor_train: {model_args: {dtype: bf16}}\n"),
        ("trinity", "algorithm: {algorithm_type: grpo}\nmode: both\n"),
        ("verl", "python3 -m verl.trainer.main_ppo distillation.enabled=False actor_rollout_ref.model.path=sft-model"),
    ]
    for framework, text in cases:
        convert_text(framework, tmp_path, text)
