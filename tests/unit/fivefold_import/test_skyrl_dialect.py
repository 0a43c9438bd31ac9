"""SkyRL: scripts that `uv run` starts, and its trainer's keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import convert_files, convert_fixture, convert_words

ALGORITHM = "trainer.algorithm."


def test_a_module_that_uv_runs_is_the_program(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'uv run --isolated --with "transformers==5.0" --extra fsdp -m skyrl.train.entrypoints.main_base '
        "trainer.train_batch_size=64 trainer.policy.model.path=a/b\n",
        encoding="utf-8",
    )
    conversion = convert_files("skyrl", [script], [], {})
    assert conversion.recipe["train_dataset.batch_size"] == 64
    assert conversion.unsupported() == set()
    assert conversion.report.problems == ()


def test_a_program_with_its_own_code_is_a_problem(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("uv run -m examples.train.multiply.main_multiply trainer.seed=1\n", encoding="utf-8")
    (problem,) = convert_files("skyrl", [script], [], {}).report.problems
    assert "main_multiply trains by its own code" in problem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            {"actor.kl_ctl": 0.001, "actor.kl_estimator": "k3", "actor.fsdp.recompute": "full", "gconfig.n_samples": 5},
        ),
        (["use_kl_loss=false"], {"actor.kl_ctl": None}),
        (["grpo_norm_by_std=false"], {"actor.reward_norm.std_level": "none"}),
        (["advantage_estimator=reinforce++"], {"actor.advantage": "reinforce_pp"}),
        (["policy_loss_type=cispo"], {"actor.loss": "cispo", "actor.eps_clip": 1.0, "actor.eps_clip_higher": 4.0}),
        (["policy_loss_type=dual_clip"], {"actor.c_clip": 3.0}),
        (["clip_ratio_c=5"], {"actor.c_clip": None}),
        (
            ["policy_loss_type=kl_cov", "kl_cov.kl_cov_frac=0.1"],
            {"actor.loss": "kl_cov", "actor.loss_kwargs.kl_cov_ratio": 0.1},
        ),
        (
            ["loss_reduction=seq_mean_token_sum_norm", "max_seq_len=4096"],
            {"actor.loss_aggregation": "sequence_sum_fixed", "actor.loss_length": 4096},
        ),
        (["use_entropy_loss=true"], {"actor.entropy_coeff": 0.01}),
        (["use_tis=true", "tis_imp_ratio_cap=3"], {"actor.rollout_correction.weight_cap": 3.0}),
        (
            [
                "off_policy_correction.sequence_mask_metric=product",
                "off_policy_correction.outlier_token_is_threshold_low=0.001",
            ],
            {"actor.rollout_correction.mask": "sequence", "actor.rollout_correction.veto_below": 0.001},
        ),
    ],
)
def test_keys_of_the_algorithm(words: list[str], expected: dict[str, object]) -> None:
    recipe = convert_words("skyrl", "trainer.policy.model.path=a/b", *(ALGORITHM + word for word in words)).recipe
    assert {key: recipe.get(key) for key in expected} == expected


def test_losses_and_masks_without_a_counterpart_are_unsupported() -> None:
    for word in ("policy_loss_type=rollout_is", "loss_reduction=prompt_mean", "advantage_estimator=maxrl"):
        assert ALGORITHM + word.partition("=")[0] in convert_words("skyrl", ALGORITHM + word).unsupported(), word


def test_older_names_of_the_engines_options_are_read() -> None:
    new = ["inference_engine.num_engines=4", "inference_engine.tensor_parallel_size=2", "inference_engine.backend=vllm"]
    old = ["num_inference_engines=4", "inference_engine_tensor_parallel_size=2", "backend=vllm"]
    for words in (new, old):
        conversion = convert_words(
            "skyrl", "trainer.placement.policy_num_gpus_per_node=8", *(f"generator.{word}" for word in words)
        )
        assert conversion.recipe["rollout.backend"] == "vllm:d4t2", words
        assert conversion.unsupported() == set(), words


def test_held_out_prompts_are_answered_greedily_unless_the_source_says_otherwise() -> None:
    words = ["data.val_data=['a.parquet']", "generator.eval_n_samples_per_prompt=4"]
    conversion = convert_words("skyrl", *words)
    assert "evaluator.greedy" not in conversion.recipe
    assert conversion["generator.eval_n_samples_per_prompt"].outcome == "implied"
    recipe = convert_words("skyrl", *words, "generator.eval_sampling_params.temperature=0.5").recipe
    assert (recipe["evaluator.greedy"], recipe["evaluator.n_samples"]) == (False, 4)


def test_training_ahead_needs_its_switch() -> None:
    assert convert_fixture("skyrl", "skyrl_async_search.sh").recipe["rollout.max_head_offpolicyness"] == 2
    words = ["trainer.fully_async.enabled=false", "trainer.fully_async.max_staleness_steps=4"]
    assert "rollout.max_head_offpolicyness" not in convert_words("skyrl", *words).recipe
