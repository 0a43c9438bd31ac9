"""Reading and writing of Hugging Face folders."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_files import ShardFiles
from fivefold.bridge.shard_plan import TensorSpec, plan_shards

TENSORS = {f"layer.{i}": torch.randn(10, 10, generator=torch.Generator().manual_seed(i)) for i in range(5)}
"""400 bytes each."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder: config, tokenizer and weights, which must not be taken over."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
    ):
        (folder / name).write_text(name)
    save_file({"old": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "model-00001-of-00002.safetensors").write_text("old")
    return folder


def save(folder: Path, tensors: Mapping[str, Tensor], source: Path, **options: Any) -> None:
    """Write a folder of `tensors`, which are not those of the model that the config describes."""
    save_hf(folder, tensors.items(), source, tensors=specs(tensors), **options)


def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def contents(folder: Path) -> dict[str, Tensor]:
    with HFWeights(folder) as weights:
        return {name: weights.read(name) for name in weights.names}


def test_shards_stay_below_their_size_and_the_index_finds_all(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source, max_shard_bytes=1000)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files] == [800, 800, 400]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert all(torch.equal(contents(tmp_path / "out")[name], tensor) for name, tensor in TENSORS.items())


def test_the_tokenizer_may_come_from_another_model(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt"):
        (other / name).write_text("{}")
    save(tmp_path / "out", TENSORS, source, tokenizer_source=other)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "vocab.txt", "model.safetensors"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_one_shard_needs_no_index(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source)
    assert [file.name for file in tmp_path.glob("out/model*")] == ["model.safetensors"]
    assert contents(tmp_path / "out").keys() == TENSORS.keys()


def test_a_tensor_larger_than_a_shard_gets_its_own(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source, max_shard_bytes=100)
    assert len(list(tmp_path.glob("out/*.safetensors"))) == 5


def test_views_of_one_buffer_are_written(source: Path, tmp_path: Path) -> None:
    buffer = torch.arange(12.0).view(3, 4)
    save(tmp_path / "out", {"rows": buffer[:2], "columns": buffer[:, 1:3], "all": buffer}, source)
    assert contents(tmp_path / "out")["columns"].equal(buffer[:, 1:3])


def test_the_tokenizer_is_copied_and_the_config_states_the_dtype(source: Path, tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    save(tmp_path / "out", {**half, "router": torch.zeros(2)}, source)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    copied = {file.name for file in (tmp_path / "out").iterdir()} - {"config.json", "model.safetensors"}
    assert copied == {file.name for file in source.iterdir()} - {
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
    }


@pytest.mark.parametrize(
    ("old", "new"), [({"torch_dtype": "float16"}, {"torch_dtype": "float32"}), ({}, {"torch_dtype": "float32"})]
)
def test_the_older_name_of_the_dtype_is_kept(
    source: Path, tmp_path: Path, old: dict[str, str], new: dict[str, str]
) -> None:
    (source / "config.json").write_text(json.dumps(old))
    save(tmp_path / "out", TENSORS, source)
    assert json.loads((tmp_path / "out/config.json").read_text()) == new


def test_an_interrupted_save_leaves_the_earlier_model(source: Path, tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield "layer.0", torch.zeros(10, 10)
        raise KeyboardInterrupt

    save(tmp_path / "out", TENSORS, source)
    with pytest.raises(KeyboardInterrupt):
        save_hf(tmp_path / "out", interrupted(), source, tensors=specs(TENSORS))
    assert contents(tmp_path / "out")["layer.0"].equal(TENSORS["layer.0"])
    assert {folder.name for folder in tmp_path.iterdir()} == {"source", "out"}


def test_a_save_leaves_nothing_of_the_earlier_model(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source, max_shard_bytes=1000)
    save(tmp_path / "out", {"layer.0": torch.zeros(3)}, source)
    assert contents(tmp_path / "out").keys() == {"layer.0"}
    assert {folder.name for folder in tmp_path.iterdir()} == {"source", "out"}


def test_a_model_may_be_saved_over_its_own_source(source: Path) -> None:
    save(source, TENSORS, source)
    assert contents(source).keys() == TENSORS.keys()
    assert (source / "tokenizer.json").read_text() == "tokenizer.json"


def test_bytes_do_not_depend_on_the_order_in_which_tensors_come(source: Path, tmp_path: Path) -> None:
    for name, weights in (("one", [*TENSORS.items()]), ("other", [*TENSORS.items()][::-1])):
        save_hf(tmp_path / name, weights, source, tensors=specs(TENSORS), max_shard_bytes=1000)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "other", files, shallow=False) == (files, [], [])


def test_tensors_of_several_dtypes_share_a_file_and_are_aligned(source: Path, tmp_path: Path) -> None:
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float16, torch.bool, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.arange(3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.0), "cube": torch.randn(2, 3, 4), "empty": torch.zeros(0, 4)}
    save(tmp_path / "out", tensors, source)
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert TensorSpec.of(stored[name]) == TensorSpec.of(tensor)
        assert stored[name].view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.ndim else stored[name] == tensor
    plan = plan_shards(specs(tensors))
    assert all(place.begin % place.spec.dtype.itemsize == 0 for place in plan.places.values())
    assert (tmp_path / "out/model.safetensors").stat().st_size == plan.file_bytes


def test_rectangles_of_a_tensor_may_be_written_in_any_order(tmp_path: Path) -> None:
    whole = torch.randn(7, 10)
    plan = plan_shards({"before": TensorSpec(torch.float32, (3,)), "whole": TensorSpec.of(whole)})
    rectangles = [(0, 7, 6, 10), (3, 7, 0, 6), (0, 1, 0, 2), (1, 3, 0, 6), (0, 1, 2, 6)]
    with ShardFiles(tmp_path, plan) as files:
        files.create()
        for top, bottom, left, right in rectangles:
            n_bytes = files.write("whole", whole[top:bottom, left:right], top, left)
            assert n_bytes == 4 * (bottom - top) * (right - left)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["whole"].equal(whole)
    assert stored["before"].equal(torch.zeros(3)), "what is not written is zero"
    with ShardFiles(tmp_path, plan) as files, pytest.raises(ValueError, match=r"\[2, 10\] at \[6, 0\] is no part"):
        files.write("whole", whole[:2], 6)


def test_blocks_cover_a_tensor_that_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.bridge.shard_files.BLOCK_BYTES", 70)
    whole = torch.randn(9, 11)
    plan = plan_shards({"whole": TensorSpec.of(whole)})
    with ShardFiles(tmp_path, plan) as files:
        files.create()
        files.write("whole", whole[:, :4], 0, 0)
        files.write("whole", whole[:, 4:], 0, 4)
    assert load_file(tmp_path / "model.safetensors")["whole"].equal(whole)


def test_a_link_to_a_folder_stays_one_and_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large disk" / "model", target_is_directory=True)
    for _ in range(2):
        save(tmp_path / "link", TENSORS, source)
        assert (tmp_path / "link").is_symlink()
        assert contents(tmp_path / "large disk" / "model").keys() == TENSORS.keys()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        save(tmp_path / "file", TENSORS, source)
    assert (tmp_path / "file").read_text() == "mine"


def test_weights_that_are_not_the_planned_ones_are_refused_when_all_have_come(source: Path, tmp_path: Path) -> None:
    consumed: list[str] = []

    def wrong() -> Iterator[tuple[str, Tensor]]:
        yield from {"layer.9": torch.zeros(1), "layer.0": TENSORS["layer.0"].bfloat16()}.items()
        yield from [("layer.1", TENSORS["layer.1"])] * 2
        yield "layer.2", torch.zeros(10, 1)
        yield "layer.3", TENSORS["layer.3"]
        consumed.append("all")

    with pytest.raises(ValueError, match="not the 5 tensors of the model") as raised:
        save_hf(tmp_path / "out", wrong(), source, tensors=specs(TENSORS))
    for problem in (
        "layer.9 is not a tensor of the model",
        "layer.0 is bfloat16 [10, 10], and the model has float32 [10, 10]",
        "layer.1 came a second time",
        "layer.2 is float32 [10, 1], and the model has float32 [10, 10]",
        "layer.4 is missing",
    ):
        assert problem in str(raised.value)
    assert consumed, "other ranks wait in the collectives behind the iterator"
    with pytest.raises(ValueError, match="no weights"):
        save_hf(tmp_path / "out", iter([]), source)
    assert {folder.name for folder in tmp_path.iterdir()} == {"source"}


def test_tensors_are_those_of_the_config_unless_they_are_given(hf_models: dict[str, Path], tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in load_file(hf_models["llama"] / "model.safetensors").items()}
    save_hf(tmp_path / "out", weights.items(), hf_models["llama"])
    stored = contents(tmp_path / "out")
    assert stored.keys() == weights.keys()
    assert all(stored[name].equal(tensor) for name, tensor in weights.items())
    weights.popitem()
    with pytest.raises(ValueError, match="is missing"):
        save_hf(tmp_path / "out", weights.items(), hf_models["llama"])


def test_a_save_holds_one_tensor_at_a_time(source: Path, tmp_path: Path) -> None:
    tensors = {f"layer.{i}": TensorSpec(torch.float32, (1024, 2048)) for i in range(16)}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i, (name, spec) in enumerate(tensors.items()):
            yield name, torch.full(spec.shape, float(i))

    save_hf(tmp_path / "out", weights(), source, tensors=tensors)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak in the status starts anew
    save_hf(tmp_path / "out", weights(), source, tensors=tensors)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert peak - before < 4 * 1024 * 2048 * 4, "the next tensor is made while the last one is let go"


def test_slices_are_those_of_the_tensor(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source)
    whole = TENSORS["layer.3"]
    with HFWeights(tmp_path / "out") as weights:
        assert weights.shape("layer.3") == (10, 10)
        assert weights.read("layer.3", slice(2, 5)).equal(whole[2:5])
        assert weights.read("layer.3", slice(None), slice(7, 10)).equal(whole[:, 7:])


def test_a_hub_name_is_fetched(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"org/model": str(source)}[name])
    assert HFWeights("org/model").names == {"old"}


def test_a_hub_that_cannot_be_reached_is_one_message_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError("An error happened.\nCheck your connection.") from OSError("connection refused")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        ValueError, match=r"'org/model' .* https?://\S+ could not be reached \(connection refused\)"
    ) as told:
        resolve_model_folder("org/model")
    assert "download it, and give the folder" in str(told.value)
    # `generate --model` loads models too.
    assert "actor.path" not in str(told.value)
    assert "\n" not in str(told.value)


def test_neither_folder_nor_hub_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        resolve_model_folder(tmp_path / "nowhere")


def test_a_folder_without_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="only safetensors files are read"):
        HFWeights(tmp_path)


def test_an_incomplete_download_is_an_error(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "out", TENSORS, source, max_shard_bytes=1000)
    (tmp_path / "out/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003"):
        HFWeights(tmp_path / "out")


def test_all_files_that_the_written_configs_name_are_written(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "configuration_own.Own"}}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("tools")
    (source / "tokenization_own.py").write_text("code")
    save(tmp_path / "out", TENSORS, source)
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text()), "its code is not written"
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "tools"
    assert (tmp_path / "out/tokenization_own.py").read_text() == "code"
