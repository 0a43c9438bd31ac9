"""One short training run, from the command line to its files; and the errors of recipes that cannot work."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.evaluate import evaluate
from fivefold.rollout.servers import command
from fivefold.train_setup import set_up
from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import README, as_listed, listed_metrics, shell_commands
from tests.e2e.reward_models import write_reward_model
from tests.rows import long

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
N_STEPS = 12
HERE = f"rollout.server_python={sys.executable}"
TWO_GPU_NODES = ("cluster.n_nodes=3", "cluster.n_gpus_per_node=2")


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the README's run, which stops early, with a KL term, a reference and a dual clip."""
    root = tmp_path_factory.mktemp("runs")
    train, *_ = shell_commands(README)
    result = fivefold(
        *train, f"cluster.fileroot={root}", f"total_train_steps={N_STEPS}", "valid_dataset.limit=96",
        "actor.kl_ctl=0.001", "actor.c_clip=3.0", "saver.freq_steps=8",
        "cluster.device_peak_tflops=0.1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert "held-out accuracy before training" in result.stdout
    assert re.search(r"^ready after \d+\.\d s: rollout \d+\.\d s, actor \d+\.\d s$", result.stdout, re.MULTILINE)
    assert "finished in" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    return root / "quickstart" / "two-stages"


@pytest.fixture(scope="module")
def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_grpo_raises_the_reward(metrics: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in metrics] == list(range(1, N_STEPS + 1))
    rewards = [row["reward/mean"] for row in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def test_every_step_says_what_it_did(metrics: list[dict[str, Any]]) -> None:
    shown = {
        "reward/mean", "accuracy", "kl_ref", "entropy", "clip_fraction", "grad_norm", "lr", "response_length/mean",
        "tokens_per_second", "rollout_mismatch", "rollout_mismatch_kl", "seconds/rollout", "seconds/train",
        "seconds/step", "train/tflops_per_device", "zero_variance_groups", "skipped_updates",
    }  # fmt: skip
    for row in metrics:
        assert shown <= row.keys()
        assert row["skipped_updates"] == 0


def test_the_page_of_metrics_lists_what_a_run_writes(metrics: list[dict[str, Any]]) -> None:
    elsewhere = {
        "nll",
        "eval/nll",
        "eval/loss",
        "eval/margin",  # fivefold sft, dpo and rm
        "seconds/hand-over",  # a rollout on the actor's devices
        "offload/freed_gb",  # the same
        "offload/restored_gb",
        "seconds/checkpoint write",  # of a checkpoint before the last one
        *(f"peak_memory_gb/{phase}" for phase in ("max", "old log-probs", "reference")),  # GPUs
        "allocator_retries/max",
        "loss_scale",  # models in float16
        *("draft_acceptance", "prefix_cache_hits"),  # servers that count tokens: test_generated.py
        "reward/penalty",  # keys and losses that the recipe does not have
        *(
            *("pairs", "pairs/accuracy", "pairs/loss", "pairs/margin", "pairs/reward/chosen", "pairs/reward/rejected"),
            *("covariance_chosen", "entropy_clipped"),
            "masked_groups",
            "opsm_masked",
            "entropy_coeff",
            "imitation_nll",
            "imitation_weight",
            "sample_weights/ess",
        ),
        *(f"experts/{name}" for name in ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")),
        *(f"seconds/{phase}" for phase in ("values", "advantages", "critic train")),
        *(f"mfu/{phase}" for phase in ("values", "critic train", "teacher")),
        "hfu/critic train",
        *(f"dynamic_sampling/{name}" for name in ("rounds", "kept")),
        # asynchronous training: test_asynchronous_runs.py
        *(f"seconds/{phase}" for phase in ("generation", "weight staging", "weight swap")),
        *(name for name in listed_metrics() if name.startswith("staleness/")),
        *(name for name in listed_metrics() if name.startswith("reuse/")),  # test_replay_buffer_runs.py
        *(name for name in listed_metrics() if name.startswith("episode/")),  # environments: test_environment_runs.py
        *(name for name in listed_metrics() if name.startswith("replay/")),  # test_router_replay_runs.py
        *("kl", "margin", "nll/chosen", "seconds/scores", "mfu/scores"),  # preferences: test_preferences.py
        *("teacher_kl", "seconds/teacher"),  # distillation: test_all_roles.py
        *("imitation_teacher_kl", "seconds/teachers", "seconds/taught examples"),  # test_several_teachers_runs.py
        *(f"reward/{name}" for name in ("chosen", "rejected", "desirable", "undesirable")),
        *(name for name in listed_metrics() if "<" in name),  # several rewards or data sources
        *(f"correction/{name}" for name in ("weight", "truncated", "masked", "ess")),
    }
    of_critic = {name for name in listed_metrics() if name.startswith("critic/")}  # test_all_roles.py
    written = {as_listed(name) for name in set().union(*metrics)}
    assert {"experts/imbalance/layer_<n>", "pass_at/<n>", "entropy_quarter/<n>", "response_length/p<n>"} <= written
    assert {name for name in written if "<" not in name} - {"step"} == listed_metrics().keys() - elsewhere - of_critic


def test_mfu_is_the_speed_by_what_the_recipe_says_of_a_device(metrics: list[dict[str, Any]]) -> None:
    for row in metrics:
        assert row["mfu/train"] == pytest.approx(row["train/tflops_per_device"] / 0.1)
        # Nothing is recomputed but the logits.
        assert row["mfu/train"] < row["hfu/train"] < 4 / 3 * row["mfu/train"]
        assert 0 < row["mfu/reference"] < 1


def test_rollout_and_trainer_agree_on_the_log_probs(metrics: list[dict[str, Any]]) -> None:
    # Both have the same float32 weights, so they differ only by rounding and by the step of the first update.
    assert max(row["rollout_mismatch"] for row in metrics) < 0.05
    assert max(row["rollout_mismatch_kl"] for row in metrics) < 0.01


def test_the_learning_rate_warms_up_and_decays(metrics: list[dict[str, Any]]) -> None:
    rates = [row["lr"] for row in metrics]
    peak = rates.index(max(rates))
    assert rates[0] > 0
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.35 * max(rates)


def test_transformers_loads_the_weights_which_differ_from_the_first_ones(run: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(run / "weights", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "weights")
    first = AutoModelForCausalLM.from_pretrained(ROOT / "fivefold" / "models" / "tiny-moe", dtype=torch.float32)
    assert tokenizer.decode(tokenizer("1+2=").input_ids) == "1+2="
    for (name, after), before in zip(trained.state_dict().items(), first.state_dict().values(), strict=True):
        assert not torch.equal(after, before), name


def test_the_run_folder_holds_summary_recipe_and_samples(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["accuracy_before"] < summary["accuracy_after"] <= 1
    assert {"torch", "megatron-core", "ray", "transformers"} <= summary["versions"].keys()
    assert summary["seconds"] > 0
    assert load_recipe(run / "recipe.yaml", [], TrainRecipe).total_train_steps == N_STEPS
    assert list((run / "tensorboard").iterdir())
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(range(1, N_STEPS + 1))
    assert all(sample["weight_version"] == sample["step"] - 1 for sample in samples)


@pytest.mark.parametrize("end", ["posix._exit(0)", *long("os.execv('/bin/true', ['true'])")])
def test_a_reward_that_ends_the_process_ends_the_run_with_a_failure(
    end: str, tmp_path: Path, fivefold: Fivefold
) -> None:
    (tmp_path / "ends.py").write_text(f"import os, posix\n\ndef reward(response, ground_truth, **_):\n    {end}\n")
    result = fivefold(
        "train", str(QUICKSTART), "total_train_steps=1", "train_dataset.batch_size=8", "valid_dataset=null",
        "reward={fn: 'ends.py:reward'}", f"cluster.fileroot={tmp_path}",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    assert "has ended with exit code 0 before the run did" in result.stderr
    assert not (tmp_path / "quickstart" / "trial-0" / "weights").exists()


def test_a_second_run_of_the_same_name_is_refused_without_recovery(run: Path) -> None:
    place = [f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}"]
    result = CliRunner().invoke(app, ["train", str(QUICKSTART), *place, "recover.mode=disabled"])
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr


def test_the_other_commands_of_the_readme_evaluate_generate_and_plan(run: Path, fivefold: Fivefold) -> None:
    shown = [
        [word.replace("runs/quickstart/trial-0", str(run)) for word in command] for command in shell_commands(README)
    ]
    assert [command[0] for command in shown] == ["train", "eval", "generate", "plan"]
    _, evaluation, generation, plan = shown
    # An evaluation ignores the actor's layout, so one that could not train here does not matter.
    result = fivefold(*evaluation, "valid_dataset.limit=32", "actor.backend=megatron:d64t3")
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["n_prompts"] == 32
    assert 0 <= told["accuracy"] <= 1
    result = fivefold(*generation)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("47+35-36=") == 4
    planned = CliRunner().invoke(app, plan)
    assert planned.exit_code == 0, planned.output
    assert "actor" in planned.output


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optimiser.lr=1e-5", "optimizer"),
        ("actor.optimizer.lr=-1", "actor.optimizer.lr"),
        ("actor.backend=megatron:t16", "heads"),
        ("actor.backend=megatron:p5", "layers"),
        ("actor.backend=megatron:d3e3", "experts"),
        ("actor.path=package:no-such-model", "tiny-moe"),
        ("train_dataset.path=nowhere.jsonl", "nowhere.jsonl"),
        ("train_dataset.max_length=3", "max_length"),
        ("train_dataset.batch_size=4096", "batch_size"),
        ("reward.fn=no_such_module:f", "no_such_module"),
        ("actor.ppo_n_minibatches=5", "multiple"),
        ("cluster.n_gpus_per_node=1", "sizes differ"),
        ("gconfig.max_new_tokens=4000", "positions"),
        ("gconfig.stop_token_ids=[100000]", "vocabulary"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_a_process_starts(override: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        set_up(load_recipe(QUICKSTART, [override], TrainRecipe))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cluster.n_gpus_per_node=1", "needs 2"),
        ("gconfig.max_new_tokens=4000", "positions"),
        ("valid_dataset=null", "no valid_dataset"),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused_before_a_process_starts(override: str, expected: str) -> None:
    overrides = ["rollout.backend=transformers:d2", override]
    with pytest.raises(ValueError, match=expected):
        evaluate(load_recipe(QUICKSTART, overrides, TrainRecipe))


@pytest.mark.parametrize("run", [set_up, evaluate])
def test_completions_that_a_reward_model_cannot_read_are_refused(
    run: Callable[[TrainRecipe], object], tmp_path: Path
) -> None:
    """A prompt of 12 tokens with its completion has the actor's 512, and an end token is behind it."""
    rewards = {"right": {"fn": "exact_match"}, "liked": {"fn": "model"}}
    reward = {"rewards": rewards, "model": {"path": str(write_reward_model(tmp_path)), "colocate": False}}
    overrides = [f"reward={json.dumps(reward)}", "rollout.backend=transformers:d1", "gconfig.max_new_tokens=500"]
    recipe = load_recipe(QUICKSTART, overrides, TrainRecipe)
    with pytest.raises(ValueError, match="make 514 tokens, but the reward model has 512 positions"):
        run(recipe)


def no_package(name: str) -> None:
    """Replaces `find_spec`: neither vLLM nor SGLang is installed."""


@pytest.mark.parametrize("run", [set_up, evaluate])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "is {server}, which is not installed next to Fivefold: .*rollout.server_python"),
        (["rollout.server_python=/nowhere/python"], "rollout.server_python=/nowhere/python is no program: .*{server}"),
        ([HERE, "rollout.server_args=[--enforce-eager,--port=80]"], "server_args has --port, which follows from other"),
        ([HERE, "rollout.server_args=[--dtype,half]"], "server_args has --dtype, which follows from other"),
        ([HERE, *TWO_GPU_NODES, "rollout.backend={server}:d1t3"], "a replica of {server} would span nodes 0, 1"),
    ],
)
def test_a_server_that_cannot_be_started_is_refused_before_a_process_starts(
    run: Callable[[TrainRecipe], object],
    server: str,
    overrides: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", no_package)
    written = [f"rollout.backend={server}:d1", "actor.backend=megatron:d1", *overrides]
    recipe = load_recipe(QUICKSTART, [word.format(server=server) for word in written], TrainRecipe)
    with pytest.raises(ValueError, match=expected.format(server=server)):
        run(recipe)


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match="no rows"):
        set_up(load_recipe(QUICKSTART, [f"train_dataset.path={empty}"], TrainRecipe))


def test_prompts_above_the_limit_are_dropped_and_counted() -> None:
    setup = set_up(load_recipe(QUICKSTART, ["train_dataset.max_length=9"], TrainRecipe))
    assert setup.data.n_too_long > 0
    assert len(setup.data) + setup.data.n_too_long == setup.data.n_rows
    assert all(len(prompt.token_ids) <= 9 for prompt in setup.data.prompts)
