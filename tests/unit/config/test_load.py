"""Recipes from files and overrides: the values that are accepted, and the message of every mistake."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fivefold.config.keys import description_of, known_keys, nearest_keys
from fivefold.config.load import kind_of, load_any_recipe, load_recipe, resolved_yaml
from fivefold.config.problems import COMMANDS, RecipeError
from fivefold.config.roles import ROLES
from fivefold.config.schema.fields import ONE_LINE
from fivefold.config.schema.machines import SchedulerConfig
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.source import apply_overrides, read_mapping

MINIMAL = """\
experiment_name: first
actor: {path: some/model}
train_dataset: {path: data.parquet}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_recipe(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def problems(path: Path, *overrides: str, schema: Any = TrainRecipe) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, schema)
    assert "pydantic" not in str(caught.value)
    return caught.value.problems


def test_defaults_come_from_the_schema(write: Any) -> None:
    recipe = load_recipe(write(MINIMAL), [], TrainRecipe)
    assert recipe.actor.path == "some/model"
    assert recipe.gconfig.n_samples == 8
    assert recipe == TrainRecipe.model_validate(yaml.safe_load(MINIMAL))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optimizer.lr=1e-5", 1e-5),
        ("actor.optimizer.lr=1", 1.0),
        ("actor.backend=megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"),
        ("actor.megatron.use_deterministic_algorithms=True", True),
        ("gconfig.stop=['\\n', \"x #y\"]", ["\\n", "x #y"]),
        ("reward.kwargs={tolerance: 1e-3, deep: {a: [1]}}", {"tolerance": 1e-3, "deep": {"a": [1]}}),
        ("reward.kwargs.tolerance=0.5", {"tolerance": 0.5}),
        ("tokenizer_path=", None),
        ("tokenizer_path=a=b", "a=b"),
        ("tokenizer_path='8'", "8"),
        ("tokenizer_path=12:30:45", "12:30:45"),
        ("reward.kwargs.when=2024-01-01", {"when": "2024-01-01"}),
    ],
)
def test_overrides_have_the_types_of_yaml(write: Any, override: str, expected: Any) -> None:
    recipe = load_recipe(write(MINIMAL), [override], TrainRecipe).model_dump()
    keys = override.partition("=")[0].split(".")
    for key in keys[:-1] if isinstance(expected, dict) and keys[-1] in expected else keys:
        recipe = recipe[key]
    assert recipe == expected
    assert type(recipe) is type(expected)


def test_the_last_override_wins(write: Any) -> None:
    assert load_recipe(write(MINIMAL), ["seed=2", "seed=3"], TrainRecipe).seed == 3


def test_an_override_replaces_a_whole_mapping_or_sets_one_key_of_it(write: Any) -> None:
    path = write(MINIMAL + "reward: {fn: exact_match, kwargs: {ignore_case: true}}\nrollout: {max_batch_size: 4}\n")

    def kwargs(*overrides: str) -> dict[str, Any]:
        return load_recipe(path, overrides, TrainRecipe).reward.kwargs

    assert kwargs("reward.kwargs.numbers=true") == {"ignore_case": True, "numbers": True}
    assert kwargs("reward.kwargs={numbers: true}") == {"numbers": True}
    assert kwargs("reward.kwargs={}") == {}
    assert kwargs("reward={fn: math}") == {}
    assert kwargs("reward.kwargs.numbers=true", "reward.kwargs={}", "reward.kwargs.pattern=x") == {"pattern": "x"}


def test_null_stands_for_the_default_of_a_section_or_a_mapping(write: Any) -> None:
    path = write(MINIMAL + "rollout: {max_batch_size: 4}\ngconfig:\nreward: {kwargs: {a: 1}}\n")
    recipe = load_recipe(path, ["rollout=null", "reward.kwargs=null", "actor.megatron.ddp="], TrainRecipe)
    assert recipe == load_recipe(write(MINIMAL), [], TrainRecipe)
    assert problems(path, "seed=null") == ("seed=null: must be a whole number, not empty",)


