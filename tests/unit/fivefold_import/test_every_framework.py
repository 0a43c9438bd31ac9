"""What holds for every framework: each key ends in one entry, and the recipe loads and can be laid out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from dialect_conversion import (
    ENVIRONMENT,
    FIXTURES,
    SOURCES,
    convert_fixture,
    convert_words,
    keys_of,
    leaves,
)

from fivefold.config.keys import known_keys
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import place
from fivefold_import.framework import Framework, dialect_of
from fivefold_import.recipe import STAND_INS, import_recipe
from fivefold_import.source import read_document
from tests.rows import long


def test_every_key_ends_in_one_entry_that_names_a_key_of_the_recipe_or_a_reason() -> None:
    assert {framework for framework, _ in SOURCES} == set(get_args(Framework))
    for framework, fixture in SOURCES:
        conversion = convert_fixture(framework, fixture)
        known = set(known_keys(conversion.report.schema))
        entries = [entry for entry in conversion.report.entries if not entry.is_default]
        source_keys = keys_of(fixture)
        # An interpolation of a section, such as `${actor.megatron}`, has an entry for each key of the section.
        keys = {
            next((key for key in source_keys if f"{entry.key}.".startswith(f"{key}.")), "")
            for entry in entries
            if entry.key not in source_keys
        }
        assert keys | ({entry.key for entry in entries} & source_keys) == source_keys, fixture
        assert len({entry.key for entry in entries}) == len(entries), fixture
        for entry in entries:
            if entry.outcome == "mapped":
                by_name = (
                    "reward.rewards.",
                    "valid_datasets.",
                    "chat_template_kwargs.",
                    "scheduler.environment.",
                    "train_dataset.reader_kwargs.",
                    "valid_dataset.reader_kwargs.",
                    "train_dataset.source_weights.",
                )
                assert entry.to in known or entry.to.startswith(by_name), (fixture, entry)
                values = dict(leaves({entry.to: entry.result}))
                assert {key: conversion.recipe[key] for key in values} == values, (fixture, entry)
            else:
                assert entry.note, (fixture, entry)
                assert not entry.to, (fixture, entry)


def test_the_recipe_loads_and_is_laid_out_on_its_cluster(tmp_path: Path) -> None:
    for framework, fixture in SOURCES:
        output = tmp_path / f"{fixture}.yaml"
        schema = import_recipe(framework, [FIXTURES / fixture], [], output, environment=ENVIRONMENT).schema
        written = dict(leaves(yaml.safe_load(output.read_text(encoding="utf-8"))))
        to_give = [key for key, value in written.items() if value == "???"]
        given = [f"{key}={json.dumps(STAND_INS.get(key, 'given'))}" for key in to_give]
        placement = place(load_recipe(output, given, schema))
        roles = {"actor", "rollout"} if schema is TrainRecipe else {"actor"}
        assert roles <= {placed.role for placed in placement.roles}, fixture
        trainers = {placed.layout.backend for placed in placement.roles if placed.role != "rollout"}
        assert len(trainers) == 1, fixture
        assert trainers <= {"megatron", "fsdp"}, fixture


@pytest.mark.parametrize("every", [12, *long(1)])
@pytest.mark.parametrize("framework", get_args(Framework))
def test_any_value_of_any_key_is_converted_or_refused_by_the_name_of_its_key(
    framework: Framework, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key of `every`, at other places in each fixture."""
    for number, fixture in enumerate(name for owner, name in SOURCES if owner == framework):
        # Reading the same file again for each of its keys would take most of the time.
        dialect = dialect_of(framework)
        document = (dialect.read or read_document)(FIXTURES / fixture, ENVIRONMENT)
        once = replace(dialect, read=lambda *_, document=document: document)
        monkeypatch.setattr("fivefold_import.drafting.dialect_of", lambda _, once=once: once)
        for key in sorted(keys_of(fixture))[number % every :: every]:
            for value in ("abc", "0"):
                try:
                    conversion = convert_fixture(framework, fixture, overrides=[f"{key}={value}"])
                except ValueError as error:
                    assert f"{key}: " in str(error), (fixture, key, value)  # noqa: PT017 (most keys are converted)
                else:
                    assert key in {entry.key for entry in conversion.report.entries}, (fixture, key, value)


