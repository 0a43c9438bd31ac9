"""Shapes from files and names: published sizes, names that people write, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.families.read import SHAPES, find_shape, load_shape
from fivefold.families.shape import ModelShape

# Billions of parameters, and of those that a token visits, from the model cards and papers.
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (80, 3.9),
    "Qwen3.5-35B-A3B": (35, 3.45),
    "Qwen3-VL-30B-A3B": (30.5, 3.35),
    "Qwen3-VL-235B-A22B": (235, 22.2),
    "Qwen2.5-0.5B": (0.49, 0.49),
    "Qwen2.5-1.5B": (1.54, 1.54),
    "Qwen2.5-3B": (3.09, 3.09),
    "Qwen2.5-7B": (7.61, 7.61),
    "Qwen2.5-14B": (14.7, 14.7),
    "Qwen2.5-32B": (32.5, 32.5),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-1.7B": (1.7, 1.7),
    "Qwen3-4B": (4.0, 4.0),
    "Qwen3-8B": (8.2, 8.2),
    "Qwen3-14B": (14.8, 14.8),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Llama-3.2-1B": (1.24, 1.24),
    "Llama-3.2-3B": (3.21, 3.21),
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.6, 70.6),
    "Llama-3.1-405B": (405, 405),
    "MiniMax-M2": (230, 10),
    "gemma-3-1b": (1.0, 1.0),
    "gemma-3-270m": (0.268, 0.268),
    # The model card counts 3.6 and 5.1 of a token, without the embedding.
    "gpt-oss-20b": (20.9, 3.6 + 0.58),
    "gpt-oss-120b": (116.8, 5.1 + 0.58),
    "Mistral-Nemo": (12.2, 12.2),
    "Mistral-Small-24B": (23.6, 23.6),
    "Mixtral-8x7B": (46.7, 12.9),
    "Mixtral-8x22B": (141, 39),
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "Qwen2-57B-A14B": (57.4, 14.2),
    "DeepSeek-V2": (236, 21),
    # The report counts 2.4 of a token, without the embedding.
    "DeepSeek-V2-Lite": (15.7, 2.45 + 0.21),
    "DeepSeek-V3": (671, 37),
    # With its indexers.
    "DeepSeek-V3.2": (671.9, 38),
    "GLM-5": (744, 40),
    "GLM-4.5": (355, 32),
    "GLM-4.5-Air": (106, 12),
    "GLM-4.6": (355, 32),
    "Kimi-K2": (1040, 32.6),
    "Moonlight-16B-A3B": (15.29, 2.24),
    # The name says 30 and 3, which are counts with and without embeddings.
    "GLM-4.7-Flash": (29.9, 3.9),
}
WITHOUT_EMBEDDINGS = ("GLM-4.5", "GLM-4.5-Air", "GLM-4.6", "GLM-5", "MiniMax-M2", "Moonlight-16B-A3B")
"""Models whose reports count neither the embedding nor the output layer."""


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.json")))
def test_shipped_shapes_have_the_published_sizes(name: str) -> None:
    shape = find_shape(name)
    total, active = PUBLISHED[name]
    left_out = 2 * shape.vocab * shape.hidden if name in WITHOUT_EMBEDDINGS else 0
    assert (shape.n_parameters - left_out) / 1e9 == pytest.approx(total, rel=0.015)
    assert (shape.n_active_parameters - left_out) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("qwen3-8b", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3.2", "DeepSeek-V3.2"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "DeepSeek-V3.2"),
    ],
)
def test_names_and_variants_are_found_as_people_write_them(written: str, name: str) -> None:
    shape = find_shape(written)
    assert (replace(shape, max_positions=0), shape.name) == (replace(find_shape(name), max_positions=0), name)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen/Qwen3-30B-A3B", 40_960),
        ("Qwen/Qwen3-30B-A3B-Base", 32_768),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 262_144),
        ("Qwen/Qwen3-4B-Thinking-2507", 262_144),
        ("Qwen/Qwen2.5-7B", 131_072),
        ("Qwen/Qwen2.5-7B-Instruct", 32_768),
        ("Qwen/Qwen2.5-0.5B", 32_768),
        ("Qwen/Qwen2-57B-A14B-Instruct", 32_768),
        ("moonshotai/Kimi-K2-Instruct", 131_072),
        ("moonshotai/Kimi-K2-Instruct-0905", 262_144),
        ("meta-llama/Llama-3.1-8B-Instruct", 131_072),
    ],
)
def test_variants_have_the_positions_of_their_own_config(name: str, positions: int) -> None:
    assert find_shape(name).max_positions == positions


def test_files_and_folders_are_read_and_named(tmp_path: Path) -> None:
    file = SHAPES / "Qwen3-8B.json"
    assert (find_shape(str(file)), find_shape(str(file)).name) == (find_shape("Qwen3-8B"), "Qwen3-8B")
    (tmp_path / "config.json").write_text(file.read_text())
    assert find_shape(str(tmp_path)) == load_shape(tmp_path) == find_shape("Qwen3-8B")
    assert find_shape(str(tmp_path / "config.json")).name == tmp_path.name
    assert find_shape("package:tiny-moe").name == "tiny-moe"


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="did you mean Qwen3-30B-A3B") as error:
        find_shape("Qwen3-30B-A3")
    assert "DeepSeek-V3" in str(error.value)


@pytest.mark.parametrize("read", [load_shape, lambda folder: find_shape(str(folder))], ids=["engine", "plan"])
def test_folders_without_a_usable_file_are_an_error(read: Callable[[Path], ModelShape], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read(tmp_path)
    for text, problem in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: it is nested too deep"),
        (f'{{"a": {"1" * 5000}}}', "is not JSON: Exceeds the limit"),
        ("\udcff", "is not a text in UTF-8"),
        ("[]", "holds a list"),
        (json.dumps({}), "model_type is None"),
    ):
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=problem):
            read(tmp_path)
