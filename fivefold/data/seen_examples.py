"""Images of examples with given answers: their places among the tokens, and their patches in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fivefold.batch import RowImages
from fivefold.data.files import Row
from fivefold.data.images import PromptImages, placed
from fivefold.data.sft import SFTExample


@dataclass(frozen=True)
class ExampleImages:
    """The images of one row, for the examples that are made of it."""

    reader: PromptImages
    sources: tuple[str | bytes, ...]
    """As `PromptImages.encoded` returns them."""
    where: str
    """The row, for error messages."""

    @classmethod
    def of(cls, reader: PromptImages, row: Row, where: str) -> ExampleImages:
        """Read a row's column of images. Raises as `PromptImages.encoded`."""
        return cls(reader, reader.of_row(row, where), where)

    def asked(self, prompt: Any) -> Any:
        """Return a prompt, or a conversation, with the model's marker for each image. Raises as `marked`."""
        return self.reader.asked(prompt, len(self.sources), self.where)

    def seen(self, example: SFTExample, *, is_whole: bool = True) -> SFTExample:
        """Return an example with as many tokens for each marker as its image becomes; one that is too long stays.

        Args:
            example: made of a marked prompt.
            is_whole: whether all of the row's images are in it; a conversation's first examples may have some alone.

        Raises:
            ValueError: as `expanded`, or an image in an answer.
        """
        if example.n_tokens > self.reader.config.max_length:
            return example
        token, prompt = self.reader.vision.image_token, example.prompt_ids
        if token in example.response_ids or any(token in prompt[start:end] for start, end in example.earlier):
            raise ValueError(
                f"{self.where}: an answer has an image, and models answer with text alone: move it to the question"
            )
        places = [place for place, each in enumerate(prompt) if each == token]
        sources = self.sources if is_whole else self.sources[: len(places)]
        prompt_ids, images = self.reader.expanded(prompt, sources, self.where)

        def moved(place: int) -> int:
            return place + sum(image.n_tokens - 1 for old, image in zip(places, images, strict=True) if old < place)

        earlier = tuple((moved(start), moved(end)) for start, end in example.earlier)
        return replace(example, prompt_ids=prompt_ids, earlier=earlier, images=images)


def row_images(examples: Sequence[SFTExample]) -> RowImages:
    """Return the images of examples as a vision tower takes them. Raises as `placed`."""
    flat = iter(placed([image for example in examples for image in example.images]))
    return tuple(tuple(next(flat) for _ in example.images) for example in examples)
