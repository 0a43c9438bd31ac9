"""Defaults of the frameworks: each key that is mapped has one, and one that differs from Fivefold's is written or told."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from dialect_conversion import SOURCES, convert_fixture, convert_text, convert_words

from fivefold.config.keys import known_keys
from fivefold.config.problems import COMMANDS
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.defaults import own_default
from fivefold_import.framework import Framework
from fivefold_import.rules import Mapped
from fivefold_import.tables import read_tables

CONFIG = "actor_train.strategy_args.strategy_config."
LOSS = "actor.megatron.transformer.moe_aux_loss_coeff"


@pytest.mark.parametrize("framework", get_args(Framework))
def test_rows_of_tables_name_keys_of_the_recipe_and_their_defaults_can_be_converted(framework: Framework) -> None:
    rows = import_module(f"fivefold_import.{framework}.dialect").RULES.rows
    mapped = {key: row for key, row in rows.items() if isinstance(row.rule, Mapped)}
    assert len(mapped) > 40
    known = {key for schema in COMMANDS for key in known_keys(schema)}
    options = ("actor.loss_kwargs.", "actor.rollout_correction.")  # options of the loss that is chosen
    assert [
        row.rule.key for row in mapped.values() if row.rule.key not in known and not row.rule.key.startswith(options)
    ] == []
    for row in mapped.values():
        if row.default is not None:
            row.rule.convert(row.default)


@pytest.mark.parametrize(
    "text",
    [
        "a: {to: {lr: [actor.optimizer.lr, number]}}",  # no default, not even `~`
        "a: {to: {lr: [actor.optimizer.lr, no_such_conversion, ~]}}",
        "a: {code: {lr: no_such_rule}}",
        "a: {use: [no_such_table]}",
        "a: {no_such_part: {lr: x}}",
        "a: {when: {on: true}, off: {lr: x}}",  # without a reason
        "a: {implied: {lr: x}, off: {KERNELS: [lr]}}",  # a key in two parts
    ],
)
def test_tables_with_mistakes_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr("fivefold_import.tables.FOLDER", tmp_path)
    with pytest.raises(ValueError, match="table a"):
        read_tables("keys", {})


def test_defaults_that_differ_are_written_and_told_and_others_are_neither() -> None:
    for framework, fixture in SOURCES:
        conversion = convert_fixture(framework, fixture)
        for entry in (entry for entry in conversion.report.entries if entry.is_default):
            if entry.outcome == "mapped":
                assert conversion.recipe[entry.to] == entry.result, (fixture, entry)
                assert entry in conversion.report.defaults
            assert entry.outcome != "implied" or entry not in conversion.report.defaults


def test_a_schedule_that_is_left_out_is_that_of_the_framework() -> None:
    schedule, rate, decay = (f"actor.optimizer.{name}" for name in ("lr_scheduler_type", "lr", "weight_decay"))
    cases: list[tuple[Framework, list[str], dict[str, object]]] = [
        ("roll", [], {schedule: "linear", rate: 5e-5, decay: 0.0}),
        ("roll", ["actor_train.training_args.lr_scheduler_type=constant"], {rate: 5e-5, decay: 0.0}),
        ("areal", [], {rate: 1e-3, "actor.optimizer.warmup_steps_proportion": 0.001}),
        ("siirl", ["actor_rollout_ref.actor.strategy=megatron"], {}),
        ("siirl", ["actor_rollout_ref.actor.strategy=fsdp"], {}),
        ("verl", [], {}),
        ("trinity", [], {}),
    ]
    for framework, words, expected in cases:
        recipe = convert_words(framework, "seed=1", *words).recipe
        found = {key: value for key, value in recipe.items() if key.startswith("actor.optimizer.")}
        found = {key: value for key, value in found.items() if value != own_default(key)}
        assert found == expected, (framework, words)


def test_defaults_of_a_section_hold_if_the_source_has_the_section() -> None:
    own = "actor_infer.generating_args."
    recipe = convert_words("roll", f"{own}top_p=0.9", "response_length=8").recipe
    assert (recipe["gconfig.temperature"], recipe["gconfig.top_p"], recipe["gconfig.top_k"]) == (0.95, 0.9, 50)
    assert "gconfig.temperature" not in convert_words("roll", "response_length=8").recipe
    norm = "actor.reward_norm."
    recipe = convert_words("areal", "gconfig.n_samples=4", f"{norm}std_level=group").recipe
    assert (recipe[norm + "mean_level"], recipe[norm + "std_level"], recipe[norm + "eps"]) == ("batch", "group", 1e-5)
    recipe = convert_words("areal", "gconfig.n_samples=4", f"{norm}std_level=null").recipe
    assert (recipe[norm + "mean_level"], recipe[norm + "std_level"]) == ("batch", "none")


def test_what_the_source_writes_comes_before_a_default_of_another_key(tmp_path: Path) -> None:
    """Both keys of a pair set the same key of the recipe."""
    engine = "actor_infer.strategy_args.strategy_config."
    conversion = convert_words("roll", f"{engine}max_num_seqs=64")
    assert conversion.recipe["rollout.max_batch_size"] == 64
    assert conversion["max_running_requests"].outcome == "implied"
    assert conversion.unsupported() == set()
    tree = "trainer: {trainer_config: {actor_rollout_ref: {actor: {clip_ratio: 0.4}}}}\n"
    assert convert_text("trinity", tmp_path, tree).recipe["actor.eps_clip"] == 0.4


def test_the_weight_of_the_routers_loss_is_the_frameworks() -> None:
    model = "Qwen/Qwen3-30B-A3B"  # its config.json has router_aux_loss_coef: 0.001
    roll = [f"pretrain={model}", "actor_train.strategy_args.strategy_name=megatron_train"]
    own = "actor_train.model_args.moe_aux_loss_coef"
    areal = [f"actor.path={model}", "actor.backend=megatron:d8"]
    cases: list[tuple[Framework, list[str], float | None]] = [
        ("roll", roll, 0.001),
        ("roll", [*roll, f"{own}=0.02"], 0.02),
        ("roll", [*roll, f"{own}=0.02", f"{CONFIG}moe_aux_loss_coeff=0.03"], 0.03),
        ("roll", [*roll, f"{CONFIG}additional_configs.moe_aux_loss_coeff=0.04"], 0.04),
        ("roll", ["pretrain=Qwen/Qwen3-8B", *roll[1:]], None),
        ("roll", [roll[0], "actor_train.strategy_args.strategy_name=fsdp2_train"], None),
        ("areal", areal, None),
        ("areal", [*areal, "actor.megatron.bridge_type=megatron-bridge"], 0.001),
        ("areal", [areal[0], "actor.backend=fsdp:d8", "actor.megatron.bridge_type=megatron-bridge"], None),
    ]
    for framework, words, weight in cases:
        conversion = convert_words(framework, *words)
        assert conversion.recipe.get(LOSS) == weight, words
        assert not {key for key in conversion.unsupported() if "moe" in key}, words


def test_a_balancing_of_none_has_no_auxiliary_loss() -> None:
    override = "actor_rollout_ref.actor.megatron.override_transformer_config."
    words = [f"{override}moe_router_load_balancing_type=none", f"{override}moe_aux_loss_coeff=0.001"]
    conversion = convert_words("verl", "actor_rollout_ref.actor.strategy=megatron", *words)
    assert LOSS not in conversion.recipe
    assert conversion[f"{override}moe_aux_loss_coeff"].outcome == "implied"


def test_defaults_that_are_not_known_are_named_in_a_note() -> None:
    name = "actor_train.strategy_args.strategy_config.moe_aux_loss_coeff"
    words = ["pretrain=someone/some-moe-model", "actor_train.strategy_args.strategy_name=megatron_train"]
    (note,) = [note for note in convert_words("roll", *words).report.notes if "defaults are not known" in note]
    assert name in note
    assert "ROLL" in note
    assert not [note for note in convert_words("roll", "seed=1").report.notes if "not known" in note]


def test_own_defaults_are_those_of_the_schema() -> None:
    for key, value in {
        "seed": 1,
        "actor.path": None,
        "actor.optimizer.beta2": 0.999,
        "gconfig.stop": [],
        "valid_dataset.max_length": 1024,
        "actor.megatron.transformer.moe_aux_loss_coeff": 0.0,
        "no.such.key": None,
    }.items():
        assert own_default(key) == value, key
    assert TrainRecipe.model_fields["seed"].default == own_default("seed")
