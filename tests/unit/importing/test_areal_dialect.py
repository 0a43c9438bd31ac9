"""AReaL: its keys are native where they mean the same; older spellings of layouts are brought up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import convert_fixture, convert_text

from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema import TrainRecipe
from fivefold.importing.areal.dialect import modern
from fivefold.layout.parser import parse, parse_role

FOLDED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
COMMON = [
    "scheduler.type=ray",
    "experiment_name=moe-run",
    "trial_name=trial-7",
    "cluster.n_nodes=4",
    "cluster.n_gpus_per_node=8",
    "actor.path=Qwen/Qwen3-30B-A3B",
    "actor.megatron.use_deterministic_algorithms=True",
]
ONE_STRING = [f"allocation_mode=sglang:d4t4+{FOLDED}"]
A_STRING_EACH = ["rollout.backend=sglang:d4t4", f"actor.backend={FOLDED}"]


@pytest.mark.parametrize("layout", [ONE_STRING, A_STRING_EACH], ids=["allocation_mode", "backends"])
def test_command_lines_convert_without_anything_unsupported(layout: list[str]) -> None:
    conversion = convert_fixture("areal", "areal_moe_megatron.yaml", overrides=[*COMMON, *layout])
    assert conversion.report.unsupported == []
    expected = dict(word.split("=", 1) for word in layout)
    assert conversion.recipe.items() >= expected.items()
    assert conversion.recipe["scheduler.type"] == "ray"
    assert conversion.recipe["experiment_name"] == "moe-run"
    assert conversion.recipe["cluster.n_nodes"] == 4
    assert conversion.recipe["actor.megatron.use_deterministic_algorithms"] is True
    assert conversion["actor.megatron.bridge_type"].outcome == "implied"
    assert conversion.recipe["actor.megatron.recompute"] == "selective"
    assert conversion.recipe["actor.kl_in"] == "reward"
    assert not [note for note in conversion.report.notes if "does not fit" in note]


@pytest.mark.parametrize("layout", [ONE_STRING, A_STRING_EACH], ids=["allocation_mode", "backends"])
def test_command_lines_are_recipes_overrides_as_they_stand(layout: list[str], tmp_path: Path) -> None:
    base = tmp_path / "recipe.yaml"
    base.write_text(
        "experiment_name: base\n"
        "actor: {path: some/model, megatron: {bridge_type: fivefold}}\n"
        "gconfig: {n_samples: 4}\n"
        "train_dataset: {path: data/train.parquet, batch_size: 8}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(base, [*COMMON, *layout], TrainRecipe)
    assert (recipe.scheduler.type, recipe.experiment_name, recipe.trial_name) == ("ray", "moe-run", "trial-7")
    assert (recipe.cluster.n_nodes, recipe.cluster.n_gpus_per_node) == (4, 8)
    assert recipe.actor.path == "Qwen/Qwen3-30B-A3B"
    assert recipe.actor.megatron.use_deterministic_algorithms is True
    if layout is ONE_STRING:
        assert recipe.allocation_mode is not None
        roles = {role.role: role for group in parse(recipe.allocation_mode).groups for role in group}
    else:
        roles = {"rollout": parse_role(recipe.rollout.backend), "actor": parse_role(recipe.actor.backend)}
    assert (roles["rollout"].dp, roles["rollout"].tp) == (4, 4)
    actor = roles["actor"]
    assert (actor.dp, actor.pp, actor.tp, actor.cp, actor.ep, actor.etp) == (1, 4, 2, 2, 4, 1)


def test_bridges_of_others_are_refused_natively(tmp_path: Path) -> None:
    base = tmp_path / "recipe.yaml"
    base.write_text("experiment_name: b\nactor: {path: m}\ntrain_dataset: {path: d.parquet}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"actor\.megatron\.bridge_type"):
        load_recipe(base, ["actor.megatron.bridge_type=mbridge"], TrainRecipe)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sglang:d4p1t1+d4p1t1", "sglang:d4+fsdp:d4"),
        ("sglang.d4p1t1+d2t2", "sglang:d4+fsdp:d2t2"),
        ("vllm:d2t2+d1p2t2", "vllm:d2t2+megatron:d1p2t2"),
        ("sglang:d1t1p1+fsdp:d1t1p1", "sglang:d1+fsdp:d1"),
        (f"sglang:d4t4+{FOLDED}", f"sglang:d4t4+{FOLDED}"),
        ("megatron:d1p10t1", "megatron:d1p10t1"),
    ],
)
def test_old_layouts_are_brought_up_to_date(old: str, new: str) -> None:
    assert modern(old) == new
    parse_role(new) if "+" not in new else parse(new)


@pytest.mark.parametrize(
    ("words", "key", "layout"),
    [
        (["allocation_mode=vllm:d4t2+fsdp:d8"], "allocation_mode", "vllm:d4t2+megatron:d8"),
        (["allocation_mode=sglang[rollout]:d8|fsdp[actor]:d4t2"], "allocation_mode", "sglang[rollout]:d8|megatron[actor]:d4t2"),
        (["allocation_mode=sglang:d4p1t1+d2c2"], "allocation_mode", "sglang:d4+megatron:d2c2"),
        (["actor.backend=fsdp:d4c2", "rollout.backend=vllm:d8"], "actor.backend", "megatron:d4c2"),
        (["actor.backend=archon:d2p2t2", "rollout.backend=vllm:d8"], "actor.backend", "megatron:d2p2t2"),
    ],
)  # fmt: skip
def test_other_trainers_degrees_become_megatrons(words: list[str], key: str, layout: str, tmp_path: Path) -> None:
    text = "actor: {path: Qwen/Qwen2.5-1.5B, gradient_checkpointing: true}\n"
    conversion = convert_text("areal", tmp_path, text, *words)
    assert conversion.recipe[key] == layout
    assert "Megatron-Core trains in its place" in conversion[key].note
    assert conversion.recipe["actor.megatron.recompute"] == "full"
    assert conversion.unsupported() == set()
    assert any("fivefold plan RECIPE --search" in note for note in conversion.report.notes)


def test_options_of_an_engine_that_does_not_train_have_no_effect(tmp_path: Path) -> None:
    text = (
        "actor: {backend: 'fsdp:d8', megatron: {virtual_pipeline_parallel_size: 2}, archon: {offload_params: true}}\n"
    )
    conversion = convert_text("areal", tmp_path, text)
    assert conversion["actor.megatron.virtual_pipeline_parallel_size"].outcome == "implied"
    assert conversion["actor.archon.offload_params"].outcome == "implied"
    assert "actor.megatron.virtual_pipeline_parallel_size" not in conversion.recipe


def test_a_full_recipe_keeps_its_values() -> None:
    conversion = convert_fixture("areal", "areal_grpo_fsdp.yaml")
    expected = {
        "experiment_name": "sums-grpo",
        "seed": 3,
        "cluster.fileroot": "/scratch/runs",
        "allocation_mode": "sglang:d4+megatron:d4",
        "actor.optimizer.lr": 2e-5,
        "actor.mb_spec.max_tokens_per_mb": 9216,
        "actor.reward_clip": 20.0,  # AReaL's default
        "gconfig.temperature": 0.9,
        "valid_dataset.split": "test",
    }
    assert conversion.recipe.items() >= expected.items()
    assert conversion.unsupported() == {
        "async_training",
        "rollout.max_head_offpolicyness",
        "actor.use_decoupled_loss",
        "actor.behav_imp_weight_cap",
        "saver.freq_epochs",
    }
    # Interpolated values are compared with what they repeat.
    assert conversion["actor.group_size"].outcome == "implied"
    assert conversion["ref.path"].note.startswith("no reference model is loaded")


RECOMPUTE = "actor.recompute_logprob"


@pytest.mark.parametrize(
    ("words", "written", "outcome"),
    [
        # AReaL's old log-probs are the inference engine's, unless told otherwise.
        ([], False, "mapped"),
        (["actor.use_decoupled_loss=false"], False, "mapped"),
        (["actor.recompute_logprob=true"], True, "mapped"),
        (["actor.recompute_logprob=true", "actor.use_decoupled_loss=true"], True, "mapped"),
        # The decoupled loss computes them anyway.
        (["actor.use_decoupled_loss=true"], None, "implied"),
        (["actor.recompute_logprob=false", "actor.use_decoupled_loss=true"], None, "implied"),
        # The rollout's log-probs are of a cut distribution.
        (["gconfig.top_p=0.9"], None, "unsupported"),
        (["gconfig.top_k=50"], None, "unsupported"),
        (["gconfig.top_p=0.9", "actor.recompute_logprob=true"], True, "mapped"),
    ],
)
def test_old_log_probs_are_whose_areal_says(
    words: list[str], written: bool | None, outcome: str, tmp_path: Path
) -> None:
    conversion = convert_text("areal", tmp_path, "actor: {path: some/model}\n", *words)
    assert conversion.recipe.get(RECOMPUTE) is written
    assert conversion[RECOMPUTE].outcome == outcome


def test_a_split_is_of_a_hub_name_not_of_a_file(tmp_path: Path) -> None:
    text = "train_dataset: {path: openai/gsm8k, split: main}\nvalid_dataset: {path: data/test.jsonl}\n"
    recipe = convert_text("areal", tmp_path, text).recipe
    assert recipe["train_dataset.split"] == "main"
    assert "valid_dataset.split" not in recipe


def test_a_group_of_another_size_is_unsupported() -> None:
    conversion = convert_fixture("areal", "areal_grpo_fsdp.yaml", overrides=["actor.reward_norm.group_size=3"])
    assert "actor.reward_norm.group_size" in conversion.unsupported()


def test_leave_one_out_is_exact_up_to_a_factor() -> None:
    """r_i less the mean of the 3 others is 4/3 times r_i less the mean of all 4."""
    conversion = convert_fixture("areal", "areal_ppo.yaml")
    rewards = [1.0, 0.0, 0.0, 0.5]
    for place, reward in enumerate(rewards):
        others = [other for index, other in enumerate(rewards) if index != place]
        left_out = reward - sum(others) / 3
        ours = conversion.recipe["actor.reward_scaling"] * (reward - sum(rewards) / 4)
        assert ours == pytest.approx(left_out)
    assert conversion.recipe["actor.reward_norm.std_level"] == "none"


def test_critics_and_lora_are_unsupported_with_the_reason() -> None:
    conversion = convert_fixture("areal", "areal_ppo.yaml")
    assert "no critic" in conversion["critic.optimizer.lr"].note
    assert "LoRA" in conversion["actor.use_lora"].note
    assert {"critic.backend", "critic.path", "actor.use_lora"} <= conversion.unsupported()
    conversion = convert_fixture("areal", "areal_ppo.yaml", overrides=["critic.scheduling_strategy.type=colocation"])
    assert "critic.scheduling_strategy.type" in conversion.unsupported()


def test_steps_and_roles_that_share_devices(tmp_path: Path) -> None:
    text = """
    cluster: {n_nodes: 1, n_gpus_per_node: 8}
    actor:
      backend: megatron:d8
      path: some/model
      scheduling_strategy: {type: colocation, target: rollout}
    rollout: {backend: "sglang:d8"}
    """
    conversion = convert_text("areal", tmp_path, text)
    assert conversion.recipe["rollout.colocate"] is True
    assert conversion.unsupported() == set()


def test_a_reference_that_nothing_needs_is_left_out_of_the_allocation(tmp_path: Path) -> None:
    text = """
    actor: {path: some/model}
    allocation_mode: "sglang[rollout]:d4+megatron[actor]:d4|megatron[ref]:d4"
    """
    conversion = convert_text("areal", tmp_path, text)
    assert conversion.recipe["allocation_mode"] == "sglang[rollout]:d4+megatron[actor]:d4"
    assert "no reference model is loaded" in conversion["allocation_mode"].note
    needed = text.rstrip() + "\n    ref: {path: other/model}\n"
    assert convert_text("areal", tmp_path, needed).recipe["allocation_mode"].endswith("|megatron[ref]:d4")
