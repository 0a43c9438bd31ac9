"""Prompts with images on SGLang: what its server is told, and the code inside it, over stand-ins for both."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.servers import sglang_dialect
from fivefold.rollout.servers.command import check_command, server_command
from fivefold.rollout.servers.dialect import Ask
from fivefold.rollout.servers.images import SharedImages
from fivefold.vision.positions import positions_with
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import Log, write_python
from tests.unit.rollout.served import Served, sampling, start
from tests.unit.rollout.stand_ins import stand_in
from tests.unit.rollout.test_seen_by_vllm import MERGE, image, is_held, request, sha256

Folder = Callable[..., Path]
DIALECT = DIALECTS["sglang"]


# What Fivefold does outside SGLang


def test_a_server_gets_the_patches_of_each_request(model_folder: Folder, tmp_path: Path) -> None:
    model = model_folder("qwen3_vl")
    spec = spec_of("sglang", model, python=write_python(tmp_path), sees=True)
    engine, log = start(spec), Log(tmp_path)
    served = Served(spec, engine, tmp_path, {name: tensor.clone() for name, tensor in _weights(model).items()})
    served.update(1)
    pair, alone = (image(1, 2, 2, 3), image(2, 9, 1, 2)), image(1, 4, 2, 3)
    complete(engine, [request(14, *pair), request(14, alone), request(3)], sampling())
    engine.close()
    rows = log.rows("image")
    assert sorted((row["name"], row["start"]) for row in rows) == [("1-2x3", 2), ("1-2x3", 4), ("2-1x2", 9)]
    for row in rows:
        meant = next(each for each in (*pair, alone) if f"{each.digest}-{each.rows}x{each.columns}" == row["name"])
        assert row["sha256"] == sha256(meant, torch.bfloat16)
        assert (row["n_tokens"], row["grid"]) == (meant.n_tokens, [meant.rows * MERGE, meant.columns * MERGE])
        assert not is_held(row["path"])
    assert [len(body.get("image_data", ())) for body in served.bodies()].count(0) == 1


@pytest.mark.parametrize(("patch", "runs"), [(14, True), (4, False)])
def test_sglang_runs_the_tower_of_qwen2_5_vl_with_patches_of_published_models_only(
    model_folder: Folder, tmp_path: Path, patch: int, runs: bool
) -> None:
    """It takes all other patches for features, and embeds them as they are."""
    folder = Path(shutil.copytree(model_folder("qwen2_5_vl"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"patch_size": patch, "window_size": 4 * patch, "temporal_patch_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_of("sglang", folder, python=write_python(tmp_path / "server"), sees=True)
    if runs:
        check_command(DIALECT, spec)
        return
    with pytest.raises(ValueError, match=f"has patches of {6 * patch**2} numbers, and SGLang runs .* only with 1176"):
        check_command(DIALECT, spec)


def _weights(model: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: each for name, each in load_file(model / "model.safetensors").items() if ".visual." not in name}


def test_a_server_has_the_tower_of_the_files_and_keeps_it_asleep() -> None:
    """A tower is never sent, and SGLang keeps all weights on the host, or none."""
    for sees in (False, True):
        for can_sleep in (False, True):
            spec = spec_of("sglang", Path("/models/a"), python="/opt/python", sees=sees, can_sleep=can_sleep)
            words = server_command(DIALECT, spec, 81)
            assert ("dummy" in words) is not sees
            assert ("--enable-weights-cpu-backup" in words) is (sees and can_sleep)
            package = DIALECT.environment(spec).get("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE")
            assert package == ("fivefold_processors" if sees else None)
    folder = sglang_dialect.INSIDE / "fivefold_processors"
    assert {file.name for file in folder.glob("*.py")} == {"__init__.py", "images.py"}


def test_a_server_that_completes_a_prompt_of_another_length_is_an_error() -> None:
    reply = b'{"output_ids": [7], "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 15}}'
    ask = Ask(request(0, image(1, 1, 1, 1)).token_ids, None, False, images=(image(1, 1, 1, 1),))
    assert len(ask.token_ids) == 14
    with pytest.raises(RuntimeError, match="SGLang made 15 tokens of a prompt with images that has 14"):
        DIALECT.answer(reply, ask)
    assert DIALECT.answer(reply.replace(b"15", b"14"), ask).token_ids_T.tolist() == [7]
    assert DIALECT.answer(reply, Ask(ask.token_ids, None, False)).token_ids_T.tolist() == [7]


# The code inside SGLang


@dataclass
class Item:
    """SGLang's `MultimodalDataItem`."""

    modality: str
    feature: Tensor
    offsets: list[tuple[int, int]]
    model_specific_data: dict[str, Any]
    hash: int | None = None
    pad_value: int | None = None

    def set_hash(self, value: int) -> None:
        self.hash, self.pad_value = value, 1_000_000 + value % 2**30


