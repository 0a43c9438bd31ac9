"""The command: every key accounted for, a recipe that loads, and a report for people and programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from dialect_conversion import ENVIRONMENT, FIXTURES, convert_fixture, convert_text, keys_of, leaves
from rich.console import Console

from fivefold.config.load import load_recipe
from fivefold.config.problems import known_keys
from fivefold.config.schema import TrainRecipe
from fivefold.importing.framework import Framework
from fivefold.importing.recipe import convert, import_recipe, split_arguments

DIALECTS = get_args(Framework)
from fivefold.layout.placement import place

SOURCES: list[tuple[Framework, str]] = [
    (framework, path.name) for framework in DIALECTS for path in sorted(FIXTURES.glob(f"{framework}_*"))
]


def run(framework: Framework, fixture: str, folder: Path, *overrides: str, strict: bool = False) -> Path:
    output = folder / "recipe.yaml"
    import_recipe(framework, [FIXTURES / fixture], overrides, output, strict=strict, environment=ENVIRONMENT)
    return output


def test_every_framework_has_dense_and_moe_fixtures() -> None:
    assert {framework for framework, _ in SOURCES} == set(DIALECTS)
    assert len(SOURCES) == len(list(FIXTURES.iterdir()))


@pytest.mark.parametrize(("framework", "fixture"), SOURCES)
def test_every_key_ends_in_one_entry(framework: Framework, fixture: str) -> None:
    conversion = convert_fixture(framework, fixture)
    entries = [entry for entry in conversion.report.entries if not entry.is_default]
    assert sorted(entry.key for entry in entries) == sorted(keys_of(fixture))
    known = set(known_keys(TrainRecipe))
    for entry in entries:
        if entry.outcome == "mapped":
            assert entry.to in known, entry
            assert conversion.recipe[entry.to] == entry.result, entry
        else:
            assert entry.note, entry
            assert not entry.to, entry


@pytest.mark.parametrize(("framework", "fixture"), SOURCES)
def test_the_recipe_loads_and_is_laid_out_on_its_cluster(framework: Framework, fixture: str, tmp_path: Path) -> None:
    recipe_file = run(framework, fixture, tmp_path)
    written = dict(leaves(yaml.safe_load(recipe_file.read_text(encoding="utf-8"))))
    to_give = [key for key, value in written.items() if value == "???"]
    assert to_give == (["actor.path", "train_dataset.path"] if fixture == "roll_megatron.yaml" else [])
    recipe = load_recipe(recipe_file, [f"{key}=given" for key in to_give], TrainRecipe)
    placement = place(recipe)
    assert {"actor", "rollout"} <= {placed.role for placed in placement.roles}
    assert {placed.layout.backend for placed in placement.roles if placed.role != "rollout"} == {"megatron"}


def test_comments_hold_the_report(tmp_path: Path) -> None:
    text = run("verl", "verl_grpo_megatron.sh", tmp_path).read_text(encoding="utf-8")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "verl_grpo_megatron.sh" in comments[0]
    for key in keys_of("verl_grpo_megatron.sh"):
        assert sum(line.startswith(f"#   {key}=") for line in comments) == 1, key
    assert "#   actor_rollout_ref.rollout.n=5 -> gconfig.n_samples=5" in comments


ON_ONE_NODE = ["actor.path=Qwen/Qwen3-8B", "train_dataset.path=a", "cluster.n_nodes=1", "cluster.n_gpus_per_node=8"]


@pytest.mark.parametrize(
    "layout",
    [["actor.backend=megatron:d*t8", "rollout.backend=sglang:d4"], ["allocation_mode=sglang:d6+megatron:d*t4"]],
)
def test_a_layout_that_cannot_be_placed_is_told_in_comments(layout: list[str], tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    report = import_recipe("areal", [], [*ON_ONE_NODE, *layout], output, environment={})
    (note,) = [note for note in report.notes if "does not fit" in note]
    comments = [line for line in output.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for line in note.splitlines():
        assert f"#   {line}" in comments
    load_recipe(output, [], TrainRecipe)


def test_devices_that_cannot_be_read_are_told_in_one_line(tmp_path: Path) -> None:
    text = (FIXTURES / "roll_megatron.yaml").read_text(encoding="utf-8")
    source, output = tmp_path / "roll.yaml", tmp_path / "recipe.yaml"
    source.write_text(text.replace("list(range(0,32))", "list(range(0,32)"), encoding="utf-8")
    report = import_recipe("roll", [source], ["pretrain=m"], output, environment={})
    (entry,) = [entry for entry in report.unsupported if entry.key == "actor_train.device_mapping"]
    assert "a list of devices is expected" in entry.note
    assert "write for example 0-31" in entry.note
    assert "\n" not in entry.note
    load_recipe(output, ["train_dataset.path=d.jsonl"], TrainRecipe)


def test_control_characters_do_not_get_into_the_comments(tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text('actor: {path: m, odd: "a\\e[1mb\\x85c"}\ntrain_dataset: {path: d.jsonl}\n', encoding="utf-8")
    import_recipe("areal", [source], [], output, environment={})
    load_recipe(output, [], TrainRecipe)


TEXTS_LIKE_NUMBERS = ["1e-06", "2e5", "1_0e3", "12:30", "007", "null", "on", "-1e3"]


@pytest.mark.parametrize("name", TEXTS_LIKE_NUMBERS)
def test_texts_that_look_like_something_else_stay_texts(name: str, tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    quoted = json.dumps(name)
    source.write_text(
        f"trainer: {{experiment_name: {quoted}, project_name: p}}\n"
        f"data: {{train_files: {quoted}, val_files: {quoted}, prompt_key: {quoted}}}\n"
        "actor_rollout_ref: {model: {path: m}}\n",
        encoding="utf-8",
    )
    import_recipe("verl", [source], [], output, environment={})
    recipe = load_recipe(output, [], TrainRecipe)
    assert recipe.trial_name == name.replace(":", "-").strip("-")
    assert recipe.train_dataset.path == recipe.train_dataset.prompt_key == name
    assert recipe.valid_dataset is not None
    assert recipe.valid_dataset.path == name


def test_a_number_as_the_runs_name_is_written_as_a_text(tmp_path: Path) -> None:
    output = run("verl", "verl_grpo_megatron.sh", tmp_path, "trainer.experiment_name=1e-6")
    assert load_recipe(output, [], TrainRecipe).trial_name == "1e-06"


@pytest.mark.parametrize("value", ["'${'", "'[a, ${nowhere}]'"])
@pytest.mark.parametrize("key", ["gconfig.stop", "actor.path"])
def test_interpolations_that_lead_nowhere_are_not_written(key: str, value: str, tmp_path: Path) -> None:
    conversion = convert_text("areal", tmp_path, f"{key}: {value}\n")
    assert key in conversion.unsupported()
    assert "${" not in str(conversion.recipe)


def test_files_of_interpolations_that_lead_nowhere_are_not_written(tmp_path: Path) -> None:
    conversion = convert_text("verl", tmp_path, "data: {train_files: ['${data.none}/a.parquet', b.parquet]}\n")
    assert "data.train_files" in conversion.unsupported()
    assert conversion.report.to_give == ("actor.path", "train_dataset.path")


def test_the_table_shows_every_key() -> None:
    conversion = convert_fixture("trinity", "trinity_ppo_megatron.yaml")
    console = Console(width=400, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(conversion.report.table())
    table = capture.get()
    # A default that holds in Fivefold as well is no news.
    told = [entry for entry in conversion.report.entries if not entry.is_default or entry.outcome != "implied"]
    assert [entry.key for entry in told if entry.key not in table] == []


def test_strict_refuses_what_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)--strict.*critic\.optim\.lr: there is no critic") as caught:
        run("verl", "verl_ppo_fsdp.sh", tmp_path, strict=True)
    assert "algorithm.adv_estimator" in str(caught.value)
    assert not (tmp_path / "recipe.yaml").exists()


def test_strict_accepts_what_is_mapped_or_implied(tmp_path: Path) -> None:
    assert run("areal", "areal_moe_megatron.yaml", tmp_path, "rollout.backend=sglang:d4", strict=True).exists()


VERL_IN_SHORT = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "data.train_files=a.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=vllm",
]
TRINITY_IN_SHORT = [
    "algorithm.algorithm_type=grpo",
    "model.model_path=Qwen/Qwen3-8B",
    "buffer.explorer_input.taskset.path=a.jsonl",
    "explorer.rollout_model.engine_type=vllm",
    "cluster.node_num=1",
    "cluster.gpu_per_node=8",
]


@pytest.mark.parametrize(
    ("framework", "words", "layout", "defaults"),
    [
        ("verl", VERL_IN_SHORT, "vllm:d4t2", {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}),
        (
            "trinity",
            TRINITY_IN_SHORT,
            "vllm:d1",
            {"explorer.rollout_model.tensor_parallel_size": 1, "explorer.rollout_model.engine_num": 1},
        ),
    ],
)
def test_degrees_that_hold_by_default_are_mapped(
    framework: Framework, words: list[str], layout: str, defaults: dict[str, int], tmp_path: Path
) -> None:
    output = tmp_path / "recipe.yaml"
    report = import_recipe(framework, [], words, output, strict=True, environment={})
    assert load_recipe(output, [], TrainRecipe).rollout.backend == layout
    entries = {entry.key: entry for entry in report.defaults}
    for key, degree in defaults.items():
        entry = entries[key]
        assert (entry.value, entry.to, entry.result) == (degree, "rollout.backend", layout)


def test_strict_counts_one_key_as_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^1 key is unsupported"):
        import_recipe(
            "verl", [], [*VERL_IN_SHORT, "data.new_key=1"], tmp_path / "recipe.yaml", strict=True, environment={}
        )


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("", "is a folder"),
        ("file/recipe.yaml", "file is a file"),
        ("file/deeper/recipe.yaml", "file is a file"),
        ("r" * 300, "File name too long"),
        ("r" * 300 + "/recipe.yaml", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_with_the_reason(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder", encoding="utf-8")
    output = tmp_path / place
    with pytest.raises(ValueError, match=reason) as caught:
        import_recipe("verl", [], VERL_IN_SHORT, output, overwrite=True, environment={})
    assert f"-o {output}" in str(caught.value)


def test_recipes_are_not_overwritten_unless_told(tmp_path: Path) -> None:
    output = run("areal", "areal_ppo.yaml", tmp_path)
    before = output.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="--overwrite"):
        run("roll", "roll_grpo_moe.yaml", tmp_path)
    assert output.read_text(encoding="utf-8") == before
    files = [FIXTURES / "roll_grpo_moe.yaml"]
    import_recipe("roll", files, [], output, overwrite=True, environment=ENVIRONMENT)
    assert output.read_text(encoding="utf-8") != before


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to import"):
        import_recipe("verl", [], [], tmp_path / "recipe.yaml")


def test_arguments_are_files_or_overrides(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.yaml"
    odd.write_text("a: 1\n", encoding="utf-8")
    files, overrides = split_arguments(["run.sh", "a.b=c", "+d=e", str(odd), "x/y=z.yaml"])
    assert files == [Path("run.sh"), odd]
    assert overrides == ["a.b=c", "+d=e", "x/y=z.yaml"]
    too_long_for_a_file = "a.b=" + "c" * 300
    assert split_arguments([too_long_for_a_file]) == ([], [too_long_for_a_file])


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    text = run("areal", "areal_grpo_fsdp.yaml", tmp_path).read_text(encoding="utf-8")
    assert "stats_logger.wandb.api_key=***" in text
    assert "not-for-everybody" not in text
    report = convert_fixture("areal", "areal_grpo_fsdp.yaml").report
    assert "not-for-everybody" not in json.dumps(report.as_dict())
    assert convert_fixture("areal", "areal_grpo_fsdp.yaml")["actor.mb_spec.max_tokens_per_mb"].result == 9216


def test_unknown_keys_are_unsupported_and_empty_ones_imply_the_default(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, "pretrain: some/model\nbrand_new: 3\nbrand_empty: ~\n")
    assert conversion["brand_new"].outcome == "unsupported"
    assert conversion["brand_empty"].outcome == "implied"
    assert "not a key of ROLL" in conversion["brand_new"].note


def test_values_that_are_left_to_be_given_are_unsupported(tmp_path: Path) -> None:
    conversion = convert_text("verl", tmp_path, "actor_rollout_ref: {model: {path: '???'}}\n")
    assert conversion["actor_rollout_ref.model.path"].outcome == "unsupported"
    assert conversion.recipe["actor.path"] == "???"
    assert "actor.path" in conversion.report.to_give


@pytest.mark.parametrize(
    ("framework", "text", "key", "kept"),
    [
        # Out of range.
        ("verl", "python3 -m t actor_rollout_ref.rollout.top_p=1.5", "actor_rollout_ref.rollout.top_p", {}),
        # Of another type.
        ("areal", "actor: {eps_clip: wide}", "actor.eps_clip", {}),
        # Two keys that contradict one another: k1 is no loss, and the rollout's log-probs are of a cut distribution.
        (
            "verl",
            "python3 -m t actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl",
            "actor_rollout_ref.actor.kl_loss_type",
            {"actor.kl_in": "loss"},
        ),
        (
            "areal",
            "actor: {recompute_logprob: false}\ngconfig: {top_p: 0.9}",
            "actor.recompute_logprob",
            {"gconfig.top_p": 0.9},
        ),
        ("areal", "gconfig: {greedy: true}", "gconfig.greedy", {}),
        (
            "areal",
            "actor: {ppo_n_minibatches: 3}\ntrain_dataset: {batch_size: 8}",
            "actor.ppo_n_minibatches",
            {"train_dataset.batch_size": 8},
        ),
        # One response cannot be sampled more than once.
        (
            "areal",
            "eval_gconfig: {greedy: true, n_samples: 4}\nvalid_dataset: {path: a.jsonl}",
            "eval_gconfig.n_samples",
            {"evaluator.greedy": True},
        ),
        (
            "areal",
            "gconfig: {min_new_tokens: 9, max_new_tokens: 8}",
            "gconfig.min_new_tokens",
            {"gconfig.max_new_tokens": 8},
        ),
        # One of a list.
        ("areal", "gconfig: {stop_token_ids: [3, -1]}", "gconfig.stop_token_ids", {}),
        (
            "areal",
            "actor: {megatron: {ddp: {overlap_grad_reduce: often}}}",
            "actor.megatron.ddp.overlap_grad_reduce",
            {},
        ),
    ],
)
def test_values_that_the_recipe_refuses_are_taken_back(
    framework: Framework, text: str, key: str, kept: dict[str, object], tmp_path: Path
) -> None:
    conversion = convert_text(framework, tmp_path, text)
    assert conversion[key].outcome == "unsupported"
    assert conversion.recipe.items() >= kept.items()


@pytest.mark.parametrize(
    ("framework", "text", "key", "note"),
    [
        ("verl", "trainer: {test_freq: 5}", "trainer.test_freq", "held-out"),
        ("areal", "actor: {optimizer: {min_lr_ratio: 0.1}}", "actor.optimizer.min_lr_ratio", "constant"),
        (
            "areal",
            "eval_gconfig: {greedy: true, temperature: 0.6}\nvalid_dataset: {path: a.jsonl}",
            "eval_gconfig.temperature",
            "greedy",
        ),
        ("areal", "valid_dataset: {path: a.jsonl, batch_size: 4}", "valid_dataset.batch_size", "at once"),
        ("areal", "train_dataset: {path: a.parquet, split: train}", "train_dataset.split", "one file"),
        (
            "trinity",
            "buffer: {explorer_input: {taskset: {path: a.jsonl, split: train}}}",
            "buffer.explorer_input.taskset.split",
            "one file",
        ),
    ],
)
def test_what_has_no_effect_is_implied(framework: Framework, text: str, key: str, note: str, tmp_path: Path) -> None:
    conversion = convert_text(framework, tmp_path, text)
    assert conversion[key].outcome == "implied"
    assert note in conversion[key].note


@pytest.mark.parametrize(
    ("framework", "word", "expected"),
    [
        ("verl", "actor_rollout_ref.actor.clip_ratio_low=abc", "a number"),
        ("verl", "actor_rollout_ref.rollout.n=many", "a whole number"),
        ("siirl", "actor_rollout_ref.actor.optim.lr_warmup_steps=[1]", "a whole number"),
        ("verl", "actor_rollout_ref.model.enable_gradient_checkpointing=often", "true nor false"),
        ("trinity", "algorithm.kl_loss_fn_args.kl_coef=abc", "a number"),
        ("trinity", "buffer.batch_size=0", "at least 1"),
        ("roll", "pg_clip=wide", "a number"),
        ("areal", "actor.kl_ctl=abc", "a number"),
    ],
)
def test_values_of_another_type_that_others_depend_on_end_the_import(
    framework: Framework, word: str, expected: str, tmp_path: Path
) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(ValueError, match=rf"{key}: .*{re.escape(value)}.* {expected}.*{key}=\.\.\."):
        import_recipe(framework, [], [word], tmp_path / "recipe.yaml", environment={})
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize("value", ["abc", "0"])
@pytest.mark.parametrize(("framework", "fixture"), SOURCES)
def test_any_value_is_converted_or_refused_with_its_key(framework: Framework, fixture: str, value: str) -> None:
    for key in sorted(keys_of(fixture)):
        try:
            conversion = convert_fixture(framework, fixture, overrides=[f"{key}={value}"])
        except ValueError as error:
            assert f"{key}: " in str(error)  # noqa: PT017 (most keys are converted)
        else:
            assert key in {entry.key for entry in conversion.report.entries}


MEGATRON_REF = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"
TREE = "trainer.trainer_config."
ROLL_REF = "reference.strategy_args.strategy_config.tensor_model_parallel_size"
ROLL_WORDS = [
    "actor_train.strategy_args.strategy_name=megatron_train",
    "reference.strategy_args.strategy_name=megatron_infer",
    "actor_train.device_mapping=0-7",
    "reference.device_mapping=8-15",
    f"{ROLL_REF}=2",
]
VERL_WORDS = ["actor_rollout_ref.actor.strategy=megatron", f"{MEGATRON_REF}=2"]
AREAL_WORDS = [
    "actor.backend=megatron:d8",
    "rollout.backend=vllm:d8",
    "ref.backend=megatron:d4t2",
    "ref.path=other/model",
]


@pytest.mark.parametrize(
    ("framework", "words", "keys", "kl"),
    [
        ("verl", VERL_WORDS, [MEGATRON_REF], ["actor_rollout_ref.actor.use_kl_loss=True"]),
        ("siirl", VERL_WORDS, [MEGATRON_REF], ["actor_rollout_ref.actor.use_kl_loss=True"]),
        (
            "trinity",
            [
                f"{TREE}actor_rollout_ref.actor.strategy=megatron",
                f"{TREE}{MEGATRON_REF}=2",
                "algorithm.algorithm_type=grpo",
                "cluster.node_num=2",
                "cluster.gpu_per_node=8",
                "explorer.rollout_model.engine_num=8",
            ],
            [TREE + MEGATRON_REF],
            ["algorithm.kl_loss_fn=k2"],
        ),
        ("roll", ROLL_WORDS, [ROLL_REF, "reference.device_mapping"], ["use_kl_loss=true", "kl_loss_coef=0.01"]),
        ("areal", AREAL_WORDS, ["ref.backend", "ref.path"], ["actor.kl_ctl=0.1"]),
    ],
)
def test_a_reference_without_a_kl_term_is_not_written(
    framework: Framework, words: list[str], keys: list[str], kl: list[str]
) -> None:
    without = {"trinity": ["algorithm.kl_loss_fn=none"], "areal": ["actor.kl_ctl=0"]}.get(framework, [])
    recipe, report = convert(framework, [], [*words, *without], {})
    assert "ref" not in recipe
    assert "kl_ctl" not in recipe["actor"] or recipe["actor"]["kl_ctl"] == 0
    entries = {entry.key: entry for entry in report.entries}
    for key in keys:
        assert (entries[key].outcome, "no reference model is loaded" in entries[key].note) == ("implied", True), key
    assert "ref" in convert(framework, [], [*words, *kl], {})[0]


@pytest.mark.parametrize("weight", ["-0.1", "0"])
def test_a_weight_of_the_kl_term_that_is_taken_back_takes_the_reference_with_it(weight: str) -> None:
    words = [*VERL_WORDS, "actor_rollout_ref.actor.use_kl_loss=True", f"actor_rollout_ref.actor.kl_loss_coef={weight}"]
    recipe, report = convert("verl", [], words, {})
    assert "ref" not in recipe
    (entry,) = [entry for entry in report.entries if entry.key == MEGATRON_REF]
    assert (entry.outcome, "no reference model is loaded" in entry.note) == ("implied", True)


def test_devices_of_a_reference_that_is_not_loaded_take_no_nodes() -> None:
    assert convert("roll", [], ROLL_WORDS, {})[0]["cluster"]["n_nodes"] == 1


def test_values_that_the_script_does_not_know_are_unsupported_or_carry_a_note(tmp_path: Path) -> None:
    text = "python3 -m t data.train_files=$DATA trainer.experiment_name=run-$(date) trainer.nnodes=$NODES"
    conversion = convert_text("verl", tmp_path, text)
    assert conversion["data.train_files"].outcome == "unsupported"
    assert "DATA=" in conversion["data.train_files"].note
    assert conversion["trainer.experiment_name"].outcome == "mapped"
    assert "not run" in conversion["trainer.experiment_name"].note
    assert conversion["trainer.nnodes"].outcome == "unsupported"
    assert conversion.report.to_give == ("actor.path", "train_dataset.path")


VERL_MEMORY = "actor_rollout_ref.rollout.gpu_memory_utilization"
ROLL_MEMORY = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
TRINITY_MEMORY = "explorer.rollout_model.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("framework", "fixture", "key", "overrides", "fraction"),
    [
        ("roll", "roll_grpo_moe.yaml", ROLL_MEMORY, [], 0.6),
        ("areal", "areal_grpo_fsdp.yaml", "sglang.mem_fraction_static", [], 0.7),
        ("areal", "areal_grpo_fsdp.yaml", "sglang.mem_fraction_static", ["allocation_mode=", "rollout.backend=sglang:d4"], 0.7),
        ("trinity", "trinity_grpo.yaml", TRINITY_MEMORY, [f"{TRINITY_MEMORY}=0.7"], 0.7),
    ],
)  # fmt: skip
def test_a_servers_share_of_the_memory_is_kept(
    framework: Framework, fixture: str, key: str, overrides: list[str], fraction: float
) -> None:
    conversion = convert_fixture(framework, fixture, overrides=overrides)
    assert conversion[key].to == "rollout.memory_fraction"
    assert conversion.recipe["rollout.memory_fraction"] == fraction


@pytest.mark.parametrize(
    ("framework", "fixture", "key", "overrides", "note"),
    [
        ("verl", "verl_grpo_megatron.sh", VERL_MEMORY, [], "takes the memory that roles on the same devices leave"),
        ("siirl", "siirl_megatron.sh", VERL_MEMORY, [], "takes the memory that roles on the same devices leave"),
        ("roll", "roll_grpo_moe.yaml", ROLL_MEMORY, ["actor_infer.device_mapping=list(range(0,16))"], "takes the memory that roles on the same devices leave"),
        ("verl", "verl_grpo_megatron.sh", VERL_MEMORY, ["actor_rollout_ref.rollout.name=hf"], "the embedded engine takes what it needs"),
    ],
)  # fmt: skip
def test_a_share_of_the_memory_that_others_settle_is_implied(
    framework: Framework, fixture: str, key: str, overrides: list[str], note: str
) -> None:
    conversion = convert_fixture(framework, fixture, overrides=overrides)
    assert conversion[key].outcome == "implied"
    assert note in conversion[key].note
    assert "rollout.memory_fraction" not in conversion.recipe
