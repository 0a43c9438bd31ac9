"""The report: comments in the recipe's file, the table, and what is not shown."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from dialect_conversion import ENVIRONMENT, FIXTURES, convert_fixture, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.key_table import wrap
from fivefold_import.recipe import import_recipe


def comments(recipe: Path) -> list[str]:
    return [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]


def test_the_recipe_begins_with_a_comment_for_each_key(tmp_path: Path) -> None:
    output, fixture = tmp_path / "recipe.yaml", "verl_grpo_megatron.sh"
    import_recipe("verl", [FIXTURES / fixture], [], output, environment=ENVIRONMENT)
    lines = comments(output)
    assert fixture in lines[0]
    for key in keys_of(fixture):
        assert sum(line.startswith(f"#   {key}=") for line in lines) == 1, key
    assert "#   actor_rollout_ref.rollout.n=5 -> gconfig.n_samples=5" in lines


def test_the_table_shows_each_key_but_no_default_that_fivefold_has_too() -> None:
    report = convert_fixture("trinity", "trinity_ppo_megatron.yaml").report
    console = Console(width=400, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.table())
    told = [entry for entry in report.entries if not entry.is_default or entry.outcome != "implied"]
    assert len(told) < len(report.entries)
    assert [entry.key for entry in told if entry.key not in capture.get()] == []


def test_on_a_narrow_terminal_keys_break_at_their_dots() -> None:
    report = convert_fixture("verl", "verl_moe_megatron.sh").report
    console = Console(width=80, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.table())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]
    assert all(len(line) <= 80 for line in capture.get().splitlines())
    first, second, _ = (list(column) for column in zip(*rows, strict=True))
    for cells, keys in (
        (first, [entry.key for entry in report.entries if not entry.is_default]),
        (second, [entry.to for entry in report.of("mapped")]),
    ):
        text = "".join(cells)
        for key in keys:
            assert key in text, key
        for cell, following in pairwise(cells):
            # A line that does not end a cell ends with a sign, or the word is wider than the column.
            broken = following and cell and any(key.startswith(cell) and key != cell for key in keys)
            assert not broken or cell[-1] in ".=/," or len(cell) > 20, cell


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab. =,/", max_size=60), st.integers(1, 20))
def test_wrapping_loses_nothing_but_blanks_at_the_ends_of_lines(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    output, fixture = tmp_path / "recipe.yaml", "areal_grpo_fsdp.yaml"
    report = import_recipe("areal", [FIXTURES / fixture], [], output, environment=ENVIRONMENT)
    assert "stats_logger.wandb.api_key=***" in output.read_text(encoding="utf-8")
    assert "not-for-everybody" not in output.read_text(encoding="utf-8")
    assert "not-for-everybody" not in json.dumps(report.as_dict())
    # The names of token counts look like names of secrets.
    entries = {entry["key"]: entry["value"] for entry in report.as_dict()["entries"]}
    assert entries["actor.mb_spec.max_tokens_per_mb"] == "9216"


def test_control_characters_do_not_get_into_the_comments(tmp_path: Path) -> None:
    source, output = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text('actor: {path: m, odd: "a\\e[1mb\\x85c"}\ntrain_dataset: {path: d.jsonl}\n', encoding="utf-8")
    import_recipe("areal", [source], [], output, environment={})
    load_recipe(output, [], TrainRecipe)


def test_a_layout_that_cannot_be_placed_is_described_in_the_comments(tmp_path: Path) -> None:
    words = ["actor.path=Qwen/Qwen3-8B", "train_dataset.path=a", "cluster.n_nodes=1", "cluster.n_gpus_per_node=8"]
    for layout in (
        ["actor.backend=megatron:d*t8", "rollout.backend=sglang:d4"],
        ["allocation_mode=sglang:d6+megatron:d*t4"],
    ):
        output = tmp_path / "recipe.yaml"
        report = import_recipe("areal", [], [*words, *layout], output, overwrite=True, environment={})
        (problem,) = report.problems
        for line in problem.splitlines():
            assert f"#   {line}" in comments(output), layout
        load_recipe(output, [], TrainRecipe)


def test_devices_that_cannot_be_read_are_described_in_one_line(tmp_path: Path) -> None:
    text = (FIXTURES / "roll_megatron.yaml").read_text(encoding="utf-8")
    source, output = tmp_path / "roll.yaml", tmp_path / "recipe.yaml"
    source.write_text(text.replace("list(range(0,32))", "list(range(0,32)"), encoding="utf-8")
    report = import_recipe("roll", [source], ["pretrain=m"], output, environment={})
    (entry,) = [entry for entry in report.unsupported if entry.key == "actor_train.device_mapping"]
    assert "a list of devices is expected" in entry.note
    assert "write for example 0-31" in entry.note
    assert "\n" not in entry.note
    load_recipe(output, ["train_dataset.path=d.jsonl"], TrainRecipe)