def test_a_value_of_another_type_that_other_keys_depend_on_ends_the_import(tmp_path: Path) -> None:
    cases: list[tuple[Framework, str, str]] = [
        ("verl", "actor_rollout_ref.actor.clip_ratio_low=abc", "a number"),
        ("verl", "actor_rollout_ref.rollout.n=many", "a whole number"),
        ("siirl", "actor_rollout_ref.actor.optim.lr_warmup_steps=[1]", "a whole number"),
        ("verl", "actor_rollout_ref.model.enable_gradient_checkpointing=often", "true nor false"),
        ("trinity", "algorithm.kl_loss_fn_args.kl_coef=abc", "a number"),
        ("trinity", "buffer.batch_size=0", "at least 1"),
        ("roll", "pg_clip=wide", "a number"),
        ("areal", "actor.kl_ctl=abc", "a number"),
    ]
    output = tmp_path / "recipe.yaml"
    for framework, word, expected in cases:
        key, _, value = word.partition("=")
        with pytest.raises(ValueError, match=rf"{key}: .*{re.escape(value)}.* {expected}.*{key}=\.\.\."):
            import_recipe(framework, [], [word], output, environment={})
        assert not output.exists(), word


def test_degrees_that_hold_by_default_are_mapped() -> None:
    verl = [
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "data.train_files=a.parquet",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    trinity = ["model.model_path=Qwen/Qwen3-8B", "cluster.node_num=1", "cluster.gpu_per_node=8"]
    engine = "explorer.rollout_model."
    cases: list[tuple[Framework, list[str], str, dict[str, int]]] = [
        ("verl", verl, "vllm:d4t2", {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}),
        ("trinity", trinity, "vllm:d1", {engine + "tensor_parallel_size": 1, engine + "engine_num": 1}),
    ]
    for framework, words, layout, defaults in cases:
        conversion = convert_words(framework, *words)
        assert conversion.recipe["rollout.backend"] == layout
        for key, degree in defaults.items():
            entry = conversion[key]
            assert (entry.value, entry.to, entry.result) == (degree, "rollout.backend", layout), key
            assert entry in conversion.report.defaults


VERL_REF = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"
VERL_WITH_REFERENCE = ["actor_rollout_ref.actor.strategy=megatron", f"{VERL_REF}=2"]
VERL_KL = "actor_rollout_ref.actor.use_kl_loss=True"
TREE = "trainer.trainer_config."
TRINITY_WITH_REFERENCE = [
    f"{TREE}actor_rollout_ref.actor.strategy=megatron",
    f"{TREE}{VERL_REF}=2",
    "algorithm.algorithm_type=grpo",
    "cluster.node_num=2",
    "cluster.gpu_per_node=8",
    "explorer.rollout_model.engine_num=8",
]
ROLL_REF = "reference.strategy_args.strategy_config.tensor_model_parallel_size"
ROLL_WITH_REFERENCE = [
    "actor_train.strategy_args.strategy_name=megatron_train",
    "reference.strategy_args.strategy_name=megatron_infer",
    "actor_train.device_mapping=0-7",
    "reference.device_mapping=8-15",
    f"{ROLL_REF}=2",
]
AREAL_WITH_REFERENCE = [
    "actor.backend=megatron:d8",
    "rollout.backend=vllm:d8",
    "ref.backend=megatron:d4t2",
    "ref.path=other/model",
]


def test_a_reference_is_written_only_with_a_kl_term() -> None:
    cases: list[tuple[Framework, list[str], list[str], list[str], list[str]]] = [
        ("verl", VERL_WITH_REFERENCE, [VERL_REF], [], [VERL_KL]),
        ("verl", VERL_WITH_REFERENCE, [VERL_REF], [VERL_KL, "actor_rollout_ref.actor.kl_loss_coef=0"], [VERL_KL]),
        # The recipe refuses a negative weight, and the reference goes with it.
        ("verl", VERL_WITH_REFERENCE, [VERL_REF], [VERL_KL, "actor_rollout_ref.actor.kl_loss_coef=-0.1"], [VERL_KL]),
        ("siirl", VERL_WITH_REFERENCE, [VERL_REF], [], [VERL_KL]),
        (
            "trinity",
            TRINITY_WITH_REFERENCE,
            [TREE + VERL_REF],
            ["algorithm.kl_loss_fn=none"],
            ["algorithm.kl_loss_fn=k2"],
        ),
        (
            "roll",
            ROLL_WITH_REFERENCE,
            [ROLL_REF, "reference.device_mapping"],
            [],
            ["use_kl_loss=true", "kl_loss_coef=0.01"],
        ),
        ("areal", AREAL_WITH_REFERENCE, ["ref.backend", "ref.path"], ["actor.kl_ctl=0"], ["actor.kl_ctl=0.1"]),
    ]
    for framework, words, keys, without, kl in cases:
        conversion = convert_words(framework, *words, *without)
        assert not [key for key in conversion.recipe if key.startswith("ref.")], (framework, without)
        assert not conversion.recipe.get("actor.kl_ctl"), (framework, without)
        for key in keys:
            entry = conversion[key]
            assert (entry.outcome, "no reference model is loaded" in entry.note) == ("implied", True), (framework, key)
        assert "ref.backend" in convert_words(framework, *words, *kl).recipe, framework


def test_devices_of_a_reference_that_is_not_loaded_take_no_nodes() -> None:
    assert convert_words("roll", *ROLL_WITH_REFERENCE).recipe["cluster.n_nodes"] == 1


VERL_MEMORY = "actor_rollout_ref.rollout.gpu_memory_utilization"
ROLL_MEMORY = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
TRINITY_MEMORY = "explorer.rollout_model.gpu_memory_utilization"
AREAL_MEMORY = "sglang.mem_fraction_static"


def test_a_servers_share_of_the_memory_is_kept_on_devices_of_its_own() -> None:
    cases: list[tuple[Framework, str, str, list[str], float]] = [
        ("roll", "roll_grpo_moe.yaml", ROLL_MEMORY, [], 0.6),
        ("areal", "areal_grpo_fsdp.yaml", AREAL_MEMORY, [], 0.7),
        ("areal", "areal_grpo_fsdp.yaml", AREAL_MEMORY, ["allocation_mode=", "rollout.backend=sglang:d4"], 0.7),
        ("trinity", "trinity_grpo.yaml", TRINITY_MEMORY, [f"{TRINITY_MEMORY}=0.7"], 0.7),
    ]
    for framework, fixture, key, overrides, fraction in cases:
        conversion = convert_fixture(framework, fixture, overrides=overrides)
        assert conversion[key].to == "rollout.memory_fraction", (fixture, overrides)
        assert conversion.recipe["rollout.memory_fraction"] == fraction, (fixture, overrides)


def test_a_share_of_the_memory_is_implied_on_shared_devices_and_for_the_embedded_engine() -> None:
    shared, embedded = "memory that roles on the same devices leave", "the embedded engine takes what it needs"
    cases: list[tuple[Framework, str, str, list[str], str]] = [
        ("verl", "verl_grpo_megatron.sh", VERL_MEMORY, [], shared),
        ("siirl", "siirl_megatron.sh", VERL_MEMORY, [], shared),
        ("roll", "roll_grpo_moe.yaml", ROLL_MEMORY, ["actor_infer.device_mapping=list(range(0,16))"], shared),
        ("verl", "verl_grpo_megatron.sh", VERL_MEMORY, ["actor_rollout_ref.rollout.name=hf"], embedded),
    ]
    for framework, fixture, key, overrides, note in cases:
        conversion = convert_fixture(framework, fixture, overrides=overrides)
        assert conversion[key].outcome == "implied", (fixture, overrides)
        assert note in conversion[key].note, (fixture, overrides)
        assert "rollout.memory_fraction" not in conversion.recipe, (fixture, overrides)


@pytest.mark.parametrize(
    ("framework", "fixture", "override", "expected"),
    [
        ("roll", "roll_grpo_moe.yaml", "async_generation_ratio=1.5", 2),
        ("verl", "verl_trainer.yaml", "async_training.staleness_threshold=0.3", 1),
        ("trinity", "trinity_grpo.yaml", "synchronizer.sync_offset=1", 1),
        ("areal", "areal_grpo_fsdp.yaml", "rollout.max_head_offpolicyness=4", 4),
        ("areal", "areal_grpo_fsdp.yaml", "rollout.max_head_offpolicyness=0", None),
    ],
)
def test_a_rollout_that_is_ahead_stays_ahead(
    framework: Framework, fixture: str, override: str, expected: int | None
) -> None:
    conversion = convert_fixture(framework, fixture, [override])
    key = override.partition("=")[0]
    assert conversion[key].outcome == ("implied" if expected is None else "mapped")
    assert conversion.recipe.get("rollout.max_head_offpolicyness") == expected
    if expected is None:
        assert "rollout.max_concurrent_rollouts" not in conversion.recipe


IMAGES: list[tuple[Framework, list[str], str]] = [
    ("verl", ["data.image_key=images"], "data.image_key"),
    ("siirl", ["data.video_key=videos"], "data.video_key"),
    ("trinity", ["buffer.explorer_input.taskset.format.image_key=images"], ""),
    ("roll", ["actor_train.data_args.image_key=image"], ""),
    ("roll", ["vlm_filter.max_pixels=9"], ""),
]


@pytest.mark.parametrize(("framework", "words", "key"), IMAGES)
def test_keys_of_images_are_unsupported(framework: Framework, words: list[str], key: str) -> None:
    assert (key or words[0].partition("=")[0]) in convert_words(framework, *words).unsupported()


SEEING = "Qwen/Qwen3-VL-8B-Instruct"
SEEING_EXPERTS = "Qwen/Qwen3-VL-30B-A3B-Instruct"


@pytest.mark.parametrize(
    ("framework", "words", "key"),
    [
        ("verl", [f"actor_rollout_ref.model.path={SEEING}", "data.val_files=test.parquet"], "data.image_key"),
        ("trinity", [f"model.model_path={SEEING_EXPERTS}"], "buffer.explorer_input.taskset.format.image_key"),
        ("siirl", [f"actor_rollout_ref.model.path={SEEING}", "data.val_files=test.parquet"], "data.image_key"),
    ],
)
def test_columns_of_images_are_mapped_for_models_that_see_them(
    framework: Framework, words: list[str], key: str
) -> None:
    conversion = convert_words(framework, *words, f"{key}=pictures")
    assert conversion[key].outcome == "mapped"
    assert conversion.recipe["train_dataset.image_key"] == "pictures"
    has_held_out = framework in ("verl", "siirl")
    assert conversion.recipe.get("valid_dataset.image_key") == ("pictures" if has_held_out else None)
    assert not any("reads images" in problem for problem in conversion.report.problems)
    without = convert_words(framework, *words)
    assert any("name their column in train_dataset.image_key" in problem for problem in without.report.problems)


def test_rolls_rows_have_their_images_in_the_column_that_its_code_reads() -> None:
    data = "actor_train.data_args"
    words = [f"{data}.file_name=train.parquet", f"{data}.image_max_pixels=9000", f"{data}.image_min_pixels=50"]
    held_out = ["validation.data_args.file_name=test.parquet", "validation.data_args.image_max_pixels=8000"]
    frozen = "actor_train.model_args.freeze_module_prefix"
    given = [*words, *held_out, f"{frozen}=vision_model"]
    conversion = convert_words("roll", f"pretrain={SEEING}", *given)
    wanted = {"train_dataset.image_key": "images", "train_dataset.max_pixels": 9000, "train_dataset.min_pixels": 50}
    wanted |= {"valid_dataset.image_key": "images", "valid_dataset.max_pixels": 8000}
    assert {key: conversion.recipe.get(key) for key in wanted} == wanted
    assert "train_dataset.answer_key" not in conversion.recipe
    assert conversion[frozen].outcome == "implied"
    assert not any("reads images" in problem for problem in conversion.report.problems)
    texts = convert_words("roll", "pretrain=Qwen/Qwen3-8B", *given)
    assert not any("image_key" in key or "pixels" in key for key in texts.recipe)
    assert f"{data}.image_max_pixels" in texts.unsupported()


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_kinds_of_columns_are_mapped_if_they_are_images_alone(framework: Framework) -> None:
    words = [f"hf_checkpoint={SEEING}", "prompt_data=train.parquet"]
    conversion = convert_words(framework, *words, """multimodal_keys='{"image": "pictures"}'""")
    assert conversion.recipe["train_dataset.image_key"] == "pictures"
    for other in ('{"image": "pictures", "video": "films"}', '{"video": "films"}', "{"):
        assert "multimodal_keys" in convert_words(framework, *words, f"multimodal_keys='{other}'").unsupported()
    text = convert_words(framework, "hf_checkpoint=Qwen/Qwen3-8B", """multimodal_keys='{"image": "pictures"}'""")
    assert "multimodal_keys" in text.unsupported()


def test_a_model_that_reads_images_is_a_problem(tmp_path: Path) -> None:
    keys: dict[Framework, str] = {
        "areal": "actor.path",
        "miles": "hf_checkpoint",
        "nemo_rl": "policy.model_name",
        "roll": "pretrain",
        "siirl": "actor_rollout_ref.model.path",
        "skyrl": "trainer.policy.model.path",
        "slime": "hf_checkpoint",
        "trinity": "model.model_path",
        "verl": "actor_rollout_ref.model.path",
    }
    (tmp_path / "config.json").write_text('{"model_type": "own", "vision_config": {}}')
    seeing = [
        "Qwen/Qwen2.5-VL-7B",
        SEEING_EXPERTS,
        SEEING,
        "/models/qwen2_5_vl",
        "OpenGVLab/InternVL3-8B",
        "zai-org/GLM-4.5V",
        str(tmp_path),
    ]
    reading = ["Qwen/Qwen3-8B", "/data/vision/Qwen3-8B", "zai-org/GLM-4.5-Air", "/models/novlm-8B"]
    for framework, key in keys.items():
        for model in seeing + reading:
            problems = convert_words(framework, f"{key}={model}").report.problems
            assert any("reads images" in problem for problem in problems) == (model in seeing), (framework, model)


def test_models_that_no_family_has_the_layers_of_are_a_problem() -> None:
    for model, is_problem in (
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", True),
        ("/models/NVIDIA-Nemotron-Nano-12B-v2", True),
        ("google/gemma-2b-it", True),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", False),
        ("google/gemma-3-1b-it", False),
        ("Qwen/Qwen3-8B", False),
    ):
        problems = convert_words("verl", f"actor_rollout_ref.model.path={model}").report.problems
        assert any("no family with this model's layers" in problem for problem in problems) is is_problem, model
