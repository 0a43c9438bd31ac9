"""Adapters (LoRA): rank, alpha and layers are converted, what the rollout needs for them is implied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialect_conversion import ENVIRONMENT, FIXTURES, Conversion, convert_fixture, convert_text, convert_words

from fivefold.config.load import load_any_recipe
from fivefold_import import reasons
from fivefold_import.framework import Framework
from fivefold_import.recipe import import_recipe

MODEL, ACTOR = "actor_rollout_ref.model.", "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
BRIDGE = f"{MODEL}lora."
DENSE, MOE = f"{MODEL}path=Qwen/Qwen3-8B", f"{MODEL}path=Qwen/Qwen3-30B-A3B"
ROLL = "actor_train.model_args."
TRINITY = "model.lora_configs.0."


def of_verl(*words: str) -> Conversion:
    """Convert words of verl, which trains with FSDP unless they say otherwise."""
    return convert_words("verl", "algorithm.adv_estimator=grpo", f"{ROLLOUT}n=4", *words)


def of_bridge(*words: str) -> Conversion:
    """Convert words of verl with Megatron-Core, whose adapters are Megatron-Bridge's."""
    return of_verl(f"{ACTOR}strategy=megatron", *words)


def of_areal(*words: str) -> Conversion:
    base = ("actor.path=Qwen/Qwen3-8B", "actor.backend=fsdp:d1", "rollout.backend=vllm:d1", "gconfig.n_samples=4")
    batch = "train_dataset.batch_size=8"
    return convert_words("areal", *base, batch, *words)


def lora(conversion: Conversion, role: str = "actor") -> dict[str, Any]:
    """Return the recipe's section of adapters of a role."""
    section = f"{role}.lora."
    return {key.removeprefix(section): value for key, value in conversion.recipe.items() if key.startswith(section)}


