"""ROLL's rewards by domain, its games on boards, and the files that a file of its builds on."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from dialect_conversion import ENVIRONMENT, Conversion, convert_files, convert_text

from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.source import MISSING
from fivefold.rewards.code_reward import CodeReward
from fivefold.rewards.static_check import reward_problems
from fivefold_import.roll.rewards import PREAMBLE

WORKERS = "roll.pipeline.rlvr.rewards"
ROLES = """
pretrain: some/model
prompt_length: 512
response_length: 1024
num_return_sequences_in_group: 4
adv_estimator: reinforce
whiten_advantages: true
difficulty_mask: true
actor_train:
  strategy_args: {strategy_name: megatron_train}
  device_mapping: list(range(0,8))
  data_args:
    file_name: [data/a.jsonl, data/b.jsonl]
    messages: messages
    domain_interleave_probs: {math: 0.5, choice: 0.25, orders: 0.25}
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,8))"}
validation: {data_args: {file_name: data/c.jsonl}}
"""
REWARDS = f"""
rewards:
  math: {{worker_cls: {WORKERS}.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [gsm8k, aime]}}
  choice:
    worker_cls: {WORKERS}.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker
    reward_type: soft
    response_length_penalty_coef: 0.0
    tag_included: [quiz]
  orders:
    worker_cls: {WORKERS}.ifeval_rule_reward_worker.GeneralRuleRewardWorker
    reward_type: soft
    tag_included: [ifeval]
