"""Agents: the limits of episodes are converted, and what plays them is left open, with a sentence on how to write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialect_conversion import ENVIRONMENT, FIXTURES, Conversion, convert_fixture, convert_text, convert_words

from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold_import import reasons
from fivefold_import.framework import Framework
from fivefold_import.recipe import import_recipe

MISSING = "???"
FIXTURES_OF_AGENTS: list[tuple[Framework, str, str, dict[str, str], dict[str, Any]]] = [
    (
        "verl",
        "verl_tools.sh",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        {"environment.tools": "[search.py:search]"},
        {
            "environment.tools": MISSING,
            "environment.max_turns": 4,
            "environment.max_length": 4096 + 3000,
            "gconfig.max_new_tokens": 3000,
            "reward.fn": "/data/search/exact_match.py:compute_score",
        },
    ),
    (
        "areal",
        "areal_agent.yaml",
        "workflow",
        {"environment.agent": "agent.py:solve"},
        {
            "environment.agent": MISSING,
            "environment.max_turns": 2,
            "environment.max_length": 2048,
            "gconfig.n_samples": 4,
            "gconfig.max_new_tokens": 1024,
            "reward.fn": "environment",
        },
    ),
    (
        "roll",
        "roll_agentic.yaml",
        "custom_envs.FrozenLake.env_type",
        {"environment.game": "lake.py:FrozenLake", "train_dataset.path": "lakes.jsonl"},
        {
            "environment.game": MISSING,
            "environment.max_turns": 10,
            "environment.max_length": 8192,
            "train_dataset.path": MISSING,
            "train_dataset.batch_size": 1024 // 8,
            "gconfig.n_samples": 8,
            "gconfig.max_new_tokens": 128,
            "actor.ppo_n_minibatches": 1024 // (2 * 64 * 8),
            "actor.reward_norm.mean_level": "group",
            "actor.reward_norm.std_level": "group",
            "reward.fn": "environment",
        },
    ),
    (
        "trinity",
        "trinity_react.yaml",
        "buffer.explorer_input.default_workflow_type",
        {"environment.agent": "agent.py:search"},
        {
            "environment.agent": MISSING,
            "environment.max_turns": 10,
            "environment.max_length": 20480,
            "environment.retries": 2,
            "gconfig.n_samples": 8,
            "gconfig.max_new_tokens": 4096,
            "actor.reward_norm.mean_level": "group",
            "reward.fn": "environment",
        },
    ),
]
"""For each fixture: the key that names what plays, what a user gives for it, and what the recipe has."""
TO_WRITE = (reasons.WRITE_GAME, reasons.WRITE_TOOLS, reasons.WRITE_AGENT)
VERL = "actor_rollout_ref.rollout."
WORKFLOW = "buffer.explorer_input.default_workflow_type"


def of_verl(*words: str) -> Conversion:
    return convert_words("verl", "algorithm.adv_estimator=grpo", f"{VERL}n=4", *(VERL + word for word in words))


def of_trinity(workflow: str, *words: str) -> Conversion:
    words = ("model.model_path=m", "algorithm.algorithm_type=grpo", *words)
    return convert_words("trinity", *words, f"{WORKFLOW}={workflow}")


def of_areal(*words: str) -> Conversion:
    base = ("actor.path=m", "actor.backend=fsdp:d1", "rollout.backend=sglang:d1", "gconfig.n_samples=4")
    return convert_words("areal", *base, *words)


def of_roll(folder: Path, *words: str) -> Conversion:
    text = (FIXTURES / "roll_agentic.yaml").read_text(encoding="utf-8")
    return convert_text("roll", folder, text, *words)


@pytest.mark.parametrize(("framework", "fixture", "key", "given", "values"), FIXTURES_OF_AGENTS)
def test_limits_are_converted_and_the_player_is_left_open(
    framework: Framework, fixture: str, key: str, given: dict[str, str], values: dict[str, Any]
) -> None:
    conversion = convert_fixture(framework, fixture)
    assert {name: conversion.recipe.get(name) for name in values} == values
    assert set(conversion.report.to_give) == set(given)
    entry = conversion[key]
    assert (entry.outcome, entry.note in TO_WRITE) == ("unsupported", True)
    assert "docs/agents.md" in entry.note


@pytest.mark.parametrize(("framework", "fixture", "key", "given", "values"), FIXTURES_OF_AGENTS)
def test_the_recipe_is_refused_until_the_player_is_given(
    framework: Framework, fixture: str, key: str, given: dict[str, str], values: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "recipe.yaml"
    import_recipe(framework, [FIXTURES / fixture], [], output, environment=ENVIRONMENT)
    with pytest.raises(RecipeError, match=r"environment\.\w+: `\?\?\?` stands for a value that is still missing"):
        load_recipe(output, [], TrainRecipe)
    recipe = load_recipe(output, [f"{name}={value}" for name, value in given.items()], TrainRecipe)
    assert recipe.environment is not None
    assert recipe.environment.max_turns == values["environment.max_turns"]


def test_every_key_of_agents_is_mapped_or_has_a_reason_of_its_own() -> None:
    for framework, fixture, *_ in FIXTURES_OF_AGENTS:
        for entry in convert_fixture(framework, fixture).report.unsupported:
            assert "not among those that are converted" not in entry.note, entry
            assert entry.note != reasons.NO_AGENTS, entry


# verl


def test_the_smaller_limit_of_verls_turns_counts_and_a_turn_follows_the_last_user() -> None:
    conversion = of_verl("multi_turn.enable=True", "multi_turn.max_assistant_turns=5", "multi_turn.max_user_turns=2")
    assert conversion.recipe["environment.max_turns"] == 3
    assert conversion[f"{VERL}multi_turn.max_user_turns"].to == "environment.max_turns"
    assert conversion[f"{VERL}multi_turn.max_assistant_turns"].outcome == "implied"


def test_without_a_limit_of_turns_verls_episodes_are_limited_by_their_tokens() -> None:
    conversion = of_verl("multi_turn.enable=True")
    assert conversion.recipe["environment.max_length"] == 512 + 512
    assert conversion.recipe["environment.max_turns"] == 512 + 512
    assert conversion[f"{VERL}multi_turn.enable"].note == reasons.WRITE_TOOLS


@pytest.mark.parametrize(
    "word",
    [
        "multi_turn.interaction_config_path=users.yaml",
        "agent.agent_loop_config_path=loops.yaml",
        "agent.default_agent_loop=react_agent",
    ],
)
def test_verls_interactions_and_agent_loops_are_agents(word: str) -> None:
    conversion = of_verl(word, "multi_turn.tool_config_path=tools.yaml")
    assert conversion.recipe["environment.agent"] == MISSING
    assert conversion[VERL + word.partition("=")[0]].note == reasons.WRITE_AGENT
    assert "environment.agent" in conversion[f"{VERL}multi_turn.tool_config_path"].note
    assert conversion.recipe["reward.fn"] == "environment"


def test_an_agent_calls_the_reward_function_of_the_source() -> None:
    path = "custom_reward_function.path"
    conversion = convert_words("verl", f"{path}=reward.py", f"{VERL}agent.default_agent_loop=own")
    assert conversion.recipe["reward.fn"] == "environment"
    assert "environment.agent" in conversion[path].note


@pytest.mark.parametrize("word", ["multi_turn.enable=False", "agent.default_agent_loop=single_turn_agent"])
def test_verls_single_turns_have_no_environment(word: str) -> None:
    conversion = of_verl(word, "multi_turn.max_assistant_turns=4", "multi_turn.format=hermes")
    assert not any(key.startswith("environment.") for key in conversion.recipe)
    assert {conversion[f"{VERL}multi_turn.{name}"].outcome for name in ("max_assistant_turns", "format")} == {"implied"}


def test_functions_that_verl_reads_from_a_file_are_named_in_tools() -> None:
    conversion = convert_words("verl", "data.function_tool_path=tools.py")
    assert "environment.tools=[tools.py:function" in conversion["data.function_tool_path"].note


def test_a_penalty_for_single_completions_is_taken_off_in_the_reward() -> None:
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg."
    conversion = convert_words(
        "verl",
        f"{overlong}enable=True",
        f"{overlong}len=100",
        f"{overlong}penalty_factor=1.0",
        f"{VERL}multi_turn.enable=True",
    )
    assert "actor.overlong_reward_penalty" not in conversion.recipe
    assert conversion[f"{overlong}enable"].outcome == "unsupported"


def test_an_advantage_for_single_completions_is_replaced() -> None:
    conversion = convert_words("verl", "algorithm.adv_estimator=remax", f"{VERL}n=4", f"{VERL}multi_turn.enable=True")
    assert "actor.advantage" not in conversion.recipe
    assert "GRPO" in conversion["algorithm.adv_estimator"].note


def test_siirls_tools_are_verls() -> None:
    conversion = convert_words("siirl", f"{VERL}multi_turn.tool_config_path=t.yaml", f"{VERL}multi_turn.max_turns=3")
    assert conversion.recipe["environment.tools"] == MISSING
    assert conversion.recipe["environment.max_turns"] == 3


# AReaL


def test_areals_workflow_of_one_completion_has_no_environment() -> None:
    conversion = of_areal("workflow=areal.workflow.rlvr.RLVRWorkflow")
    assert "environment.agent" not in conversion.recipe
    assert conversion["workflow"].note == reasons.ONE_COMPLETION


def test_areals_multi_turn_workflow_counts_episodes_by_its_own_key() -> None:
    workflow = "areal.workflow.multi_turn.MultiTurnWorkflow"
    conversion = of_areal(f"workflow={workflow}", "max_turns=3", "n_trajs=8", "turn_discount=0.9")
    assert conversion.recipe["environment.max_turns"] == 3
    assert conversion.recipe["gconfig.n_samples"] == 8
    assert conversion["gconfig.n_samples"].outcome == "implied"
    assert conversion.recipe["actor.credit"] == "turn"
    assert conversion.recipe["actor.turn_discount"] == 0.9
    assert of_areal(f"workflow={workflow}", "turn_discount=1.0")["turn_discount"].note == reasons.SAME_TURNS


def test_areals_section_openai_shows_an_agent_whose_class_is_named_in_python() -> None:
    conversion = of_areal("rollout.openai.mode=online", "rollout.openai.engine_max_tokens=9000")
    assert conversion.recipe["environment.agent"] == MISSING
    assert conversion.recipe["environment.max_length"] == 9000
    assert conversion["rollout.openai.mode"].outcome == "unsupported"
    assert any(note.endswith(reasons.WRITE_AGENT) for note in conversion.report.notes)


# ROLL


def test_rolls_steps_that_stand_alone_are_an_agents_requests(tmp_path: Path) -> None:
    manager = "env_manager_cls=roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    weights = ("step_reward_weight=0.5", "episode_reward_weight=1.0")
    conversion = of_roll(tmp_path, manager, "adv_estimator=gigpo", *weights)
    assert conversion.recipe["environment.agent"] == MISSING
    assert conversion.recipe["actor.credit"] == "state"
    assert conversion.recipe["actor.turn_discount"] == 0.95
    assert conversion.recipe["actor.state_weight"] == 0.5
    assert conversion["episode_reward_weight"].outcome == "implied"
    other = of_roll(tmp_path, manager, "adv_estimator=step_reinforce", *weights)
    assert other.recipe["actor.credit"] == "turn"
    assert other["step_reward_weight"].outcome == other["episode_reward_weight"].outcome == "implied"
    other = of_roll(tmp_path, manager, "adv_estimator=gigpo", "episode_reward_weight=0.5")
    assert other["episode_reward_weight"].outcome == "unsupported"


@pytest.mark.parametrize(
    ("grouping", "method", "mean", "std"),
    [
        ("traj_group_id", "mean", "group", "none"),
        ("batch", "mean_std", "batch", "batch"),
        ("state", "identity", "none", "none"),
    ],
)
def test_rolls_rewards_are_normalised_as_its_section_says(
    grouping: str, method: str, mean: str, std: str, tmp_path: Path
) -> None:
    words = (f"reward_normalization.grouping={grouping}", f"reward_normalization.method={method}")
    recipe = of_roll(tmp_path, *words).recipe
    assert (recipe["actor.reward_norm.mean_level"], recipe["actor.reward_norm.std_level"]) == (mean, std)


def test_episodes_that_are_no_whole_groups_are_reported(tmp_path: Path) -> None:
    conversion = of_roll(tmp_path, "rollout_batch_size=100")
    assert conversion.recipe["train_dataset.batch_size"] == 12
    assert "100 episodes do not divide into groups of 8" in conversion["rollout_batch_size"].note


def test_one_class_plays_rolls_environments(tmp_path: Path) -> None:
    conversion = of_roll(tmp_path, "train_env_manager.tags=[SimpleSokoban,FrozenLake]")
    assert "extra_info" in conversion["train_env_manager.tags"].note
    assert conversion["custom_envs.SimpleSokoban.env_type"].note == reasons.WRITE_GAME


# Trinity-RFT


@pytest.mark.parametrize(
    ("workflow", "key"),
    [
        ("alfworld_workflow", "environment.game"),
        ("step_wise_alfworld_workflow", "environment.game"),
        ("frozen_lake_workflow", "environment.game"),
        ("webshop_workflow", "environment.game"),
        ("sciworld_workflow", "environment.game"),
        ("as_react_workflow", "environment.agent"),
        ("email_search_workflow", "environment.agent"),
    ],
)
def test_trinitys_workflows_of_several_turns_are_left_open(workflow: str, key: str) -> None:
    conversion = of_trinity(workflow, "buffer.explorer_input.taskset.workflow_args.max_env_steps=30")
    assert conversion.recipe[key] == MISSING
    assert conversion.recipe["environment.max_turns"] == 30
    assert conversion[WORKFLOW].note in TO_WRITE


@pytest.mark.parametrize(
    ("workflow", "outcome", "words"),
    [
        ("math_workflow", "implied", "prompt, response and reward"),
        ("async_simple_workflow", "implied", "prompt, response and reward"),
        ("math_boxed_workflow", "mapped", "reward.fn"),
        ("async_simple_mm_workflow", "unsupported", reasons.NO_MULTIMODAL),
        ("my_own_workflow", "unsupported", "environment.agent"),
    ],
)
def test_trinitys_other_workflows_have_no_environment(workflow: str, outcome: str, words: str) -> None:
    conversion = of_trinity(workflow)
    assert not any(key.startswith("environment.") for key in conversion.recipe)
    assert conversion[WORKFLOW].outcome == outcome
    assert words in conversion[WORKFLOW].note


def test_trinitys_own_workflow_with_a_limit_of_turns_is_an_agent() -> None:
    conversion = of_trinity("my_own_workflow", "buffer.explorer_input.taskset.workflow_args.max_turns=5")
    assert conversion.recipe["environment.agent"] == MISSING


def test_mean_and_deviation_of_rolls_rewards_have_levels_of_their_own() -> None:
    at = "reward_normalization."
    for grouping, mean, std, levels in (
        ("traj_group_id", "group", "batch", ("group", "batch")),
        ("traj_group_id", "batch", None, ("batch", "group")),
        ("batch", "group", "group", ("batch", "batch")),
    ):
        words = [f"{at}grouping={grouping}", f"{at}method=mean_std", f"{at}norm_mean_type={mean}"]
        words += [] if std is None else [f"{at}norm_std_type={std}"]
        conversion = convert_fixture("roll", "roll_agentic.yaml", words)
        recipe = conversion.recipe
        found = tuple(recipe.get(f"actor.reward_norm.{name}_level", "group") for name in ("mean", "std"))
        assert found == levels
        assert not any(key.startswith(at) for key in conversion.unsupported())
