"""Images in episodes: sequences that begin otherwise than the row's prompt have the same images at other places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fivefold.types import Episode, PlacedImage, Prompt


def image_token(prompt: Prompt) -> int:
    """Return the token that stands for images in a prompt with some."""
    return prompt.token_ids[prompt.images[0].start]


def expanded(token_ids: Sequence[int], images: Sequence[PlacedImage], token: int) -> tuple[int, ...]:
    """Return the tokens of a text that has `token` once for each image, with as many as each image becomes.

    Raises:
        ValueError: another number of such tokens than of images.
    """
    _check(sum(each == token for each in token_ids), len(images))
    left = iter(images)
    return tuple(each for one in token_ids for each in ([one] * next(left).n_tokens if one == token else [one]))


def placed_among(token_ids: Sequence[int], images: Sequence[PlacedImage], token: int) -> tuple[PlacedImage, ...]:
    """Return the images where they are among the tokens of a sequence, which `expanded` has made.

    Raises:
        ValueError: the sequence has more or fewer tokens of images.
    """
    places = [place for place, each in enumerate(token_ids) if each == token]
    _check(len(places), sum(image.n_tokens for image in images), "tokens of ")
    found, first = [], 0
    for image in images:
        found.append(replace(image, start=places[first]))
        first += image.n_tokens
    return tuple(found)


def with_images(episode: Episode, prompt: Prompt, images: Sequence[PlacedImage]) -> Episode:
    """Return an episode whose sequences have the images of its prompt at their places.

    Raises:
        ValueError: as `placed_among`.
    """
    token = image_token(prompt)
    trajectories = (
        replace(each, images=placed_among(each.tokens_T.tolist(), images, token)) for each in episode.trajectories
    )
    return replace(episode, trajectories=tuple(trajectories))


def _check(found: int, wanted: int, what: str = "") -> None:
    if found != wanted:
        raise ValueError(
            f"a sequence of an episode has {found} {what}images, and its prompt {wanted}: what an environment adds "
            "must be text, and the chat template must write the row's messages once"
        )
