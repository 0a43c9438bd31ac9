"""Checkpoints and saved weights of the frameworks: when they are written, how many stay, and whether a run resumes."""

from __future__ import annotations

from typing import Any

from dialect_conversion import Conversion, convert_words

from fivefold_import.framework import Framework

CONTENTS = "actor_rollout_ref.actor.checkpoint."


def saved(conversion: Conversion) -> dict[str, Any]:
    """Return the recipe's keys of checkpoints and of saved weights."""
    return {key: value for key, value in conversion.recipe.items() if key.startswith(("recover.", "saver."))}


def test_a_frequency_of_the_source_takes_the_place_of_fivefolds() -> None:
    cases: list[tuple[Framework, list[str], dict[str, Any]]] = [
        ("verl", ["trainer.save_freq=20"], {"recover.freq_steps": 20, "recover.freq_secs": None}),
        ("siirl", ["trainer.save_freq=20"], {"recover.freq_steps": 20, "recover.freq_secs": None}),
        ("roll", ["save_steps=20"], {"recover.freq_steps": 20, "recover.freq_secs": None}),
        ("trinity", ["trainer.save_interval=20"], {"recover.freq_steps": 20, "recover.freq_secs": None}),
        ("areal", ["recover.freq_epochs=1"], {"recover.freq_epochs": 1, "recover.freq_secs": None}),
        ("areal", ["recover.freq_steps=9", "recover.freq_secs=60"], {"recover.freq_steps": 9, "recover.freq_secs": 60}),
        ("areal", ["recover.freq_secs=3600"], {"recover.freq_secs": 3600}),
        ("areal", ["checkpointer.freq_steps=5"], {"recover.freq_steps": 5, "recover.freq_secs": None}),
        # Without one, Fivefold's own holds.
        ("verl", ["trainer.save_freq=-1"], {}),
        ("trinity", ["trainer.save_interval=0"], {}),
        ("roll", ["save_steps=-1"], {}),
        ("areal", ["seed=1"], {}),
    ]
    for framework, words, expected in cases:
        conversion = convert_words(framework, *words)
        assert saved(conversion) == expected, words
        assert conversion.unsupported() == set(), words


def test_whether_a_run_goes_on_from_its_newest_checkpoint() -> None:
    cases: list[tuple[Framework, str, list[str], str | None, str]] = [
        ("areal", "recover.mode=auto", [], "auto", "mapped"),
        ("areal", "recover.mode=on", [], "auto", "mapped"),
        ("areal", "recover.mode=fault", [], "auto", "mapped"),
        ("areal", "recover.mode=resume", [], "auto", "mapped"),
        ("areal", "recover.mode=off", [], "disabled", "mapped"),
        ("areal", "recover.mode=disabled", [], "disabled", "mapped"),
        ("areal", "recover.mode=sometimes", [], None, "unsupported"),
        ("verl", "trainer.resume_mode=auto", [], "auto", "mapped"),
        ("verl", "trainer.resume_mode=disable", [], "disabled", "mapped"),
        # Checkpoints are still written, and a run in a free folder starts from scratch.
        ("verl", "trainer.resume_mode=disable", ["trainer.save_freq=20"], None, "implied"),
        ("roll", "resume_from_checkpoint=false", ["save_steps=20"], None, "implied"),
        ("trinity", "continue_from_checkpoint=false", ["trainer.save_interval=20"], None, "implied"),
        ("trinity", "continue_from_checkpoint=false", [], "disabled", "mapped"),
        ("trinity", "continue_from_checkpoint=true", [], "auto", "mapped"),
        ("roll", "resume_from_checkpoint=true", [], "auto", "mapped"),
        # Checkpoints of other frameworks are not read.
        ("roll", "resume_from_checkpoint=/models/run/checkpoint-9", [], None, "unsupported"),
        ("siirl", "trainer.resume_mode=resume_path", [], None, "unsupported"),
    ]
    for framework, word, others, mode, outcome in cases:
        conversion = convert_words(framework, word, *others)
        assert conversion.recipe.get("recover.mode") == mode, word
        assert conversion[word.partition("=")[0]].outcome == outcome, word


def test_a_checkpoint_to_start_from_counts_only_if_the_mode_asks_for_it() -> None:
    path = "trainer.resume_from_path=/ckpts/global_step_9"
    assert convert_words("verl", path)["trainer.resume_from_path"].outcome == "implied"
    conversion = convert_words("verl", path, "trainer.resume_mode=resume_path")
    assert conversion.unsupported() == {"trainer.resume_mode", "trainer.resume_from_path"}
    assert "recover.mode" in conversion["trainer.resume_from_path"].note


def test_frequencies_of_a_run_without_checkpoints_have_no_effect() -> None:
    conversion = convert_words("areal", "recover.mode=disabled", "recover.freq_steps=5", "recover.retries=3")
    assert saved(conversion) == {"recover.mode": "disabled"}
    assert conversion["recover.freq_steps"].outcome == "implied"
    assert "same command" in conversion["recover.retries"].note