"""


def converted(tmp_path: Path, text: str = ROLES + REWARDS) -> Conversion:
    return convert_text("roll", tmp_path, dedent(text))


def test_each_domain_has_its_reward_its_share_and_its_penalty_for_repetition(tmp_path: Path) -> None:
    conversion = converted(tmp_path)
    assert conversion.unsupported() == set()
    recipe = conversion.recipe
    assert {key.removeprefix("reward."): value for key, value in recipe.items() if key.startswith("reward.")} == {
        "rewards.math.fn": "math",
        "rewards.math.data_sources": ["math"],
        "rewards.choice.fn": "choice",
        "rewards.choice.kwargs.right": 1.0,
        "rewards.choice.kwargs.right_unboxed": 0.5,
        "rewards.choice.kwargs.wrong": -0.5,
        "rewards.choice.kwargs.wrong_unboxed": -1.0,
        "rewards.choice.data_sources": ["choice"],
        "rewards.orders.fn": "instructions",
        "rewards.orders.data_sources": ["orders"],
        "rewards.repetition.fn": "repetition",
        "rewards.repetition.weight": 0.5,
        "rewards.repetition.data_sources": ["choice", "orders"],
    }
    tags = {"gsm8k": "math", "aime": "math", "quiz": "choice", "ifeval": "orders"}
    for section in ("train_dataset", "valid_dataset"):
        assert recipe[f"{section}.reader"] == "fivefold.data.roll:rows"
        domains = {key: value for key, value in recipe.items() if key.startswith(f"{section}.reader_kwargs.domains.")}
        assert {key.rpartition(".")[2]: value for key, value in domains.items()} == tags
    shares = {key: value for key, value in recipe.items() if key.startswith("train_dataset.source_weights.")}
    assert {key.rpartition(".")[2]: value for key, value in shares.items()} == {
        "math": 0.5,
        "choice": 0.25,
        "orders": 0.25,
    }
    assert (recipe["actor.whiten_by_source"], recipe["actor.group_mean_of"]) == (True, "accuracy")


def test_questions_with_choices_are_judged_by_letters_with_and_without_a_box(tmp_path: Path) -> None:
    for worker, kwargs in (("GeneralVal", {}), ("MultipleChoiceBoxed", {"right_unboxed": 0.0})):
        rewards = f"rewards: {{qa: {{worker_cls: {WORKERS}.x.{worker}RuleRewardWorker, tag_included: [mmlu_pro]}}}}"
        shares = "data_args: {file_name: a.jsonl, domain_interleave_probs: {qa: 1.0}}"
        conversion = converted(tmp_path, f"actor_train: {{{shares}}}\n{rewards}\n")
        assert conversion.unsupported() == set()
        found = {key: value for key, value in conversion.recipe.items() if key.startswith("reward.")}
        assert {key.rpartition(".")[2]: value for key, value in found.items()} == {"fn": "choice", **kwargs}


def test_what_a_worker_does_besides_stays_unsupported(tmp_path: Path) -> None:
    text = (ROLES + REWARDS).replace("coef: 0.0", "coef: 0.2").replace("reward_type: soft", "reward_type: other", 1)
    assert converted(tmp_path, text).unsupported() == {
        "rewards.choice.reward_type",
        "rewards.choice.response_length_penalty_coef",
    }
    alone = converted(tmp_path, ROLES.replace("choice: 0.25, orders: 0.25", "other: 0.5"))
    assert "actor_train.data_args.domain_interleave_probs.math" in alone.unsupported()


@pytest.mark.parametrize("is_local", [True, False])
def test_programs_run_in_the_sandbox_here(tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = f"worker_cls: {WORKERS}.code_sandbox_reward_worker.CodeSandboxRewardWorker"
    text = f"rewards: {{code: {{{worker}, use_local: {str(is_local).lower()}, tag_included: [kod]}}}}\n"
    conversion = converted(tmp_path, ROLES + text)
    if not is_local:
        assert any("ROLL sends programs to a service" in note for note in conversion.report.notes)
    kwargs = {"timeout_s": 20, "preamble": PREAMBLE}
    found = {key.rpartition(".")[2]: value for key, value in conversion.recipe.items() if ".kwargs." in key}
    assert found == kwargs
    CodeReward(**kwargs)  # the preamble is Python
    # The limit is the sandbox's: in this process, later tests would overflow the stack.
    limits: list[int] = []
    monkeypatch.setattr(sys, "setrecursionlimit", limits.append)
    scope: dict[str, Any] = {}
    exec(PREAMBLE, scope)
    assert limits == [600_000]
    assert {"List", "heappush", "math", "deque", "inf"} <= scope.keys()


JUDGE = f"""
rewards:
  judge:
    worker_cls: {WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker
    judge_prompt: of-answers
    judge_model_type: inference
    model_args: {{model_name_or_path: some/judge}}
    generating_args: {{max_new_tokens: 9, temperature: 0.8, top_p: 0.7, top_k: 5, num_beams: 1, do_sample: true}}
    strategy_args: {{strategy_name: vllm}}
    device_mapping: list(range(8,16))
"""


def test_the_question_to_a_judge_is_read_from_the_code_of_roll(tmp_path: Path) -> None:
    code = tmp_path / "roll" / "utils" / "prompt.py"
    code.parent.mkdir(parents=True)
    code.write_text('ASK = """Q {question} A {response} R {reference} {{x}}"""\nprompt_maps = {"of-answers": ASK}\n')
    (tmp_path / "examples").mkdir()
    one = ROLES.replace("{math: 0.5, choice: 0.25, orders: 0.25}", "{judge: 1}")
    conversion = converted(tmp_path / "examples", one + JUDGE)
    assert conversion.unsupported() == {"rewards.judge.generating_args.do_sample"}
    kwargs = {
        key.removeprefix("reward.kwargs."): value
        for key, value in conversion.recipe.items()
        if key.startswith("reward.kwargs.")
    }
    assert kwargs == {
        "template": "Q {question} A {response} R {ground_truth} {x}",
        "words.yes": 1,
        "words.no": 0,
        "retries": 0,
        "on_failure": 0,
        "max_tokens": 9,
        "temperature": 0.8,
        "top_p": 0.7,
        "top_k": 5,
    }
    given = {**{key: value for key, value in kwargs.items() if "." not in key}, "words": {"yes": 1, "no": 0}}
    config = RewardConfig.model_validate({"fn": "judge", "kwargs": given, "judge": {"path": "p"}})
    assert list(reward_problems(config)) == []
    code.write_text("prompt_maps = {}\n")
    assert "rewards.judge.judge_prompt" in converted(tmp_path / "examples", one + JUDGE).unsupported()


BASE = """
max_actions_per_traj: 7
env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
custom_env:
  Lake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: 32
    env_manager_cls: ${env_manager_cls}
    agent_system_template: Play.
    agent_template: "Turn {turn_idx} of {actions_left}, {max_response_length} tokens: {observation}"
    env_config: {max_steps: "${max_actions_per_traj}", is_slippery: false, format_penalty: -0.1, action_pattern: "<a>(.*)</a>"}
"""
AGENTS = """
defaults: [../config/base@_here_]
pretrain: some/model
sequence_length: 4096
rollout_batch_size: 16
max_steps: 10
adv_estimator: grpo
actor_train: {strategy_args: {strategy_name: megatron_train}, device_mapping: "list(range(0,8))"}
actor_infer:
  generating_args: {temperature: 0.9, top_p: 0.8, max_new_tokens: 64}
  strategy_args: {strategy_name: vllm}
  device_mapping: list(range(0,8))
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [Lake, Boxes], num_groups_partition: [3, 1]}
val_env_manager: {num_env_groups: 5, group_size: 1, tags: [Lake], num_groups_partition: [5]}
max_actions_per_traj: 6
custom_envs:
  Lake: ${custom_env.Lake}
  Boxes:
    env_type: sokoban
    max_steps: 6
    max_tokens_per_step: 32
    env_manager_cls: ${env_manager_cls}
    agent_system_template: Play.
    agent_template: "Turn {turn_idx} of {actions_left}, {max_response_length} tokens: {observation}"
    env_config:
      dim_room: [6, 6]
      grid_lookup: {0: W, 1: "."}
      grid_vocab: {W: wall, ".": floor}
