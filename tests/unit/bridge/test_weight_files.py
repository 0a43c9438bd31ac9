"""Broken model folders are found by their headers: every problem in one error, with file, tensor, rule and fix."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fivefold.bridge.audit import WeightMismatchError, check_weights
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.weight_files import INDEX_FILE, SINGLE_FILE
from fivefold.families.read import load_shape

MODEL = "qwen3_moe"
SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"


@pytest.fixture
def whole(hf_models: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a model folder with one weight file."""
    return Path(shutil.copytree(hf_models[MODEL], tmp_path / "whole"))


@pytest.fixture
def sharded(hf_models: dict[str, Path], tmp_path: Path) -> Path:
    """Return the same model in three shards with an index."""
    tensors = load_file(hf_models[MODEL] / SINGLE_FILE)
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_hf(tmp_path / "sharded", tensors.items(), hf_models[MODEL], max_shard_bytes=size // 3 + 4000)
    assert (tmp_path / "sharded" / SHARD).is_file()
    return tmp_path / "sharded"


def problems(folder: Path) -> str:
    """Return the message of the error about `folder`."""
    with pytest.raises(WeightMismatchError) as raised:
        check_weights(folder, load_shape(folder))
    message = str(raised.value)
    assert message.startswith(f"{folder} does not hold the weights")
    return message


def placed(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index says."""
    return dict(json.loads((folder / INDEX_FILE).read_text())["weight_map"])


def place(folder: Path, weight_map: dict[str, str]) -> None:
    """Write an index."""
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Write the tensors of a folder's single file again, as `edit` leaves them."""
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def test_folders_of_every_family_pass(hf_models: dict[str, Path], sharded: Path) -> None:
    for folder in [*hf_models.values(), sharded]:
        check_weights(folder, load_shape(folder))


def test_a_truncated_file_is_named_with_both_sizes(whole: Path) -> None:
    size = (whole / SINGLE_FILE).stat().st_size
    os.truncate(whole / SINGLE_FILE, 60_000)
    expected = f"{SINGLE_FILE} is truncated: it has 60,000 bytes, and its header describes {size:,}: fetch it again"
    assert expected in problems(whole)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "is a Git LFS pointer .*git lfs pull"),
        (b"\x00\x10\x00\x00\x00\x00\x00\x00{", "is truncated: it has 9 bytes, and its header describes 4,104"),
        (b"", "has 0 bytes and is not a whole safetensors file"),
        (b"<html>not found</html>", "has 22 bytes and is not a whole safetensors file .*: fetch it again"),
        (b"\x04\x00\x00\x00\x00\x00\x00\x00[[]]", "has 12 bytes and is not a whole safetensors file"),
    ],
)
def test_a_file_that_holds_something_else_is_named(whole: Path, content: bytes, expected: str) -> None:
    (whole / SINGLE_FILE).write_bytes(content)
    message = problems(whole)
    assert len(message.splitlines()) == 3, "tensors of a file that cannot be read are no further problem"
    with pytest.raises(WeightMismatchError, match=f"    {SINGLE_FILE} {expected}"):
        check_weights(whole, load_shape(whole))


def test_all_problems_are_in_one_error(sharded: Path) -> None:
    lost = sorted(name for name, file in placed(sharded).items() if file == SHARD)
    (sharded / SHARD).unlink()
    last = sharded / SHARD.replace("2-of", "3-of")
    tensors = load_file(last)
    tensors["extra"] = torch.zeros(1)
    tensors[NORM] = torch.zeros(17)
    save_file(tensors, last)
    assert problems(sharded).splitlines()[1:] == [
        "  Problems of the weight files (1):",
        f"    {SHARD} ({len(lost)} tensors, among them {lost[0]}) is missing: complete the download",
        "  Hugging Face tensors that no parameter uses (1):",
        f"    extra in {last.name}",
        "  Hugging Face tensors of the wrong shape (1):",
        f"    {NORM} in {last.name}: [17], expected [16]",
        "  config.json and weights must be of one model: correct config.json, or fetch the weights again",
    ]


@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight"])
def test_a_reward_model_in_the_place_of_a_language_model_is_told_as_one(whole: Path, head: str) -> None:
    tensors = load_file(whole / SINGLE_FILE)
    tensors[head] = torch.zeros(1, 16)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, whole / SINGLE_FILE)
    message = problems(whole)
    assert f"{head} in {SINGLE_FILE}" in message
    assert message.endswith("it serves as reward.model.path or critic.path; name a language model here")


