"""The reward `detection`: how well a response's boxes cover the objects of an image."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from fivefold.rewards.boxes import (
    Box,
    average_precision,
    boxes_of,
    paired_by_label,
    paired_by_overlap,
    read_boxes,
)
from fivefold.rewards.contract import QuickReward
from fivefold.types import ImagePart, Prompt

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LEAST_OVERLAPS = (*(round(0.5 + 0.05 * step, 2) for step in range(10)), 0.99)
"""Overlaps from which two boxes are a pair; the scores of all are averaged."""
COCOS = LEAST_OVERLAPS[:10]
"""The ones of COCO's average precision."""
THOUSANDTHS = 1000
"""Width and height of an image in the ground truth."""
KEY = "detection"
"""Key of `extra_info` that changes arguments for a row."""


@dataclass(frozen=True)
class Detection(QuickReward):
    """Scores a list of boxes in `<answer>` tags, each tag on a line.

        <answer>
        [{"bbox_2d": [120, 40, 480, 610], "label": "cat"}]
        </answer>

    The accuracy is the mean of the scores that have a weight, times `size_factor` for each box too many or too few. The
    reward is its mean with the form's score, by their weights. The ground truth is such an answer, or the list alone,
    in thousandths of the image's width and height.
    """

    by_label: float = 1.0
    """Weight of the overlap of pairs with one label, in the order of the ground truth."""
    by_overlap: float = 0.0
    """Weight of the overlap of pairs of any label, the greatest first; 0 for two labels."""
    map: float = 0.0
    """Weight of COCO's mean average precision."""
    map50: float = 0.0
    """Weight of the average precision from an overlap of 0.5 on."""
    map75: float = 0.0
    """Weight of the average precision from an overlap of 0.75 on."""
    completeness: float = 0.0
    """Share that boxes without a partner have in the score of pairs, in the place of their overlap."""
    accuracy_weight: float = 1.0
    """Weight of the accuracy."""
    format_weight: float = 0.1
    """Weight of the form, whose score is 1 with a list between tags on separate lines."""
    size_factor: float = 0.6
    """Factor of the accuracy for each box by which the response has more or fewer."""
    pixels_per_token: int | None = None
    """Width and height, in pixels, of a token of the first image, if responses are in its pixels; None: in
    thousandths."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"reward.kwargs.{name}={value} must be a finite number of at least 0")
        for name in ("completeness", "size_factor"):
            if getattr(self, name) > 1:
                raise ValueError(f"reward.kwargs.{name}={getattr(self, name)} must be from 0 to 1")
        if self.accuracy_weight + self.format_weight == 0:
            raise ValueError("reward.kwargs.accuracy_weight and format_weight are both 0: raise one")

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth without boxes.

        Raises:
            ValueError: it has none.
        """
        if not _wanted(ground_truth):
            raise ValueError(
                f"the ground truth is {ground_truth!r:.200}: give a list of boxes, such as "
                '[{"bbox_2d": [120, 40, 480, 610], "label": "cat"}]'
            )

    def judge_prompt(self, prompt: Prompt, response: str) -> float:
        """Return the reward of one response.

        Raises:
            ValueError: `extra_info` has other arguments than these, or `pixels_per_token` is set and the prompt has no
                image.
        """
        own = self._of_row(prompt.extra_info)
        found, wanted = read_boxes(_answer(response)), _wanted(prompt.ground_truth)
        form = float(bool(found) and "\n<answer>\n" in response and response.count("\n</answer>") == 1)
        if own.pixels_per_token:
            found = [_in_thousandths(box, prompt.images, own.pixels_per_token) for box in found]
        accuracy = own.accuracy(found, wanted) if found else 0.0
        total = own.accuracy_weight + own.format_weight
        return (accuracy * own.accuracy_weight + form * own.format_weight) / total

    def accuracy(self, found: Sequence[Box], wanted: Sequence[Box]) -> float:
        """Return the score of boxes from 0 to 1.

        Args:
            found: boxes of a response, at least one.
            wanted: boxes of the ground truth, at least one.
        """
        weights = {name: getattr(self, name) for name in ("by_label", "by_overlap", "map", "map50", "map75")}
        if not (total := sum(weights.values())):
            return 0.0
        scores = {name: self._score(name, found, wanted) for name, weight in weights.items() if weight}
        return (
            sum(weights[name] * score for name, score in scores.items())
            / total
            * self.size_factor ** abs(len(found) - len(wanted))
        )

    def _score(self, name: str, found: Sequence[Box], wanted: Sequence[Box]) -> float:
        match name:
            case "by_label":
                return fmean(
                    self._of_pairs(paired_by_label(found, wanted, each), found, wanted) for each in LEAST_OVERLAPS
                )
            case "by_overlap":
                return fmean(
                    self._of_pairs(paired_by_overlap(found, wanted, each), found, wanted) for each in LEAST_OVERLAPS
                )
            case "map":
                return fmean(average_precision(found, wanted, each) for each in COCOS)
            case _:
                return average_precision(found, wanted, int(name.removeprefix("map")) / 100)

    def _of_pairs(self, pairs: Sequence[float], found: Sequence[Box], wanted: Sequence[Box]) -> float:
        overlap = sum(pairs) / len(wanted)
        complete = (len(pairs) / len(wanted) + len(pairs) / len(found)) / 2
        return overlap * (1 - self.completeness) + complete * self.completeness

    def _of_row(self, extra_info: Mapping[str, Any]) -> Detection:
        """Return this reward with the arguments that a row has."""
        changed = extra_info.get(KEY)
        if not changed:
            return self
        known = {field.name for field in fields(self)}
        if not isinstance(changed, Mapping) or not changed.keys() <= known:
            raise ValueError(f"extra_info.{KEY}={changed!r} must be a mapping with some of {sorted(known)}")
        return replace(self, **changed)


def _answer(text: str) -> str:
    found = ANSWER.search(text)
    return found[1] if found else ""


def _wanted(ground_truth: Any) -> list[Box]:
    if isinstance(ground_truth, str):
        return read_boxes(_answer(ground_truth) or ground_truth)
    return boxes_of(ground_truth)


def _in_thousandths(box: Box, images: Sequence[ImagePart], per_token: int) -> Box:
    if not images:
        raise ValueError("reward.kwargs.pixels_per_token is set, and the prompt has no image whose pixels these are")
    width, height = images[0].columns * per_token, images[0].rows * per_token
    x1, y1, x2, y2 = (
        int(each / side * THOUSANDTHS) for each, side in zip(box.corners, (width, height, width, height), strict=True)
    )
    return Box((x1, y1, x2, y2), box.label)