"""


def agentic(tmp_path: Path, text: str = AGENTS, base: str = BASE) -> Conversion:
    for folder in ("config", "run"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "config" / "base.yaml").write_text(base)
    (tmp_path / "run" / "a.yaml").write_text(text)
    return convert_files("roll", [tmp_path / "run" / "a.yaml"], [], ENVIRONMENT)


def test_known_games_are_played_by_fivefold(tmp_path: Path) -> None:
    conversion = agentic(tmp_path)
    assert (conversion.unsupported(), conversion.report.problems, conversion.report.to_give) == (set(), (), ())
    recipe = conversion.recipe
    lake = {
        "game": "frozen_lake",
        "options.is_slippery": False,
        "format_penalty": -0.1,
        "move_pattern": "<a>(.*)</a>",
    }
    boxes = {"game": "sokoban", "options.dim_room": [6, 6], "options.symbols.W": "wall", "options.symbols..": "floor"}

    def games(section: str) -> dict[str, Any]:
        start = f"{section}.reader_kwargs.games."
        return {key.removeprefix(start): value for key, value in recipe.items() if key.startswith(start)}

    assert games("train_dataset") == {
        **{f"Lake.{name}": value for name, value in {"n": 30, **lake}.items()},
        **{f"Boxes.{name}": value for name, value in {"n": 10, **boxes}.items()},
    }
    assert games("valid_dataset") == {f"Lake.{name}": value for name, value in {"n": 5, **lake}.items()}
    assert (recipe["train_dataset.source_weights.Lake"], recipe["train_dataset.source_weights.Boxes"]) == (3, 1)
    expected = {
        "environment.game": "fivefold.environments.games.grid:GridGame",
        "environment.turn_template": "Turn {turn} of {turns_left}, {max_new_tokens} tokens: {observation}",
        "environment.max_turns": 6,
        "gconfig.max_new_tokens": 32,
        "train_dataset.system_prompt": "Play.",
        "valid_dataset.system_prompt": "Play.",
        "evaluator.greedy": False,
        "evaluator.temperature": 0.9,
        "reward.fn": "environment",
    }
    assert {key: recipe[key] for key in expected} == expected
    assert "train_dataset.answer_key" not in recipe


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("env_type: sokoban", "env_type: chess"),
        (
            "${env_manager_cls}\n    agent_system_template: Play.\n",
            "${env_manager_cls}\n    agent_system_template: Other.\n",
        ),
        ("tokens: {observation}", "tokens: {observation} {suffix}"),
        ("env_manager_cls: ${env_manager_cls}", "env_manager_cls: my.StepEnvManager"),  # of other fields
        ("env_manager_cls: ${env_manager_cls}", "env_manager_cls: my.ProxyEnvManager"),
        ("max_tokens_per_step: 32", "max_tokens_per_step: 32\n    agent_runner_cls: my.Runner"),
    ],
)
def test_games_of_another_form_are_left_to_the_user(tmp_path: Path, old: str, new: str) -> None:
    conversion = agentic(tmp_path, AGENTS.replace(old, new))
    assert MISSING in (conversion.recipe.get(f"environment.{one}") for one in ("game", "agent"))
    assert "custom_envs.Boxes.env_type" in conversion.unsupported()


def test_turns_that_are_chats_of_their_own_have_a_memory(tmp_path: Path) -> None:
    template = (
        "{env_instruction} {step_count} done. [{history}] of {history_length}, now {current_step}: "
        "{current_observation} in {max_response_length}"
    )
    chat = "Turn {turn_idx} of {actions_left}, {max_response_length} tokens: {observation}"
    manager, own = "env_manager_cls: ${env_manager_cls}", "env_manager_cls: my.StepEnvManager\n    history_length: 5"
    text, base = (each.replace(chat, template).replace(manager, own) for each in (AGENTS, BASE))
    conversion = agentic(tmp_path, text, base)
    assert conversion.unsupported() == set()
    assert conversion.recipe["environment.memory"] == 4
    assert conversion.recipe["environment.turn_template"] == (
        "{prompt} {turns_done} done. [{history}] of {turns_shown}, now {turn}: {observation} in {max_new_tokens}"
    )
    assert any("StepEnvManager shows the ones" in note for note in conversion.report.notes)
    # One game in turns and another in a chat is no form that all have.
    mixed = agentic(tmp_path, text.replace("my.StepEnvManager", "my.TrajEnvManager"), base)
    assert "custom_envs.Boxes.env_type" in mixed.unsupported()


def test_rolls_own_runner_plays_a_game_in_a_chat(tmp_path: Path) -> None:
    own = "env_manager_cls: my.ProxyEnvManager\n    agent_runner_cls: my.GEMRunner"
    text, base = (each.replace("env_manager_cls: ${env_manager_cls}", own) for each in (AGENTS, BASE))
    conversion = agentic(tmp_path, text, base)
    assert conversion.unsupported() == set()
    assert "environment.memory" not in conversion.recipe
    assert any("GEMRunner has them in the system's" in note for note in conversion.report.notes)


def test_an_option_that_a_game_has_not_is_unsupported(tmp_path: Path) -> None:
    conversion = agentic(tmp_path, AGENTS.replace("dim_room: [6, 6]", "dim_room: [6, 6]\n      levels: [1]"))
    assert conversion.unsupported() == {"custom_envs.Boxes.env_config.levels"}


def test_sampling_of_the_managers_counts_only_without_the_engines(tmp_path: Path) -> None:
    own = "generating_args: {temperature: 0.5, top_p: 0.6, max_new_tokens: 64, num_return_sequences: 1}"
    text = AGENTS.replace("tags: [Lake], num", f"{own}, tags: [Lake], num")
    assert agentic(tmp_path, text).recipe["evaluator.temperature"] == 0.9
    alone = text.replace("  generating_args: {temperature: 0.9, top_p: 0.8, max_new_tokens: 64}\n", "")
    conversion = agentic(tmp_path, alone)
    assert conversion.unsupported() == set()
    assert (conversion.recipe["evaluator.temperature"], conversion.recipe["evaluator.top_p"]) == (0.5, 0.6)


def test_files_in_defaults_come_before_the_file_unless_it_says_where_its_own_keys_come(tmp_path: Path) -> None:
    assert agentic(tmp_path)["max_actions_per_traj"].value == 6
    last = agentic(tmp_path, AGENTS.replace("[../config/base@_here_]", "[_self_, ../config/base@_here_]"))
    assert last["max_actions_per_traj"].value == 7
    for entry in ("absent", "../config/base@other", "{model: base}"):
        text = AGENTS.replace("../config/base@_here_", entry)
        [problem] = [each for each in agentic(tmp_path, text).report.problems if "its defaults have" in each]
        assert problem.startswith("a.yaml: its defaults have ")
    (tmp_path / "config" / "base.yaml").write_text("defaults: base\n")
    with pytest.raises(ValueError, match="or back to itself"):
        convert_files("roll", [tmp_path / "config" / "base.yaml"], [], ENVIRONMENT)


def test_several_teachers_have_the_domains_of_their_tags(tmp_path: Path) -> None:
    students = ROLES.replace("actor_", "student_").replace("difficulty_mask: true\n", "")
    teachers = """
