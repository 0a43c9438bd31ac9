"""`fivefold import`: what it writes, what it prints, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fivefold.cli.main import app
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe

CONFIG = """
trainer: {nnodes: 2, n_gpus_per_node: 8, brand_new: 3}
data: {train_files: a.parquet}
actor_rollout_ref: {model: {path: Qwen/Qwen3-8B}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def run(config: str, output: Path, *arguments: str) -> Result:
    command = ["import", "--from", "verl", config, "trainer.nnodes=4", "-o", str(output), *arguments]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, command)


def test_a_recipe_is_written_and_the_report_is_printed(config: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "recipe.yaml"
    result = run(config, output, "--json")
    assert result.exit_code == 0, result.output
    assert load_recipe(output, [], TrainRecipe).cluster.n_nodes == 4

    report = json.loads(result.stdout)
    assert report["recipe"] == str(output)
    own = [entry for entry in report["entries"] if not entry["is_default"]]
    assert {entry["key"]: (entry["to"], entry["result"]) for entry in own}["trainer.nnodes"] == ("cluster.n_nodes", 4)
    assert report["counts"] == {
        outcome: sum(entry["outcome"] == outcome for entry in own) for outcome in ("mapped", "implied", "unsupported")
    }
    for entry in own:
        assert entry["key"] in result.stderr


def test_without_json_standard_output_is_empty(config: str, tmp_path: Path) -> None:
    assert run(config, tmp_path / "recipe.yaml").stdout == ""


def test_notes_and_the_next_command_are_told(config: str, tmp_path: Path) -> None:
    output = tmp_path / "my recipe.yaml"
    result = run(config, output, "--json")
    notes = json.loads(result.stdout)["notes"]
    assert any("reward.fn=math judges all responses" in note for note in notes)
    assert any("scheduler.type=ray" in note for note in notes)
    lines = result.stderr.splitlines()
    assert [line.removeprefix("Note: ") for line in lines if line.startswith("Note: ")] == notes
    assert lines[-1] == f"Wrote {output}. Next: fivefold plan '{output}'"


def test_one_node_needs_no_ray_cluster(config: str, tmp_path: Path) -> None:
    result = run(config, tmp_path / "recipe.yaml", "trainer.nnodes=1", "--json")
    assert not any("scheduler.type=ray" in note for note in json.loads(result.stdout)["notes"])


def test_values_that_are_left_to_the_user_are_told(tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text("trainer: {nnodes: 1, n_gpus_per_node: 8}\n")
    result = run(str(source), output, "--json")
    to_give = json.loads(result.stdout)["to_give"]
    assert to_give
    assert all(f"Still to be given: {key}" in result.stderr for key in to_give)
    assert "Next: give the values that are ??? in it, then: fivefold plan " in result.stderr


def test_strict_prints_the_report_and_writes_nothing(config: str, tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    result = run(config, output, "--strict")
    assert (result.exit_code, output.exists()) == (2, False)
    table, _, message = result.stderr.partition("Error: ")
    assert "trainer.nnodes=4" in table
    assert "--strict allows none" in message
    assert "- trainer.brand_new: " in message


def test_a_problem_is_told_and_fails_only_with_strict(tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text(
        "cluster: {n_nodes: 1, n_gpus_per_node: 8}\nrollout: {backend: 'sglang:d4'}\n"
        "actor: {path: Qwen/Qwen3-8B, backend: 'megatron:d16', optimizer: {lr: 1e-6}}\ntrain_dataset: {path: a.jsonl}\n"
    )
    command = ["import", "--from", "areal", str(source), "-o", str(output)]
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(app, [*command, "--json"])
    assert (result.exit_code, output.exists()) == (0, True)
    (problem,) = json.loads(result.stdout)["problems"]
    assert f"Problem: {problem}" in result.stderr
    planned = runner.invoke(app, ["plan", str(output)])
    assert problem in planned.stderr
    output.unlink()
    result = runner.invoke(app, [*command, "--strict"])
    assert (result.exit_code, output.exists()) == (2, False)
    assert f"- {problem}" in result.stderr


def test_a_recipe_is_replaced_only_with_overwrite(config: str, tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    output.write_text("mine\n")
    refused = run(config, output)
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert output.read_text() == "mine\n"
    assert run(config, output, "--overwrite").exit_code == 0
    assert output.read_text() != "mine\n"
