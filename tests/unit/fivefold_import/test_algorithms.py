"""Losses, advantages, corrections and dynamic sampling of other frameworks, and the keys that depend on them."""

from __future__ import annotations

from typing import Any

from dialect_conversion import convert_words

from fivefold_import.framework import Framework

ACTOR = "actor_rollout_ref.actor."
LOSS = "algorithm.policy_loss_fn_args."
CLIP_RANGE = {"actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip"}


def test_losses_keep_their_clip_range() -> None:
    verl = [f"{ACTOR}clip_ratio_low=3e-4", f"{ACTOR}clip_ratio_high=4e-4"]
    trinity = [f"{LOSS}clip_range_low=3e-4", f"{LOSS}clip_range_high=4e-4"]
    areal = ["actor.eps_clip=3e-4", "actor.eps_clip_higher=4e-4"]
    roll = ["use_pg_clip_range=true", "pg_clip_low=3e-4", "pg_clip_high=4e-4"]
    cases: list[tuple[Framework, str, list[str], str]] = [
        ("verl", f"{ACTOR}policy_loss.loss_mode=gspo", verl, "gspo"),
        ("verl", f"{ACTOR}policy_loss.loss_mode=geo_mean", verl, "gmpo"),
        ("verl", f"{ACTOR}policy_loss.loss_mode=cispo", verl, "cispo"),
        ("siirl", f"{ACTOR}use_cpgd_loss=True", verl, "cpgd"),
        ("trinity", "algorithm.policy_loss_fn=gspo", trinity, "gspo"),
        ("trinity", "algorithm.algorithm_type=gspo", trinity, "gspo"),
        ("trinity", "algorithm.policy_loss_fn=rec", [f"{LOSS}epsilon_low=3e-4", f"{LOSS}epsilon_high=4e-4"], "rec"),
        ("areal", "actor.use_cispo_loss=true", areal, "cispo"),
        ("areal", "actor.importance_sampling_level=sequence", areal, "gspo"),
        ("roll", "importance_sampling=seq", roll, "gspo"),
    ]
    for framework, name, clip, loss in cases:
        conversion = convert_words(framework, name, *clip)
        recipe = conversion.recipe
        assert conversion[name.partition("=")[0]].outcome == "mapped", name
        found = (recipe["actor.loss"], recipe["actor.eps_clip"], recipe["actor.eps_clip_higher"])
        assert found == (loss, 3e-4, 4e-4), name
        assert "actor.c_clip" not in recipe, name