tag_to_template: {gsm8k: qwen3, quiz: qwen3}
teacher:
  one: {model_args: {model_name_or_path: big, dtype: bf16}, tag_included: [aime, gsm8k], opd_kl_coef: 0.5}
  two: {model_args: {model_name_or_path: large}, tag_included: [quiz, ifeval], opd_kl_coef: 0.5}
"""
    conversion = converted(tmp_path, students + REWARDS + teachers)
    assert conversion.unsupported() == set()
    recipe = conversion.recipe
    assert (recipe["teachers.one.path"], recipe["teachers.one.data_sources"]) == ("big", ["math"])
    assert (recipe["teachers.two.path"], recipe["teachers.two.data_sources"]) == ("large", ["choice", "orders"])
    assert (recipe["actor.distill.coeff"], recipe["actor.advantage"]) == (0.5, "none")
    for other in (
        teachers.replace("aime, ", ""),  # a domain of two teachers, or of one and none
        teachers.replace("coef: 0.5}\n  two", "coef: 1}\n  two"),
        teachers.replace("[quiz, ifeval]", "[quiz, ifeval, gsm8k]"),
    ):
        found = converted(tmp_path, students + REWARDS + other)
        assert {f"teacher.{name}.model_args.model_name_or_path" for name in ("one", "two")} <= found.unsupported()
    templates = converted(tmp_path, students + REWARDS + teachers.replace("quiz: qwen3", "quiz: other"))
    assert templates.unsupported() == {"tag_to_template.gsm8k", "tag_to_template.quiz"}


def test_a_judge_that_rewards_share_is_hosted(tmp_path: Path) -> None:
    judge = f"""