def test_a_link_that_leads_nowhere_is_a_missing_file(whole: Path) -> None:
    (whole / SINGLE_FILE).unlink()
    (whole / SINGLE_FILE).symlink_to("blob")
    assert f"{SINGLE_FILE} is missing: complete the download" in problems(whole)


def test_an_index_that_places_a_tensor_in_another_file_is_named(sharded: Path) -> None:
    weight_map = placed(sharded)
    assert weight_map[NORM] != SHARD
    place(sharded, weight_map | {NORM: SHARD})
    message = problems(sharded)
    assert f"{INDEX_FILE} places tensors in files that do not hold them: {NORM} in {SHARD}: fetch" in message
    assert "that are missing" not in message


@pytest.mark.parametrize("content", ['{"weight_map": {', "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_cannot_be_read_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    assert f"    {INDEX_FILE} cannot be read (" in problems(sharded)


def test_one_file_beside_an_index_of_others_is_ambiguous(sharded: Path, whole: Path) -> None:
    shutil.copy(whole / SINGLE_FILE, sharded)
    assert f"{SINGLE_FILE} is there next to {INDEX_FILE}, which names other files: delete" in problems(sharded)
    place(sharded, dict.fromkeys(placed(sharded), SINGLE_FILE))
    check_weights(sharded, load_shape(sharded))


def rename(tensors: dict[str, Tensor], name: str, other: str) -> None:
    tensors[other] = tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.pop(EXPERT), [f"    {EXPERT}"]),
        (
            lambda t: rename(t, NORM, "model.norm.scale"),
            [f"    model.norm.scale in {SINGLE_FILE} (nearest: {NORM})", f"    {NORM} (nearest: model.norm.scale)"],
        ),
        (
            lambda t: t.update({EXPERT: torch.zeros(9, 16)}),
            [f"    {EXPERT} in {SINGLE_FILE}: [9, 16], expected [8, 16]"],
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)}),
            [f"    {EXPERT} in {SINGLE_FILE}: I8, expected one of BF16, F16, F32, F64"],
        ),
    ],
    ids=["missing", "renamed", "other shape", "quantized"],
)
def test_a_tensor_that_does_not_fit_is_named(
    whole: Path, edit: Callable[[dict[str, Tensor]], object], expected: Sequence[str]
) -> None:
    change(whole, edit)
    assert [line for line in problems(whole).splitlines() if line.startswith("    ")] == expected


def test_tensors_that_loading_ignores_pass(whole: Path) -> None:
    change(whole, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    check_weights(whole, load_shape(whole))


def test_without_a_shape_only_the_files_are_checked(whole: Path) -> None:
    change(whole, lambda tensors: tensors.pop(NORM))
    check_weights(whole, None)
    os.truncate(whole / SINGLE_FILE, 60_000)
    with pytest.raises(WeightMismatchError, match="is truncated"):
        check_weights(whole, None)


def test_a_folder_of_pickled_weights_says_how_to_convert_them(whole: Path) -> None:
    torch.save(load_file(whole / SINGLE_FILE), whole / "pytorch_model.bin")
    (whole / SINGLE_FILE).unlink()
    message = problems(whole)
    assert "only safetensors files are read (found pytorch_model.bin): convert it once with transformers:" in message
    conversion = message.partition("convert it once with transformers: ")[2]
    exec(conversion, {"AutoModelForCausalLM": AutoModelForCausalLM})
    check_weights(whole, load_shape(whole))


def test_shards_may_lie_in_a_folder_within(sharded: Path) -> None:
    (sharded / "weights").mkdir()
    for shard in set(placed(sharded).values()):
        (sharded / shard).rename(sharded / "weights" / shard)
    place(sharded, {name: f"weights/{file}" for name, file in placed(sharded).items()})
    check_weights(sharded, load_shape(sharded))
    with HFWeights(sharded) as weights:
        assert weights.read(NORM).equal(load_file(sharded / weights.file(NORM))[NORM])


def test_shards_without_their_index_say_that_it_is_missing(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    assert f"{INDEX_FILE} is missing next to model-00001-of-00003.safetensors and 2 more" in problems(sharded)


def test_a_folder_without_weights_says_so(whole: Path) -> None:
    (whole / SINGLE_FILE).unlink()
    assert f"{SINGLE_FILE} and {INDEX_FILE} are both missing" in problems(whole)
    assert "actor.init_from_scratch=true" in problems(whole)
    (whole / "model.gguf").touch()
    assert "(found model.gguf): convert it once with `fivefold convert`" in problems(whole)
