"""Plans count a vision tower where images are computed, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse_backend
from fivefold.planning.fsdp_memory import fsdp_memory
from fivefold.planning.memory import training_memory
from fivefold.planning.plan import plan_recipe
from fivefold.planning.recipe_inputs import Changes, recipe_inputs
from fivefold.planning.rollout_memory import rollout_memory
from fivefold.planning.workload import Workload

ROOT = Path(__file__).resolve().parents[3]
SEEING = find_shape("package:tiny-vl")
TEXT = replace(SEEING, vision=None)
WORK = Workload(sequence_length=64, sequences=8, micro_tokens=512)


def tower() -> int:
    """Return the bytes of the tower's weights in bfloat16, as transformers has them."""
    config = AutoConfig.from_pretrained(ROOT / "fivefold" / "models" / "tiny-vl")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return 2 * sum(parameter.numel() for parameter in model.model.visual.parameters())


def test_the_first_stage_has_the_tower() -> None:
    layout = parse_backend("megatron:p3")
    with_, without = (training_memory(layout, shape, WORK) for shape in (SEEING, TEXT))
    more = [mine.total - other.total for mine, other in zip(with_, without, strict=True)]
    assert more[0] > tower()
    assert more[1:] == [0, 0]
    fsdp = [fsdp_memory(parse_backend("fsdp:d2"), shape, WORK).total for shape in (SEEING, TEXT)]
    assert fsdp[0] - fsdp[1] == more[0]


def test_images_take_room_in_a_micro_batch() -> None:
    layout = parse_backend("megatron:d1")
    small, large = (training_memory(layout, SEEING, replace(WORK, micro_tokens=n))[0].buffers for n in (512, 1024))
    plain = [training_memory(layout, TEXT, replace(WORK, micro_tokens=n))[0].buffers for n in (512, 1024)]
    assert large - small > plain[1] - plain[0]


def test_the_embedded_rollout_has_the_tower() -> None:
    layout, gpu = parse_backend("transformers:d1"), find_gpu("h100-80g")
    options = {"sequence_length": 64, "batch_size": 4, "element_bytes": 2}
    with_, without = (rollout_memory(layout, shape, gpu, **options).total for shape in (SEEING, TEXT))  # type: ignore[arg-type]
    assert with_ - without == tower()


def test_a_server_has_its_part_of_the_tower_and_room_for_a_prompt_of_images() -> None:
    layout, gpu = parse_backend("vllm:d1t2"), find_gpu("h100-80g")
    options = {"sequence_length": 64, "batch_size": 4, "element_bytes": 2}
    with_, without = (rollout_memory(layout, shape, gpu, **options) for shape in (SEEING, TEXT))  # type: ignore[arg-type]
    assert with_.weights - without.weights == tower() // 2
    assert SEEING.vision is not None
    features = 64 * SEEING.vision.out_hidden * (1 + SEEING.vision.n_deepstack) * 2
    assert with_.workspace - without.workspace > features
    assert without.kv_cache - with_.kv_cache == with_.weights + with_.workspace - without.weights - without.workspace


def test_runs_without_images_have_none() -> None:
    keys = ["cluster.n_gpus_per_node=2"]
    texts = [*keys, "train_dataset.image_key=null", "valid_dataset=null"]
    seeing, reading = (
        recipe_inputs(load_recipe(ROOT / "recipes" / "squares.yaml", given, TrainRecipe), "h100-80g", Changes())
        for given in (keys, texts)
    )
    assert seeing.models["actor"].shape.vision is not None
    assert reading.models["actor"].shape.vision is None


def test_sglang_keeps_the_whole_model_on_the_host_while_it_sleeps() -> None:
    """vLLM keeps the tower alone, which is small, and SGLang all weights or none."""
    needed = {}
    for backend in ("vllm", "sglang"):
        for texts in ([], ["train_dataset.image_key=null", "valid_dataset=null"]):
            keys = ["cluster.n_gpus_per_node=1", f"rollout.backend={backend}:d1", *texts]
            recipe = load_recipe(ROOT / "recipes" / "squares.yaml", keys, TrainRecipe)
            estimate = plan_recipe(recipe, gpu="h100-80g").estimate
            assert estimate is not None
            needed[backend, bool(texts)] = estimate.host_memory[0].total
            weights = estimate.rollouts[0].memory.weights
            if backend == "sglang" and not texts:
                assert needed["sglang", False] == needed["vllm", False] + weights
    assert needed["sglang", True] == needed["vllm", True]
