"""The reward `detection`: boxes of a response, as text, in pairs with those of the ground truth."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.boxes import boxes_of, paired_by_label, paired_by_overlap, read_boxes
from fivefold.rewards.detection import LEAST_OVERLAPS, Detection
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.static_check import reward_problems
from fivefold.types import ImagePart, Prompt
from tests.unit.rewards.conftest import judge


def boxes(*places: tuple[list[int], str]) -> list[dict[str, Any]]:
    return [{"bbox_2d": corners, "label": label} for corners, label in places]


def answer(found: list[dict[str, Any]]) -> str:
    return f"I see\n<answer>\n{json.dumps(found)}\n</answer>"


CAT, DOG = ([0, 0, 100, 100], "cat"), ([400, 0, 500, 200], "dog")
WANTED = boxes(CAT, ([200, 200, 300, 300], "cat"), DOG, ([600, 600, 700, 700], "cow"))
FOUND = boxes(
    ([0, 0, 100, 90], "cat"),
    CAT,
    ([205, 200, 300, 300], "cat"),
    ([400, 0, 500, 130], "dog"),
    ([1, 1, 2, 2], "bird"),
)


def test_average_precision_is_as_pycocotools_has_it() -> None:
    """The numbers are of pycocotools 2.0.10, for the same boxes with a score of 1 each."""
    found, wanted = boxes_of(FOUND), boxes_of(WANTED)
    for name, value in (("map", 0.40605061), ("map50", 0.61166117), ("map75", 0.27832783)):
        reward = Detection(**{"by_label": 0.0, "size_factor": 1.0, name: 2.0})
        assert reward.accuracy(found, wanted) == pytest.approx(value, abs=1e-8)


def test_pairs_have_one_label_or_the_greatest_overlap() -> None:
    found, wanted = boxes_of(FOUND), boxes_of(WANTED)
    assert paired_by_label(found, wanted, 0.5) == [1.0, 0.95, 0.65]
    assert paired_by_label(found, wanted, 0.9) == [1.0, 0.95]
    mixed = boxes_of(boxes(([0, 0, 100, 90], "dog"), ([0, 0, 100, 60], "cat")))
    assert paired_by_overlap(mixed, wanted, 0.5) == [0.0], "the greatest overlap has another label"
    assert paired_by_label(mixed, wanted, 0.5) == [0.6]


def test_the_reward_weighs_overlaps_partners_number_and_form() -> None:
    score = judge(resolve_reward(RewardConfig(fn="detection", kwargs={"completeness": 0.3})), answer(FOUND), WANTED)

    def of_pairs(pairs: list[float]) -> float:
        return 0.7 * sum(pairs) / 4 + 0.3 * (len(pairs) / 4 + len(pairs) / 5) / 2

    pairs = [[pair for pair in (1.0, 0.95, 0.65) if pair >= least] for least in LEAST_OVERLAPS]
    assert score == pytest.approx((0.6 * fmean(map(of_pairs, pairs)) + 0.1) / 1.1)
    reward = resolve_reward(RewardConfig(fn="detection"))
    assert judge(reward, answer(WANTED), answer(WANTED)) == pytest.approx(1.0)
    assert judge(reward, answer(WANTED).replace("\n", ""), WANTED) == pytest.approx(1 / 1.1), "no tags on lines"
    assert judge(reward, "no idea", WANTED) == 0.0
    own = {"detection": {"format_weight": 1.0}}
    assert judge(reward, answer(WANTED).replace("\n", ""), WANTED, own) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"extra_info\.detection=.* must be a mapping with some of"):
        judge(reward, answer(WANTED), WANTED, {"detection": {"weight": 1}})


def test_pixels_of_the_first_image_become_thousandths() -> None:
    reward = Detection(pixels_per_token=28)
    image = ImagePart("a.png", "model", 1, 0, rows=10, columns=20)  # 280 high, 560 wide
    response = answer(boxes(([56, 28, 280, 140], "cat")))
    prompt = Prompt(0, "q", (1,), boxes(([100, 100, 500, 500], "cat")), images=(image,))
    assert reward.judge_prompt(prompt, response) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="the prompt has no image whose pixels these are"):
        reward.judge_prompt(Prompt(0, "q", (1,), prompt.ground_truth), response)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        (json.dumps(FOUND), 5),
        (json.dumps([*FOUND, {**FOUND[0], "label": "dog"}]), 5),
        (json.dumps(FOUND).replace('"', "'"), 5),
        (json.dumps(FOUND)[:-9], 4),
        ('[{"bbox_2d": [9, 0, 1, 1], "label": "a"}, {"bbox_2d": [0, 0, 1], "label": "a"}]', 0),
        ('[{"bbox_2d": [0, 0, 1, NaN], "label": "a"}, {"bbox_2d": [0, 0, 1, 1], "label": 7}]', 0),
        ("[1, 2]", 0),
        ("", 0),
        ("[" * 100_000, 0),
    ],
)  # fmt: skip
def test_boxes_are_read_from_what_models_write(text: str, n: int) -> None:
    assert len(read_boxes(text)) == n


def test_what_cannot_be_scored_is_refused() -> None:
    for truth in ("no boxes", [], 7):
        with pytest.raises(ValueError, match="give a list of boxes"):
            Detection().check_ground_truth(truth)
    for name, value in (("map", -1.0), ("completeness", 2.0), ("size_factor", 1.5), ("by_label", "much")):
        (problem,) = reward_problems(RewardConfig(fn="detection", kwargs={name: value}))
        assert f"reward.kwargs.{name}={value!r}" in problem
    (problem,) = reward_problems(RewardConfig(fn="detection", kwargs={"accuracy_weight": 0, "format_weight": 0}))
    assert "both 0" in problem
