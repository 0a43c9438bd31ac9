"""AReaL: its keys are Fivefold's where they mean the same, and older forms of layouts are converted."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import convert_fixture, convert_text, convert_words

from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.parser import parse, parse_role
from fivefold_import.areal.layout import modern

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


def test_command_lines_for_a_mixture_of_experts_convert_without_anything_unsupported() -> None:
    for layout in (ONE_STRING, A_STRING_EACH):
        conversion = convert_fixture("areal", "areal_moe_megatron.yaml", overrides=[*COMMON, *layout])
        assert conversion.report.unsupported == []
        assert conversion["actor.megatron.bridge_type"].outcome == "implied"
        assert conversion.report.problems == ()


def test_command_lines_override_a_recipe_as_they_stand(tmp_path: Path) -> None:
    base = tmp_path / "recipe.yaml"
    base.write_text(
        "experiment_name: base\n"
        "actor: {path: some/model, megatron: {bridge_type: fivefold}}\n"
        "gconfig: {n_samples: 4}\n"
        "train_dataset: {path: data/train.parquet, batch_size: 8}\n",
        encoding="utf-8",
    )
    for layout in (ONE_STRING, A_STRING_EACH):
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


def test_a_recipe_takes_five_of_areals_options_of_megatron(tmp_path: Path) -> None:
    base = tmp_path / "recipe.yaml"
    base.write_text("experiment_name: b\nactor: {path: m}\ntrain_dataset: {path: d.parquet}\n", encoding="utf-8")
    taken = {
        "use_deterministic_algorithms=true",
        "virtual_pipeline_parallel_size=2",
        "ddp.bucket_size=1000",
        "ddp.overlap_grad_reduce=true",
        "ddp.grad_reduce_in_fp32=true",
        "bridge_type=mbridge",
        "bridge_type=megatron-bridge",
    }
    others = {
        *(f"{name}=true" for name in ("wrap_with_ddp", "async_save", "use_precision_aware_optimizer")),
        *(f"ddp.{name}=true" for name in ("overlap_param_gather", "use_distributed_optimizer")),
        *(f"{name}=float32" for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
        *(
            "recompute_granularity=full",
            "recompute_method=uniform",
            "recompute_num_layers=1",
            "recompute_modules=[mlp]",
        ),
        *("moe_router_dtype=fp32", "moe_token_dispatcher_type=alltoall", "moe_permute_fusion=true"),
        *("moe_shared_expert_overlap=true", "moe_enable_deepep=true"),
    }
    for option in taken | others:
        try:
            load_recipe(base, [f"actor.megatron.{option}"], TrainRecipe)
        except RecipeError:
            assert option in others
        else:
            assert option in taken


def test_older_layouts_name_their_backends_and_leave_degrees_of_1_out() -> None:
    for old, new in {
        "sglang:d4p1t1+d4p1t1": "sglang:d4+fsdp:d4",
        "sglang.d4p1t1+d2t2": "sglang:d4+fsdp:d2t2",
        "vllm:d2t2+d1p2t2": "vllm:d2t2+megatron:d1p2t2",
        "sglang:d1t1p1+fsdp:d1t1p1": "sglang:d1+fsdp:d1",
        f"sglang:d4t4+{FOLDED}": f"sglang:d4t4+{FOLDED}",
        "megatron:d1p10t1": "megatron:d1p10t1",
    }.items():
        assert modern(old) == new
        parse_role(new) if "+" not in new else parse(new)


def test_fsdp_keeps_its_layout_and_archon_gets_megatrons(tmp_path: Path) -> None:
    text = "actor: {path: Qwen/Qwen2.5-1.5B, gradient_checkpointing: true}\n"
    sides = "sglang[rollout]:d8|fsdp[actor]:d4t2"
    for words, key, layout in (
        (["allocation_mode=vllm:d4t2+fsdp:d8"], "allocation_mode", "vllm:d4t2+fsdp:d8"),
        ([f"allocation_mode={sides}"], "allocation_mode", sides),
        (["allocation_mode=sglang:d4p1t1+d2c2"], "allocation_mode", "sglang:d4+fsdp:d2c2"),
        (["actor.backend=fsdp:d4c2", "rollout.backend=vllm:d8"], "actor.backend", "fsdp:d4c2"),
    ):
        conversion = convert_text("areal", tmp_path, text, *words)
        assert conversion.recipe[key] == layout
        assert conversion.recipe["actor.fsdp.recompute"] == "full", words
        assert conversion.unsupported() == set(), words
    conversion = convert_text("areal", tmp_path, text, "actor.backend=archon:d2p2t2", "rollout.backend=vllm:d8")
    assert conversion.recipe["actor.backend"] == "megatron:d2p2t2"
    assert "Megatron-Core trains in its place" in conversion["actor.backend"].note
    assert conversion.recipe["actor.megatron.recompute"] == "full"
    assert any("fivefold plan RECIPE --search" in note for note in conversion.report.notes)


def test_a_critic_on_another_engine_than_the_actor_has_that_engines_options(tmp_path: Path) -> None:
    text = (
        "actor: {path: m, backend: 'megatron:d4', gradient_checkpointing: true}\n"
        "critic: {path: c, backend: 'fsdp:d4', gradient_checkpointing: true}\n"
        "rollout: {backend: 'vllm:d4'}\n"
        "train_dataset: {path: d.parquet, batch_size: 8}\n"
    )
    recipe = convert_text("areal", tmp_path, text).recipe
    assert (recipe["actor.megatron.recompute"], recipe["critic.fsdp.recompute"]) == ("full", "full")
    assert "critic.megatron.recompute" not in recipe


def test_moments_in_bfloat16_and_on_the_host_are_fsdps(tmp_path: Path) -> None:
    text = "actor: {{backend: '{}', optimizer: {{type: adam_bf16}}, fsdp: {{offload_params: true}}}}\n"
    conversion = convert_text("areal", tmp_path, text.format("fsdp:d8"))
    chosen = {name: conversion.recipe[f"actor.fsdp.optimizer.{name}"] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    assert chosen == {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    assert conversion.recipe["actor.fsdp.optimizer.state_on"] == "host"
    assert "weights and gradients stay on the GPU" in conversion["actor.fsdp.offload_params"].note
    on_megatron = convert_text("areal", tmp_path, text.format("megatron:d8"))
    assert on_megatron["actor.optimizer.type"].outcome == "unsupported"
    assert not any(key.startswith("actor.fsdp") for key in on_megatron.recipe)


def test_options_of_an_engine_that_does_not_train_have_no_effect(tmp_path: Path) -> None:
    text = (
        "actor: {backend: 'fsdp:d8', megatron: {virtual_pipeline_parallel_size: 2}, archon: {offload_params: true}}\n"
    )
    conversion = convert_text("areal", tmp_path, text)
    assert conversion["actor.megatron.virtual_pipeline_parallel_size"].outcome == "implied"
    assert conversion["actor.archon.offload_params"].outcome == "implied"
    assert "actor.megatron.virtual_pipeline_parallel_size" not in conversion.recipe


def test_keys_that_repeat_others_are_implied() -> None:
    conversion = convert_fixture("areal", "areal_grpo_fsdp.yaml")
    assert conversion["recover.freq_secs"].outcome == "implied"  # nothing is checkpointed
    # `${gconfig.n_samples}` is filled in before the group's size is compared with the number of samples.
    assert conversion["actor.group_size"].outcome == "implied"
    assert conversion["ref.path"].note.startswith("no reference model is loaded")


def test_a_critic_has_its_own_devices_or_the_actors() -> None:
    assert convert_fixture("areal", "areal_ppo.yaml").recipe["critic.colocate"] is False
    beside = [f"critic.scheduling_strategy.{pair}" for pair in ("type=colocation", "target=actor")]
    options = ["actor.gae_lambda=0.95", "critic.eps_clip=0.3", "critic.backend=megatron:d2"]
    options += ["critic.megatron.use_deterministic_algorithms=true"]
    recipe = convert_fixture("areal", "areal_ppo.yaml", overrides=[*beside, *options]).recipe
    assert recipe["critic.colocate"] is True
    assert (recipe["actor.gae_lambda"], recipe["critic.eps_clip"]) == (0.95, 0.3)
    assert recipe["critic.megatron.use_deterministic_algorithms"] is True


def test_a_section_of_the_critic_that_is_the_actors_has_the_actors_values(tmp_path: Path) -> None:
    """A default of AReaL's critic does not fill a section that is written, even if that leads nowhere."""
    text = (
        "actor: {path: m, backend: 'fsdp:d4', optimizer: {type: adam, lr: 1.7e-5, weight_decay: 0.017}}\n"
        "critic: {path: '${actor.path}', backend: '${actor.backend}', optimizer: '${%s.optimizer}'}\n"
        "train_dataset: {batch_size: 8}\n"
    )
    recipe = convert_text("areal", tmp_path, text % "actor").recipe
    assert (recipe["critic.optimizer.lr"], recipe["critic.optimizer.weight_decay"]) == (1.7e-5, 0.017)
    nowhere = convert_text("areal", tmp_path, text % "nobody")
    assert "critic.optimizer.lr" not in nowhere.recipe
    assert "critic.optimizer" in nowhere.unsupported()


