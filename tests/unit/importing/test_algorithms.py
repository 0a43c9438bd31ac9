"""Algorithms that Fivefold does not have: keys that name them are unsupported, and so are keys that depend on them."""

from __future__ import annotations

from dialect_conversion import convert_words

from fivefold.importing.framework import Framework

ACTOR = "actor_rollout_ref.actor."
LOSS = "algorithm.policy_loss_fn_args."
CLIP_RANGE = {"actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip"}


def test_the_clip_range_of_another_loss_is_not_that_of_ppo() -> None:
    """3e-4 is a clip range for ratios of sequences; a token's ratio would almost always be clipped at it."""
    verl = [f"{ACTOR}clip_ratio_low=3e-4", f"{ACTOR}clip_ratio_high=4e-4"]
    trinity = [f"{LOSS}clip_range_low=3e-4", f"{LOSS}clip_range_high=4e-4"]
    areal, roll = ["actor.eps_clip=3e-4", "actor.eps_clip_higher=4e-4"], ["pg_clip=3e-4"]
    cases: list[tuple[Framework, str, list[str], str]] = [
        ("verl", f"{ACTOR}policy_loss.loss_mode=gspo", verl, "whole sequence"),
        ("verl", f"{ACTOR}policy_loss.loss_mode=cispo", verl, "CISPO"),
        ("verl", f"{ACTOR}policy_loss.loss_mode=brand_new", verl, "'brand_new' is not offered"),
        ("siirl", f"{ACTOR}use_cpgd_loss=True", verl, "CPGD"),
        ("trinity", "algorithm.policy_loss_fn=gspo", trinity, "whole sequence"),
        ("trinity", "algorithm.algorithm_type=gspo", trinity, "whole sequence"),
        ("trinity", "algorithm.algorithm_type=cispo", trinity, "CISPO"),
        ("areal", "actor.importance_sampling_level=sequence", areal, "whole sequence"),
        ("areal", "actor.use_sapo_loss=true", areal, "SAPO"),
        ("areal", "actor.m2_threshold=0.04", areal, "M2PO"),
        ("roll", "importance_sampling=seq", roll, "whole sequence"),
        ("roll", "use_policy_loss_type=PG", roll, "policy gradient"),
        ("roll", "actor_train.pg_variant=topr", roll, "TOPR"),
    ]
    for framework, name, clip, words in cases:
        key = name.partition("=")[0]
        conversion = convert_words(framework, name, *clip)
        assert conversion[key].outcome == "unsupported", name
        assert words in conversion[key].note, name
        assert not CLIP_RANGE & set(conversion.recipe), name
        for word in clip:
            entry = conversion[word.partition("=")[0]]
            assert (entry.outcome, f"depends on {name.partition('=')[0]}" in entry.note) == ("unsupported", True), name


def test_the_clip_range_of_ppo_stays() -> None:
    cases: list[tuple[Framework, list[str]]] = [
        ("verl", [f"{ACTOR}policy_loss.loss_mode=vanilla", f"{ACTOR}clip_ratio_high=0.28"]),
        ("trinity", ["algorithm.algorithm_type=grpo", f"{LOSS}clip_range_high=0.28"]),
        ("trinity", ["algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn=ppo", f"{LOSS}clip_range_high=0.28"]),
        ("areal", ["actor.importance_sampling_level=token", "actor.eps_clip_higher=0.28"]),
        ("roll", ["importance_sampling=token", "use_pg_clip_range=true", "pg_clip_high=0.28"]),
    ]
    for framework, words in cases:
        assert convert_words(framework, *words).recipe["actor.eps_clip_higher"] == 0.28, words


def test_options_of_a_loss_are_unsupported_with_the_loss_and_have_no_effect_without_it() -> None:
    cases: list[tuple[Framework, str, str]] = [
        ("verl", f"{ACTOR}policy_loss.clip_cov_ratio=0.1", f"{ACTOR}policy_loss.loss_mode=clip_cov"),
        ("siirl", f"{ACTOR}policy_drift_coeff=0.1", f"{ACTOR}use_cpgd_loss=True"),
        ("areal", "actor.sapo_tau_pos=1.0", "actor.use_sapo_loss=true"),
        ("roll", "actor_train.topr_positive_weight=0.5", "actor_train.pg_variant=topr"),
    ]
    for framework, option, switch in cases:
        key = option.partition("=")[0]
        assert convert_words(framework, option)[key].outcome == "implied", option
        assert convert_words(framework, option, switch)[key].outcome == "unsupported", option


def test_estimators_that_are_not_offered_are_unsupported() -> None:
    cases: list[tuple[Framework, str, list[str]]] = [
        ("verl", "algorithm.adv_estimator", ["gae", "remax", "opo", "gpg", "reinforce_plus_plus"]),
        ("siirl", "algorithm.adv_estimator", ["gae", "cpgd", "remax"]),
        ("trinity", "algorithm.advantage_fn", ["ppo", "remax", "opmd", "reinforceplusplus"]),
        ("roll", "adv_estimator", ["gae", "gigpo", "step_reinforce"]),
    ]
    for framework, key, names in cases:
        for name in names:
            conversion = convert_words(framework, f"{key}={name}")
            assert conversion[key].outcome == "unsupported", (framework, name)
    for name in ("gae", "grpo"):
        conversion = convert_words("verl", f"algorithm.adv_estimator={name}", "algorithm.lam=0.95")
        assert ("algorithm.lam" in conversion.unsupported()) is (name == "gae")
