"""Trinity-RFT: explorer and trainer in one file, with verl's key tree below the trainer."""

from __future__ import annotations

from pathlib import Path

from dialect_conversion import convert_fixture, convert_text

from fivefold.importing.recipe import convert

TREE = "trainer.trainer_config."


def test_grpo_with_devices_for_explorer_and_trainer() -> None:
    conversion = convert_fixture("trinity", "trinity_grpo.yaml", environment={"CHECKPOINTS": "/scratch"})
    expected = {
        "experiment_name": "sums",
        "trial_name": "grpo-small",
        "cluster.fileroot": "/scratch",
        "cluster.n_nodes": 2,
        "rollout.backend": "vllm:d2t2",
        "actor.backend": "megatron:d2c2",  # 8 devices less the explorer's 4, in pairs that share a sequence
        "rollout.colocate": False,
        "gconfig.n_samples": 6,
        "gconfig.max_new_tokens": 768,
        "gconfig.temperature": 0.9,
        "train_dataset.max_length": 1280 - 768,
        "train_dataset.path": "openai/gsm8k:main",
        "train_dataset.prompt_key": "question",
        "train_dataset.answer_key": "answer",
        "train_dataset.batch_size": 96,
        "valid_dataset.path": "openai/gsm8k:main",
        "valid_dataset.split": "test",
        "actor.mb_spec.max_tokens_per_mb": 2 * 12288,
        "actor.kl_in": "loss",
        "actor.kl_estimator": "k3",
        "actor.kl_ctl": 0.004,
        "actor.optimizer.lr": 4e-6,
        "actor.optimizer.beta2": 0.95,
        "evaluator.freq_steps": 40,
        "saver.freq_steps": 80,
        "total_train_epochs": 3,
    }
    assert conversion.recipe.items() >= expected.items()
    second = "buffer.explorer_input.eval_tasksets.1."
    assert {second + "name", second + "path"} <= conversion.unsupported()


def test_ppo_on_megatron() -> None:
    """8 devices less 4 engines: 4 for training. Experts are split as attention: e2 * t2 fill a stage of 4."""
    conversion = convert_fixture("trinity", "trinity_ppo_megatron.yaml")
    expected = {
        "actor.backend": "megatron:(attn:d2t2|ffn:d1t2e2)",
        "rollout.backend": "vllm:d4",
        "actor.megatron.recompute": "full",
        "actor.mb_spec.max_tokens_per_mb": 3 * (256 + 1024),
        "train_dataset.path": "./data/train.jsonl",
    }
    assert conversion.recipe.items() >= expected.items()
    critic = {entry.key for entry in conversion.report.entries if entry.key.startswith(TREE + "critic.")}
    assert len(critic) == 14
    filled = {key for key in critic if conversion[key].value is not None}
    assert {"algorithm.algorithm_type", "synchronizer.sync_interval", *filled} <= conversion.unsupported()
    # A reference is loaded only for a KL term.
    reference = [entry for entry in conversion.report.entries if entry.key.startswith(TREE + "actor_rollout_ref.ref.")]
    assert reference
    assert {entry.outcome for entry in reference} == {"implied"}


def test_the_trainers_file_may_stand_apart(tmp_path: Path) -> None:
    run, trainer = tmp_path / "run.yaml", tmp_path / "train.yaml"
    run.write_text(
        "model: {model_path: some/model}\ntrainer: {trainer_config_path: train.yaml}\ncluster: {gpu_per_node: 4}\n",
        encoding="utf-8",
    )
    trainer.write_text(
        "actor_rollout_ref: {actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 3}}}\n",
        encoding="utf-8",
    )
    recipe, report = convert("trinity", [run], [], {})
    (path,) = [entry for entry in report.entries if entry.key == "trainer.trainer_config_path"]
    assert path.outcome == "unsupported"
    recipe, report = convert("trinity", [run, trainer], [], {})
    (path,) = [entry for entry in report.entries if entry.key == "trainer.trainer_config_path"]
    assert path.outcome == "implied"
    # The number of nodes is not written, so neither is that of the replicas.
    assert recipe["actor"]["backend"] == "megatron:d*t3"


def test_interpolations_of_the_trainers_file_stay_in_it(tmp_path: Path) -> None:
    run, trainer = tmp_path / "run.yaml", tmp_path / "train.yaml"
    run.write_text("model: {model_path: some/model}\n", encoding="utf-8")
    trainer.write_text(
        "data: {clip: 0.1}\nactor_rollout_ref: {actor: {grad_clip: '${data.clip}', ppo_epochs: '${.epochs}', epochs: 2}}\n",
        encoding="utf-8",
    )
    recipe, _ = convert("trinity", [run, trainer], [], {})
    assert recipe["actor"]["optimizer"]["gradient_clipping"] == 0.1
    assert recipe["actor"]["ppo_epochs"] == 2


def test_keys_of_the_first_releases(tmp_path: Path) -> None:
    text = "model: {model_path: some/model}\ndata: {dataset_path: a.jsonl}\nexplorer: {engine_num: 3}\n"
    recipe = convert_text("trinity", tmp_path, text).recipe
    assert recipe["train_dataset.path"] == "a.jsonl"
    assert recipe["rollout.backend"].endswith(":d3")