FRAMEWORKS: list[tuple[Framework, str, list[str], dict[str, Any]]] = [
    (
        "verl",
        "verl_grpo_megatron.sh",
        [f"{BRIDGE}rank=16", f"{BRIDGE}target_modules=[linear_qkv,linear_proj]", f"{BRIDGE}merge=True"],
        {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    ("verl", "verl_ppo_fsdp.sh", [f"{MODEL}lora_rank=16"], {"rank": 16, "alpha": 16.0}),
    ("verl", "verl_sft_fsdp.yaml", ["model.lora_rank=64", "model.lora_alpha=16"], {"rank": 64, "alpha": 16.0}),
    ("areal", "areal_grpo_fsdp.yaml", ["actor.use_lora=true"], {"rank": 32, "alpha": 16.0}),
    ("areal", "areal_dpo.yaml", ["actor.use_lora=true", "actor.lora_rank=8"], {"rank": 8, "alpha": 16.0}),
    ("roll", "roll_megatron.yaml", [f"{ROLL}lora_target=all-linear"], {"rank": 8, "alpha": 16.0}),
    ("roll", "roll_dpo.yaml", [f"{ROLL}lora_target=all", f"{ROLL}lora_rank=64"], {"rank": 64, "alpha": 128.0}),
    ("trinity", "trinity_grpo.yaml", [f"{TRINITY}lora_rank=16", f"{TRINITY}lora_alpha=8"], {"rank": 16, "alpha": 8.0}),
    ("trinity", "trinity_sft.yaml", [f"{TRINITY}name=lora"], {"rank": 32, "rank_of_experts": 32}),
]
"""For each framework, a source with adapters and the section `actor.lora` that it becomes."""


@pytest.mark.parametrize(("framework", "fixture", "words", "section"), FRAMEWORKS)
def test_adapters_are_converted_and_the_recipe_loads(
    framework: Framework, fixture: str, words: list[str], section: dict[str, Any], tmp_path: Path
) -> None:
    conversion = convert_fixture(framework, fixture, words)
    assert lora(conversion) == section
    keys = {word.partition("=")[0] for word in words}
    assert not keys & conversion.unsupported()
    plain = convert_fixture(framework, fixture).recipe
    rate = "actor.optimizer.lr"
    assert conversion.recipe.get(rate) == plain.get(rate)
    import_recipe(framework, [FIXTURES / fixture], words, tmp_path / "recipe.yaml", environment=ENVIRONMENT)
    loaded = load_any_recipe(tmp_path / "recipe.yaml", [f"{key}=x" for key in conversion.report.to_give])
    assert loaded.actor.lora is not None
    assert loaded.actor.lora.rank == section["rank"]


def test_siirls_keys_are_verls() -> None:
    conversion = convert_words("siirl", DENSE, f"{MODEL}lora_rank=16", f"{MODEL}target_modules=[q_proj,v_proj]")
    assert lora(conversion) == {"rank": 16, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("verl", [f"{MODEL}lora_rank=0", f"{MODEL}lora_alpha=16", f"{MODEL}target_modules=all-linear"]),
        ("verl", [f"{ACTOR}strategy=megatron", f"{BRIDGE}rank=0", f"{BRIDGE}alpha=32", f"{BRIDGE}dropout=0.1"]),
        ("siirl", [f"{MODEL}lora_rank=0", f"{MODEL}exclude_modules=[o_proj]"]),
        ("areal", ["actor.use_lora=false", "actor.lora_rank=8", "actor.target_modules=[q_proj]"]),
        ("roll", ["actor_train.model_args.lora_rank=8", "actor_train.model_args.lora_alpha=8"]),
        ("trinity", ["model.lora_configs=null"]),
    ],
)
def test_without_adapters_all_weights_are_trained(framework: Framework, words: list[str]) -> None:
    conversion = convert_words(framework, *words)
    assert not lora(conversion)
    entries = [conversion[word.partition("=")[0]] for word in words if "lora" in word]
    assert {entry.outcome for entry in entries} == {"implied"}


def test_an_adapters_rank_that_is_no_number_is_unsupported() -> None:
    assert f"{MODEL}lora_rank" in of_verl(DENSE, f"{MODEL}lora_rank=0.5").unsupported()


# Layers


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("all-linear", None),
        ("all", None),
        ("[all-linear]", None),
        ("null", None),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("o_proj", ["o_proj"]),
        ("[self_attn.q_proj]", ["q_proj"]),
        (".*\\.(gate|up)_proj", ["gate_proj", "up_proj"]),
        (".*layers.*_proj", None),
    ],
)
def test_peft_chooses_layers_by_name(targets: str, layers: list[str] | None) -> None:
    conversion = of_verl(DENSE, f"{MODEL}lora_rank=8", f"{MODEL}target_modules={targets}")
    assert lora(conversion).get("targets") == layers
    assert not conversion.unsupported()


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("[linear_qkv,linear_proj,linear_fc1,linear_fc2]", None),
        ("[linear_q,linear_v]", ["q_proj", "v_proj"]),
        ("[linear_fc1_up,linear_fc1_gate,linear_fc2]", ["up_proj", "gate_proj", "down_proj"]),
        ("[linear_q_down_proj,linear_kv_up_proj]", ["q_a_proj", "kv_b_proj"]),
    ],
)
def test_megatrons_names_become_hugging_faces(targets: str, layers: list[str] | None) -> None:
    conversion = of_bridge(f"{BRIDGE}rank=8", f"{BRIDGE}type=canonical_lora", f"{BRIDGE}target_modules={targets}")
    assert lora(conversion).get("targets") == layers


def test_excluded_layers_leave_the_others_of_the_model() -> None:
    words = (f"{MODEL}lora_rank=8", f"{MODEL}exclude_modules=[o_proj,down_proj]")
    conversion = of_verl(DENSE, *words)
    assert lora(conversion)["targets"] == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    assert conversion[f"{MODEL}exclude_modules"].to == "actor.lora.targets"
    unknown = of_verl(f"{MODEL}path=own/model", *words)
    assert "list those that have adapters" in unknown[f"{MODEL}exclude_modules"].note
    images = of_verl(DENSE, f"{MODEL}lora_rank=8", f"{MODEL}exclude_modules=.*visual.*")
    assert images[f"{MODEL}exclude_modules"].outcome == "implied"
    assert "targets" not in lora(images)


