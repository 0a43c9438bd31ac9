"""Images among examples with given answers: for supervised fine-tuning, DPO, KTO and reward models."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from fivefold.config.schema.data import DPORowsConfig, ExpertDatasetConfig, PreferenceRowsConfig, SFTRowsConfig
from fivefold.data.images import placed
from fivefold.data.preferences import load_labelled, load_pairs, score_columns
from fivefold.data.prompts import load_prompts
from fivefold.data.sft import load_sft, sft_columns
from fivefold.dpo import LabelledAnswers
from fivefold.families.read import find_shape
from fivefold.rollout.tokenizer import load_tokenizer
from tests.unit.data.test_images import config as prompt_config

FOLDER = Path(__file__).resolve().parents[3] / "fivefold" / "models" / "tiny-vl"
MODEL = str(FOLDER), find_shape(str(FOLDER))
IMAGE = 4
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(FOLDER))


def png(width: int, height: int, colour: str) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(held, "PNG")
    return held.getvalue()


RED, BLUE = png(16, 24, "red"), png(24, 8, "blue")
"""Images of 3 x 2 tokens and of 1 x 3."""


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[[list[dict[str, Any]]], str]:
    def write(rows: list[dict[str, Any]]) -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
        return str(tmp_path / "data.parquet")

    return write


def grids(images: Any) -> list[tuple[int, int, int]]:
    return [(image.start, image.rows, image.columns) for image in images]


def test_an_example_has_the_tokens_of_the_prompt_that_is_sampled(parquet: Load, words: Any) -> None:
    """Training on answers and sampling them see the same prompt."""
    prompt = [ask("<image> is the square <image> red")]
    path = parquet([{"image": [RED, BLUE], "prompt": prompt, "answer": "blue"}])
    [example] = load_sft(SFTRowsConfig(path=path, image_key="image", response_key="answer"), words, MODEL).examples
    [sampled] = load_prompts(prompt_config(path, answer_key="answer"), words, MODEL).prompts
    assert example.prompt_ids == sampled.token_ids
    assert example.images == sampled.images
    assert [(image.rows, image.columns) for image in example.images] == [(3, 2), (1, 3)]
    assert words.decode(example.response_ids) == "blue <|im_end|>"
    columns = sft_columns([example])
    assert columns.values["mask"].tolist() == [False] * len(sampled.token_ids) + [True] * 2
    assert columns.images is not None
    for mine, other in zip(columns.images[0], placed(sampled.images), strict=True):
        np.testing.assert_array_equal(mine.patches_PC, other.patches_PC)
        assert (columns.values["tokens"][mine.start : mine.start + mine.n_tokens] == IMAGE).all()


def test_each_example_of_a_conversation_has_the_images_before_its_answer(parquet: Load, words: Any) -> None:
    talk = [ask("<image> what colour"), say("red"), ask("is <image> red"), say("blue"), ask("what"), say("square")]
    path = parquet([{"image": [RED, BLUE], "talk": talk}])
    rows = SFTRowsConfig(path=path, image_key="image", messages_key="talk", max_length=64)
    [example] = load_sft(rows, words, MODEL).examples
    learned = np.array([*example.prompt_ids, *example.response_ids])[example.mask()]
    assert words.decode(learned.tolist()).split() == ["red", "<|im_end|>", "blue", "<|im_end|>", "square", "<|im_end|>"]
    text = words.decode(example.prompt_ids)
    assert text.count("<|image_pad|>") == 6 + 3
    for image in example.images:
        around = example.prompt_ids[image.start - 1], example.prompt_ids[image.start + image.n_tokens]
        assert around == (3, 6)

    # A template that drops earlier answers makes an example of each, the first without the second image.
    words.chat_template, kept = (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }} "
            "{{ m.content if m.role == 'user' or loop.last else 'what' }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
        ),
        words.chat_template,
    )
    try:
        first, second, third = load_sft(rows, words, MODEL).examples
    finally:
        words.chat_template = kept
    assert [grids(each.images) for each in (first, second)] == [[(3, 3, 2)], grids(third.images)]
    assert len(third.images) == 2


def test_pairs_and_labelled_answers_have_their_prompts_images(parquet: Load, words: Any) -> None:
    rows = [
        {"image": [RED], "prompt": [ask("what")], "chosen": [say("red")], "rejected": [say("blue")], "label": True},
        {"image": [], "prompt": [ask("is")], "chosen": [say("blue")], "rejected": [say("is red")], "label": False},
    ]
    path = parquet(rows)
    first, second = load_pairs(PreferenceRowsConfig(path=path, image_key="image"), words, MODEL).examples
    assert first.chosen.prompt_ids == first.rejected.prompt_ids
    assert grids(first.chosen.images) == grids(first.rejected.images) != []
    assert second.chosen.images == ()
    answers = [first.chosen, first.rejected, second.chosen]
    for columns in (sft_columns(answers), score_columns(answers)):
        assert columns.images is not None
        assert [grids(row) for row in columns.images] == [grids(each.images) for each in answers]
        assert columns.images[0][0].patches_PC is columns.images[1][0].patches_PC  # which are made once
    assert sft_columns([second.chosen]).images is None

    whole = [
        {**row, "chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]]}
        for row in rows
    ]
    assert load_pairs(PreferenceRowsConfig(path=parquet(whole), image_key="image"), words, MODEL).examples == (
        first,
        second,
    )
    single = DPORowsConfig(path=parquet(rows), image_key="image", response_key="chosen", label_key="label")
    labelled = load_labelled(single, words, MODEL).examples
    assert [each.answer for each in labelled] == [first.chosen, second.chosen]
    method: Any = LabelledAnswers(SimpleNamespace(actor=None))  # type: ignore[arg-type]
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fivefold.dpo.RemoteBatch.of", made.append)
        patch.setattr("fivefold.dpo.KahnemanTversky", lambda *given: None)
        patch.setattr("fivefold.dpo.Comparison", lambda *given, **more: None)
        method._comparison(labelled)
    # Each prompt, with its image, comes with its own answer and with the other one's.
    assert [len(row) for row in made[0].images] == [1, 0, 1, 0]


def test_other_images_make_another_data_set(parquet: Load, words: Any) -> None:
    def print_of(image: bytes) -> str:
        path = parquet([{"image": image, "prompt": "<image> what", "answer": "red"}])
        rows = SFTRowsConfig(path=path, image_key="image", response_key="answer")
        data = load_sft(rows, words, MODEL)
        assert data.largest_token < len(words)
        return data.fingerprint()

    assert print_of(RED) != print_of(png(16, 24, "blue"))
    assert print_of(RED) == print_of(RED)


def test_tokens_of_images_count_for_the_length(parquet: Load, words: Any) -> None:
    path = parquet([{"image": image, "prompt": "<image> what", "answer": "red"} for image in (RED, BLUE)])
    rows = SFTRowsConfig(path=path, image_key="image", response_key="answer", max_length=9)
    data = load_sft(rows, words, MODEL)
    assert (len(data), data.n_too_long) == (1, 1)
    assert data.longest == 8


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"image": [RED], "prompt": "what", "answer": "<|vision_start|><|image_pad|><|vision_end|>"}, "answer has an"),
        ({"image": [RED], "prompt": "<image> <image>", "answer": "red"}, "has 2 placeholders of images"),
        ({"image": [b"no image"], "prompt": "<image>", "answer": "red"}, "is no image that PIL reads"),
    ],
)
def test_rows_that_cannot_be_read_are_named(parquet: Load, words: Any, row: dict[str, Any], error: str) -> None:
    rows = SFTRowsConfig(path=parquet([row]), image_key="image", response_key="answer")
    with pytest.raises(ValueError, match=rf"row 1 of .*{error}"):
        load_sft(rows, words, MODEL)


def test_an_image_in_an_earlier_answer_is_refused(parquet: Load, words: Any) -> None:
    talk = [ask("what"), say("<image> red"), ask("is"), say("blue")]
    rows = SFTRowsConfig(path=parquet([{"image": [RED], "talk": talk}]), image_key="image", messages_key="talk")
    with pytest.raises(ValueError, match="an answer has an image"):
        load_sft(rows, words, MODEL)


def test_expert_responses_have_no_images() -> None:
    with pytest.raises(ValueError, match="image_key='image': an expert's prompts are read as texts alone"):
        ExpertDatasetConfig(path="a.parquet", image_key="image")