def test_one_key_of_an_interpolation_cannot_be_set(write: Any) -> None:
    path = write(MINIMAL + "reward: {kwargs: '${oc.create:{a: 1}}'}\n")
    (problem,) = problems(path, "reward.kwargs.b=1")
    assert problem.startswith("override 'reward.kwargs.b=1': kwargs is ${oc.create:{a: 1}}, whose keys cannot be set")


def test_interpolation_reaches_values_overrides_and_defaults(write: Any) -> None:
    text = MINIMAL + "trial_name: ${experiment_name}-seed${seed}\ntokenizer_path: ${actor.path}\n"
    recipe = load_recipe(
        write(text), ["actor.path=other", "valid_dataset={path: '${train_dataset.path}'}"], TrainRecipe
    )
    assert recipe.trial_name == "first-seed1"
    assert recipe.tokenizer_path == "other"
    assert recipe.valid_dataset is not None
    assert recipe.valid_dataset.path == "data.parquet"
    assert "seed" not in recipe.model_fields_set


def chain(length: int, width: int) -> str:
    """A section with values that are `width` interpolations of the next one each."""
    links = [f"a{number}: 'x" + width * f"${{.a{number + 1}}}" + "'" for number in range(length)]
    return f"reward: {{kwargs: {{{', '.join(links)}, a{length}: x}}}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tokenizer_path: ${nowhere}", "tokenizer_path: Interpolation key 'nowhere' not found"),
        ("tokenizer_path: ???", "tokenizer_path: `???` stands for a value"),
        ("tokenizer_path: ${open", "tokenizer_path: "),
        ("tokenizer_path: ${tokenizer_path}", "tokenizer_path: the interpolations lead in a circle"),
        ("reward: {kwargs: {a: '${reward}'}}", "reward.kwargs.a: the interpolations lead in a circle"),
        (
            chain(30, 1),
            "reward.kwargs.a0, reward.kwargs.a1, reward.kwargs.a2: the interpolations lead in a circle, or on",
        ),
        (chain(15, 2), "reward.kwargs.a0: the interpolations look up more than 2,000 values: write a value there"),
        (f"tokenizer_path: {'${' * 300}x{'}' * 300}", "tokenizer_path=${${${"),
        (f"tokenizer_path: {'${seed}' * 200}", "tokenizer_path: 1,400 characters with a `${...}`; write at most 1,000"),
        ("gconfig: {stop: [" + "'${seed}', " * 501 + "]}", "there are 501 interpolations `${...}`; write at most 500"),
    ],
)
def test_an_interpolation_that_cannot_be_filled_in_is_a_problem(write: Any, line: str, expected: str) -> None:
    (problem,) = problems(write(MINIMAL + line + "\n"))
    assert problem.startswith(expected)