def test_held_out_prompts_are_sampled_as_areals_programs_do(tmp_path: Path) -> None:
    text = "gconfig: {n_samples: 4}\nvalid_dataset: {path: a.jsonl}\n"
    recipe = convert_text("areal", tmp_path, text).recipe
    evaluator = {name: recipe[f"evaluator.{name}"] for name in ("greedy", "temperature", "n_samples")}
    assert evaluator == {"greedy": False, "temperature": 0.6, "n_samples": 4}
    written = convert_text("areal", tmp_path, f"{text}eval_gconfig: {{n_samples: 1, temperature: 0.8}}\n").recipe
    assert (written["evaluator.temperature"], written["evaluator.n_samples"]) == (0.8, 1)


def test_a_mean_that_leaves_one_out_is_exact_up_to_a_factor() -> None:
    """r_i less the mean of the 3 others is 4/3 times r_i less the mean of all 4."""
    overrides = ["critic=null", "actor.adv_norm=null"]
    conversion = convert_fixture("areal", "areal_ppo.yaml", overrides=overrides)
    rewards = [1.0, 0.0, 0.0, 0.5]
    for place, reward in enumerate(rewards):
        others = [other for index, other in enumerate(rewards) if index != place]
        left_out = reward - sum(others) / 3
        ours = conversion.recipe["actor.reward_scaling"] * (reward - sum(rewards) / 4)
        assert ours == pytest.approx(left_out)