def test_how_many_checkpoints_are_kept() -> None:
    cases: list[tuple[Framework, str, str]] = [
        ("verl", "trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep"),
        ("siirl", "trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep"),
        ("roll", "save_steps=20", "max_ckpt_to_keep"),
        ("trinity", "trainer.save_interval=20", "trainer.max_checkpoints_to_keep"),
    ]
    for framework, frequency, key in cases:
        given = convert_words(framework, frequency, f"{key}=3")
        assert given.recipe["recover.max_to_keep"] == 3, framework
        assert not [note for note in given.report.notes if "recover.max_to_keep" in note], framework
        for words in ([], [f"{key}=null"]):
            conversion = convert_words(framework, frequency, *words)
            assert "recover.max_to_keep" not in conversion.recipe, framework
            assert [note for note in conversion.report.notes if "the newest 2 are kept" in note], framework
        assert convert_words(framework, frequency, f"{key}=0").unsupported() == {key}, framework
    assert convert_words("siirl", "trainer.remove_previous_ckpt_in_save=True").recipe["recover.max_to_keep"] == 1


def test_weights_are_saved_with_checkpoints_where_the_source_says_so() -> None:
    whole = f"{CONTENTS}save_contents=['model','optimizer','extra']"
    with_weights = f"{CONTENTS}save_contents=['model','optimizer','extra','hf_model']"
    always = "trainer.save_hf_checkpoint=always"
    cases: list[tuple[Framework, list[str], dict[str, Any]]] = [
        ("verl", [whole, "trainer.save_freq=20"], {}),
        ("verl", [with_weights, "trainer.save_freq=20"], {"saver.freq_steps": 20, "saver.max_to_keep": None}),
        (
            "verl",
            [with_weights, "trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=3"],
            {"saver.freq_steps": 20, "saver.max_to_keep": 3},
        ),
        ("verl", [f"{CONTENTS}contents=['model','hf_model']"], {}),
        ("trinity", [always, "trainer.save_interval=8"], {"saver.freq_steps": 8, "saver.max_to_keep": None}),
        ("trinity", ["trainer.save_hf_checkpoint=last", "trainer.save_interval=8"], {}),
        ("areal", ["saver.freq_secs=600"], {"saver.freq_secs": 600, "saver.max_to_keep": None}),
    ]
    for framework, words, expected in cases:
        conversion = convert_words(framework, *words)
        found = {key: value for key, value in saved(conversion).items() if key.startswith("saver.")}
        assert found == expected, words
        assert conversion.unsupported() == set(), words
    never = "trainer.save_hf_checkpoint"
    assert convert_words("trinity", f"{never}=never").unsupported() == {never}


def test_a_part_of_a_checkpoint_is_not_loaded() -> None:
    key = f"{CONTENTS}load_contents"
    assert convert_words("verl", f"{key}=['model']").unsupported() == {key}
    for words in (
        [f"{key}=['model','optimizer','extra']"],
        [f"{key}=['model']", f"{CONTENTS}save_contents=['model']"],
        [f"{key}=${{{CONTENTS}save_contents}}"],
    ):
        assert convert_words("verl", *words).unsupported() == set(), words


def test_options_of_writing_checkpoints() -> None:
    cases: list[tuple[Framework, str, str]] = [
        ("verl", f"{CONTENTS}async_save=True", "implied"),
        ("areal", "actor.megatron.async_save=true", "implied"),
        ("roll", "checkpoint_config.async_upload=true", "implied"),
        ("trinity", "trainer.save_strategy=single_node", "implied"),
        ("verl", "trainer.esi_redundant_time=0", "implied"),
        ("verl", "trainer.esi_redundant_time=60", "unsupported"),
        ("verl", "trainer.del_local_ckpt_after_load=True", "unsupported"),
        ("areal", "recover.no_save_optim=true", "unsupported"),
    ]
    for framework, word, outcome in cases:
        assert convert_words(framework, word)[word.partition("=")[0]].outcome == outcome, word


def test_held_out_prompts_are_evaluated_by_epochs_and_seconds_too() -> None:
    words = ["valid_dataset.path=data/test.jsonl", "evaluator.freq_epochs=2", "evaluator.freq_secs=900"]
    recipe = convert_words("areal", *words).recipe
    assert (recipe["evaluator.freq_epochs"], recipe["evaluator.freq_secs"]) == (2, 900)


def test_one_switch_offloads_all_of_the_actors_state() -> None:
    cases: list[tuple[Framework, str, set[str]]] = [
        ("areal", "enable_offload=true", {"params", "grads", "optimizer"}),
        ("areal", "actor.offload=true", {"params", "grads", "optimizer"}),
        ("areal", "actor.optimizer.offload=true", {"optimizer"}),
        ("roll", "is_offload_states=true", {"params", "grads", "optimizer"}),
        ("trinity", "trainer.param_offload=true", {"params"}),
        ("areal", "enable_offload=false", set()),
        ("roll", "is_offload_states=false", set()),
    ]
    for framework, word, kinds in cases:
        conversion = convert_words(framework, word)
        found = {key: value for key, value in conversion.recipe.items() if key.startswith("actor.offload.")}
        assert found == {f"actor.offload.{kind}": True for kind in kinds}, word
        assert conversion.unsupported() == set(), word