def test_all_values_that_are_missing_are_listed(write: Any) -> None:
    text = MINIMAL + "trial_name: ${x}\nreward: {kwargs: {deep: [1, '???', '${y}']}}\n"
    assert problems(write(text), "bad") == (
        "override 'bad': there is no `=`; write key=value",
        "reward.kwargs.deep.1: `???` stands for a value that is still missing: give one",
        "trial_name: Interpolation key 'x' not found",
        "reward.kwargs.deep[2]: Interpolation key 'y' not found",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("- a\n- b\n", "a recipe is a mapping of keys to values, not a list"),
        ("a: [1\n", "not YAML: "),
        ("a: b: c\n", "not YAML: mapping values are not allowed here in line 1, column 5"),
        ("8\n", "a recipe is a mapping of keys to values, not the value 8"),
        ("a: !!python/object:os.system {}\n", "a: the tag tag:yaml.org,2002:python/object:os.system in line 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(write: Any, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


def test_a_path_that_is_no_text_file_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path / "nowhere.yaml") == ("it does not exist",)
    assert problems(tmp_path) == ("it is a folder, not a file",)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert problems(tmp_path / "binary")[0].startswith("it is not a text in UTF-8")


def test_every_duplicate_key_is_named_with_its_lines(write: Any) -> None:
    text = "seed: 1\nactor:\n  path: a\n  path: b\nseed: 2\nlists:\n- {x: 1, x: 2}\n"
    assert set(problems(write(text))) == {
        "actor.path: given twice, in lines 3 and 4; keep one",
        "seed: given twice, in lines 1 and 5; keep one",
        "lists.0.x: given twice, in lines 7 and 7; keep one",
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "override 'seed': there is no `=`; write key=value"),
        ("+seed=1", "override '+seed=1': no prefix is needed; write seed=..."),
        ("--actor.path=x", "override '--actor.path=x': no prefix is needed; write actor.path=..."),
        ("=1", "override '=1': '' is not a key; write section.key=value"),
        ("seed=[1", "override 'seed=[1': not YAML: expected ',' or ']'"),
        (".".join(["a"] * 51) + "=1", "override 'a.a.a.a.a"),
        ("reward.kwargs={1: 2}", "override 'reward.kwargs={1: 2}': the key 1 in line 1 is not a text; quote it"),
        ("actor.path=x # y", "override 'actor.path=x # y': ` #` starts a comment in YAML"),
    ],
)
def test_an_override_that_cannot_be_read_is_a_problem(write: Any, override: str, expected: str) -> None:
    (problem,) = problems(write(MINIMAL), override)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seeds=1", "seeds=1: unknown key; did you mean seed?"),
        ("actor.lr=1", "actor.lr=1: unknown key; did you mean actor.optimizer.lr?"),
        ("actor.lerning_rate=1", "actor.lerning_rate=1: unknown key; did you mean actor.optimizer.lr?"),
        ("actor.weight_dcay=1", "actor.weight_dcay=1: unknown key; did you mean actor.optimizer.weight_decay?"),
        ("n_samples=4", "n_samples=4: unknown key; did you mean gconfig.n_samples or evaluator.n_samples?"),
        (
            "actor.temperture=1",
            "actor.temperture=1: unknown key; did you mean gconfig.temperature or evaluator.temperature?",
        ),
        ("actor.optimiser={lr: 1}", "actor.optimiser={'lr': 1}: unknown key; did you mean actor.optimizer?"),
        ("zzz=1", "zzz=1: unknown key"),
        ("seed='8'", "seed='8': must be a whole number, not a text; if it is one, drop the quotes"),
        ("seed=1.0", "seed=1.0: must be a whole number, not a fraction"),
        ("seed=-1", "seed=-1: must be at least 0"),
        ("seed=", "seed=null: must be a whole number, not empty"),
        ("trial_name=3", 'trial_name=3: must be a text, not a number; quote it: "3"'),
        ("actor.path=' '", "actor.path=' ': must be a text in one line that is not blank"),
        ('train_dataset.path="a\\0b"', "train_dataset.path='a\\x00b': must be a text in one line that is not blank"),
        ("tokenizer_path=''", "tokenizer_path='': must be a text in one line that is not blank"),
        (
            "trial_name=..",
            "trial_name='..': must consist of letters, digits, `_`, `.` and `-`, and begin with neither `.` nor `-`",
        ),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr=inf: must be a finite number"),
        ("actor.optimizer.beta1=1", "actor.optimizer.beta1=1: must be less than 1"),
        (
            "gconfig.temperature=0",
            "gconfig.temperature=0: must be greater than 0; greedy=true takes the most likely token",
        ),
        ("gconfig.top_p=1.5", "gconfig.top_p=1.5: must be at most 1"),
        ("gconfig.greedy=1", "gconfig.greedy=1: must be true or false, not a number"),
        (
            "gconfig.stop_token_ids=[1, a]",
            "gconfig.stop_token_ids.1='a': must be a whole number, not a text",
        ),
        ("seed=12:30:45", "seed='12:30:45': must be a whole number, not a text"),
        ("total_train_steps=1_000", "total_train_steps='1_000': must be a whole number, not a text; write 1000"),
        (
            "actor.optimizer.lr='1e-5'",
            "actor.optimizer.lr='1e-5': must be a number, not a text; if it is one, drop the quotes",
        ),
        ("gconfig.greedy=no", "gconfig.greedy='no': must be true or false, not a text; write false"),
        ("actor=", "actor=null: must be a section with its own keys, not empty"),
        ("rollout.device_mapping=0", "rollout.device_mapping=0: must be a text or a list, not a number"),
        (
            "rollout.device_mapping=[0, a]",
            "rollout.device_mapping.1='a': must be a whole number, not a text",
        ),
        (
            "stats.trackers=[wand]",
            "stats.trackers.0='wand': must be 'tensorboard', 'wandb', 'mlflow', 'swanlab' or 'trackio'; did you mean "
            "wandb?",
        ),
        ("stats.n_logged_samples=some", "stats.n_logged_samples='some': must be a whole number or 'all', not a text"),
        ("actor.dtype=fp32", "actor.dtype='fp32': must be 'float32', 'bfloat16' or 'float16'"),
        (
            "actor.loss_aggregation=Token-Mean",
            "actor.loss_aggregation='Token-Mean': must be 'token_mean', 'sequence_mean', 'sequence_sum' or "
            "'sequence_sum_fixed'; did you mean token_mean?",
        ),
        (
            "actor.optimizer.lr_scheduler_type=cosin",
            "actor.optimizer.lr_scheduler_type='cosin': must be 'constant', 'linear', 'cosine' or 'wsd'; did you mean "
            "cosine?",
        ),
        (
            "actor.ppo_n_minibatches=5",
            "train_dataset.batch_size=32 must be a multiple of actor.ppo_n_minibatches=5, so that groups stay whole",
        ),
        (
            "actor.megatron.transformer.moe_aux_los_coeff=1",
            "actor.megatron.transformer.moe_aux_los_coeff=1: unknown key; did you mean "
            "actor.megatron.transformer.moe_aux_loss_coeff?",
        ),
        (
            "actor.megatron.transformer.hidden_dropout=0.1",
            "actor.megatron.transformer: hidden_dropout of Megatron-Core's TransformerConfig cannot be set in a "
            "recipe: the forward pass has no noise, so that log-probs are the same on every layout and in every pass",
        ),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(write: Any, override: str, expected: str) -> None:
    assert problems(write(MINIMAL), override) == (expected,)


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Where a JSON schema has a whole number without a maximum."""
    if isinstance(schema, dict) and schema.get("type") == "integer" and "maximum" not in schema:
        yield path
    for key, inner in (
        schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    ):
        yield from unbounded(inner, f"{path}/{key}")


@pytest.mark.parametrize("recipe", [TrainRecipe, SFTRecipe, DPORecipe, RMRecipe])
def test_every_whole_number_has_an_upper_bound(recipe: type[BaseModel]) -> None:
    paths = list(unbounded(recipe.model_json_schema()))
    assert all("server_args" in path for path in paths), paths


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.n_nodes=4097"], "cluster: n_nodes=4097 with n_gpus_per_node=8 are 32,776 GPUs, and at most 32,768"),
        (["scheduler.timeout_s=1e300"], "scheduler.timeout_s=1e+300: must be at most 100,000,000"),
        (["seed=4294967296"], "seed=4294967296: must be at most 4,294,967,295"),
    ],
)
def test_a_number_that_would_take_for_ever_is_refused(write: Any, overrides: list[str], expected: str) -> None:
    (problem,) = problems(write(MINIMAL), *overrides)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["actor.optimizer.min_lr_ratio=0.1"],
            "min_lr_ratio=0.1 is the end of a decay, got actor.optimizer.lr_scheduler_type=constant",
        ),
        (
            ["scheduler.address=10.0.0.1:6379"],
            "scheduler.address=10.0.0.1:6379 names a cluster to join, got scheduler.type=local",
        ),
        (["valid_dataset.path=v", "evaluator.temperature=0.7"], "has no effect with evaluator.greedy=true"),
        (
            ["evaluator.freq_steps=5"],
            "the section evaluator has no effect without valid_dataset: set valid_dataset.path",
        ),
        (["valid_dataset={path: v, batch_size: 4}"], "valid_dataset.batch_size=4: unknown key"),
        (["ref.path=m"], "the section ref has no effect with actor.kl_ctl=0: raise actor.kl_ctl"),
        (["actor.kl_ctl=0.1", "ref.device_mapping=0-3"], "ref.device_mapping=0-3 has no effect without ref.backend"),
        (["environment={game: a:B, keep_thinking: true}"], "environment.keep_thinking=true has no effect on a game"),
        (["environment={game: a:B, parser: glm-4.5}"], "environment.parser=glm-4.5 has no effect on a game"),
        (
            ["scheduler.environment={all: {CUDA_VISIBLE_DEVICES: '0'}}"],
            "environment.all.CUDA_VISIBLE_DEVICES is a variable that Fivefold or Ray sets: drop it",
        ),
        (
            ["scheduler.environment={rollout: {RAY_ADDRESS: here}}"],
            "environment.rollout.RAY_ADDRESS is a variable that Fivefold or Ray sets: drop it",
        ),
        (
            ["train_dataset.hold_out=0.1", "valid_dataset.path=v"],
            "train_dataset.hold_out=0.1 and valid_dataset exclude each other",
        ),
        (["actor.group_mean_of=accuracy"], "set group_mean_above or group_mean_below"),
        (["actor.whiten_by_source=true"], "whiten_by_source=true has no effect, because advantages are not whitened"),
        (
            ["actor.group_mean_above=0.8", "actor.group_mean_below=0.8"],
            "group_mean_above=0.8 is not below group_mean_below=0.8",
        ),
    ],
)
def test_a_key_that_would_have_no_effect_is_refused(write: Any, overrides: list[str], expected: str) -> None:
    (problem,) = problems(write(MINIMAL), *overrides)
    assert expected in problem


def undescribed(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys below `section` that have neither a description nor keys of their own."""
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_section(kind)]
        if inner:
            yield from undescribed(inner[0], f"{prefix}{name}.")
        elif not description_of(section, name):
            yield prefix + name


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize("recipe", [TrainRecipe, SFTRecipe, DPORecipe, RMRecipe])
def test_every_key_is_described(recipe: type[BaseModel]) -> None:
    assert list(undescribed(recipe)) == []


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("gconfig: [a]", None, "gconfig=['a']: must be a section with its own keys, not a list"),
        ("reward: {kwargs: {a: 1}}", "reward.kwargs=[1]", "reward.kwargs=[1]: must be a mapping, not a list"),
        ("gconfig: {stop: [a]}", "gconfig.stop={a: 1}", "gconfig.stop={'a': 1}: must be a list, not a mapping"),
        ("gconfig: {stop: [a]}", "gconfig.stop.a=1", "gconfig.stop={'a': 1}: must be a list, not a mapping"),
        ("gconfig: [a]", "gconfig.seed.x=[1]", "gconfig.seed={'x': [1]}: unknown key; did you mean seed?"),
    ],
)
def test_a_list_is_no_mapping_and_a_mapping_no_list(write: Any, text: str, override: str | None, expected: str) -> None:
    assert problems(write(f"{MINIMAL}{text}\n"), *([override] if override else [])) == (expected,)


