"""`fivefold plan`: its options, its output, its pictures and its exit codes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fivefold.cli.main import app
from fivefold.config import load
from fivefold.config.source import read_mapping

RECIPE = """
experiment_name: plan-me
cluster: {n_nodes: 1, n_gpus_per_node: 8}
actor: {path: Qwen/Qwen3-8B, backend: "megatron:d4t2"}
rollout: {backend: "sglang:d4t2"}
train_dataset: {path: data.jsonl}
"""


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *arguments])


def printed_json(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return values


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


@pytest.mark.parametrize(
    ("model", "gpus", "actor", "gpu"),
    [
        ("Qwen3-8B", "8", "megatron:t2p4", "h100"),
        ("Qwen3-30B-A3B", "32", "megatron:d8t2p2v8e4", "h100"),
        ("DeepSeek-V3", "256", "megatron:(attn:d2p16t8|ffn:e16)", "h200"),
    ],
)
def test_a_plan_is_printed_and_drawn(model: str, gpus: str, actor: str, gpu: str, tmp_path: Path) -> None:
    picture, page = tmp_path / "plan.svg", tmp_path / "plan.html"
    result = run(
        "--model", model, "--gpus", gpus, "--actor", actor, "--gpu", gpu, "--recompute", "full",
        "--svg", str(picture), "--html", str(page),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "recompute full" in result.stdout
    assert "It fits." in result.stdout
    assert page.read_text().count("<tr>") == int(gpus) + 1
    check_picture(picture, n_cells=int(gpus) * (1 if model == "Qwen3-8B" else 2))


def check_picture(file: Path, n_cells: int) -> None:
    """The picture is well-formed, has a cell for every rank, and draws nothing outside of the page."""
    root = ElementTree.parse(file).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text or "" for title in root.iter(f"{space}title")]
    assert sum(title.startswith("rank ") for title in titles) == n_cells
    for element in [*root.iter(f"{space}rect"), *root.iter(f"{space}text")]:
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= x + float(element.get("width", 0)) <= width + 0.1
        assert 0 <= y <= y + float(element.get("height", 0)) <= height + 0.1


def test_options_of_the_work_go_over_the_recipe(recipe: str) -> None:
    options = ("--sequence-length", "2048", "--sequences", "64", "--micro-tokens", "4096", "--recompute", "selective")
    work = printed_json(recipe, "actor.megatron.recompute=full", *options)["work"]
    assert [work[name] for name in ("sequence_length", "sequences", "micro_tokens", "recompute")] == [
        2048, 64, 4096, "selective"
    ]  # fmt: skip


def test_options_of_the_model_form_say_the_roles_and_their_devices() -> None:
    roles = ("--actor", "megatron:d*t2", "--devices", "actor=0-7", "--rollout", "vllm:d*", "--devices", "rollout=4-7")
    values = printed_json("--model", "Qwen3-8B", "--gpus", "8", "--gpus-per-node", "4", "--gpu", "h200", *roles)
    assert values["cluster"]["nodes"] == 2
    assert values["cluster"]["gpu"]["name"].startswith("h200")
    assert values["devices"] == {"actor": list(range(8)), "rollout": [4, 5, 6, 7]}


def test_a_plan_that_does_not_fit_is_exit_code_1() -> None:
    assert run("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:d8").exit_code == 1
    result = run("--model", "Llama-3.1-405B", "--gpus", "8", "--search", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["search"]["best"] == []


def test_the_verdict_stands_beside_the_best_layout_and_without_a_search_at_the_end() -> None:
    lines = run("--model", "Qwen3-8B", "--gpus", "8", "--search").stdout.splitlines()
    [verdict] = [number for number, line in enumerate(lines) if "It fits." in line]
    [ranks] = [number for number, line in enumerate(lines) if line.startswith("Ranks of actor")]
    best = next(number for number, line in enumerate(lines) if line.lstrip().startswith("1  megatron:"))
    assert best < verdict < ranks
    assert lines[verdict].startswith("The first: It fits.")
    planned = run("--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:t2p4").stdout.splitlines()
    assert [line.startswith("It fits.") for line in planned[-2:]].count(True) == 1


def test_every_rank_is_listed_when_asked_for() -> None:
    arguments = ("--model", "Qwen3-8B", "--gpus", "32", "--actor", "megatron:d16t2", "--gpu", "h200")
    assert "--ranks lists them" in run(*arguments).stdout
    assert "--ranks lists them" not in run(*arguments, "--ranks").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a recipe, or --model with --gpus"),
        (["--model", "Qwen3-8B"], "give either a recipe, or --model with --gpus"),
        (["--model", "Qwen9-8B", "--gpus", "8"], "did you mean Qwen3-8B"),
        (["--model", "Qwen3-8B", "--gpus", "8", "--recompute", "some"], "'none', 'selective', 'full'"),
    ],
)
def test_a_wrong_question_is_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_options_of_the_model_form_are_refused_with_a_recipe(recipe: str) -> None:
    for option, value, key in [
        ("--actor", "megatron:d8", "actor.backend"),
        ("--rollout", "vllm:d8", "rollout.backend"),
        ("--gpus", "0", "cluster.n_nodes"),
        # The default, given by the user.
        ("--gpus-per-node", "8", "cluster.n_gpus_per_node"),
        ("--devices", "actor=0-7", "actor.device_mapping"),
    ]:
        result = run(recipe, option, value)
        assert result.exit_code == 2
        assert f"{option} belongs to --model; with a recipe set {key}" in result.stderr


def test_a_picture_that_cannot_be_written_is_the_only_message(tmp_path: Path) -> None:
    for option, path, why in [
        ("--svg", tmp_path, "Is a directory; name a path that you may use"),
        ("--html", tmp_path / "nowhere" / "plan", "No such file or directory; name a path that you may use"),
        ("--svg", Path("/dev/full"), "No space left on device; free some space, or name another path"),
    ]:
        result = run("--model", "Qwen3-8B", "--gpus", "8", option, str(path))
        assert result.exit_code == 2
        assert result.stderr == f"Error: {path}: {why}\n"
        assert result.stdout == ""


def test_a_picture_without_a_layout_that_fits_is_not_written(tmp_path: Path) -> None:
    picture = tmp_path / "none.svg"
    result = run("--model", "Qwen2.5-72B", "--gpus", "8", "--search", "--svg", str(picture))
    assert (result.exit_code, picture.exists()) == (1, False)
    assert result.stderr.startswith("--svg: nothing was written")
    assert "nothing was written" not in result.stdout
    assert run("--model", "Qwen2.5-72B", "--gpus", "8", "--search").stderr == ""


def test_the_effective_configuration_is_what_differs_from_megatron_cores_defaults(recipe: str) -> None:
    result = run(recipe, "actor.megatron.transformer.bias_activation_fusion=true", "--effective")
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "bias_activation_fusion: true  # default: false" in lines
    assert "tensor_model_parallel_size: 2  # default: 1" in lines
    assert not any(line.startswith("pipeline_model_parallel_size") for line in lines)
    values = printed_json(recipe, "--effective")
    assert values["actor"]["TransformerConfig"]["num_layers"] == 36
    assert "bias_activation_fusion" not in values["actor"]["TransformerConfig"]
    for option in (("--search",), ("--svg", "plan.svg"), ("--lengths", "mean=4,max=8"), ("--micro-tokens", "64")):
        assert f"{option[0]} belongs to the plan" in run(recipe, "--effective", *option).output
    refused = run("--model", "Qwen3-8B", "--gpus", "8", "--effective")
    assert "--effective needs a recipe" in refused.output


def test_a_look_ahead_is_simulated_on_the_divisions_of_the_gpus(recipe: str) -> None:
    arguments = (recipe, "actor.megatron.recompute=full", "--gpu", "h200", "--lengths", "mean=300,max=4096")
    arguments += ("rollout.weight_transport=folder",)
    values = printed_json(*arguments)["look_ahead"]
    assert values["length_max"] == 1024, "gconfig.max_new_tokens cuts them off"
    choices = values["choices"]
    assert [choice["max_head_offpolicyness"] for choice in choices] == [0, 1, 2, 4]
    assert choices[0]["gain"] == 1.0
    assert choices[0]["staleness_max"] == 0
    # One division that is shared, and three that are not: t2 leaves 2, 4 or 6 GPUs to the trainer.
    assert values["splits"] == 4
    text = run(*arguments).stdout
    for choice in choices:
        assert f"{choice['seconds']:.1f}" in text
        assert choice["actor"].startswith("megatron:d")
        assert choice["rollout"].startswith("sglang:d")
    assert "rollout.max_head_offpolicyness=" in text
    # Weights go through host memory, and so in parallel with the next step, if any.
    assert choices[0]["weights_overlap"] is None
    [beside] = {tuple(c["weights_overlap"].values()) for c in choices[1:] if not c["colocate"]}
    assert sum(beside) == pytest.approx(next(c["update_seconds"] for c in choices if not c["colocate"]))
    alone = printed_json(*arguments, "rollout.overlap_weight_sync=false")["look_ahead"]["choices"]
    assert all(choice["weights_overlap"] is None for choice in alone)


def test_a_look_ahead_of_held_requests_reads_nothing_anew(recipe: str) -> None:
    """Where the rollout has separate devices."""
    arguments = (recipe, "actor.megatron.recompute=full", "--gpu", "h200", "--lengths", "mean=3000,max=8192")
    vllm = (
        "actor.backend=megatron:d2t2",
        "rollout.backend=vllm:d2t2",
        "rollout.colocate=false",
        "gconfig.max_new_tokens=8192",
        "rollout.max_head_offpolicyness=1",
    )
    read, held = (
        {
            choice["max_head_offpolicyness"]: choice
            for choice in printed_json(*arguments, *vllm, f"rollout.recompute_kv_cache={key}")["look_ahead"]["choices"]
        }
        for key in ("null", "false")
    )
    assert held[0]["seconds"] == read[0]["seconds"], "nothing is in progress when weights change"
    assert not held[4]["colocate"]
    assert held[4]["seconds"] < read[4]["seconds"]


def test_a_look_ahead_of_episodes_counts_their_turns_and_what_they_read(recipe: str) -> None:
    arguments = (recipe, "actor.megatron.recompute=full", "--gpu", "h200", "reward.fn=environment", "reward.kwargs={}")
    arguments += ("environment={game: a:B, max_turns: 8, max_length: 8192}",)
    alone, reading = (
        printed_json(*arguments, "--lengths", f"mean=3000,max=8192{more}")["look_ahead"]
        for more in ("", ",turns=8,read=300")
    )
    assert alone["length_max"] == 8192, "8 turns of gconfig.max_new_tokens=1024, and not one, cut them off"
    assert (reading["turns_mean"], reading["read_mean"]) == (8.0, 300.0)
    for one, other in zip(alone["choices"], reading["choices"], strict=True):
        # 2,100 tokens more are trained and prefilled, and make caches longer.
        assert 1.02 * one["seconds"] < other["seconds"] < 2 * one["seconds"]
    text = run(*arguments, "--lengths", "mean=3000,max=8192,turns=8,read=300").stdout
    assert "in 8 turns on average, with 300 tokens to read between two" in text
    assert "8 turns sample at most 8,192, which it has no room for" in " ".join(text.split())
    refused = run(*arguments, "environment.max_turns=4", "--lengths", "mean=3000,max=8192,turns=8")
    assert "turns=8, and the recipe environment.max_turns=4" in refused.stderr


def test_what_context_groups_by_length_would_save_is_the_exchange_between_fewer_ranks(recipe: str) -> None:
    arguments = (recipe, "actor.megatron.recompute=full", "--gpu", "h200", "gconfig.max_new_tokens=30000")
    arguments += ("train_dataset.max_length=1000",)

    def groups(backend: str, lengths: str) -> dict[str, Any]:
        values: dict[str, Any] = printed_json(
            *arguments, f"actor.backend={backend}", "rollout.backend=sglang:d8", "--lengths", lengths
        )["look_ahead"]["context_groups"]
        return values

    assert groups("megatron:d4t2", "mean=300,max=1024") is None
    # Sequences up to a plan's longest share a micro-batch of as many tokens: 31,000 tokens on 4 ranks.
    short = groups("megatron:d2c4", "p50=5000,max=6000")
    assert short["shares"] == {"1": 1.0}
    assert short["left"] == 0.0
    assert short["gain"] == pytest.approx(short["step"] / (short["step"] - short["exchanging"]))
    mixed = groups("megatron:d2c4", "p1=6749,p50=6750,p51=29999,max=30000")
    lengths = [7750] * 500 + [31000] * 490
    assert list(mixed["shares"]) == ["1", "2", "4"]
    assert mixed["shares"]["4"] == pytest.approx(sum(lengths[500:]) / sum(lengths), abs=0.02)
    # Two of four ranks exchange a third of what four do.
    assert mixed["left"] == pytest.approx(mixed["exchanging"] * (mixed["shares"]["2"] / 3 + mixed["shares"]["4"]))
    text = " ".join(run(*arguments, "actor.backend=megatron:d2c4", "--lengths", "p50=5000,max=6000").stdout.split())
    assert f"at most {short['gain']:.2f} times as fast" in text


@pytest.mark.parametrize(
    "options",
    [
        ["--effective"],
        ["--lengths", "mean=300,max=1024", "rollout.backend=sglang:d2t2", "actor.backend=megatron:d2t2",
         "rollout.colocate=false"],
    ],
)  # fmt: skip
def test_a_recipe_is_read_once_for_all_of_its_checks(
    recipe: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counting(path: Path) -> dict[str, Any]:
        read.append(path)
        return read_mapping(path)

    monkeypatch.setattr(load, "read_mapping", counting)
    result = run(recipe, *options)
    assert result.exit_code == 0, result.output
    assert read == [Path(recipe)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen3-8B", "--gpus", "8"], "--lengths needs a recipe"),
        (["recipes/tiny-moe-sft.yaml"], "does not generate"),
        (["recipes/quickstart.yaml"], "cluster.n_gpus_per_node is 0"),
        (["recipes/quickstart-ppo.yaml"], "the recipe has actor, critic, rollout"),
    ],
)
def test_a_look_ahead_that_cannot_be_simulated_says_why(arguments: list[str], message: str) -> None:
    root = Path(__file__).parents[3]
    paths = [str(root / word) if word.endswith(".yaml") else word for word in arguments]
    result = run(*paths, "--lengths", "mean=300,max=1024")
    assert result.exit_code == 2
    assert message in result.stderr