def test_losses_without_a_clip_range_have_none() -> None:
    cases: list[tuple[Framework, list[str], str]] = [
        ("verl", [f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}clip_ratio_high=0.3"], "sapo"),
        ("verl", [f"{ACTOR}policy_loss.loss_mode=gpg"], "reinforce"),
        ("areal", ["actor.use_sapo_loss=true", "actor.eps_clip=0.3"], "sapo"),
        ("roll", ["use_policy_loss_type=PG"], "reinforce"),
        ("roll", ["actor_train.pg_variant=topr", "pg_clip=0.3"], "topr"),
        ("roll", ["actor_train.pg_variant=kimi15"], "kimi"),
        ("roll", ["actor_train.pg_variant=vanilla"], "reinforce"),
        ("trinity", ["algorithm.policy_loss_fn=sapo"], "sapo"),
    ]
    for framework, words, loss in cases:
        conversion = convert_words(framework, *words)
        assert conversion.recipe["actor.loss"] == loss, words
        assert not CLIP_RANGE & set(conversion.recipe), words
        assert not {word.partition("=")[0] for word in words} & conversion.unsupported(), words


def test_cispo_has_bounds_of_its_own() -> None:
    verl = convert_words(
        "verl", f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_low=10", f"{ACTOR}clip_ratio_high=0.2"
    )
    assert (verl.recipe["actor.eps_clip"], verl.recipe["actor.eps_clip_higher"]) == (1.0, 0.2)
    train = "actor_train."
    roll = convert_words("roll", f"{train}pg_variant=cispo", f"{train}cispo_epsilon_high=4.0", "pg_clip=0.3")
    assert (roll.recipe["actor.eps_clip"], roll.recipe["actor.eps_clip_higher"]) == (0.1, 4.0)
    tis = convert_words("roll", f"{train}pg_variant=tis").recipe
    assert (tis["actor.loss"], tis["actor.eps_clip"], tis["actor.eps_clip_higher"]) == ("cispo", 1.0, 0.0)


def test_losses_that_are_means_over_sequences_in_their_framework_are_so_in_the_recipe() -> None:
    """verl and siiRL read no `loss_agg_mode` for them; for Trinity-RFT's GSPO it is only a default."""
    modes: list[tuple[Framework, str]] = [
        ("verl", "gspo"),
        ("verl", "geo_mean"),
        ("verl", "geo-mean"),
        ("verl", "sapo"),
        ("siirl", "gspo"),
    ]
    for framework, mode in modes:
        chosen, written = f"{ACTOR}policy_loss.loss_mode={mode}", f"{ACTOR}loss_agg_mode=token-mean"
        for words in ([chosen], [chosen, written], [written, chosen]):
            conversion = convert_words(framework, *words)
            assert conversion.recipe["actor.loss_aggregation"] == "sequence_mean", words
            if written in words:
                assert conversion[f"{ACTOR}loss_agg_mode"].outcome == "implied", words
    for mode in ("vanilla", "cispo", "gpg"):
        words = [f"{ACTOR}policy_loss.loss_mode={mode}", f"{ACTOR}loss_agg_mode=seq-mean-token-sum"]
        assert convert_words("verl", *words).recipe["actor.loss_aggregation"] == "sequence_sum", mode


def test_losses_have_their_own_defaults_in_trinity_rft() -> None:
    keys = ("actor.eps_clip", "actor.eps_clip_higher", "actor.loss_aggregation")
    cases: list[tuple[list[str], tuple[Any, ...]]] = [
        (["algorithm.algorithm_type=gspo"], (3e-4, 4e-4, "sequence_mean")),
        (["algorithm.policy_loss_fn=gspo", f"{LOSS}clip_range=0.01"], (0.01, None, "sequence_mean")),
        (["algorithm.policy_loss_fn=gspo", f"{LOSS}loss_agg_mode=token-mean"], (3e-4, 4e-4, "token_mean")),
        (["algorithm.policy_loss_fn=gspo", "algorithm.loss_agg_mode=token-mean"], (3e-4, 4e-4, "token_mean")),
        (["algorithm.algorithm_type=cispo"], (1.0, 0.28, None)),
        (["algorithm.algorithm_type=cispo", f"{LOSS}clip_range_high=4.0"], (1.0, 4.0, None)),
        (["algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn=ppo"], (None, None, None)),
    ]
    for words, wanted in cases:
        recipe = convert_words("trinity", *words).recipe
        assert tuple(recipe.get(key) for key in keys) == wanted, words
    notes = convert_words("trinity", "algorithm.algorithm_type=cispo").report.notes
    assert any("keeps the gradient of every token" in note for note in notes)
    assert any("actor.eps_clip=1.0, actor.eps_clip_higher=0.28" in note for note in notes)


def test_the_clip_range_of_a_loss_that_is_not_offered_is_not_that_of_ppo() -> None:
    cases: list[tuple[Framework, str, str, str]] = [
        (
            "verl",
            f"{ACTOR}policy_loss.loss_mode=brand_new",
            f"{ACTOR}clip_ratio_low=3e-4",
            "'brand_new' is not offered",
        ),
    ]
    for framework, name, clip, words in cases:
        key = name.partition("=")[0]
        conversion = convert_words(framework, name, clip)
        assert conversion[key].outcome == "unsupported", name
        assert words in conversion[key].note, name
        assert not CLIP_RANGE & set(conversion.recipe), name
        entry = conversion[clip.partition("=")[0]]
        assert (entry.outcome, f"depends on {key}" in entry.note) == ("unsupported", True), name


def test_the_clip_range_of_ppo_stays() -> None:
    cases: list[tuple[Framework, list[str]]] = [
        ("verl", [f"{ACTOR}policy_loss.loss_mode=vanilla", f"{ACTOR}clip_ratio_high=0.28"]),
        ("trinity", ["algorithm.algorithm_type=grpo", f"{LOSS}clip_range_high=0.28"]),
        ("trinity", ["algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn=ppo", f"{LOSS}clip_range_high=0.28"]),
        ("areal", ["actor.importance_sampling_level=token", "actor.eps_clip_higher=0.28"]),
        ("roll", ["importance_sampling=token", "use_pg_clip_range=true", "pg_clip_high=0.28"]),
    ]
    for framework, words in cases:
        recipe = convert_words(framework, *words).recipe
        assert recipe["actor.eps_clip_higher"] == 0.28, words
        assert "actor.loss" not in recipe, words


def test_options_of_a_loss_are_mapped_with_the_loss_and_have_no_effect_without_it() -> None:
    cases: list[tuple[Framework, str, str, str]] = [
        ("verl", f"{ACTOR}policy_loss.clip_cov_ratio=0.1", f"{ACTOR}policy_loss.loss_mode=clip_cov", "clip_cov_ratio"),
        ("verl", f"{ACTOR}policy_loss.ppo_kl_coef=0.1", f"{ACTOR}policy_loss.loss_mode=kl_cov", "ppo_kl_coef"),
        ("siirl", f"{ACTOR}policy_drift_coeff=0.1", f"{ACTOR}use_cpgd_loss=True", "drift"),
        ("areal", "actor.sapo_tau_pos=0.1", "actor.use_sapo_loss=true", "tau_pos"),
        ("roll", "actor_train.topr_positive_weight=0.1", "actor_train.pg_variant=topr", "positive_weight"),
    ]
    for framework, option, switch, name in cases:
        key = option.partition("=")[0]
        assert convert_words(framework, option)[key].outcome == "implied", option
        assert convert_words(framework, option, switch).recipe[f"actor.loss_kwargs.{name}"] == 0.1, option


def test_estimators_have_their_names_or_are_unsupported() -> None:
    samples = {"verl": "actor_rollout_ref.rollout.n=4", "siirl": "actor_rollout_ref.rollout.n=4"}
    cases: list[tuple[Framework, str, dict[str, str | None]]] = [
        (
            "verl",
            "algorithm.adv_estimator",
            {
                "rloo": "rloo",
                "remax": "remax",
                "opo": "opo",
                "gdpo": "gdpo",
                "gpg": "gpg",
                "reinforce_plus_plus": "reinforce_pp",
                "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
                "grpo_passk": "pass_at_k_best",
                "optimal_token_baseline": "optimal_token_baseline",
                "tir_optimal_token_baseline": "optimal_token_baseline",
            },
        ),
        ("siirl", "algorithm.adv_estimator", {"remax": "remax", "cpgd_other": None}),
        ("trinity", "algorithm.advantage_fn", {"remax": "remax", "reinforceplusplus": "reinforce_pp"}),
        ("trinity", "algorithm.algorithm_type", {"asymre": "asymre", "raft": "raft"}),
        ("roll", "adv_estimator", {"gigpo": None, "step_reinforce": None}),
    ]
    for framework, key, names in cases:
        for name, ours in names.items():
            conversion = convert_words(framework, f"{key}={name}", *filter(None, [samples.get(framework)]))
            assert conversion.recipe.get("actor.advantage") == ours, (framework, name)
            assert (conversion[key].outcome == "unsupported") is (ours is None), (framework, name)


def test_corrections_of_the_rollouts_log_probs() -> None:
    section = "actor.rollout_correction."
    custom = {"method": "custom"}
    cases: list[tuple[Framework, list[str], dict[str, Any]]] = [
        ("verl", [f"{ACTOR}tis_imp_ratio_cap=2.0"], {"weight": "token", "weight_cap": 2.0, **custom}),
        ("verl", [f"{ACTOR}tis_imp_ratio_cap=-1"], {}),
        (
            "verl",
            [
                f"algorithm.rollout_correction.{word}"
                for word in ("rollout_is=sequence", "rollout_is_threshold=3.0", "rollout_rs=geometric",
                             "rollout_rs_threshold=1.01", "rollout_rs_threshold_lower=0.99")
            ],
            {"weight": "sequence", "weight_cap": 3.0, "mask": "geometric", "mask_above": 1.01, "mask_below": 0.99, **custom},
        ),
        ("verl", ["algorithm.rollout_correction.rollout_is=null"], {}),
        (
            "verl",
            [f"algorithm.rollout_correction.{w}" for w in ("rollout_is=token", "rollout_is_threshold=0.5_5.0")],
            {"weight": "token", "mask": "token", "mask_below": 0.5, "mask_above": 5.0, **custom},
        ),
        (
            "verl",
            [f"algorithm.rollout_correction.{w}" for w in ("rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.9_1.2")],
            {"mask": "geometric", "mask_below": 0.9, "mask_above": 1.2, **custom},
        ),
        (
            "verl",
            [f"algorithm.rollout_correction.{w}" for w in ("rollout_rs=seq_max_k3", "rollout_rs_threshold=0.01")],
            {"mask": "largest", "mask_by": "k3", "mask_above": 0.01, **custom},
        ),
        (
            "verl",
            [f"algorithm.rollout_correction.{w}" for w in ("rollout_is=token", "rollout_is_batch_normalize=True")],
            {"weight": "token", "weight_normalized": True, **custom},
        ),
        (
            "areal",
            ["actor.use_decoupled_loss=true", "actor.m2_threshold=0.04"],
            {"weight": "token", "mask": "second_moment", "mask_above": 0.04, **custom},
        ),
        ("areal", ["actor.m2_threshold=0.04"], {}),
        (
            "areal",
            [
                "actor.use_decoupled_loss=true",
                *(f"actor.rejection_sampling.{w}" for w in ("level=sequence", "metric=kl_k3", "agg=max", "upper=0.5")),
            ],
            {"weight": "token", "mask": "largest", "mask_by": "k3", "mask_above": 0.5, **custom},
        ),
        (
            "areal",
            [
                "actor.use_decoupled_loss=true",
                *(f"actor.rejection_sampling.{w}" for w in ("action=clamp", "upper=2.0", "lower=0.5")),
            ],
            {"weight": "token", "weight_cap": 2.0, "weight_floor": 0.5, **custom},
        ),
        (
            "roll",
            [
                *(f"train_infer_correction.is_weight.{w}" for w in ("enabled=true", "upper_bound=1.5")),
                *(
                    f"train_infer_correction.filters.0.{w}"
                    for w in ("enabled=true", "agg_type=geometric", "ratio_high=1.1", "diff_high=0.1")
                ),
            ],
            {
                "weight": "token", "weight_cap": 1.5, "mask": "geometric", "mask_below": 0.8, "mask_above": 1.1,
                **custom,
            },
        ),
        (
            "roll",
            [
                f"train_infer_correction.filters.0.{w}"
                for w in ("enabled=true", "agg_type=segment", "ratio_high=1.05", "diff_enabled=true", "diff_low=-0.1")
            ],
            {
                "mask": "turn", "mask_below": 0.8, "mask_above": 1.05, "difference_below": -0.1,
                "difference_above": 0.2, **custom,
            },
        ),
        ("roll", ["train_infer_correction.filters.0.ratio_high=1.1"], {}),
        ("areal", ["actor.use_decoupled_loss=true"], {"weight": "token", **custom}),
        (
            "areal",
            ["actor.use_decoupled_loss=true", "actor.behav_imp_weight_cap=5.0"],
            {"weight": "token", "mask": "token", "mask_above": 5.0, "mask_below": 0.0, **custom},
        ),
        # The names and ways of later releases.
        (
            "areal",
            ["actor.use_decoupled_loss=true", "actor.behave_imp_weight_cap=5.0"],
            {"weight": "token", "mask": "token", "mask_above": 5.0, "mask_below": 0.0, **custom},
        ),
        (
            "areal",
            ["actor.use_decoupled_loss=true", "actor.behave_imp_weight_mode=token_truncate"],
            {"weight": "token", "weight_cap": 5.0, **custom},
        ),
        (
            "areal",
            [
                "actor.use_decoupled_loss=true",
                *(f"actor.behave_imp_weight_{w}" for w in ("cap=3.0", "mode=sequence_mask")),
            ],
            {"weight": "token", "mask": "geometric", "mask_above": 3.0, "mask_below": 0.0, **custom},
        ),
        (
            "areal",
            ["actor.use_decoupled_loss=true", *(f"actor.behave_imp_weight_{w}" for w in ("cap=3.0", "mode=disabled"))],
            {"method": "none"},
        ),
    ]  # fmt: skip
    for framework, words, wanted in cases:
        conversion = convert_words(framework, *words)
        found = {k.removeprefix(section): v for k, v in conversion.recipe.items() if k.startswith(section)}
        assert found == wanted, words
        assert not {word.partition("=")[0] for word in words} & conversion.unsupported(), words


def test_areals_way_to_old_log_probs() -> None:
    key = "actor.prox_logp_method"
    words = ("actor.use_decoupled_loss=true", "actor.recompute_logprob=true", "rollout.max_head_offpolicyness=2")
    for method, wanted, outcome in (
        ("loglinear", "loglinear", "mapped"),
        ("metrics", None, "implied"),
        ("reuse_train_logp", None, "unsupported"),
    ):
        conversion = convert_words("areal", *words, f"{key}={method}")
        assert conversion.recipe.get(key) == wanted
        assert conversion[key].outcome == outcome
        assert conversion.recipe.get("actor.recompute_logprob") == (None if wanted else True)


def test_dynamic_sampling_and_long_responses() -> None:
    cases: list[tuple[Framework, list[str], dict[str, Any]]] = [
        (
            "verl",
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=5"],
            {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 5},
        ),
        (
            "verl",
            ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=100"],
            {"overlong_reward_penalty": True, "overlong_tokens": 100},
        ),
        (
            "areal",
            ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=9"],
            {"overlong_reward_penalty": True, "overlong_tokens": 9},
        ),
        ("roll", ["max_len_mask=true"], {"mask_truncated": True}),
        ("verl", [f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"], {"loss_aggregation": "sequence_sum_fixed"}),
    ]
    for framework, words, wanted in cases:
        samples = {"areal": ["gconfig.n_samples=4"], "roll": ["num_return_sequences_in_group=4"]}
        group = samples.get(framework, ["actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo"])
        conversion = convert_words(framework, *words, *group)
        for key, value in wanted.items():
            assert conversion.recipe[f"actor.{key}"] == value, (words, key)
        assert not {word.partition("=")[0] for word in words} & conversion.unsupported(), words


def test_a_weight_of_the_kl_term_that_is_adapted() -> None:
    cases: list[tuple[Framework, list[str]]] = [
        (
            "verl",
            [
                "algorithm.use_kl_in_reward=True",
                *(f"algorithm.kl_ctrl.{w}" for w in ("type=adaptive", "target_kl=0.2", "horizon=500")),
            ],
        ),
        ("roll", ["add_token_level_kl=true", "target_kl=0.2", "kl_horizon=500"]),
        ("trinity", [*(f"algorithm.kl_loss_fn_args.{w}" for w in ("adaptive=true", "target_kl=0.2", "horizon=500"))]),
    ]
    for framework, words in cases:
        recipe = convert_words(framework, *words).recipe
        assert (recipe["actor.kl_target"], recipe["actor.kl_horizon"]) == (0.2, 500), framework


def test_bounds_of_a_mask_that_is_not_offered_are_not_those_of_another() -> None:
    section = "algorithm.rollout_correction."
    words = (
        "rollout_rs=token_k1,seq_mean_k3",
        "rollout_rs_threshold=2.0",
        "rollout_is=turn",
        "rollout_is_threshold=2.0",
    )
    conversion = convert_words("verl", *(section + word for word in words))
    assert {section + word.partition("=")[0] for word in words} <= conversion.unsupported()
    assert not any(key.startswith("actor.rollout_correction") for key in conversion.recipe)


def test_in_bypass_mode_the_rollouts_log_probs_are_the_old_ones() -> None:
    section = "algorithm.rollout_correction."
    words = [f"{section}{word}" for word in ("bypass_mode=true", "rollout_is=token", "rollout_is_threshold=2.0")]
    clipped = convert_words("verl", *words)
    assert clipped.recipe["actor.recompute_logprob"] is False
    assert "actor.rollout_correction.weight" not in clipped.recipe
    assert clipped[f"{section}rollout_is"].outcome == "implied"
    gradient = convert_words("verl", *words, f"{section}loss_type=reinforce").recipe
    assert (gradient["actor.loss"], gradient["actor.rollout_correction.weight"]) == ("reinforce", "token")
    assert gradient["actor.recompute_logprob"] is False


def test_weights_of_samples() -> None:
    own = "algorithm.pf_ppo."
    words = ["algorithm.use_pf_ppo=true", f"{own}reweight_method=pow", f"{own}weight_pow=3.0"]
    verl = convert_words("verl", "algorithm.adv_estimator=gae", "critic.model.path=m", *words)
    weights = "actor.sample_weights."
    assert (verl.recipe[f"{weights}reward"], verl.recipe[f"{weights}reward_power"]) == ("power", 3.0)
    assert {verl[word.partition("=")[0]].outcome for word in words} == {"mapped"}
    without_critic = convert_words("verl", "algorithm.adv_estimator=grpo", *words)
    assert {without_critic[word.partition("=")[0]].outcome for word in words} == {"implied"}
    other = convert_words(
        "verl", "algorithm.adv_estimator=gae", "critic.model.path=m", words[0], f"{own}reweight_method=max_min"
    )
    assert other.recipe[f"{weights}reward"] == "max_min"
    assert f"{weights}reward_power" not in other.recipe

    roll = convert_words("roll", "difficulty_loss_weight=true", "length_loss_weight=true")
    assert (roll.recipe[f"{weights}difficulty_key"], roll.recipe[f"{weights}length"]) == ("difficulty", True)
    off = convert_words("roll", "difficulty_loss_weight=false", "length_loss_weight=false")
    assert not any(key.startswith(weights) for key in off.recipe)


def test_losses_of_trinity_with_options_of_rec() -> None:
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (["policy_loss_fn=importance_sampling"], {"loss": "rec", "region": "none", "weight": "ratio"}),
        (
            ["algorithm_type=sppo", "policy_loss_fn_args.epsilon=0.25"],
            {"loss": "rec", "region": "two_side", "eps_clip": 0.2, "eps_clip_higher": 0.25, "std_level": "none"},
        ),
        (
            ["algorithm_type=rec", *(f"policy_loss_fn_args.{w}" for w in ("clip_mode=one-side", "weight=none"))],
            {"loss": "rec", "region": "one_side", "weight": "none", "std_level": "none"},
        ),
        (["algorithm_type=rec", "advantage_fn_args.std_normalize=true"], {"region": "none", "std_level": "group"}),
        (["algorithm_type=sppo"], {"region": "two_side", "eps_clip": 0.3 / 1.3, "eps_clip_higher": 0.3}),
        (
            ["algorithm_type=opmd", "policy_loss_fn_args.tau=3.0", "kl_loss_fn=none"],
            {"loss": "reinforce", "reward_scaling": 0.25, "mean_level": "group", "std_level": "none"},
        ),
        (
            ["algorithm_type=opmd", "advantage_fn_args.opmd_baseline=logavgexp", "advantage_fn_args.tau=0.5"],
            {"loss": "reinforce", "advantage": "opmd", "reward_scaling": 0.5, "tau": 0.25},
        ),
        (
            ["algorithm_type=asymre", "policy_loss_fn_args.tau=0.0", "advantage_fn_args.baseline_shift=-0.2"],
            {"loss": "reinforce", "advantage": "asymre", "reward_scaling": 1.0, "baseline_shift": -0.2},
        ),
        (
            ["policy_loss_fn_args.enable_sequence_masking=true", "policy_loss_fn_args.delta_sequence_masking=0.2"],
            {"opsm_delta": 0.2},
        ),
        (["kl_loss_fn=corrected_k3", "kl_loss_fn_args.kl_coef=0.01"], {"kl_unbiased": True, "kl_estimator": "k3"}),
    ]
    for words, wanted in cases:
        two_updates = ["algorithm.repeat_times=4", "buffer.batch_size=8", "buffer.train_batch_size=16"]
        conversion = convert_words("trinity", *(f"algorithm.{word}" for word in words), *two_updates)
        found = {key.rpartition(".")[2]: value for key, value in conversion.recipe.items() if key.startswith("actor.")}
        assert wanted.items() <= found.items(), (words, found)
        assert not {f"algorithm.{word.partition('=')[0]}" for word in words} & conversion.unsupported(), words


def test_expert_data_of_trinity() -> None:
    without = convert_words("trinity", "algorithm.algorithm_type=mix", f"{LOSS}mu=0.3")
    assert without["algorithm.algorithm_type"].outcome == "unsupported"
    assert not any(key.startswith("expert_dataset") for key in without.recipe)
    data = [
        "buffer.batch_size=8",
        *(f"buffer.trainer_input.auxiliary_buffers.sft_dataset.{w}" for w in ("path=expert", "format.prompt_key=q")),
        "algorithm.sample_strategy_args.expert_data_ratio=0.25",
    ]
    mix = convert_words("trinity", "algorithm.algorithm_type=mix", f"{LOSS}mu=0.3", *data)
    expert = {k.removeprefix("expert_dataset."): v for k, v in mix.recipe.items() if k.startswith("expert_dataset.")}
    assert expert == {
        "path": "expert", "prompt_key": "q", "batch_size": 16, "weight": 0.3, "loss_aggregation": "sequence_mean"
    }  # fmt: skip
    assert "actor.loss" not in mix.recipe
    assert not {word.partition("=")[0] for word in data} & mix.unsupported()


def test_the_order_of_trinitys_tasks() -> None:
    key = "buffer.explorer_input.taskset.task_selector.selector_type"
    for value, shuffle in {"sequential": False, "shuffle": True, "difficulty_based": None}.items():
        conversion = convert_words("trinity", f"{key}={value}")
        assert conversion.recipe.get("train_dataset.shuffle") is shuffle
        assert (conversion[key].outcome == "unsupported") is (shuffle is None)


def test_areal_leaves_groups_without_signal_out_and_stays_ahead() -> None:
    """Its `dynamic_sampling` puts nothing in their place, unlike DAPO's, with which no rollout is ahead."""
    conversion = convert_words("areal", "actor.dynamic_sampling=true", "rollout.max_head_offpolicyness=4")
    assert "actor.dynamic_sampling" not in conversion.recipe
    assert conversion.recipe["rollout.max_head_offpolicyness"] == 4
    assert "nothing takes their place" in conversion["actor.dynamic_sampling"].note
    assert conversion["actor.dynamic_sampling"].outcome == "unsupported"


def test_advantages_of_trinity_that_leave_out_tokens_become_losses() -> None:
    for name, loss, words, options in (
        ("clipb", "clip_b", ["mu=3"], {"mu": 3.0}),
        ("clipv", "clip_v", ["mu=7.5", "max_frac=0.01"], {"mu": 7.5, "max_share": 0.01}),
    ):
        arguments = [f"algorithm.advantage_fn_args.{word}" for word in words]
        conversion = convert_words(
            "trinity", "algorithm.algorithm_type=grpo_verl", f"algorithm.advantage_fn={name}", *arguments
        )
        assert conversion.report.unsupported == []
        recipe = conversion.recipe
        prefix = "actor.loss_kwargs."
        assert recipe["actor.loss"] == loss
        assert {key.removeprefix(prefix): recipe[key] for key in recipe if key.startswith(prefix)} == options
    plain = convert_words("trinity", "algorithm.algorithm_type=grpo_verl", "algorithm.advantage_fn_args.mu=3")
    assert [entry.key for entry in plain.report.unsupported] == ["algorithm.advantage_fn_args.mu"]
    assert "actor.loss" not in plain.recipe


def test_dapos_reward_of_trinity_penalises_long_responses() -> None:
    task = "buffer.explorer_input.taskset."
    words = [f"{task}default_reward_fn_type=math_dapo_reward", f"{task}path=a/b", "model.max_response_tokens=2000"]
    penalty = [
        f"{task}reward_fn_args.{word}"
        for word in ("enable_overlong_penalty=true", "penalty_factor=0.5", "cache_length=400")
    ]
    longest = f"{task}reward_fn_args.max_response_length="
    conversion = convert_words("trinity", *words, *penalty, f"{longest}2000")
    assert conversion.report.unsupported == []
    names = ("overlong_reward_penalty", "overlong_penalty_factor", "overlong_tokens")
    assert [conversion.recipe[f"actor.{name}"] for name in names] == [True, 0.5, 400]
    assert conversion.recipe["reward.fn"] == "math"
    other = convert_words("trinity", *words, *penalty, f"{longest}1000")
    assert [entry.key for entry in other.report.unsupported] == [longest.rstrip("=")]


def test_trinitys_workflow_of_answers_in_boxes_has_its_system_prompt() -> None:
    task = "buffer.explorer_input.taskset."
    words = [f"{task}default_workflow_type=math_boxed_workflow", f"{task}path=a/b"]
    boxed = convert_words("trinity", *words, f"{task}workflow_args.use_base=false")
    assert boxed.report.unsupported == []
    assert boxed.recipe["train_dataset.system_prompt"].endswith(r"within \boxed{}.")
    own = convert_words("trinity", *words, f"{task}format.system_prompt=Think.")
    assert own.recipe["train_dataset.system_prompt"] == "Think."
    base = convert_words("trinity", *words, f"{task}workflow_args.use_base=true")
    assert len(base.report.unsupported) == 2


def test_siirls_estimator_of_cpgd_is_grpos() -> None:
    words = ["algorithm.adv_estimator=cpgd", "actor_rollout_ref.rollout.n=4"]
    weight = "algorithm.weight_factor_in_cpgd"
    plain = convert_words("siirl", *words, f"{weight}=STD_weight", "algorithm.norm_adv_by_std_in_grpo=False")
    assert plain.unsupported() == set()
    assert plain.recipe.get("actor.advantage", "grpo") == "grpo"
    assert plain.recipe["actor.reward_norm.std_level"] == "group"
    assert convert_words("siirl", *words, f"{weight}=naive").recipe["actor.reward_norm.std_level"] == "none"
    assert convert_words("siirl", *words, f"{weight}=clip_filter_like_weight").unsupported() == {weight}
    tau = "actor_rollout_ref.actor.policy_loss.tau_pos"
    sapo = convert_words("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=sapo", f"+{tau}=2.0")
    assert sapo[tau].outcome == "implied"
    assert "actor.loss_kwargs.tau_pos" not in sapo.recipe
