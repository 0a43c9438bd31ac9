"""Images of prompts: columns of every form, places among tokens, and the patches that a vision tower gets."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.images import placed
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.families.read import find_shape
from fivefold.rollout.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "fivefold" / "models" / "tiny-vl"
MODEL = str(FOLDER), find_shape(str(FOLDER))
IMAGE, START, END = 4, 3, 6
"""Tokens of the shipped model."""
Write = Callable[..., str]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(FOLDER))


def png(width: int = 24, height: int = 40, colour: str = "red", **options: Any) -> bytes:
    """Return an image whose left third is white, so that no turn leaves it as it is."""
    image, held = Image.new("RGB", (width, height), colour), io.BytesIO()
    image.paste("white", (0, 0, width // 3, height))
    image.save(held, options.pop("format", "PNG"), **options)
    return held.getvalue()


def config(path: str, **keys: Any) -> DatasetConfig:
    return DatasetConfig(**{"path": path, "image_key": "image", "answer_key": "answer", "max_length": 64} | keys)


def load(path: str, words: PreTrainedTokenizerBase, **keys: Any) -> PromptDataset:
    return load_prompts(config(path, **keys), words, MODEL)


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return str(folder / "data.parquet")


def row(image: Any, prompt: Any = "<image> what colour") -> dict[str, Any]:
    return {"image": image, "prompt": prompt, "answer": "red"}


def processed(content: bytes, **options: Any) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Return what transformers' own processor makes of an image."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(FOLDER)
    made = processor.preprocess([Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="np", **options)
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def test_images_of_every_form_are_the_same(tmp_path: Path, write_jsonl: Write, words: PreTrainedTokenizerBase) -> None:
    content = png()
    (tmp_path / "a.png").write_bytes(content)
    forms = parquet(tmp_path, [row([{"bytes": content, "path": "x.png"}]), row([{"bytes": None, "path": "a.png"}])])
    paths = write_jsonl([row("a.png"), row([str(tmp_path / "a.png")])])
    prompts = [*load(forms, words).prompts, *load(paths, words).prompts]
    assert "⟦image a.png, 5 x 3 tokens⟧" in prompts[-1].text
    [digest] = {prompt.images[0].digest for prompt in prompts}
    assert len({prompt.token_ids for prompt in prompts}) == 1
    wanted, grid = processed(content)
    for prompt in prompts:
        [image] = placed(prompt.images)
        assert (image.patches_PC == wanted).all()
        assert [1, 2 * image.rows, 2 * image.columns] == grid
        assert image.digest == digest


def test_images_of_pil_and_rows_of_a_reader(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    (tmp_path / "own.py").write_text(
        "from PIL import Image\n"
        "def rows(path, split):\n"
        "    yield {'image': Image.new('RGB', (16, 16), 'red'), 'prompt': 'what colour', 'answer': 'red'}\n"
    )
    [prompt] = load("anything", words, reader=f"{tmp_path / 'own.py'}:rows").prompts
    assert prompt.images[0].n_tokens == 4


def test_tokens_of_images_are_where_the_prompt_has_them(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    first, second = png(), png(48, 16, "blue")
    parts = [{"type": "text", "text": "what "}, {"type": "image"}, {"type": "text", "text": " is the "}]
    chat = [{"role": "user", "content": [*parts, {"type": "image"}]}]
    text = [{"role": "user", "content": "what <image> is the <image>"}]
    images = [{"bytes": first}, {"bytes": second}]
    own = tmp_path / "own.py"
    own.write_text(f"ROWS = {[row(images, chat), row(images, text)]!r}\ndef rows(path, split):\n    yield from ROWS\n")
    of_parts, of_text = load("anything", words, reader=f"{own}:rows").prompts
    assert of_parts.token_ids == of_text.token_ids
    assert of_parts.text.count("⟦image, ") == 2
    assert "<|image_pad|>" not in of_parts.text
    sizes = [rows * columns for _, (_, rows, columns) in map(processed, (first, second))]
    for image, n_patches in zip(of_parts.images, sizes, strict=True):
        assert image.n_tokens == n_patches // 4
        span = of_parts.token_ids[image.start - 1 : image.start + image.n_tokens + 1]
        assert span == (START, *[IMAGE] * image.n_tokens, END)
    assert of_parts.token_ids.count(IMAGE) == sum(image.n_tokens for image in of_parts.images)


def test_images_come_first_where_a_prompt_does_not_place_them(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "assistant", "content": "red"}, {"role": "user", "content": "what colour"}]
    data = load(parquet(tmp_path, [row([{"bytes": png()}], chat), row([], chat)]), words)
    seen, plain = data.prompts
    assert not plain.images
    assert words.decode([token for token in seen.token_ids if token not in (START, IMAGE, END)]) == words.decode(
        list(plain.token_ids)
    )
    assert data.placeholders == (IMAGE, 5)


def test_photographs_are_turned_as_their_camera_says(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, upright = png(48, 16, exif=exif), png(48, 16)
    [prompt, plain] = load(parquet(tmp_path, [row({"bytes": turned}), row({"bytes": upright})]), words).prompts
    [own], [other] = placed(prompt.images), placed(plain.images)
    assert (own.rows, own.columns) == (other.columns, other.rows)


@pytest.mark.parametrize("keys", [{"max_pixels": 300}, {"min_pixels": 2000}, {"min_pixels": 500, "max_pixels": 800}])
def test_pixels_are_bounded(tmp_path: Path, words: PreTrainedTokenizerBase, keys: dict[str, int]) -> None:
    content = png()
    [prompt] = load(parquet(tmp_path, [row({"bytes": content})]), words, **keys).prompts
    size = {"shortest_edge": keys.get("min_pixels", 64), "longest_edge": keys.get("max_pixels", 16384)}
    wanted, grid = processed(content, size=size)
    [image] = placed(prompt.images)
    assert [1, 2 * image.rows, 2 * image.columns] == grid
    assert (image.patches_PC == wanted).all()
    assert grid != processed(content)[1]


def test_prompts_that_images_make_too_long_are_dropped(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    path = parquet(tmp_path, [row({"bytes": png()}), row({"bytes": png(400, 400)}), row({"bytes": png()}, "is " * 70)])
    data = load(path, words)
    assert (len(data), data.n_too_long) == (1, 2)


def test_prompts_differ_by_their_images(tmp_path: Path, words: PreTrainedTokenizerBase) -> None:
    one, other = parquet(tmp_path, [row({"bytes": png()}), row({"bytes": png(colour="blue")})]), png(colour="green")
    data = load(one, words)
    assert data.prompts[0].token_ids == data.prompts[1].token_ids
    assert data.prompts[0].key != data.prompts[1].key
    changed = load(parquet(tmp_path, [row({"bytes": png()}), row({"bytes": other})]), words)
    assert data.fingerprint() != changed.fingerprint()


def test_a_file_that_changes_during_a_run_is_refused(
    tmp_path: Path, write_jsonl: Write, words: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    [prompt] = load(write_jsonl([row("a.png")]), words).prompts
    (tmp_path / "a.png").write_bytes(png(colour="blue"))
    with pytest.raises(ValueError, match=r"a\.png is not the image that it was"):
        placed(prompt.images)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"a\.png cannot be read"):
        placed(prompt.images)


@pytest.mark.parametrize(
    ("image", "prompt", "error"),
    [
        ("https://x.org/a.png", "what", "'https://x.org/a.png' is an address or text of base64"),
        ("data:image/png;base64,AAAA", "what", "is an address or text of base64"),
        ("b.png", "what", "there is no image 'b.png'"),
        (7, "what", "an image is the path of a file, .* not 7, a int"),
        (["a.png", "a.png"], "<image> what", "has 1 placeholders of images .* and the row 2 images"),
        (None, "<image> what", "has 1 placeholders of images .* and the row 0 images"),
        ("a.png", "<|vision_start|><|image_pad|><|vision_end|> what", "which stands for an image: write <image>"),
        ("a.png", "<|image_pad|> what", "has 2 tokens for 1 images"),
        ("a.png", [{"role": "user", "content": [{"type": "video"}]}], "holds video"),
        ("a.png", [{"role": "user", "content": [{"type": "text"}]}], "is neither a text nor an image"),
        ("c.png", "what", "c.png is no image that PIL reads"),
        ("long.png", "what", "cannot be resized for the model: absolute aspect ratio"),
    ],
)
def test_what_is_no_image_of_the_prompt_is_refused(
    tmp_path: Path, write_jsonl: Write, words: PreTrainedTokenizerBase, image: Any, prompt: Any, error: str
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "long.png").write_bytes(png(900, 3))
    (tmp_path / "c.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"row 1 of .*{error}"):
        load(write_jsonl([row(image, prompt)]), words)


@pytest.mark.parametrize(
    ("model", "tokens_of", "error"),
    [
        ("tiny-moe", "tiny-vl", "models of the family qwen3_moe as they are read here see none"),
        ("tiny-vl", "tiny-moe", "does not have the tokens [3, 4, 6]"),
    ],
)
def test_models_and_tokenizers_that_see_nothing_are_refused(
    tmp_path: Path, model: str, tokens_of: str, error: str
) -> None:
    path = parquet(tmp_path, [row({"bytes": png()})])
    tokenizer, folder = load_tokenizer(str(FOLDER.parent / tokens_of)), str(FOLDER.parent / model)
    with pytest.raises(ValueError, match=re.escape(error)):
        load_prompts(config(path), tokenizer, (folder, find_shape(folder)))


def test_the_section_of_the_page_bounds_images_as_it_says() -> None:
    page = (FOLDER.parents[2] / "docs" / "vision.md").read_text()
    [block] = re.findall(r"^    train_dataset:\n(?:      .*\n)+", page, re.M)
    section = DatasetConfig.model_validate(yaml.safe_load(block)["train_dataset"])
    assert section.max_pixels is not None
    [n_tokens] = re.findall(r"at most (\d+) tokens of 32 x 32 pixels", block)
    assert section.max_pixels == int(n_tokens) * 32 * 32


def test_rows_need_the_column(write_jsonl: Write, words: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="has no column 'image', which image_key asks for"):
        load(write_jsonl([{"prompt": "what", "answer": "red"}]), words)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"truncation": "left"}, "truncation=left would cut images apart"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 is above max_pixels=8"),
    ],
)
def test_keys_that_contradict_images_are_refused(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        config("data.jsonl", **keys)