@dataclass
class Output:
    """SGLang's `MultimodalProcessorOutput`."""

    mm_items: list[Item]
    input_ids: list[int]
    padded_input_ids: list[int]
    im_token_id: int
    im_start_id: int
    im_end_id: int
    video_token_id: int
    mrope_positions: Tensor
    mrope_position_delta: Tensor = field(default_factory=Tensor)

    @staticmethod
    def build_padded_input_ids(token_ids: list[int], items: list[Item]) -> list[int]:
        padded = list(token_ids)
        for item in items:
            for first, last in item.offsets:
                assert item.pad_value is not None
                padded[first : last + 1] = [item.pad_value] * (last + 1 - first)
        return padded


class QwenVLImageProcessor:
    """SGLang's processor, as far as ours takes things from it."""

    IM_TOKEN_ID, VIDEO_TOKEN_ID, vision_start_token_id, vision_end_token_id, spatial_merge_size = 66, 65, 63, 64, MERGE


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that runs inside SGLang, over a stand-in for SGLang."""
    contents: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.multimodal")},
        "sglang.srt.managers.schedule_batch": {
            "Modality": SimpleNamespace(IMAGE="image"), "MultimodalDataItem": Item, "MultimodalProcessorOutput": Output
        },
        "sglang.srt.multimodal.processors": {},
        "sglang.srt.multimodal.processors.qwen_vl": {"QwenVLImageProcessor": QwenVLImageProcessor},
    }  # fmt: skip
    stand_in(monkeypatch, contents)
    monkeypatch.syspath_prepend(sglang_dialect.INSIDE)
    for name in ("fivefold_processors", "fivefold_processors.images"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("fivefold_processors.images")


def test_sglang_gets_the_tokens_of_the_request_and_the_patches_at_their_places(processors: Any) -> None:
    asked = request(0, image(1, 2, 2, 3), image(2, 9, 1, 2))
    with SharedImages(torch.bfloat16, "image_data").held(asked.images) as shown:
        call = processors.PatchesOfImages().process_mm_data_async(
            image_data=shown["image_data"], audio_data=None, input_text=list(asked.token_ids), request_obj=None
        )
        output = asyncio.run(call)
    assert output.input_ids == list(asked.token_ids)
    assert output.im_token_id == 66
    assert [item.offsets for item in output.mm_items] == [[(2, 7)], [(9, 10)]]
    first, second = (item.pad_value for item in output.mm_items)
    assert first != second
    ids = output.input_ids
    assert output.padded_input_ids == [*ids[:2], *[first] * 6, ids[8], *[second] * 2, *ids[11:]]
    for item, meant in zip(output.mm_items, asked.images, strict=True):
        torch.testing.assert_close(item.feature, torch.from_numpy(meant.patches_PC).bfloat16(), rtol=0, atol=0)
        assert item.model_specific_data["image_grid_thw"].tolist() == [[1, meant.rows * MERGE, meant.columns * MERGE]]
    wanted = positions_with(asked.images, 14)
    assert output.mrope_positions.equal(wanted)
    assert output.mrope_position_delta.tolist() == [[int(wanted.max()) + 1 - 14]]


def test_images_of_one_name_have_one_hash_and_others_another(processors: Any) -> None:
    images = [image(1, 0, 2, 3), image(1, 8, 2, 3), image(1, 0, 3, 2), image(3, 0, 2, 3)]
    hashes = []
    for each in images:
        with SharedImages(torch.float32, "image_data").held([each]) as shown:
            [item] = [processors._item(form) for form in shown["image_data"]]
            hashes.append(item.hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