def test_areal_says_whether_old_log_probs_are_computed(tmp_path: Path) -> None:
    key = "actor.recompute_logprob"
    cases: list[tuple[list[str], bool | None, str]] = [
        # AReaL's old log-probs are the inference engine's, unless told otherwise.
        ([], False, "mapped"),
        (["actor.use_decoupled_loss=false"], False, "mapped"),
        ([f"{key}=true"], True, "mapped"),
        ([f"{key}=true", "actor.use_decoupled_loss=true"], True, "mapped"),
        # The decoupled loss computes them anyway.
        (["actor.use_decoupled_loss=true"], None, "implied"),
        ([f"{key}=false", "actor.use_decoupled_loss=true"], None, "implied"),
        # The rollout's log-probs describe a distribution that top_p or top_k has cut.
        (["gconfig.top_p=0.9"], None, "unsupported"),
        (["gconfig.top_k=50"], None, "unsupported"),
        (["gconfig.top_p=0.9", f"{key}=true"], True, "mapped"),
    ]
    for words, written, outcome in cases:
        conversion = convert_text("areal", tmp_path, "actor: {path: some/model}\n", *words)
        assert conversion.recipe.get(key) is written, words
        assert conversion[key].outcome == outcome, words


def test_a_hub_name_has_a_split_and_a_file_has_none(tmp_path: Path) -> None:
    text = "train_dataset: {path: openai/gsm8k, split: main}\nvalid_dataset: {path: data/test.jsonl}\n"
    recipe = convert_text("areal", tmp_path, text).recipe
    assert recipe["train_dataset.split"] == "main"
    assert "valid_dataset.split" not in recipe


def test_a_group_of_another_size_is_unsupported() -> None:
    conversion = convert_fixture("areal", "areal_grpo_fsdp.yaml", overrides=["actor.reward_norm.group_size=3"])
    assert "actor.reward_norm.group_size" in conversion.unsupported()


def test_an_actor_that_is_scheduled_onto_the_rollout_shares_its_devices(tmp_path: Path) -> None:
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


