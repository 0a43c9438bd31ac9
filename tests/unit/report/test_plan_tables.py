"""The tables of a plan, as text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fivefold.config.load import load_any_recipe
from fivefold.planning.plan import Plan, plan_model, plan_recipe
from fivefold.report.plan.as_json import plan_as_json
from fivefold.report.plan.tables import print_plan


def text_of(plan: Plan, *, width: int = 160, all_ranks: bool = False) -> str:
    file = io.StringIO()
    print_plan(Console(file=file, width=width, highlight=False), plan, all_ranks=all_ranks)
    return file.getvalue()


@pytest.fixture(scope="module")
def folded() -> Plan:
    return plan_model(
        "Qwen3-30B-A3B", 32, gpu="h200", rollout="sglang:d4t4", actor="megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
    )


def test_tables_name_every_kind_of_memory_and_every_dimension(folded: Plan) -> None:
    text = text_of(folded, all_ranks=True)
    kinds = ("weights", "gradients", "optimizer", "activations", "log-probs", "KV cache")
    for word in (*kinds, "bubble", "experts", "MFU"):
        assert word in text
    for dimension in ("tp", "cp", "ep", "pp", "dp"):
        assert any(line.startswith(f"{dimension} ") for line in text.splitlines())


def test_the_binding_rank_groups_and_modes_are_named(folded: Plan) -> None:
    text = text_of(folded)
    assert "rank 0 of actor (stage 0) needs the most" in text
    assert "actor by recompute mode: none" in text
    assert "selective" in text
    shown = ("actor tp", "actor dp", "actor pp", "rollout tp")
    groups = [line.split() for line in text.splitlines() if line.startswith(shown)]
    assert groups == [
        ["actor", "tp", "8", "2", "all", "2"],
        ["actor", "dp", "x", "cp", "8", "2", "all", "2"],
        ["actor", "pp", "4", "4", "0", "of", "4", "2"],
        ["rollout", "tp", "4", "4", "all", "4"],
    ]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("package:tiny-moe", "1.0M parameters, 0.4M of them active"),
        ("Qwen3-30B-A3B", "30.5B parameters, 3.4B of them active"),
    ],
)
def test_the_title_has_the_size_of_the_model(model: str, size: str) -> None:
    assert size in text_of(plan_model(model, 8, actor="megatron:d8"))


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_memory_of_many_stages_is_whole_in_a_narrow_terminal(width: int) -> None:
    plan = plan_model("Qwen3-235B-A22B", 64, actor="megatron:(attn:d1p16t4|ffn:e4)", rollout="sglang:d8t8")
    text = text_of(plan, width=width)
    lines = text[text.index("Peak memory of a rank") : text.index("by recompute mode")].splitlines()
    amounts = [word for line in lines if line.startswith("gradients") for word in line.split()[1:]]
    assert len(amounts) == 16 + 1
    assert plan.estimate is not None
    stages = plan.estimate.models[0].memory
    assert amounts[:16] == [f"{stage.gradients / 1e9:.1f}" for stage in stages]
    assert all(len(line) <= width for line in lines)


def test_virtual_stages_are_listed() -> None:
    plan = plan_model("Qwen3-30B-A3B", 32, actor="megatron:d8t2p2v8e4")
    lines = [line.split() for line in text_of(plan).splitlines()]
    assert ["1", "3-5", "9-11", "15-17", "21-23", "27-29", "33-35", "39-41", "45-47"] in lines


def test_a_rank_of_many_virtual_stages_has_one_line_of_80_characters() -> None:
    lines = text_of(plan_model("Qwen3-30B-A3B", 32, actor="megatron:d8t2p2v8e4"), width=80).splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("rank  node")) + 1 :]
    assert [row.split()[0] for row in rows[:16]] == [str(rank) for rank in range(16)]
    assert "0-2, 6-8, ... (8 parts)" in rows[0]


def test_what_does_not_fit_says_who_and_what_to_do() -> None:
    text = " ".join(text_of(plan_model("Qwen3-8B", 8, actor="megatron:d8", gpu="h100")).split())
    assert "rank 0 (stage 0) needs" in text
    assert "with actor.megatron.recompute=selective it needs" in text


def test_a_search_that_finds_nothing_says_what_would_fit() -> None:
    plan = plan_model("Llama-3.1-405B", 8, searching=True)
    assert not plan.fits
    text = text_of(plan)
    assert "None of" in text
    assert "the nearest is" in text


def test_notes_are_printed_with_and_without_a_layout_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "experiment_name: e\nactor: {path: Qwen/Qwen3-8B, backend: 'megatron:d8'}\n"
        "cluster: {n_gpus_per_node: 8}\ntrain_dataset: {path: foo}\n"
    )
    too_large = plan_recipe(load_any_recipe(file, ["actor.path=Llama-3.1-405B"]), searching=True)
    assert too_large.estimate is None
    for plan in (plan_recipe(load_any_recipe(file, [])), too_large):
        assert "planned for `fivefold sft`" in " ".join(text_of(plan).split())


def test_backends_of_the_ranking_are_whole_at_any_width() -> None:
    plan = plan_model("Qwen3-235B-A22B", 32, gpu="h200")
    best = plan_as_json(plan)["search"]["best"]
    for width in (40, 80, 200):
        text = text_of(plan, width=width).split("Qwen3-235B-A22B ")[0]
        assert "…" not in text
        if width >= 80:
            assert all(f" {candidate['backend']} " in text for candidate in best)
        words = set(" ".join(text.replace(";", "").split()).split())
        assert all(set(reason.split()) <= words for candidate in best for reason in candidate["reasons"])
