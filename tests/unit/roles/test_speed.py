"""Metrics of a step's speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.machines import ClusterConfig
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.backward import training_flops
from fivefold.families.read import find_shape
from fivefold.layout.gpus import device_peak, peak_flops
from fivefold.layout.placement import place
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.run.speed import StepSpeed, Worked

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart-ppo.yaml"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA B200", 2250),
        ("NVIDIA H20", 148), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA L40S", 362), ("NVIDIA L40", None),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H200 NVL", None), ("NVIDIA GB200", None), ("Tesla T4", None),
        ("NVIDIA H800 PCIe", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
    ],
)  # fmt: skip
def test_the_speed_of_a_gpu_is_known_by_its_name(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_the_recipe_says_the_speed_of_devices_that_are_not_known() -> None:
    assert device_peak(ClusterConfig(), [None, None]) is None
    assert device_peak(ClusterConfig(), ["NVIDIA H200", "Tesla T4"]) is None
    assert device_peak(ClusterConfig(), ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]) == (989e12 + 312e12) / 2
    assert device_peak(ClusterConfig(device_peak_tflops=65), ["Tesla T4"]) == 65e12


def test_each_phase_has_the_share_of_its_own_model_and_processes() -> None:
    recipe = load_recipe(
        QUICKSTART, ["actor.ppo_epochs=2", "critic.megatron.recompute=full", "critic.mb_spec.n_mbs=1"], TrainRecipe
    )
    shape = find_shape(recipe.actor.path)
    speed = StepSpeed(recipe, place(recipe), shape, {"critic": shape}, peak=1e12)
    batch = RemoteBatch(np.array([40, 20]), np.array([8, 4]), ())
    seconds = {"train": 2.0, "values": 0.5, "critic train": 1.0, "rollout": 3.0}
    metrics = speed.metrics(Worked(batch, batch), seconds)
    ranks = place(recipe)["actor"].layout.world_size
    flops = training_flops(shape, [40, 20], 12)
    assert metrics["mfu/train"] == pytest.approx(2 * flops / 2.0 / ranks / 1e12)
    assert metrics["train/tflops_per_device"] == pytest.approx(metrics["mfu/train"])
    critic = training_flops(shape.as_critic(), [40, 20], 12)
    assert metrics["mfu/values"] == pytest.approx(critic / 3 / 0.5 / place(recipe)["critic"].layout.world_size / 1e12)
    # A value head is not computed again; all layers are.
    head = 2 * 12 * shape.hidden
    assert metrics["hfu/critic train"] / metrics["mfu/critic train"] == pytest.approx(
        (recipe.critic.ppo_epochs if recipe.critic else 1) * (critic + critic / 3 - head) / critic
    )
    assert {name for name in metrics if name.startswith(("mfu", "hfu"))} == {
        "mfu/train", "hfu/train", "mfu/values", "mfu/critic train", "hfu/critic train",
    }  # fmt: skip
    without = StepSpeed(recipe, place(recipe), shape, {"critic": shape}, peak=None).metrics(
        Worked(batch, batch), seconds
    )
    assert without == {name: value for name, value in metrics.items() if name[1:3] != "fu"}


def test_the_experts_sequences_count_for_the_actors_training_alone() -> None:
    recipe = load_recipe(QUICKSTART, ["actor.ppo_epochs=2"], TrainRecipe)
    shape = find_shape(recipe.actor.path)
    speed = StepSpeed(recipe, place(recipe), shape, {"critic": shape}, peak=1e12)
    batch = RemoteBatch(np.array([40, 20]), np.array([8, 4]), ())
    given = [RemoteBatch(np.array([n]), np.array([n_trained]), ()) for n, n_trained in ((10, 4), (5, 2))]
    seconds = {"train": 2.0, "values": 0.5, "critic train": 1.0}
    alone, both = (Worked(batch, batch, experts) for experts in ((), given))
    plain, metrics = (speed.metrics(worked, seconds) for worked in (alone, both))
    ranks = place(recipe)["actor"].layout.world_size
    assert (alone.n_tokens, both.n_tokens) == (60, 75)
    assert metrics["train/tokens_per_second_per_device"] == 2 * 75 / 2.0 / ranks
    flops = training_flops(shape, [40, 20, 10, 5], 12 + 4 + 2)
    assert metrics["mfu/train"] == pytest.approx(2 * flops / 2.0 / ranks / 1e12)
    assert {name for name in metrics if metrics[name] != plain[name]} == {
        "train/tokens_per_second_per_device", "train/tflops_per_device", "mfu/train", "hfu/train",
    }  # fmt: skip


def test_supervised_training_counts_the_passes_that_it_makes() -> None:
    """KTO scores answers to other prompts too, on which it does not train."""
    recipe = load_recipe(QUICKSTART.with_name("quickstart-dpo.yaml"), ["actor.loss_type=kto"], DPORecipe)
    shape, placement = find_shape(recipe.actor.path), place(recipe)
    scored = RemoteBatch(np.array([40, 20]), np.array([8, 4]), ())
    seconds = {"train": 2.0, "scores": 1.0, "reference": 0.5}
    speed = StepSpeed(recipe, placement, shape, {}, peak=1e12)
    worked = Worked(scored.select([0]), scored)
    metrics = speed.metrics(worked, seconds)
    ranks = placement["actor"].layout.world_size
    assert worked.n_tokens == 40
    assert metrics["train/tflops_per_device"] == metrics["mfu/train"]
    assert metrics["mfu/train"] == pytest.approx(training_flops(shape, [40], 8) / 2 / ranks / 1e12)
    assert metrics["mfu/scores"] == pytest.approx(training_flops(shape, [40, 20], 12) / 3 / ranks / 1e12)
    assert metrics["mfu/reference"] == pytest.approx(2 * metrics["mfu/scores"])
    larger = replace(shape, n_layers=2 * shape.n_layers, moe_layers=2 * shape.moe_layers)
    other = StepSpeed(recipe, placement, shape, {"ref": larger}, peak=1e12)
    metrics |= {"mfu/reference": training_flops(larger, [40, 20], 12) / 3 / 0.5 / ranks / 1e12}
    assert other.metrics(worked, seconds) == pytest.approx(metrics)