def test_a_list_may_replace_a_mapping_if_both_are_allowed(write: Any) -> None:
    path = write(MINIMAL + "reward: {kwargs: {a: {b: 1}, c: [1]}}\n")
    recipe = load_recipe(path, ["reward.kwargs={a: [2], c: {d: 3}}", "reward.kwargs.e=4"], TrainRecipe)
    assert recipe.reward.kwargs == {"a": [2], "c": {"d": 3}, "e": 4}


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        (None, SFTRecipe),
        ("actor.megatron.transformer.moe_aux_loss_coeff=0.1", SFTRecipe),
        ("rollout.backend=vllm:d1", TrainRecipe),
        ("actor.eps_clip=0.1", TrainRecipe),
        ("allocation_mode=vllm:d1+megatron:d1", TrainRecipe),
        ("actor.beta=0.2", DPORecipe),
        ("actor.los_type=ipo", DPORecipe),
        ("train_dataset.label_key=label", DPORecipe),
        ("ref.path=m", DPORecipe),
        ("train_dataset.chosen_key=better", RMRecipe),
        ("actor.center_rewards_coefficient=0.1", RMRecipe),
    ],
)
def test_the_keys_decide_the_kind_of_a_recipe(write: Any, override: str | None, kind: type[BaseModel]) -> None:
    written, _ = apply_overrides(read_mapping(Path(write(MINIMAL))), [override] if override else [])
    assert kind_of(written) is kind


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.bakend=a", "rollout.bakend='a': unknown key; did you mean rollout.backend?"),
        ("gconfg.n_samples=4", "gconfg={'n_samples': 4}: unknown key; did you mean gconfig?"),
        ("actor.eps_clp=0.1", "actor.eps_clp=0.1: unknown key; did you mean actor.eps_clip?"),
        (
            "train_dataset.respons_key=a",
            "train_dataset.respons_key='a': unknown key; did you mean train_dataset.response_key?",
        ),
    ],
)
def test_a_misspelled_key_decides_the_kind_of_a_recipe_too(write: Any, override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(write(MINIMAL), [override])
    assert caught.value.problems == (expected,)


def test_shipped_recipes_load_as_the_kind_of_their_command() -> None:
    recipes = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        command = re.search(r"(fivefold (?:train|sft|dpo|rm)) recipes/" + recipe.name, recipe.read_text())
        assert command is not None, recipe
        assert COMMANDS[type(load_any_recipe(recipe, []))] == command[1]


def test_all_problems_are_listed_at_once(write: Any) -> None:
    found = problems(write("seed: x\nactor: {lr: 1}\n"), "nonsense", "gconfig.top_k=-1")
    assert found == (
        "override 'nonsense': there is no `=`; write key=value",
        "experiment_name: missing; every recipe needs it",
        "seed='x': must be a whole number, not a text",
        "actor.path: missing; every recipe needs it",
        "actor.lr=1: unknown key; did you mean actor.optimizer.lr?",
        "gconfig.top_k=-1: must be at least 0",
        "train_dataset: missing; every recipe needs it",
    )


def test_thousands_of_problems_are_told_at_once_and_not_all_of_them(write: Any) -> None:
    text = MINIMAL + "".join(f"optimiser{number}_temprature: 1\n" for number in range(4000))
    began = time.process_time()
    found = problems(write(text))
    with pytest.raises(RecipeError):
        load_any_recipe(write(text), [])
    assert time.process_time() - began < 4
    assert len(found) == 51
    assert found[-1] == "and 3,950 more problems"


def test_the_message_counts_the_problems_and_names_the_file(write: Any) -> None:
    path = write(MINIMAL)
    with pytest.raises(RecipeError, match=f"{path}: 2 problems\n- seed=-1"):
        load_recipe(path, ["seed=-1", "sed=1"], TrainRecipe)
    with pytest.raises(ValueError, match="1 problem\n"):
        load_recipe(path, ["sed=1"], TrainRecipe)


def test_a_key_of_the_other_kind_of_recipe_is_refused_with_its_command(write: Any) -> None:
    (problem,) = problems(write(MINIMAL), "gconfig.n_samples=4", schema=SFTRecipe)
    assert problem == "gconfig={'n_samples': 4}: unknown key; it belongs to a recipe of `fivefold train`"
    of_pairs = problems(write(MINIMAL), "actor.beta=0.1", "train_dataset.chosen_key=chosen")
    assert list(of_pairs) == [
        "actor.beta=0.1: unknown key; it belongs to a recipe of `fivefold dpo`",
        "train_dataset.chosen_key='chosen': unknown key; it belongs to a recipe of `fivefold dpo` or `fivefold rm`",
    ]
    assert (
        load_recipe(write(MINIMAL), ["train_dataset.response_key=answer"], SFTRecipe).train_dataset.response_key
        == "answer"
    )


def test_long_values_are_shortened(write: Any) -> None:
    (problem,) = problems(write(MINIMAL), "nonsense=" + "x" * 500)
    assert len(problem) < 120


def test_every_known_key_is_nearest_to_itself_with_a_typo() -> None:
    for key in known_keys(TrainRecipe):
        name = key.rpartition(".")[2]
        if len(name) > 5:
            assert nearest_keys(key[:-2] + key[-1], TrainRecipe) == [key]


def test_the_resolved_recipe_loads_to_itself(write: Any, tmp_path: Path) -> None:
    recipe = load_recipe(
        write(MINIMAL), ["actor.optimizer.lr=1e-5", "valid_dataset.path=v", "gconfig.stop=['\\${a}', '8']"], TrainRecipe
    )
    again = load_recipe(write(resolved_yaml(recipe)), [], TrainRecipe)
    assert again == recipe
    assert again.gconfig.stop == ["${a}", "8"]
    sft = load_recipe(write(MINIMAL), [], SFTRecipe)
    assert load_recipe(write(resolved_yaml(sft)), [], SFTRecipe) == sft


def test_the_resolved_recipe_does_not_contradict_its_allocation_mode(write: Any) -> None:
    recipe = load_recipe(
        write(MINIMAL), ["allocation_mode=vllm:d2+megatron:d2", "rollout.backend=vllm:d2"], TrainRecipe
    )
    again = load_recipe(write(resolved_yaml(recipe)), [], TrainRecipe)
    assert again == recipe
    assert "backend" not in again.actor.model_fields_set
    assert "backend" in again.rollout.model_fields_set


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=25)
@given(value=plain_values, path=st.text(min_size=1, max_size=12).filter(re.compile(ONE_LINE).fullmatch))
@example(value="${a}", path="\\${b} \\\\${c}")
def test_any_value_survives_the_resolved_recipe(
    tmp_path_factory: pytest.TempPathFactory, value: Any, path: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    recipe = TrainRecipe.model_validate(
        {
            "experiment_name": "h",
            "actor": {"path": path},
            "train_dataset": {"path": "d"},
            "reward": {"kwargs": {"value": value}},
        }
    )
    file.write_text(resolved_yaml(recipe), encoding="utf-8")
    assert load_recipe(file, [], TrainRecipe) == recipe


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["actor.label_smoothing=0.1", "actor.loss_type=ipo"],
            "label_smoothing=0.1 has no effect with actor.loss_type=ipo",
        ),
        (["actor.desirable_weight=2.0"], "no effect with actor.loss_type=sigmoid"),
        (
            ["actor.loss_type=kto", "actor.average_log_prob=true"],
            "average_log_prob=true has no effect with actor.loss_type=kto",
        ),
        (["train_dataset.label_key=good"], "train_dataset.label_key=good is for single answers"),
        (["actor.loss_type=kto", "train_dataset.batch_size=1"], "train_dataset.batch_size=1 has none: raise it"),
    ],
)
def test_keys_that_a_loss_of_preferences_does_not_read_are_refused(write: Any, keys: list[str], message: str) -> None:
    (problem,) = problems(write(MINIMAL), *keys, schema=DPORecipe)
    assert message in problem


def test_a_resolved_recipe_tells_its_kind(write: Any) -> None:
    for kind in COMMANDS:
        recipe = load_recipe(write(MINIMAL), [], kind)
        assert kind_of(read_mapping(write(resolved_yaml(recipe)))) is kind


def test_every_role_may_have_environment_variables() -> None:
    names, _ = get_args(SchedulerConfig.model_fields["environment"].annotation)
    assert set(get_args(names)) == {"all", *ROLES}