def test_trackers_that_are_on_are_tracked_with() -> None:
    written = [
        "stats_logger.wandb.mode=offline",
        "stats_logger.swanlab.mode=disabled",
        "stats_logger.trackio.mode=local",
    ]
    conversion = convert_fixture("areal", "areal_moe_megatron.yaml", overrides=[*COMMON, *ONE_STRING, *written])
    assert conversion.recipe["stats.trackers"] == ["tensorboard", "wandb", "trackio"]


def test_megatron_bridge_is_kept_where_it_is_asked_for() -> None:
    words = ["actor.path=m", "actor.backend=megatron:d4"]
    recipe = convert_words("areal", *words, "actor.megatron.bridge_type=megatron-bridge").recipe
    assert recipe["actor.megatron.bridge_type"] == "megatron-bridge"
    assert (
        "actor.megatron.bridge_type" not in convert_words("areal", *words, "actor.megatron.bridge_type=mbridge").recipe
    )


def test_an_allocation_mode_overrides_the_layouts_of_an_earlier_file(tmp_path: Path) -> None:
    text = (
        "actor: {path: m, backend: 'fsdp:d4', kl_ctl: 0.1}\n"
        "rollout: {backend: 'sglang:d4'}\n"
        "ref: {path: m, backend: '${actor.backend}'}\n"
    )
    conversion = convert_text("areal", tmp_path, text, "allocation_mode=sglang:d4+megatron:d2t2")
    assert conversion.report.problems == ()
    assert conversion.unsupported() == set()
    assert conversion.recipe["allocation_mode"] == "sglang:d4+megatron:d2t2"
    assert not [key for key in conversion.recipe if key.endswith(".backend")]


def test_gsm8k_has_the_columns_that_areals_reader_takes(tmp_path: Path) -> None:
    text = "train_dataset: {path: openai/gsm8k, type: %s}\nvalid_dataset: {path: openai/gsm8k, type: %s}\nmodel: {}\n"
    columns = {"rl": "answer_key", "sft": "response_key"}
    for kind, answer in columns.items():
        conversion = convert_text("areal", tmp_path, text % (kind, kind))
        for section in ("train_dataset.", "valid_dataset."):
            row = {name: conversion.recipe[section + name] for name in ("path", "prompt_key", answer)}
            assert row == {"path": "openai/gsm8k:main", "prompt_key": "question", answer: "answer"}, kind
        assert not any("chooses columns" in note for note in conversion.report.notes), kind
    other = convert_text("areal", tmp_path, "train_dataset: {path: some/where, type: rl}\n")
    assert "train_dataset.prompt_key" not in other.recipe
    assert any("chooses columns" in note for note in other.report.notes)


def test_losses_of_preferences_are_read_in_the_actors_section(tmp_path: Path) -> None:
    """AReaL's IPO divides log-ratios by the answers' lengths: the recipe averages them too, and its DPO sums them."""
    text = (
        "actor: {{path: m, beta: 0.3, loss_type: {loss}}}\nref: {{beta: 0.1}}\ntrain_dataset: {{path: d, type: dpo}}\n"
    )
    by_token = convert_text("areal", tmp_path, text.format(loss="ipo"))
    assert by_token.report.unsupported == []
    assert by_token.recipe["actor.loss_type"] == "ipo"
    assert by_token.recipe["actor.average_log_prob"] is True
    assert by_token.recipe["actor.beta"] == 0.3
    sums = convert_text("areal", tmp_path, text.format(loss="sigmoid"))
    assert "actor.average_log_prob" not in sums.recipe
    assert sums.report.unsupported == []


def test_sequences_that_are_padded_there_are_packed(tmp_path: Path) -> None:
    conversion = convert_text("areal", tmp_path, "actor: {path: m, pad_to_maximum: true}\n")
    assert conversion["actor.pad_to_maximum"].outcome == "implied"


def test_data_sets_with_images_have_their_column() -> None:
    words = ["train_dataset.path=hiyouga/geometry3k", "valid_dataset.path=a/b"]
    seeing = convert_words("areal", *words, "actor.path=Qwen/Qwen2.5-VL-3B-Instruct")
    assert seeing.recipe["train_dataset.image_key"] == "images"
    assert "valid_dataset.image_key" not in seeing.recipe
    blind = convert_words("areal", *words, "actor.path=Qwen/Qwen2.5-3B-Instruct")
    assert "train_dataset.image_key" not in blind.recipe