@pytest.mark.parametrize(
    ("targets", "left", "words"),
    [
        ("[q_proj,lm_head]", ["q_proj"], "lm_head"),
        ("[lm_head]", None, "no layer is left"),
        ("['*.layers.0.*.linear_qkv']", None, "not a regular expression"),
        (".*layers\\.0\\..*q_proj", None, "in all blocks alike"),
    ],
)
def test_layers_that_a_recipe_cannot_choose_are_unsupported(targets: str, left: list[str] | None, words: str) -> None:
    conversion = of_verl(DENSE, f"{MODEL}lora_rank=8", f"{MODEL}target_modules={targets}")
    assert lora(conversion).get("targets") == left
    assert conversion[f"{MODEL}target_modules"].outcome == "unsupported"
    assert words in conversion[f"{MODEL}target_modules"].note


# Experts


def test_the_rank_of_experts_is_the_sources() -> None:
    assert lora(of_verl(MOE, f"{MODEL}lora_rank=16"))["rank_of_experts"] == 16
    shared = of_bridge(MOE, f"{BRIDGE}rank=16")
    assert lora(shared) == {"rank": 16}
    assert reasons.experts_apart("actor") in shared.report.notes
    apart = of_bridge(MOE, f"{BRIDGE}rank=16", f"{BRIDGE}share_expert_adapters=False")
    assert lora(apart) == {"rank": 16, "rank_of_experts": 16}
    words = (f"{BRIDGE}share_expert_adapters=False", f"{BRIDGE}normalize_moe_lora=True")
    divided = of_bridge(MOE, f"{BRIDGE}rank=16", *words)
    assert lora(divided) == {"rank": 16}
    assert not divided.unsupported()


# Kinds, and what has no counterpart


@pytest.mark.parametrize(
    "word", ["type=dora", "dropout=1.5", "adapter_path=folder", "share_expert_adapters=True", "new_option=1"]
)
def test_what_megatron_bridge_has_besides_is_unsupported(word: str) -> None:
    key = BRIDGE + word.partition("=")[0]
    conversion = of_bridge(DENSE, f"{BRIDGE}rank=8", word.join((BRIDGE, "")))
    assert conversion.unsupported() == {key}


def test_dropout_is_converted_unless_it_is_behind_the_adapter() -> None:
    position = f"{BRIDGE}dropout_position"
    before = of_bridge(DENSE, f"{BRIDGE}rank=8", f"{BRIDGE}dropout=0.1", f"{position}=pre")
    assert lora(before) == {"rank": 8, "dropout": 0.1}
    assert not before.unsupported()
    behind = of_bridge(DENSE, f"{BRIDGE}rank=8", f"{BRIDGE}dropout=0.1", f"{position}=post")
    assert behind.unsupported() == {position}
    without = of_bridge(DENSE, f"{BRIDGE}rank=8", f"{BRIDGE}dropout=0.0", f"{position}=post")
    assert not without.unsupported()
    roll = convert_fixture("roll", "roll_megatron.yaml", [f"{ROLL}lora_target=all-linear", f"{ROLL}lora_dropout=0.05"])
    assert roll.recipe["actor.lora.dropout"] == 0.05