rewards:
  liked:
    worker_cls: {WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker
    judge_model_type: cluster
    tag_included: [RLVR]
    generating_args: {{max_new_tokens: 512, temperature: 0.3}}
reward_model:
  name: reward_llm
  worker_cls: roll.pipeline.base_worker.InferWorker
  model_args: {{model_name_or_path: some/judge, dtype: bf16}}
  generating_args: {{max_new_tokens: 512, temperature: 0.3}}
  strategy_args: {{strategy_name: vllm, strategy_config: {{tensor_parallel_size: 2}}}}
  device_mapping: "[6, 7]"
"""
    shares = "domain_interleave_probs: {math: 0.5, choice: 0.25, orders: 0.25}"
    conversion = converted(tmp_path, ROLES.replace(shares, "template: native") + judge)
    assert conversion.unsupported() == set()
    recipe = conversion.recipe
    assert (recipe["reward.fn"], recipe["reward.judge.path"]) == ("judge", "some/judge")
    assert recipe["reward.judge.backend"] == "vllm:d1t2"
    assert (recipe["reward.kwargs.max_tokens"], recipe["reward.kwargs.temperature"]) == (512, 0.3)
    other = ROLES.replace(shares, "template: native") + judge.replace("512", "256", 1)
    assert converted(tmp_path, other).unsupported() == {"reward_model.generating_args.max_new_tokens"}


QUESTIONS = """
pretrain: some/model
sequence_length: 4096
rollout_batch_size: 16
max_steps: 10
adv_estimator: reinforce
reward_normalization: {grouping: batch, method: identity}
actor_train:
  strategy_args: {strategy_name: megatron_train}
  device_mapping: "list(range(0,8))"
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,8))"}
train_env_manager: {num_env_groups: 16, group_size: 1, tags: [Sums], num_groups_partition: [16]}
val_env_manager: {num_env_groups: 5, group_size: 1, tags: [Sums], num_groups_partition: [5]}
custom_envs:
  Sums:
    env_type: roll_math
    max_steps: 10
    max_tokens_per_step: 1000
    env_manager_cls: my.TrajEnvManager
    agent_system_template: Think.
    agent_template: "{observation} In {{braces}}."
    env_config: {dataset_name: a/sums, question_key: q, answer_key: a}
