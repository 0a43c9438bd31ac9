"""Boxes around objects of an image: read from text, paired by their overlap, and scored as in COCO.

A box is `{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}`, with x1 <= x2 and y1 <= y2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.json_text import parsed

MOST_FOUND = 100
"""Boxes of one label that count in the average precision, as in COCO."""
RECALLS = np.linspace(0.0, 1.0, 101)
"""Shares of the wanted boxes at which COCO reads the precision."""


@dataclass(frozen=True)
class Box:
    """An object's place and its name in lower case."""

    corners: tuple[float, float, float, float]
    label: str

    @property
    def area(self) -> float:
        """Its size."""
        x1, y1, x2, y2 = self.corners
        return (x2 - x1) * (y2 - y1)


def read_boxes(text: str) -> list[Box]:
    """Return the boxes of a list in JSON, the first one of each place; none of a text that is no such list.

    Single quotes count as double ones. A list that breaks off is read up to its last whole box.
    """
    text = text.strip().lower().replace("[[", "[").replace("]]", "]")
    if not text.endswith("]"):
        text = text.rsplit("},", 1)[0] + "}]"
    try:
        items = parsed(text.replace("'", '"').replace("\\", ""))
    except ValueError:
        return []
    return boxes_of(items)


def boxes_of(items: Any) -> list[Box]:
    """Return the boxes among the items of a list, the first one of each place."""
    found: dict[tuple[float, ...], Box] = {}
    for item in items if isinstance(items, list | tuple) else ():
        if (box := _box(item)) is not None:
            found.setdefault(box.corners, box)
    return list(found.values())


def _box(item: Any) -> Box | None:
    if not isinstance(item, dict) or not isinstance(item.get("label"), str):
        return None
    corners = item.get("bbox_2d")
    if not isinstance(corners, list | tuple) or len(corners) != 4:
        return None
    if not all(isinstance(each, int | float) and np.isfinite(each) for each in corners):
        return None
    x1, y1, x2, y2 = corners
    return Box((x1, y1, x2, y2), item["label"].lower()) if x1 <= x2 and y1 <= y2 else None


def overlaps(found: Sequence[Box], wanted: Sequence[Box]) -> npt.NDArray[np.float64]:
    """Return the shared area of each pair by the area that either box covers, [found, wanted]."""
    return np.array([[_overlap(one, other) for other in wanted] for one in found]).reshape(len(found), len(wanted))


def _overlap(one: Box, other: Box) -> float:
    (a1, b1, a2, b2), (c1, d1, c2, d2) = one.corners, other.corners
    width, height = min(a2, c2) - max(a1, c1), min(b2, d2) - max(b1, d1)
    if width <= 0 or height <= 0:
        return 0.0
    return float(width * height / (one.area + other.area - width * height))


def paired_by_overlap(found: Sequence[Box], wanted: Sequence[Box], least: float) -> list[float]:
    """Return the overlaps of pairs, the greatest first taken, 0 for one whose labels differ; those below `least` not.

    Args:
        found: boxes of a response.
        wanted: boxes of the ground truth.
        least: overlap of a pair, from 0 to 1.
    """
    left, pairs = overlaps(found, wanted), []
    while left.size and left.max() >= least:
        row, column = divmod(int(left.argmax()), left.shape[1])
        is_same = found[row].label == wanted[column].label
        pairs.append(float(left[row, column]) if is_same else 0.0)
        left[row, :] = left[:, column] = -1
    return pairs


def paired_by_label(found: Sequence[Box], wanted: Sequence[Box], least: float) -> list[float]:
    """Return the overlap of each wanted box with the one of its label that is left and overlaps it most.

    Args: see `paired_by_overlap`.
    """
    all_overlaps, pairs = overlaps(found, wanted), []
    left = set(range(len(found)))
    for column, box in enumerate(wanted):
        of_label = sorted(row for row in left if found[row].label == box.label)
        best = max(of_label, key=lambda row: all_overlaps[row, column], default=None)
        if best is not None and all_overlaps[best, column] >= least:
            pairs.append(float(all_overlaps[best, column]))
            left.remove(best)
    return pairs


def average_precision(found: Sequence[Box], wanted: Sequence[Box], least: float) -> float:
    """Return COCO's average precision of boxes without a confidence, mean over the labels of the ground truth.

    Boxes of other labels do not count. Args: see `paired_by_overlap`.
    """
    scores = []
    for label in dict.fromkeys(box.label for box in wanted):
        own_found, own_wanted = ([box for box in boxes if box.label == label] for boxes in (found, wanted))
        scores.append(_of_label(own_found, own_wanted, least))
    return fmean(scores)


def _of_label(found: Sequence[Box], wanted: Sequence[Box], least: float) -> float:
    found = found[:MOST_FOUND]
    left, is_right = overlaps(found, wanted), np.zeros(len(found))
    for row in range(len(found)):
        # Of equal overlaps, COCO takes the last one.
        column = left.shape[1] - 1 - int(left[row, ::-1].argmax())
        if left[row, column] >= least:
            is_right[row] = 1
            left[:, column] = -1
    hits = is_right.cumsum()
    recalls, precisions = hits / len(wanted), hits / np.arange(1, len(found) + 1)
    # The precision at a share of the wanted boxes is the highest one at this share or a greater one.
    best = np.maximum.accumulate(precisions[::-1])[::-1]
    return float(np.append(best, 0.0)[recalls.searchsorted(RECALLS, side="left")].mean())