def test_other_frameworks_kinds_and_first_adapters_are_unsupported(tmp_path: Path) -> None:
    verl = of_verl(DENSE, f"{MODEL}lora_rank=8", f"{MODEL}lora_adapter_path=folder")
    assert verl[f"{MODEL}lora_adapter_path"].note == reasons.FIRST_ADAPTERS
    areal = of_areal("actor.use_lora=true", "actor.peft_type=dora")
    assert areal["actor.peft_type"].note == reasons.ONLY_LORA
    names = ("additional_target=embed_tokens", "adapter_name_or_path=folder")
    words = [f"{ROLL}lora_target=all-linear", *(ROLL + name for name in names)]
    roll = convert_fixture("roll", "roll_megatron.yaml", words)
    assert {ROLL + name.partition("=")[0] for name in names} <= roll.unsupported()
    text = (FIXTURES / "trinity_grpo.yaml").read_text(encoding="utf-8")
    sets = "lora_configs: [{name: a, lora_dtype: auto, is_dummy: true, path: folder}, {name: b}]"
    trinity = convert_text("trinity", tmp_path, text.replace("\nmodel:\n", f"\nmodel:\n  {sets}\n"))
    assert {f"{TRINITY}path", "model.lora_configs.1.name"} <= trinity.unsupported()
    assert {trinity[TRINITY + name].outcome for name in ("name", "lora_dtype", "is_dummy")} == {"implied"}


def test_what_the_rollout_needs_for_adapters_is_implied() -> None:
    names = (
        "load_format=safetensors",
        "layered_summon=True",
        "engine_kwargs.vllm.max_lora_rank=64",
        "enable_lora=True",
    )
    verl = of_verl(DENSE, f"{MODEL}lora_rank=8", *(ROLLOUT + name for name in names))
    assert not verl.unsupported()
    words = ["rollout.use_lora=true", "gconfig.lora_name=a", "vllm.enable_lora=true", "vllm.max_lora_rank=64"]
    areal = of_areal("actor.use_lora=true", *words)
    assert {areal[word.partition("=")[0]].note for word in words} == {reasons.MERGED}
    infer = "actor_infer.model_args.lora_"
    roll = convert_fixture("roll", "roll_megatron.yaml", [f"{infer}target=all-linear", f"{infer}rank=64"])
    assert {roll[f"{infer}{name}"].outcome for name in ("target", "rank")} == {"implied"}
    assert not lora(roll)
    words = [f"{TRINITY}name=a", "explorer.rollout_model.enable_lora=true"]
    trinity = convert_fixture("trinity", "trinity_grpo.yaml", words)
    assert trinity["explorer.rollout_model.enable_lora"].note == reasons.MERGED


# Engines and roles


def test_the_engine_says_which_of_verls_keys_are_read() -> None:
    both = (DENSE, f"{MODEL}lora_rank=8", f"{BRIDGE}rank=64")
    assert lora(of_verl(*both)) == {"rank": 8, "alpha": 16.0}
    assert lora(of_bridge(*both)) == {"rank": 64}
    assert of_verl(*both)[f"{BRIDGE}rank"].outcome == of_bridge(*both)[f"{MODEL}lora_rank"].outcome == "implied"


def test_adapters_have_fivefolds_bridge() -> None:
    megatron = f"{ACTOR}megatron."
    words = (DENSE, f"{megatron}use_mbridge=True", f"{megatron}vanilla_mbridge=False")
    assert of_bridge(*words).recipe["actor.megatron.bridge_type"] == "megatron-bridge"
    conversion = of_bridge(*words, f"{BRIDGE}rank=8")
    assert "actor.megatron.bridge_type" not in conversion.recipe
    assert conversion[f"{megatron}vanilla_mbridge"].outcome == "implied"
    assert not conversion.report.problems


def test_a_critic_has_its_own_adapters() -> None:
    words = ("algorithm.adv_estimator=gae", DENSE, "critic.model.path=Qwen/Qwen3-8B", "critic.model.lora_rank=4")
    conversion = convert_words("verl", *words)
    assert lora(conversion, "critic") == {"rank": 4, "alpha": 16.0}
    assert not lora(conversion)
    assert not lora(of_verl(*words[1:]), "critic")
    areal = of_areal("critic.path=Qwen/Qwen3-8B", "critic.use_lora=true", "critic.lora_rank=4")
    assert lora(areal, "critic") == {"rank": 4, "alpha": 16.0}
