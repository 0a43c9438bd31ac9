"""`fivefold plan` from the outside: the seeds' examples, recipes, pictures, JSON and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from fivefold.config.problems import RecipeError
from fivefold.planning.plan import plan, plan_recipe

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

app = typer.Typer()
app.command()(plan)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)


def asked(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    values: dict[str, Any] = json.loads(result.output)
    return values


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_the_folded_example_side_by_side_with_its_rollout() -> None:
    values = asked(
        "--model", "Qwen3-30B-A3B", "--gpus", "32", "--gpu", "h200", "--rollout", "sglang:d4t4", "--actor", FOLDED
    )
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


@pytest.mark.parametrize(
    ("model", "gpus", "actor", "gpu"),
    [
        ("Qwen3-8B", "8", "megatron:t2p4", "h100"),
        ("Qwen3-30B-A3B", "32", "megatron:d8t2p2v8e4", "h100"),
        ("DeepSeek-V3", "256", "megatron:(attn:d2p16t8|ffn:e16)", "h200"),
    ],
)
def test_the_other_seeds_are_planned(model: str, gpus: str, actor: str, gpu: str, tmp_path: Path) -> None:
    picture, page = tmp_path / "plan.svg", tmp_path / "plan.html"
    result = run(
        "--model", model, "--gpus", gpus, "--actor", actor, "--gpu", gpu, "--recompute", "full",
        "--svg", str(picture), "--html", str(page),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "It fits." in result.output
    assert page.read_text().count("<tr>") == int(gpus) + 1
    check_picture(picture, n_cells=int(gpus) * (1 if model == "Qwen3-8B" else 2))


def check_picture(file: Path, n_cells: int) -> None:
    """Well-formed, a cell for every rank, and nothing outside of the page."""
    root = ElementTree.parse(file).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text or "" for title in root.iter(f"{space}title")]
    assert sum(title.startswith("rank ") for title in titles) == n_cells
    for element in [*root.iter(f"{space}rect"), *root.iter(f"{space}text")]:
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= x + float(element.get("width", 0)) <= width + 0.1
        assert 0 <= y <= y + float(element.get("height", 0)) <= height + 0.1


def test_a_recipe_is_planned_with_its_own_numbers(recipe: Path) -> None:
    values = asked(str(recipe), "--gpu", "h200")
    assert values["work"]["sequence_length"] == 4096
    assert values["work"]["sequences"] == 256
    assert values["cluster"]["nodes"] == 4
    assert [role["role"] for role in values["roles"]] == ["actor", "rollout"]
    changed = asked(str(recipe), "actor.megatron.recompute=full", "--sequence-length", "2048")
    assert changed["work"]["recompute"] == "full"
    assert changed["work"]["sequence_length"] == 2048


def test_a_reference_model_lives_with_the_actor(recipe: Path) -> None:
    alone, beside = asked(str(recipe)), asked(str(recipe), "actor.kl_ctl=0.1")
    stages = [values["roles"][0]["memory"][0] for values in (alone, beside)]
    assert (stages[0]["reference"], stages[1]["reference"]) == (0, stages[1]["weights"])
    apart = asked(
        str(recipe), "actor.kl_ctl=0.1", "ref.backend=megatron:t2p4e2", "rollout.colocate=true",
        "rollout.backend=sglang:d2t4", "actor.backend=megatron:t2p4e2",
    )  # fmt: skip
    frozen = next(role for role in apart["roles"] if role["role"] == "ref")
    assert frozen["step"] is None
    assert (frozen["memory"][0]["optimizer"], frozen["memory"][0]["gradients"]) == (0, 0)


def test_roles_share_devices_where_there_are_too_few(recipe: Path) -> None:
    values = asked("--model", "Qwen3-8B", "--gpus", "8", "--rollout", "vllm:d4t2", "--actor", "megatron:d4t2")
    rollout = values["roles"][1]
    assert rollout["memory"]["waiting_roles"] > 0
    assert any("rollout sleeps" in note for note in values["notes"])


def test_without_a_layout_the_best_is_searched() -> None:
    values = asked("--model", "Qwen3-8B", "--gpus", "8")
    assert values["search"]["best"][0]["backend"] == values["allocation"].replace("[actor]", "")
    assert values["fits"]


def test_none_fits_says_what_would() -> None:
    result = run("--model", "Llama-3.1-405B", "--gpus", "8", "--search")
    assert result.exit_code == 1
    assert "None of" in result.output
    assert "the nearest is" in result.output


def test_what_does_not_fit_says_who_and_what_to_do() -> None:
    result = run("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:d8", "--gpu", "h100")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "rank 0 (stage 0) needs" in text
    assert "with actor.megatron.recompute=selective it needs" in text


def test_tables_name_every_kind_and_dimension(recipe: Path) -> None:
    text = run(str(recipe), "--gpu", "h200", "--ranks").output
    for word in (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "log-probs",
        "KV cache",
        "bubble",
        "experts",
        "MFU",
    ):
        assert word in text
    for dimension in ("tp", "cp", "ep", "pp", "dp"):
        assert any(line.startswith(f"{dimension} ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "Qwen3-8B"), "--model with --gpus"),
        (("--model", "Qwen9-8B", "--gpus", "8"), "did you mean Qwen3-8B"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--gpu", "h300"), "no GPU 'h300' is known"),
        (("--model", "Qwen3-8B", "--gpus", "12"), "whole number of nodes"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:d16"), "the cluster has 1 \\* 8 = 8"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:p8"), "36 layers do not divide"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--actor", "fsdp:d8"), "plan it as megatron"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--recompute", "some"), "none, selective, full"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--actor", "vllm:d8"), "vllm only generates"),
        (("--model", "Qwen3-8B", "--gpus", "8", "--rollout", "megatron:d8"), "megatron trains"),
    ],
)
def test_wrong_questions_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        raise run(*arguments).exception or AssertionError("accepted")


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--actor", "megatron:d8", "actor.backend"),
        ("--gpus", "0", "cluster.n_nodes"),
        ("--gpus-per-node", "4", "cluster.n_gpus_per_node"),
        ("--gpus-per-node", "8", "cluster.n_gpus_per_node"),
        ("--devices", "actor=0-7", "actor.device_mapping"),
    ],
)
def test_options_of_the_model_form_are_refused_with_a_recipe(recipe: Path, option: str, value: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{option} belongs to --model; with a recipe set {re.escape(key)}"):
        raise run(str(recipe), option, value).exception or AssertionError("accepted")


def test_either_kind_of_recipe_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "experiment_name: sft\nactor: {path: Qwen3-0.6B, backend: 'megatron:d8'}\n"
        "train_dataset: {path: data.jsonl, response_key: answer, batch_size: 64, max_length: 2048}\n"
    )
    planned = plan_recipe(file, [])
    assert planned.blueprint is not None
    assert planned.blueprint.question.work.sequence_length == 2048
    file.write_text(file.read_text().replace("batch_size", "batch_sise"))
    with pytest.raises(RecipeError, match=r"did you mean train_dataset\.batch_size") as error:
        plan_recipe(file, [])
    # Not that `response_key` is unknown, which it is to the other kind of recipe.
    assert len(error.value.problems) == 1


SMALL = """
experiment_name: small
actor: {path: Qwen/Qwen3-8B, backend: "megatron:d8"}
cluster: {n_nodes: 1, n_gpus_per_node: 8}
train_dataset: {path: foo}
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A recipe that both kinds could read."""
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return str(file)


@pytest.mark.parametrize(
    "recipe", sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml")), ids=lambda it: it.stem
)
def test_shipped_recipes_are_planned_as_their_kind(recipe: Path) -> None:
    planned = plan_recipe(recipe, ["actor.path=package:tiny-moe"])
    assert planned.blueprint is not None
    roles = [placed.role for placed in planned.blueprint.placement.roles]
    assert roles == (["actor"] if recipe.stem == "tiny-moe-sft" else ["rollout", "actor"])


def test_a_recipe_of_either_kind_is_said_to_be_taken_for_fine_tuning(small: str) -> None:
    said = "planned for `fivefold sft`"
    assert said in " ".join(run(small).output.split())
    assert any(said in note for note in asked(small)["notes"])
    for settled in ("train_dataset.response_key=answer", "rollout.backend=transformers:d8"):
        assert said not in " ".join(run(small, settled).output.split())
    too_large = (small, "actor.path=Llama-3.1-405B", "--search")
    assert said in " ".join(run(*too_large).output.split())
    assert any(said in note for note in asked(*too_large)["notes"])


def test_slips_are_told_as_those_of_the_kind_that_was_meant(small: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan_recipe(Path(small), ["rollout.max_bach_size=3", "rollout.bakend=a"])
    assert [problem.partition("?")[0].rpartition(" ")[2] for problem in error.value.problems] == [
        "rollout.max_batch_size", "rollout.backend"
    ]  # fmt: skip


def test_what_train_refuses_is_refused(small: str) -> None:
    keys = ["rollout.max_batch_size=16", "rollout.colocate=false"]
    inner = ["actor.kl_ctl=0.1", "ref.path=Qwen3-0.6B", "actor.backend=megatron:p9", "cluster.n_gpus_per_node=10"]
    with pytest.raises(ValueError, match="ref: 28 layers do not divide"):
        plan_recipe(Path(small), [*keys, *inner])
    losses = ["actor.backend=megatron:d1p2t2", "actor.megatron.transformer.moe_aux_loss_coeff=0.1"]
    with pytest.raises(RecipeError, match="is a router's loss, and qwen3 has none"):
        plan_recipe(Path(small), [*keys, *losses])
    with pytest.raises(RecipeError, match=r"rollout\.memory_fraction=0\.5 is for servers \(vLLM, SGLang\)"):
        plan_recipe(Path(small), [*keys, "rollout.memory_fraction=0.5"])
    with pytest.raises(RecipeError, match=r"gconfig\.temperature=3\.0: vLLM samples with"):
        plan_recipe(Path(small), ["rollout.backend=vllm:d8", "gconfig.temperature=3"])


def test_a_server_over_two_nodes_is_a_problem(recipe: Path) -> None:
    values = asked(str(recipe), "rollout.backend=sglang:d1t16", "--gpu", "h200")
    assert not values["fits"]
    assert any("would span nodes 0, 1: a server is on one node" in problem for problem in values["problems"])


def test_a_server_takes_the_fraction_of_the_recipe(recipe: Path) -> None:
    memory = asked(str(recipe), "rollout.memory_fraction=0.5", "--gpu", "h200")["roles"][1]["memory"]
    usual = asked(str(recipe), "--gpu", "h200")["roles"][1]["memory"]
    assert memory["weights"] == usual["weights"]
    assert memory["total"] / usual["total"] == pytest.approx(0.5 / 0.88)


def test_a_search_keeps_to_layouts_that_the_reference_can_take(small: str) -> None:
    keys = ["rollout.backend=vllm:d9", "actor.kl_ctl=0.1", "ref.path=Qwen3-0.6B", "cluster.n_gpus_per_node=9"]
    changes = ["cluster.n_nodes=2", "actor.backend=megatron:d9"]
    found = asked(small, *keys, *changes, "--gpu", "a100-40g", "--search")
    assert not any("p9" in each["backend"] or "p3" in each["backend"] for each in found["search"]["best"])


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_a_picture_that_cannot_be_written_is_the_only_message(option: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "plan"):
        result = run("--model", "Qwen3-8B", "--gpus", "8", option, str(path))
        assert isinstance(result.exception, ValueError)
        assert str(result.exception).startswith(f"{option} {path} cannot be written (")
        assert result.output == ""


def test_no_picture_of_nothing_is_said(tmp_path: Path) -> None:
    picture = tmp_path / "none.svg"
    result = run("--model", "DeepSeek-V3", "--gpus", "8", "--search", "--svg", str(picture))
    assert (result.exit_code, picture.exists()) == (1, False)
    assert result.stderr.startswith("--svg: nothing was written")
    assert "nothing was written" not in result.stdout
    assert run("--model", "DeepSeek-V3", "--gpus", "8", "--search").stderr == ""


def test_cpu_processes_are_not_searched(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster\.n_gpus_per_node=8"):
        plan_recipe(recipe, ["cluster.n_gpus_per_node=0"], searching=True)


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_backends_of_the_ranking_are_whole_at_any_width(width: str) -> None:
    arguments = ("--model", "DeepSeek-V3", "--gpus", "512", "--gpu", "h200", "--search")
    best = asked(*arguments)["search"]["best"]
    text = CliRunner(env={"COLUMNS": width}).invoke(app, arguments).output.split("DeepSeek-V3 ")[0]
    assert "…" not in text
    if int(width) >= 80:
        assert all(f" {candidate['backend']} " in text for candidate in best)
    words = set(" ".join(text.replace(";", "").split()).split())
    assert all(set(reason.split()) <= words for candidate in best for reason in candidate["reasons"])


def test_the_ranking_is_of_the_gpus_that_the_rollout_leaves() -> None:
    values = asked("--model", "Qwen3-8B", "--gpus", "16", "--rollout", "sglang:d4")
    assert values["roles"][0]["step"]["seconds"] == values["search"]["best"][0]["seconds"]


def test_cpu_processes_are_planned_without_a_limit(recipe: Path) -> None:
    values = asked(str(recipe), "cluster.n_gpus_per_node=0", "cluster.n_nodes=1")
    assert values["fits"]
    assert values["roles"][0]["memory"][0]["total"] > 0


def test_a_plan_needs_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; from fivefold.planning.plan import plan_model; "
        "assert plan_model('Qwen3-30B-A3B', 64, actor='megatron:d16t2p2e8').fits; "
        "print([name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_map_of_devices() -> None:
    """Trainer and reference framework-style on all 32 GPUs, generation on some of them."""
    values = asked(
        "--model", "Qwen3-30B-A3B", "--gpus", "32", "--actor", "megatron:d*t2p2v8e4", "--rollout", "sglang:d*t2",
        "--devices", "actor=list(range(0,32))", "--devices", "rollout=[0, 1, 8, 9]", "--gpu", "h200",
    )  # fmt: skip
    actor, rollout = values["roles"]
    assert values["devices"]["rollout"] == [0, 1, 8, 9]
    assert rollout["layout"]["dp"] == 2
    assert rollout["devices"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rollout["memory"]["waiting_roles"] > 0
    assert actor["waiting_roles"] > 0
    assert actor["stages"][1]["virtual_stages"][:2] == [[3, 5], [9, 11]]


def test_a_layout_is_searched_for_listed_devices() -> None:
    values = asked("--model", "Qwen3-8B", "--gpus", "16", "--devices", "actor=0-3, 8-11")
    assert values["roles"][0]["layout"]["tp"] * values["roles"][0]["layout"]["dp"] <= 8
    assert len(values["roles"][0]["ranks"]) == 8


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("actor=0-9",), "numbered 0 to 7"),
        (("actor=0-6",), "8 ranks, but its list has 7"),
        (("ref=0-7",), "write ROLE=LIST once for each of actor"),
        (("actor=0-7", "actor=0-7"), "write ROLE=LIST once"),
        (("actor=0-",), "does not belong here"),
    ],
)
def test_maps_that_cannot_be(devices: tuple[str, ...], message: str) -> None:
    options = [part for each in devices for part in ("--devices", each)]
    with pytest.raises(ValueError, match=message):
        raise run("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:d8", *options).exception or AssertionError


def test_every_role_has_a_list_or_none_has() -> None:
    with pytest.raises(ValueError, match="no list for rollout"):
        raise (
            run(
                "--model", "Qwen3-8B", "--gpus", "8", "--rollout", "vllm:d4", "--devices", "actor=0-3"
            ).exception or AssertionError
        )  # fmt: skip


def test_the_binding_rank_groups_and_modes_are_named(recipe: Path) -> None:
    text = run(str(recipe), "--gpu", "h200").output
    assert "rank 0 of actor (stage 0) needs the most" in text
    assert "actor by recompute mode: none" in text
    assert "selective" in text
    groups = [line.split() for line in text.splitlines() if line.startswith(("actor tp", "actor pp", "rollout tp"))]
    assert groups == [
        ["actor", "tp", "8", "2", "all", "2"],
        ["actor", "pp", "4", "4", "0", "of", "4", "2"],
        ["rollout", "tp", "4", "4", "all", "4"],
    ]


def test_virtual_stages_are_listed() -> None:
    result = run("--model", "Qwen3-30B-A3B", "--gpus", "32", "--actor", "megatron:d8t2p2v8e4")
    lines = [line.split() for line in result.output.splitlines()]
    assert ["1", "3-5", "9-11", "15-17", "21-23", "27-29", "33-35", "39-41", "45-47"] in lines
