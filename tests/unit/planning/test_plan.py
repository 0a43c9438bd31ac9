"""Plans of recipes and of models: the layouts of known examples, what is shared, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.config.load import load_any_recipe
from fivefold.config.problems import RecipeError
from fivefold.families.read import find_shape
from fivefold.planning.estimates import ModelEstimate
from fivefold.planning.plan import Plan, plan_model, plan_recipe
from fivefold.planning.recipe_inputs import Changes
from fivefold.report.plan.as_json import plan_as_json

RECIPES = Path(__file__).parents[3] / "recipes"
FOLDED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
RECIPE = """
experiment_name: plan-me
cluster: {n_nodes: 4, n_gpus_per_node: 8}
actor:
  path: Qwen/Qwen3-30B-A3B
  backend: "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
rollout: {backend: "sglang:d4t4"}
gconfig: {n_samples: 8, max_new_tokens: 3072}
train_dataset: {path: data.jsonl, batch_size: 32, max_length: 1024}
"""


def read_back(plan: Plan) -> dict[str, Any]:
    """The plan as a program that reads its JSON gets it."""
    values: dict[str, Any] = json.loads(json.dumps(plan_as_json(plan)))
    return values


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_a_folded_layout_lies_beside_its_rollout() -> None:
    values = read_back(plan_model("Qwen3-30B-A3B", 32, gpu="h200", rollout="sglang:d4t4", actor=FOLDED))
    assert values["fits"]
    actor, rollout = values["roles"]
    assert [len(actor["ranks"]), len(rollout["devices"])] == [16, 16]
    assert {rank["node"] for rank in actor["ranks"]} == {2, 3}
    sixth = actor["ranks"][6]
    assert {key: sixth[key] for key in ("stage", "tp", "cp", "ep", "layers")} == {
        "stage": 1, "tp": 0, "cp": 1, "ep": 2, "layers": "12-23"
    }  # fmt: skip
    assert rollout["memory"]["weights"] == pytest.approx(30.5e9 * 2 / 4, rel=0.01)
    assert actor["binding_stage"] == 0


def test_a_recipe_is_planned_with_its_own_numbers(recipe: Path) -> None:
    values = read_back(plan_recipe(load_any_recipe(recipe, []), gpu="h200"))
    assert values["work"]["sequence_length"] == 4096
    assert values["work"]["sequences"] == 256
    assert values["cluster"]["nodes"] == 4
    assert [role["role"] for role in values["roles"]] == ["actor", "rollout"]
    changes = Changes(sequence_length=2048)
    changed = read_back(plan_recipe(load_any_recipe(recipe, ["actor.megatron.recompute=full"]), changes=changes))
    assert changed["work"]["recompute"] == "full"
    assert changed["work"]["sequence_length"] == 2048


def test_an_experts_sequences_count_for_time_and_memory(recipe: Path) -> None:
    def actor(*overrides: str) -> ModelEstimate:
        estimate = plan_recipe(load_any_recipe(recipe, overrides), gpu="h200").estimate
        assert estimate is not None
        return next(model for model in estimate.models if model.placed.role == "actor")

    # 256 samples of 4,096 tokens, and an expert's 512 responses of 2,048, are as much as 512 samples.
    expert = "expert_dataset={path: d.jsonl, batch_size: 512, max_length: 2048}"
    more, twice = actor(expert).time, actor("train_dataset.batch_size=64").time
    assert more is not None
    assert twice is not None
    assert (more.total, more.mfu, more.tokens_per_second) == (twice.total, twice.mfu, twice.tokens_per_second)
    # The longest response may be a micro-batch by itself.
    long = actor("expert_dataset={path: d.jsonl, batch_size: 1, max_length: 16384}").binding
    assert long.activations == actor("actor.mb_spec.max_tokens_per_mb=16384").binding.activations


def test_a_reference_model_lives_with_the_actor(recipe: Path) -> None:
    alone, beside = (read_back(plan_recipe(load_any_recipe(recipe, keys))) for keys in ([], ["actor.kl_ctl=0.1"]))
    stages = [values["roles"][0]["memory"][0] for values in (alone, beside)]
    assert (stages[0]["reference"], stages[1]["reference"]) == (0, stages[1]["weights"])
    keys = [
        "actor.kl_ctl=0.1", "ref.backend=megatron:t2p4e2", "rollout.colocate=true", "rollout.backend=sglang:d2t4",
        "actor.backend=megatron:t2p4e2",
    ]  # fmt: skip
    apart = read_back(plan_recipe(load_any_recipe(recipe, keys)))
    frozen = next(role for role in apart["roles"] if role["role"] == "ref")
    assert frozen["step"] is None
    assert (frozen["memory"][0]["optimizer"], frozen["memory"][0]["gradients"]) == (0, 0)


def test_roles_share_devices_where_there_are_too_few() -> None:
    values = read_back(plan_model("Qwen3-8B", 8, rollout="vllm:d4t2", actor="megatron:d4t2"))
    rollout = values["roles"][1]
    assert rollout["memory"]["waiting_roles"] > 0
    assert any("rollout sleeps" in note for note in values["notes"])


def test_without_a_layout_the_best_is_searched() -> None:
    values = read_back(plan_model("Qwen3-8B", 8))
    assert values["search"]["best"][0]["backend"] == values["allocation"].replace("[actor]", "")
    assert values["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "Qwen9-8B"}, "did you mean Qwen3-8B"),
        ({"gpu": "h300"}, "no GPU 'h300' is known"),
        ({"n_gpus": 12}, "whole number of nodes"),
        ({"actor": "megatron:d16"}, "the cluster has 1 \\* 8 = 8"),
        ({"actor": "megatron:p8v8"}, "36 layers are too few for p8\\*v8 = 64"),
        ({"actor": "vllm:d8"}, "vllm only generates"),
        ({"rollout": "megatron:d8"}, "megatron trains"),
    ],
)
def test_wrong_inputs_about_a_model_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_model(**{"model": "Qwen3-8B", "n_gpus": 8, **options})


def test_either_kind_of_recipe_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "experiment_name: sft\nactor: {path: Qwen3-0.6B, backend: 'megatron:d8'}\n"
        "train_dataset: {path: data.jsonl, response_key: answer, batch_size: 64, max_length: 2048}\n"
    )
    planned = plan_recipe(load_any_recipe(file, []))
    assert planned.estimate is not None
    assert planned.estimate.inputs.actor.work.sequence_length == 2048
    file.write_text(file.read_text().replace("batch_size", "batch_sise"))
    with pytest.raises(RecipeError, match=r"did you mean train_dataset\.batch_size") as error:
        plan_recipe(load_any_recipe(file, []))
    # The other kind of recipe does not know `response_key`; that must not be a second problem.
    assert len(error.value.problems) == 1


SMALL = """
experiment_name: small
actor: {path: Qwen/Qwen3-8B, backend: "megatron:d8"}
cluster: {n_nodes: 1, n_gpus_per_node: 8}
train_dataset: {path: foo}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recipe that `fivefold train` and `fivefold sft` could both read."""
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda it: it.stem)
def test_shipped_recipes_are_planned_as_their_kind(recipe: Path) -> None:
    # A model that has yet to be converted is stood in for.
    planned = plan_recipe(
        load_any_recipe(recipe, ["actor.path=package:tiny-moe"] if "path: models/" in recipe.read_text() else [])
    )
    assert planned.estimate is not None
    roles = [placed.role for placed in planned.estimate.placement.roles]
    alone = ("tiny-moe-sft", "tiny-moe-tools-sft", "quickstart-dpo", "quickstart-rm")
    third = {
        "quickstart-ppo": "critic",
        "quickstart-distill": "teacher",
        "qwen2.5-7b-ppo-8gpus": "critic",
        "qwen3-30b-a3b-interleaved": "ref",
        "qwen3-8b-judge-8gpus": "judge",
    }
    others = [third[recipe.stem]] if recipe.stem in third else []
    assert roles == (["actor"] if recipe.stem in alone else ["rollout", "actor", *others])


def test_preferences_are_planned_with_both_answers_and_the_models_that_they_need() -> None:
    def plan(recipe: str, *overrides: str) -> dict[str, ModelEstimate]:
        keys = ["cluster.n_gpus_per_node=8", "actor.backend=megatron:d8", "actor.path=Qwen3-8B", *overrides]
        estimate = plan_recipe(load_any_recipe(RECIPES / recipe, keys)).estimate
        assert estimate is not None
        assert estimate.inputs.actor.work.sequences == 2 * 32
        return {model.placed.role: model for model in estimate.models}

    shape = find_shape("Qwen3-8B")
    dpo, reward = (plan(f"quickstart-{name}.yaml")["actor"].binding for name in ("dpo", "rm"))
    assert dpo.weights == dpo.reference == 4 * shape.n_parameters
    half = plan("quickstart-dpo.yaml", "ref.dtype=bfloat16")["actor"].binding
    assert half.reference == 2 * shape.n_parameters
    apart = plan("quickstart-dpo.yaml", "ref.dtype=bfloat16", "ref.backend=megatron:d4t2", "ref.offload=true")
    assert apart["actor"].binding.reference == 0
    assert apart["ref"].binding.weights == pytest.approx(2 * shape.n_parameters / 2, rel=1e-3)
    assert apart["ref"].offloaded == ("params",)
    assert apart["actor"].others == apart["ref"].binding.context
    assert reward.reference == 0
    assert reward.weights == 4 * shape.as_reward_model().n_parameters
    assert shape.n_parameters - shape.as_reward_model().n_parameters == (shape.vocab - 1) * shape.hidden


def test_a_critic_is_planned_with_its_own_layout_and_memory() -> None:
    def plan(*overrides: str) -> dict[str, ModelEstimate]:
        keys = ["cluster.n_gpus_per_node=8", "critic.path=Qwen3-8B", "actor.path=Qwen3-8B", *overrides]
        estimate = plan_recipe(load_any_recipe(RECIPES / "quickstart-ppo.yaml", keys)).estimate
        assert estimate is not None
        return {model.placed.role: model for model in estimate.models}

    on_four = ["actor.backend=megatron:d4", "rollout.backend=vllm:d4"]
    shared = plan(*on_four, "critic.backend=megatron:d2t2")
    actor, critic = (shared[role].binding for role in ("actor", "critic"))
    shape = find_shape("Qwen3-8B")
    n_head = shape.vocab * shape.hidden
    assert shape.n_parameters - shape.as_critic().n_parameters == n_head - shape.hidden - 1
    assert actor.weights == 4 * shape.n_parameters
    assert critic.weights == pytest.approx(4 * shape.as_critic().n_parameters / 2, rel=1e-3)
    # The critic leaves only its context while the actor works; the actor leaves nothing while the critic works.
    assert shared["actor"].others == critic.context
    assert shared["critic"].others == actor.resident + actor.context
    assert shared["critic"].offloaded == ("params", "grads", "optimizer")
    kept = plan(*on_four, "critic.backend=megatron:d2t2", "critic.offload={params: false, optimizer: false}")
    assert kept["actor"].others == critic.weights + critic.optimizer + critic.context
    offloading = plan(*on_four, "critic.backend=megatron:d4", "actor.offload={optimizer: true}")
    assert offloading["critic"].others == actor.resident - actor.optimizer + actor.context
    apart = plan("critic.colocate=false", "critic.backend=megatron:d2", "actor.backend=megatron:d2")
    assert (apart["critic"].others, apart["critic"].offloaded) == (0, ())


def test_a_recipe_of_either_kind_is_planned_for_fine_tuning_with_a_note(small: Path) -> None:
    def has_note(*keys: str, searching: bool = False) -> bool:
        notes = read_back(plan_recipe(load_any_recipe(small, keys), searching=searching))["notes"]
        return any("planned for `fivefold sft`" in note for note in notes)

    assert has_note()
    assert not has_note("train_dataset.response_key=answer")
    assert not has_note("rollout.backend=transformers:d8")
    assert has_note("actor.path=Llama-3.1-405B", searching=True)


def test_slips_are_told_as_those_of_the_kind_that_was_meant(small: Path) -> None:
    with pytest.raises(RecipeError) as error:
        plan_recipe(load_any_recipe(small, ["rollout.max_bach_size=3", "rollout.bakend=a"]))
    assert [problem.partition("?")[0].rpartition(" ")[2] for problem in error.value.problems] == [
        "rollout.max_batch_size", "rollout.backend"
    ]  # fmt: skip


def test_what_train_refuses_is_refused(small: Path) -> None:
    keys = ["rollout.max_batch_size=16", "rollout.colocate=false"]
    inner = ["actor.kl_ctl=0.1", "ref.path=Qwen3-0.6B", "actor.backend=megatron:p9v4", "cluster.n_gpus_per_node=10"]
    with pytest.raises(ValueError, match="ref: 28 layers are too few"):
        plan_recipe(load_any_recipe(small, [*keys, *inner]))
    losses = ["actor.backend=megatron:d1p2t2", "actor.megatron.transformer.moe_aux_loss_coeff=0.1"]
    with pytest.raises(RecipeError, match="is about experts, and qwen3 has none"):
        plan_recipe(load_any_recipe(small, [*keys, *losses]))
    with pytest.raises(RecipeError, match=r"rollout\.memory_fraction=0\.5 is for servers \(vLLM, SGLang\)"):
        plan_recipe(load_any_recipe(small, [*keys, "rollout.memory_fraction=0.5"]))
    with pytest.raises(RecipeError, match=r"gconfig\.temperature=3\.0: vLLM samples with"):
        plan_recipe(load_any_recipe(small, ["rollout.backend=vllm:d8", "gconfig.temperature=3"]))
    with pytest.raises(RecipeError, match=r"recompute=full is for Megatron-Core, and the actor runs on FSDP: set "):
        plan_recipe(load_any_recipe(small, [*keys, "actor.backend=fsdp:d8", "actor.megatron.recompute=full"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["reward.fn=no_such"], "reward.fn='no_such' is neither one of"),
        (["reward.fn=no_such_module:f"], "there is no module 'no_such_module'"),
        (["reward={fn: exact_match, kwargs: {patern: x}}"], "reward.kwargs has ['patern']"),
        (["gconfig.stop_token_ids=[151936]"], "gconfig.stop_token_ids holds 151936, but the model's vocabulary has"),
        (["gconfig.max_new_tokens=40960"], "gconfig.max_new_tokens=40960 leaves no room for a prompt"),
        (["actor.kl_ctl=0.1", "ref.path=package:tiny-moe"], "ref.path=package:tiny-moe has 128 tokens in its"),
        (["tokenizer_path=./no-such-folder"], "tokenizer_path: model path './no-such-folder': there is no such folder"),
    ],
)
def test_what_train_refuses_without_data_is_refused(small: Path, keys: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_recipe(load_any_recipe(small, ["rollout.backend=transformers:d8", *keys]))
    (problem,) = caught.value.problems
    assert message in problem


def test_files_that_training_needs_and_a_plan_does_not_are_noted(small: Path, tmp_path: Path) -> None:
    shipped = Path(fivefold.__file__).parent / "models/tiny-moe"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((shipped / "config.json").read_bytes())

    def notes(*keys: str) -> str:
        return "\n".join(
            read_back(plan_recipe(load_any_recipe(small, [f"actor.path={model}", "actor.backend=megatron:d2", *keys])))[
                "notes"
            ]
        )

    assert f"{model} has no weights" in notes()
    assert f"{model} has no tokenizer" in notes()
    assert "has no weights" not in notes("actor.init_from_scratch=true")
    assert "has no tokenizer" not in notes("tokenizer_path=gpt2")
    for file in shipped.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    assert str(model) not in notes()


def test_the_routes_of_a_step_are_noted(small: Path) -> None:
    def notes(*keys: str) -> str:
        words = ["actor.path=Qwen3-30B-A3B", "actor.backend=megatron:d2e2", "rollout.backend=vllm:d1", *keys]
        return "\n".join(read_back(plan_recipe(load_any_recipe(small, words)))["notes"])

    assert "router_replay" not in notes()
    # 48 layers, 8 of 128 experts: one byte each.
    assert "actor.router_replay=rollout: the experts of a token take 384 bytes" in notes("actor.router_replay=auto")
    assert "router_replay" not in notes("actor.router_replay=auto", "actor.path=Qwen3-8B", "actor.backend=megatron:d2")
    few = ("actor.router_replay=rollout", "train_dataset.batch_size=4", "gconfig.n_samples=2")
    now, later = (notes(*few, f"rollout.max_head_offpolicyness={age}") for age in (0, 1))
    assert "and 8 sequences" in now
    assert "and 16 sequences" in later


def test_a_server_over_two_nodes_is_drawn_and_noted_as_untried(recipe: Path) -> None:
    values = read_back(plan_recipe(load_any_recipe(recipe, ["rollout.backend=vllm:d1t8p2"]), gpu="h200"))
    assert values["problems"] == []
    assert any(
        note.startswith("rollout: each replica is on 2 nodes, which has never been tried over")
        for note in values["notes"]
    )
    assert {node for node, _ in values["roles"][1]["devices"]} == {0, 1}


def test_a_server_takes_the_fraction_of_the_recipe(recipe: Path) -> None:
    memory, usual = (
        read_back(plan_recipe(load_any_recipe(recipe, keys), gpu="h200"))["roles"][1]["memory"]
        for keys in (["rollout.memory_fraction=0.5"], [])
    )
    assert memory["weights"] == usual["weights"]
    assert memory["total"] / usual["total"] == pytest.approx(0.5 / 0.88)


def test_the_published_pipelines_of_qwen3_235b_are_planned() -> None:
    """94 layers divide over neither 8 nor 12 stages; the ends, which have the embedding and the head, have one less."""
    for stages, middle in ((8, 12), (12, 8)):
        backend = f"megatron:(attn:p{stages}t4|ffn:e4)"
        values = read_back(plan_model("Qwen3-235B-A22B", 4 * stages, gpus_per_node=4, gpu="h200", actor=backend))
        spans = [tuple(map(int, span.split("-"))) for [span] in values["roles"][0]["stage_layers"]]
        assert [last - first + 1 for first, last in spans] == [middle - 1, *[middle] * (stages - 2), middle - 1]


def test_the_ranking_is_of_the_gpus_that_the_rollout_leaves() -> None:
    values = read_back(plan_model("Qwen3-8B", 16, rollout="sglang:d4"))
    assert values["roles"][0]["step"]["seconds"] == values["search"]["best"][0]["seconds"]


def test_a_search_says_that_it_does_not_keep_the_recipes_layers_of_a_stage(recipe: Path) -> None:
    def is_noted(*keys: str) -> bool:
        notes = read_back(plan_recipe(load_any_recipe(recipe, keys), searching=True))["notes"]
        return any("the search divides layers as equally as possible" in note for note in notes)

    uneven = ("actor.backend=megatron:d4p2", "actor.megatron.transformer.num_layers_in_first_pipeline_stage=1")
    assert is_noted(*uneven)
    assert not is_noted(uneven[0])


def test_cpu_processes_are_planned_without_a_limit_and_not_searched(recipe: Path) -> None:
    values = read_back(plan_recipe(load_any_recipe(recipe, ["cluster.n_gpus_per_node=0", "cluster.n_nodes=1"])))
    assert values["fits"]
    assert values["roles"][0]["memory"][0]["total"] > 0
    with pytest.raises(ValueError, match=r"cluster\.n_gpus_per_node=8"):
        plan_recipe(load_any_recipe(recipe, ["cluster.n_gpus_per_node=0"]), searching=True)


def test_a_plan_needs_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; from fivefold.planning.plan import plan_model; "
        "assert plan_model('Qwen3-30B-A3B', 64, actor='megatron:d16t2p2e8').fits; "
        "print([name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_roles_are_placed_on_their_lists_of_devices() -> None:
    """The trainer takes all 32 GPUs, and some of them also generate."""
    lists = ["actor=list(range(0,32))", "rollout=[0, 1, 8, 9]"]
    layouts = {"actor": "megatron:d*t2p2v8e4", "rollout": "sglang:d*t2"}
    values = read_back(plan_model("Qwen3-30B-A3B", 32, gpu="h200", devices=lists, **layouts))
    actor, rollout = values["roles"]
    assert values["devices"]["rollout"] == [0, 1, 8, 9]
    assert rollout["layout"]["dp"] == 2
    assert rollout["devices"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rollout["memory"]["waiting_roles"] > 0
    assert actor["waiting_roles"] > 0
    assert actor["stages"][1]["virtual_stages"][:2] == [[3, 5], [9, 11]]


def test_a_layout_is_searched_for_listed_devices() -> None:
    values = read_back(plan_model("Qwen3-8B", 16, devices=["actor=0-3, 8-11"]))
    assert values["roles"][0]["layout"]["tp"] * values["roles"][0]["layout"]["dp"] <= 8
    assert len(values["roles"][0]["ranks"]) == 8


@pytest.mark.parametrize(
    ("devices", "rollout", "message"),
    [
        (["actor=0-9"], None, "numbered 0 to 7"),
        (["actor=0-6"], None, "8 ranks, but its list has 7"),
        (["ref=0-7"], None, "write ROLE=LIST once for each of actor"),
        (["actor=0-7", "actor=0-7"], None, "write ROLE=LIST once"),
        (["actor=0-"], None, "does not belong here"),
        (["actor=0-7"], "vllm:d4", "no list for rollout"),
    ],
)
def test_lists_of_devices_that_do_not_work_are_refused(devices: list[str], rollout: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_model("Qwen3-8B", 8, actor="megatron:d8", rollout=rollout, devices=devices)


def test_a_plan_says_how_much_waits_for_its_step() -> None:
    keys = ["train_dataset.max_length=44"]
    estimate = plan_recipe(load_any_recipe(RECIPES / "quickstart-async.yaml", keys)).estimate
    assert estimate is not None
    # 3 x 32 prompts with 8 samples of 44 + 20 tokens each, of 13 bytes
    [note] = [note for note in estimate.notes if "max_head_offpolicyness" in note]
    assert "up to 96 prompts (768 sequences)" in note
    assert f"{768 * 64 * 13 / 1e9:.1f} GB" in note
    synchronous = plan_recipe(
        load_any_recipe(RECIPES / "quickstart-async.yaml", [*keys, "rollout.max_head_offpolicyness=0"])
    ).estimate
    assert synchronous is not None
    assert not [note for note in synchronous.notes if "max_head_offpolicyness" in note]
    scored = [*keys, "reward={fn: model, model: {path: package:tiny-moe}}"]
    estimate = plan_recipe(load_any_recipe(RECIPES / "quickstart-async.yaml", scored)).estimate
    assert estimate is not None
    assert any("reward.model scores samples while others are generated" in note for note in estimate.notes)
