"""Importing: which values the recipe takes, which it gives back, and when nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialect_conversion import ENVIRONMENT, FIXTURES, convert_files, convert_text, convert_words

from fivefold.config.load import load_any_recipe, load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.planning.plan import plan_recipe
from fivefold_import.framework import Framework
from fivefold_import.recipe import import_recipe, split_arguments

ROLLOUT = "actor_rollout_ref.rollout."
VERL_IN_SHORT = ["actor_rollout_ref.model.path=Qwen/Qwen3-8B", "data.train_files=a.parquet"]


def test_strict_refuses_unsupported_keys_and_accepts_all_others(tmp_path: Path) -> None:
    output, fixture = tmp_path / "recipe.yaml", FIXTURES / "areal_ppo.yaml"
    with pytest.raises(ValueError, match=r"(?s)--strict.*actor\.reward_norm\.std_level") as caught:
        import_recipe("areal", [fixture], [], output, strict=True, environment=ENVIRONMENT)
    assert "actor.reward_norm.mean_level" in str(caught.value)
    words = [*VERL_IN_SHORT, "algorithm.adv_estimator=grpo", "data.new_key=1"]
    with pytest.raises(ValueError, match=r"^1 key is unsupported"):
        import_recipe("verl", [], words, output, strict=True, environment={})
    assert not output.exists()
    moe = FIXTURES / "areal_moe_megatron.yaml"
    import_recipe("areal", [moe], ["rollout.backend=sglang:d4"], output, strict=True, environment=ENVIRONMENT)
    assert output.exists()


def test_what_a_plan_would_refuse_is_a_problem(tmp_path: Path) -> None:
    cluster = "cluster: {n_nodes: 2, n_gpus_per_node: 8}\nactor: {path: Qwen/Qwen3-235B-A22B, {}}\n{}"
    cases = [
        ("backend: 'megatron:d4'", "allocation_mode: 'sglang:d8+megatron:d8'\n", "allocation_mode says"),
        ("backend: 'megatron:d1p4t2v32'", "rollout: {backend: 'sglang:d1t8'}\n", "94 layers are too few"),
        ("backend: 'megatron:d8'", "rollout: {backend: 'sglang:d9'}\n", "sizes differ"),
        ("backend: 'megatron:d7e7'", "rollout: {backend: 'sglang:d7'}\n", "128 experts"),
        ("backend: 'megatron:d16'", "rollout: {backend: 'vllm:d1t8p2'}\n", ""),
        ("backend: 'megatron:d8'", "rollout: {backend: 'sglang:d8'}\nreward: {fn: x}\n", ""),
    ]
    output = tmp_path / "recipe.yaml"
    for actor, rest, words in cases:
        source = tmp_path / "config.yaml"
        source.write_text(cluster.replace("{}", actor, 1).replace("{}", rest), encoding="utf-8")
        words_of_data = ["train_dataset.path=a.parquet", "gconfig.n_samples=4", "train_dataset.batch_size=8"]
        report = import_recipe("areal", [source], words_of_data, output, overwrite=True, environment={})
        refused = _refused_by_plan(output)
        assert bool(refused) is bool(report.problems) is bool(words), actor
        if words:
            assert any(words in problem for problem in report.problems), report.problems
            assert report.problems[0].splitlines()[0] in output.read_text(encoding="utf-8")
            with pytest.raises(ValueError, match=r"(?s)there (is 1 problem|are \d+ problems), and --strict"):
                import_recipe("areal", [source], words_of_data, tmp_path / "new.yaml", strict=True, environment={})
            assert not (tmp_path / "new.yaml").exists()


def test_files_of_another_framework_are_refused_with_its_name(tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    cases: list[tuple[Framework, str, str]] = [
        ("verl", "areal_grpo_fsdp.yaml", r"^80 of 84 keys are not verl's; this looks like AReaL's: --from areal$"),
        ("areal", "roll_ppo_deepspeed.yaml", r"keys are not AReaL's; this looks like ROLL's: --from roll$"),
        ("verl", "roll_megatron.yaml", r"this looks like ROLL's: --from roll$"),
        ("verl", "trinity_grpo.yaml", r"this looks like Trinity-RFT's: --from trinity$"),
        ("roll", "verl_grpo_megatron.sh", r"this looks like siiRL's or verl's: --from siirl or --from verl$"),
    ]
    for named, fixture, message in cases:
        with pytest.raises(ValueError, match=message):
            import_recipe(named, [FIXTURES / fixture], [], output, environment=ENVIRONMENT)
        assert not output.exists()


def test_files_that_are_mostly_of_no_framework_are_told(tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.write_text("{a: 1, b: 2, c: 3, seed: 1, experiment_name: e}", encoding="utf-8")
    problems = convert_files("areal", [source], [], {}).report.problems
    assert problems[0].startswith("3 of 5 keys are not known as AReaL's: name with --from")


def test_several_nodes_are_those_of_a_ray_cluster_unless_the_source_says_otherwise() -> None:
    nodes = [*VERL_IN_SHORT, "trainer.n_gpus_per_node=8"]
    several = convert_words("verl", *nodes, "trainer.nnodes=2")
    assert several.recipe["scheduler.type"] == "ray"
    assert any(note.startswith("scheduler.type=ray:") for note in several.report.notes)
    assert "scheduler.type" not in convert_words("verl", *nodes, "trainer.nnodes=1").recipe
    local = convert_words("areal", "cluster.n_nodes=2", "cluster.n_gpus_per_node=8", "scheduler.type=local")
    assert local.recipe["scheduler.type"] == "local"
    assert any("several nodes need scheduler.type=ray" in note for note in local.report.notes)
    submitted = convert_words("areal", "cluster.n_nodes=2", "cluster.n_gpus_per_node=8", "scheduler.type=slurm")
    assert submitted.recipe["scheduler.type"] == "ray"


def _refused_by_plan(recipe: Path) -> str:
    try:
        plan_recipe(load_any_recipe(recipe, []))
    except ValueError as error:
        return str(error)
    return ""


def test_an_empty_name_is_no_file(tmp_path: Path) -> None:
    for value in ("''", "['']", "[]"):
        conversion = convert_text("verl", tmp_path, f"data: {{val_files: {value}, train_files: {value}}}\n")
        assert conversion["data.val_files"].outcome == "implied", value
        assert conversion["data.train_files"].outcome == "unsupported", value
        assert "valid_dataset.path" not in conversion.recipe
        assert conversion.report.to_give == ("actor.path", "train_dataset.path")


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder", encoding="utf-8")
    for place, reason in {
        "": "is a folder",
        "file/recipe.yaml": "file is a file",
        "file/deeper/recipe.yaml": "file is a file",
        "r" * 300: "File name too long",
        "r" * 300 + "/recipe.yaml": "File name too long",
    }.items():
        output = tmp_path / place
        with pytest.raises(ValueError, match=reason) as caught:
            import_recipe("verl", [], VERL_IN_SHORT, output, overwrite=True, environment={})
        assert f"-o {output}" in str(caught.value)


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


def test_texts_that_look_like_something_else_stay_texts(tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    for name in ("1e-06", "2e5", "1_0e3", "12:30", "007", "null", "on", "-1e3"):
        quoted = json.dumps(name)
        source.write_text(
            f"trainer: {{experiment_name: {quoted}, project_name: p}}\n"
            f"data: {{train_files: {quoted}, val_files: {quoted}, prompt_key: {quoted}}}\n"
            "actor_rollout_ref: {model: {path: m}}\n",
            encoding="utf-8",
        )
        import_recipe("verl", [source], [], output, overwrite=True, environment={})
        recipe = load_recipe(output, [], TrainRecipe)
        assert recipe.trial_name == name.replace(":", "-").strip("-")
        assert recipe.train_dataset.path == recipe.train_dataset.prompt_key == name
        assert recipe.valid_dataset is not None
        assert recipe.valid_dataset.path == name


def test_a_number_as_the_name_of_a_run_is_written_as_a_text(tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    import_recipe("verl", [], [*VERL_IN_SHORT, "trainer.experiment_name=1e-6"], output, environment={})
    assert load_recipe(output, [], TrainRecipe).trial_name == "1e-06"


def test_interpolations_that_lead_nowhere_are_not_written(tmp_path: Path) -> None:
    cases: list[tuple[Framework, str, str]] = [
        ("areal", "gconfig.stop", "'${'"),
        ("areal", "gconfig.stop", "'[a, ${nowhere}]'"),
        ("areal", "actor.path", "'${'"),
        ("areal", "actor.path", "'[a, ${nowhere}]'"),
        ("verl", "data.train_files", "['${data.none}/a.parquet', b.parquet]"),
    ]
    for framework, key, value in cases:
        conversion = convert_text(framework, tmp_path, f"{key}: {value}\n")
        assert key in conversion.unsupported(), (key, value)
        found = str(conversion.recipe).replace("${actor.path}", "")  # verl's default is a critic like the actor
        assert "${" not in found, (key, value)
        assert conversion.report.to_give == ("actor.path", "train_dataset.path"), (key, value)


def test_unknown_keys_are_unsupported_and_empty_ones_imply_the_default(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, "pretrain: some/model\nbrand_new: 3\nbrand_empty: ~\n")
    assert conversion["brand_new"].outcome == "unsupported"
    assert conversion["brand_empty"].outcome == "implied"
    assert "not a key of ROLL" in conversion["brand_new"].note


def test_a_value_that_the_source_leaves_open_is_left_to_the_user(tmp_path: Path) -> None:
    conversion = convert_text("verl", tmp_path, "actor_rollout_ref: {model: {path: '???'}}\n")
    assert conversion["actor_rollout_ref.model.path"].outcome == "unsupported"
    assert conversion.recipe["actor.path"] == "???"
    assert "actor.path" in conversion.report.to_give


def test_values_that_a_script_does_not_know_are_unsupported_or_carry_a_note(tmp_path: Path) -> None:
    text = "python3 -m t data.train_files=$DATA trainer.experiment_name=run-$(date) trainer.nnodes=$NODES"
    conversion = convert_text("verl", tmp_path, text)
    assert conversion["data.train_files"].outcome == "unsupported"
    assert "DATA=" in conversion["data.train_files"].note
    assert conversion["trainer.experiment_name"].outcome == "mapped"
    assert "not run" in conversion["trainer.experiment_name"].note
    assert conversion["trainer.nnodes"].outcome == "unsupported"
    assert conversion.report.to_give == ("actor.path", "train_dataset.path")


def test_values_that_the_recipe_refuses_are_taken_back(tmp_path: Path) -> None:
    rollout, actor = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
    cases: list[tuple[Framework, str, str, dict[str, object]]] = [
        # A value that is out of range, and values of another type.
        ("verl", f"python3 -m t {rollout}top_p=1.5", f"{rollout}top_p", {}),
        ("areal", "actor: {eps_clip: wide}", "actor.eps_clip", {}),
        ("areal", "gconfig: {stop_token_ids: [3, -1]}", "gconfig.stop_token_ids", {}),
        (
            "areal",
            "actor: {megatron: {ddp: {overlap_grad_reduce: often}}}",
            "actor.megatron.ddp.overlap_grad_reduce",
            {},
        ),
        # Greedy sampling gives a group of equal responses.
        ("areal", "gconfig: {greedy: true}", "gconfig.greedy", {}),
        # Two keys that contradict one another. The estimator k1 has no gradient in a loss.
        (
            "verl",
            f"python3 -m t {actor}use_kl_loss=True {actor}kl_loss_type=kl",
            f"{actor}kl_loss_type",
            {"actor.kl_in": "loss"},
        ),
        # The rollout's log-probabilities describe a distribution that top_p has cut.
        (
            "areal",
            "actor: {recompute_logprob: false}\ngconfig: {top_p: 0.9}",
            "actor.recompute_logprob",
            {"gconfig.top_p": 0.9},
        ),
        (
            "areal",
            "actor: {ppo_n_minibatches: 3}\ntrain_dataset: {batch_size: 8}",
            "actor.ppo_n_minibatches",
            {"train_dataset.batch_size": 8},
        ),
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
    ]
    for framework, text, key, kept in cases:
        conversion = convert_text(framework, tmp_path, text)
        assert conversion[key].outcome == "unsupported", text
        assert conversion.recipe.items() >= kept.items(), text


def test_values_without_effect_are_implied(tmp_path: Path) -> None:
    taskset = "buffer.explorer_input.taskset"
    cases: list[tuple[Framework, str, str, str]] = [
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
        ("trinity", f"{taskset}.path: a.jsonl\n{taskset}.split: train", f"{taskset}.split", "one file"),
    ]
    for framework, text, key, note in cases:
        conversion = convert_text(framework, tmp_path, text)
        assert conversion[key].outcome == "implied", text
        assert note in conversion[key].note, text


def test_a_reward_that_no_key_names_is_noted() -> None:
    def has_note(framework: Framework, *words: str) -> bool:
        return any(
            "reward.fn=math judges all responses" in note for note in convert_words(framework, *words).report.notes
        )

    # verl chooses its rewards by the data source, AReaL names them in Python.
    assert has_note("verl", *VERL_IN_SHORT)
    assert not has_note("verl", *VERL_IN_SHORT, "custom_reward_function.path=own.py")
    assert has_note("areal", "actor.path=a")
    assert not has_note("areal", "actor.path=a", "train_dataset.type=sft")
    assert not has_note("trinity", "buffer.explorer_input.default_reward_fn_type=math_boxed_reward")


def test_sampling_that_leaves_the_mismatch_unknown_is_noted() -> None:
    def has_note(*words: str) -> bool:
        return any("neither measured nor corrected" in note for note in convert_words("verl", *words).report.notes)

    assert has_note(*VERL_IN_SHORT, "actor_rollout_ref.rollout.top_p=0.9")
    assert not has_note(*VERL_IN_SHORT)


def test_a_variable_that_is_not_set_is_the_reason_whatever_its_key_takes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    keys = {
        "trainer.nnodes": "NODES",
        "trainer.project_name": "NAME",
        "data.shuffle": "S",
        "trainer.default_local_dir": "D",
    }
    words = " ".join(f"{key}=${variable}" for key, variable in keys.items())
    script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    conversion = convert_files("verl", [script], [], {})
    for key, variable in keys.items():
        assert conversion[key].note.startswith(f"${variable} is not set"), key
    script.write_text(f"python3 -m verl.trainer.main_ppo {ROLLOUT}n=$N {ROLLOUT}name=vllm\n", encoding="utf-8")
    assert convert_files("verl", [script], [], {})[f"{ROLLOUT}n"].note.startswith("$N is not set")