"""


def test_environments_that_ask_once_are_plain_prompts(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, QUESTIONS)
    assert (conversion.unsupported(), conversion.report.to_give) == (set(), ())
    recipe = conversion.recipe
    expected = {
        "reward.fn": "math",
        "train_dataset.path": "a/sums",
        "train_dataset.prompt_key": "q",
        "train_dataset.answer_key": "a",
        "train_dataset.prompt_template": "{prompt} In {braces}.",
        "valid_dataset.prompt_template": "{prompt} In {braces}.",
        "train_dataset.system_prompt": "Think.",
        "train_dataset.batch_size": 16,
        "valid_dataset.limit": 5,
        "gconfig.max_new_tokens": 1000,
        "gconfig.max_tokens": 4096,
        "actor.mb_spec.max_tokens_per_mb": 2 * 4096,
    }
    assert {key: recipe.get(key) for key in expected} == expected
    assert not [key for key in recipe if key.startswith("environment.")]
    facts = convert_text("roll", tmp_path, QUESTIONS.replace("roll_math", "roll_qa"))
    assert (facts.recipe["reward.fn"], facts.recipe["reward.kwargs.plain_words"]) == ("exact_match", True)
    assert "<answer>" in facts.recipe["train_dataset.prompt_template"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("env_config:", "tool_wrapper: {wrapper_args: {max_tool_uses: 1}}\n    env_config:"),
        ("{observation} In", "{observation} {turn_idx} In"),
        ("roll_math", "math:Other"),
    ],
)
def test_environments_that_ask_otherwise_are_left_to_the_user(tmp_path: Path, old: str, new: str) -> None:
    assert "custom_envs.Sums.env_type" in convert_text("roll", tmp_path, QUESTIONS.replace(old, new)).unsupported()


OF_GEM = (
    QUESTIONS.replace("roll_math", "game:GuessTheNumber-v0")
    .replace("adv_estimator: reinforce", "adv_estimator: step_reinforce")
    .replace("my.TrajEnvManager", "my.StepConcatEnvManager\n    history_length: 10")
    .replace('"{observation} In {{braces}}."', '"Play.\\n{history}\\n{current_observation}\\nIn {{braces}}."')
    .replace("{dataset_name: a/sums, question_key: q, answer_key: a}", "{min_number: 2, max_number: 9, max_turns: 10}")
)


def test_gems_guessing_game_is_played_in_chats_of_one_turn(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, OF_GEM)
    assert (conversion.unsupported(), conversion.report.to_give) == (set(), ())
    recipe = conversion.recipe
    expected = {
        "environment.game": "fivefold.environments.games.guess_number:GuessNumber",
        "environment.turn_template": "Play.\n{prompt}\n{observation}\nIn {braces}.",
        "environment.memory": 0,
        "environment.max_turns": 10,
        "actor.credit": "turn",
        "train_dataset.reader_kwargs.n": 160,
        "train_dataset.reader_kwargs.least": 2,
        "train_dataset.reader_kwargs.most": 9,
        "valid_dataset.reader_kwargs.turns": 10,
        "valid_dataset.reader_kwargs.n": 5,
        "train_dataset.system_prompt": "Think.",
        "reward.fn": "environment",
    }
    assert {key: recipe.get(key) for key in expected} == expected
    for shorter in ("history_length: 9", "history_length: 10\n    tool_wrapper: {tool_configs: []}"):
        text = OF_GEM.replace("history_length: 10", shorter).replace("tool_configs: []", "a: 1")
        assert "custom_envs.Sums.env_type" in convert_text("roll", tmp_path, text).unsupported()


def test_problems_of_reasoning_gym_are_plain_prompts_with_its_score(tmp_path: Path) -> None:
    text = OF_GEM.replace("game:GuessTheNumber-v0", "rg:letter_counting").replace(
        "max_steps: 10\n    max", "max_steps: 1\n    max"
    )
    text = text.replace("{min_number: 2, max_number: 9, max_turns: 10}", "{size: 50, seed: 4, max_words: 7}")
    conversion = convert_text("roll", tmp_path, text.replace("{history}\\n", ""))
    assert (conversion.unsupported(), conversion.report.to_give) == (set(), ())
    recipe = conversion.recipe
    expected = {
        "reward.fn": "fivefold.environments.others.reasoning_gym:score",
        "reward.kwargs.boxed": True,
        "train_dataset.path": "letter_counting",
        "train_dataset.reader": "fivefold.environments.others.reasoning_gym:read",
        "train_dataset.reader_kwargs.n": 50,
        "train_dataset.reader_kwargs.seed": 4,
        "train_dataset.reader_kwargs.max_words": 7,
        "train_dataset.prompt_template": "Play.\n{prompt}\nIn {braces}.",
        "valid_dataset.limit": 5,
        "gconfig.max_new_tokens": 1000,
    }
    assert {key: recipe.get(key) for key in expected} == expected
    assert not [key for key in recipe if key.startswith(("environment.", "actor.credit", "train_dataset.answer_key"))]


WITH_TOOL = QUESTIONS.replace(
    "    env_config:",
    "    tool_wrapper:\n      wrapper_args: {max_tool_uses: 3, tool_reward: 0.1}\n"
    "      tool_configs: [{tool_id: python_code, tool_args: {timeout: 5, sandbox_type: none}}]\n    env_config:",
).replace("actor_infer: {", "actor_infer: {generating_args: {stop_strings: [</code>], temperature: 1.0}, ")


def test_questions_with_one_tool_are_a_game_in_a_chat(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, WITH_TOOL)
    assert (conversion.unsupported(), conversion.report.to_give) == (set(), ())
    recipe = conversion.recipe
    options = {"tool": "code", "question_key": "q", "answer_key": "a", "max_uses": 3, "tool_reward": 0.1}
    for section in ("train_dataset", "valid_dataset"):
        assert recipe[f"{section}.reader"] == "fivefold.environments.games.tagged_tools:rows"
        found = {key.rpartition(".")[2]: recipe[key] for key in recipe if f"{section}.reader_kwargs." in key}
        assert found == {**options, "success_reward": 0, "timeout_s": 5}
    assert recipe["environment.game"] == "fivefold.environments.games.tagged_tools:TaggedTool"
    assert recipe["environment.turn_template"] == "{observation} In {braces}."
    assert (recipe["environment.max_turns"], recipe["gconfig.stop"]) == (10, ["</code>"])
    facts = (
        WITH_TOOL.replace("roll_math", "roll_qa")
        .replace("python_code", "search")
        .replace("sandbox_type: none", "search_url: http://x/y, topk: 2")
    )
    recipe = convert_text("roll", tmp_path, facts).recipe
    assert recipe["train_dataset.reader_kwargs.search_url"] == "http://x/y"
    assert recipe["train_dataset.reader_kwargs.n_documents"] == 2
    for old, new in (("python_code", "mcp"), ("roll_math", "roll_qa")):
        assert "custom_envs.Sums.env_type" in convert_text("roll", tmp_path, WITH_TOOL.replace(old, new)).unsupported()


@pytest.mark.parametrize(
    ("model", "pixels"), [("Qwen/Qwen2.5-VL-7B-Instruct", 28), ("Qwen/Qwen3-VL-4B-Instruct", None)]
)
def test_boxes_are_scored_in_the_unit_of_the_model(tmp_path: Path, model: str, pixels: int | None) -> None:
    worker = f"worker_cls: {WORKERS}.detection_reward_worker.DetectionRewardWorker"
    text = f"rewards: {{boxes: {{{worker}, model_args: {{model_name_or_path: {model}}}, tag_included: [coco]}}}}\n"
    conversion = converted(tmp_path, ROLES + text)
    assert conversion.recipe["reward.fn"] == "detection"
    assert conversion.recipe.get("reward.kwargs.pixels_per_token") == pixels
    assert not [key for key in conversion.unsupported() if key.startswith("rewards.")]


@pytest.mark.parametrize(
    ("worker", "column"),
    [
        ("detection_reward_worker.DetectionRewardWorker", "images"),
        ("math_rule_reward_worker.MathRuleRewardWorker", None),
    ],
)
def test_boxes_are_in_images_whatever_the_models_name(tmp_path: Path, worker: str, column: str | None) -> None:
    text = f"rewards: {{boxes: {{worker_cls: {WORKERS}.{worker}, tag_included: [coco]}}}}\n"
    conversion = converted(tmp_path, ROLES.replace("some/model", "Qwen/Qwen3.5-27B") + text)
    assert conversion.recipe.get("train_dataset.image_key") == column
