"""Images of prompts: from a column of the data to places among tokens, and from there to the patches of a vision tower.

row ─ encoded ─> bytes or a path ─┐
prompt with <image> ─ marked ─> text ─> tokens ─ expanded ─> tokens, ImagePart ...     on the driver, by sizes alone
ImagePart ─ placed ─> PlacedImage                                                      where a model needs the pixels
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fivefold.config.paths import user_path
from fivefold.config.schema.data import RowsConfig
from fivefold.data.chats import read_messages
from fivefold.data.files import Row
from fivefold.data.prompts import RenderedPrompt, render
from fivefold.families.shape import ModelShape
from fivefold.families.vision import VisionShape
from fivefold.types import ImagePart, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "<image>"
"""Stands for an image in the text of a prompt."""
_ORIENTATION, _TURNED = 0x0112, range(5, 9)
"""EXIF tag of an image's orientation, and its values with which width and height change places."""
_NOT_FILES = ("http://", "https://", "data:", "file://")
_FORMS = "the path of a file, the bytes of one, {'bytes': ..., 'path': ...} or an image of PIL, or a list of them"


@dataclass(frozen=True)
class PromptImages:
    """Reads the images of a data set's prompts for one model."""

    config: RowsConfig
    tokenizer: PreTrainedTokenizerBase
    vision: VisionShape
    processor: str
    """Folder or hub name of the model."""
    marker: str
    """What the model's chat template writes for an image."""
    folders: tuple[Path, ...]
    """Where files of images are looked for that have no absolute path."""
    pixels: tuple[int, int] | None
    """As in `ImagePart`."""

    @classmethod
    def of(cls, config: RowsConfig, tokenizer: PreTrainedTokenizerBase, model: str, shape: ModelShape) -> PromptImages:
        """Return the reader of `config.image_key` for the model at `model` (folder or hub name), whose shape is known.

        Raises:
            ValueError: a model that sees no images, a tokenizer without its tokens for them, or a model without a
                usable image processor.
        """
        vision = shape.vision
        if vision is None:
            raise ValueError(
                f"image_key={config.image_key!r} names images, and models of the family {shape.family} as they are "
                "read here see none: use a model of Qwen3-VL, or drop image_key"
            )
        marker = "".join(str(token) for token in tokenizer.convert_ids_to_tokens(list(vision.marker)))
        is_added = set(vision.marker) <= set(tokenizer.get_added_vocab().values())
        if not is_added or tokenizer.encode(marker, add_special_tokens=False) != list(vision.marker):
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} does not have the tokens {list(vision.marker)}, which "
                "stand for images in the model's config.json: use the tokenizer of the model"
            )
        processor = _processor(model, vision.merge, vision.patch_values)
        pixels = None
        if config.min_pixels is not None or config.max_pixels is not None:
            pixels = (
                config.min_pixels or processor.size["shortest_edge"],
                config.max_pixels or processor.size["longest_edge"],
            )
        paths = [config.path] if isinstance(config.path, str) else config.path
        folders = [path if path.is_dir() else path.parent for path in map(user_path, paths)]
        return cls(config, tokenizer, vision, model, marker, (*dict.fromkeys(folders), Path()), pixels)

    def rendered(self, prompt: Any, row: Row, where: str) -> RenderedPrompt:
        """Return the prompt of a row as the model sees it; of one that is too long as a text, without its images.

        Raises:
            ValueError: as `render`, `encoded`, `marked` and `expanded`.
        """
        config, images = self.config, self.of_row(row, where)
        prompt = self.asked(prompt, len(images), where)
        made = render(prompt, config, self.tokenizer, where, config.max_length)
        if len(made.token_ids) > config.max_length:
            return made
        token_ids, parts = self.expanded(made.token_ids, images, where)
        return replace(made, text=self.shown(made.text, parts), token_ids=token_ids, images=parts)

    def of_row(self, row: Row, where: str) -> tuple[str | bytes, ...]:
        """Return the images of a row, as `encoded`."""
        key = str(self.config.image_key)
        return self.encoded(row[key], f"{where}: column {key!r}")

    def asked(self, prompt: Any, n_images: int, where: str) -> Any:
        """Return a prompt as `marked`; one that is neither a text nor messages stays as it is."""
        prompt = prompt if self.config.apply_chat_template is False else read_messages(prompt)
        if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(each, Mapping) for each in prompt)):
            return self.marked(prompt, n_images, where)
        return prompt

    def marked(self, prompt: Any, n_images: int, where: str) -> Any:
        """Return a prompt, a text or messages, with the model's marker for each image.

        `<image>` in a text and parts {"type": "image"} of messages stand for images; without either, all images come
        first.

        Raises:
            ValueError: another number of placeholders than of images, or a part that is neither text nor image.
        """
        if not isinstance(prompt, str):
            prompt = [self._flat(message, where) for message in prompt]
        texts = [prompt] if isinstance(prompt, str) else [str(message.get("content") or "") for message in prompt]
        if any(self.marker in text for text in texts):
            raise ValueError(f"{where}: the prompt has {self.marker}, which stands for an image: write {PLACEHOLDER}")
        n = sum(text.count(PLACEHOLDER) for text in texts)
        if n == 0 and n_images:
            prompt = self._first(prompt, n_images)
        elif n != n_images:
            raise ValueError(
                f"{where}: the prompt has {n} placeholders of images ({PLACEHOLDER}, or parts of messages), and the "
                f"row {n_images} images: give one for each"
            )
        if isinstance(prompt, str):
            return prompt.replace(PLACEHOLDER, self.marker)
        return [
            {**message, "content": message["content"].replace(PLACEHOLDER, self.marker)}
            if isinstance(message.get("content"), str)
            else message
            for message in prompt
        ]

    def _flat(self, message: Any, where: str) -> Any:
        """Return a message whose parts are one text, with a placeholder for each image."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        pieces: list[Any] = []
        for part in message["content"]:
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind in ("video", "audio", "input_audio", "video_url"):
                raise ValueError(
                    f"{where}: a chat message holds {kind}, and models read text and images alone: drop it"
                )
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            pieces.append(PLACEHOLDER if kind == "image" else text)
        if not all(isinstance(piece, str) for piece in pieces):
            raise ValueError(
                f"{where}: a part of the chat message {message!r:.200} is neither a text nor an image of the column: "
                'write {"type": "text", "text": ...} and {"type": "image"}'
            )
        return {**message, "content": "".join(pieces)}

    @staticmethod
    def _first(prompt: Any, n: int) -> Any:
        """Return a prompt that begins, or whose first message of a user begins, with placeholders."""
        if isinstance(prompt, str):
            return PLACEHOLDER * n + prompt
        place = next((i for i, message in enumerate(prompt) if message.get("role") == "user"), 0)
        first = {**prompt[place], "content": PLACEHOLDER * n + str(prompt[place].get("content") or "")}
        return [*prompt[:place], first, *prompt[place + 1 :]]

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[str | bytes], where: str
    ) -> tuple[tuple[int, ...], tuple[ImagePart, ...]]:
        """Return tokens with as many for each image as it becomes, and the images with their places.

        Args:
            token_ids: tokens of a marked prompt, with one image token for each image.
            images: paths of files, or what files hold.
            where: the row, for error messages.

        Raises:
            ValueError: something that is no image, or one that cannot be resized; or image tokens that are no marker.
        """
        if token_ids.count(self.vision.image_token) != len(images):
            raise ValueError(
                f"{where}: the rendered prompt has {token_ids.count(self.vision.image_token)} tokens for "
                f"{len(images)} images: the chat template drops or repeats some"
            )
        expanded: list[int] = []
        parts: list[ImagePart] = []
        left = iter(images)
        for token in token_ids:
            if token == self.vision.image_token:
                parts.append(self._part(next(left), len(expanded), where))
                expanded += [token] * parts[-1].n_tokens
            else:
                expanded.append(token)
        return tuple(expanded), tuple(parts)

    def shown(self, text: str, images: Sequence[ImagePart]) -> str:
        """Return a rendered prompt as logs show it: `⟦image a.png, 3 x 4 tokens⟧` in the place of each marker."""
        for image in images:
            name = f" {Path(image.source).name}" if isinstance(image.source, str) else ""
            text = text.replace(self.marker, f"⟦image{name}, {image.rows} x {image.columns} tokens⟧", 1)
        return text

    def _part(self, source: str | bytes, start: int, where: str) -> ImagePart:
        content = _content(source, where)
        try:
            with Image.open(io.BytesIO(content)) as image:
                width, height = image.size
                if image.getexif().get(_ORIENTATION) in _TURNED:
                    width, height = height, width
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{where}: {_named(source)} is no image that PIL reads ({error}): convert it") from error
        processor = _processor(self.processor, self.vision.merge, self.vision.patch_values)
        try:
            rows, columns = _token_grid(processor, height, width, self.pixels)
        except ValueError as error:
            raise ValueError(f"{where}: {_named(source)} cannot be resized for the model: {error}") from error
        return ImagePart(source, self.processor, digest_of(content), start, rows, columns, self.pixels)

    def encoded(self, value: Any, where: str) -> tuple[str | bytes, ...]:
        """Return the images of a row's column, each as an absolute path or as what its file holds; null: none.

        Raises:
            ValueError: a value of another form, an address, or a file that does not exist.
        """
        if value is None:
            return ()
        return tuple(self._encoded(item, where) for item in (value if isinstance(value, (list, tuple)) else [value]))

    def _encoded(self, value: Any, where: str) -> str | bytes:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path") or value.get("image")
        if isinstance(value, Image.Image):
            held = io.BytesIO()
            value.save(held, "PNG")
            return held.getvalue()
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise ValueError(f"{where}: an image is {_FORMS}, not {value!r:.80}, a {type(value).__name__}")
        if value.startswith(_NOT_FILES):
            raise ValueError(
                f"{where}: the image {value!r:.80} is an address or text of base64, and images are read from files or "
                "bytes alone: write it into a file, and give its path"
            )
        path = user_path(value)
        found = next((each for folder in self.folders if (each := folder / path).is_file()), None)
        if found is None:
            looked = " and ".join(str(folder.resolve()) for folder in self.folders)
            raise ValueError(f"{where}: there is no image {value!r:.200} (looked in {looked}): give {_FORMS}")
        return str(found.resolve())


def placed(images: Sequence[ImagePart]) -> tuple[PlacedImage, ...]:
    """Return images as a vision tower takes them. Equal ones share their patches.

    Raises:
        ValueError: a file that is gone, or that has changed since the data set was read.
    """
    patches = {image.digest: image for image in images}
    made = {digest: _patches(image) for digest, image in patches.items()}
    return tuple(PlacedImage(made[each.digest], each.digest, each.start, each.rows, each.columns) for each in images)


def _patches(part: ImagePart) -> np.ndarray[Any, np.dtype[np.float32]]:
    content = _content(part.source, "a prompt")
    if digest_of(content) != part.digest:
        raise ValueError(
            f"{_named(part.source)} is not the image that it was when the data set was read: keep the files of a run "
            "as they are, and the same on every node"
        )
    processor = _processor(part.processor)
    with Image.open(io.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    size = (
        {} if part.pixels is None else {"size": dict(zip(("shortest_edge", "longest_edge"), part.pixels, strict=True))}
    )
    made = processor.preprocess([upright], return_tensors="np", **size)
    merge = processor.merge_size
    assert made["image_grid_thw"].tolist() == [[1, part.rows * merge, part.columns * merge]]
    return np.ascontiguousarray(made["pixel_values"], dtype=np.float32)


def digest_of(content: bytes) -> int:
    """Return a number below 2**63 that follows from what a file holds."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _content(source: str | bytes, where: str) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"{where}: the image {source} cannot be read: {error.strerror}") from error


def _named(source: str | bytes) -> str:
    return f"the image {source}" if isinstance(source, str) else f"an image of {len(source):,} bytes"


def _token_grid(processor: Any, height: int, width: int, pixels: tuple[int, int] | None) -> tuple[int, int]:
    """Return the rows and columns of tokens that an image becomes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    side = processor.patch_size * processor.merge_size
    least, most = pixels or (processor.size["shortest_edge"], processor.size["longest_edge"])
    rows, columns = (length // side for length in smart_resize(height, width, side, min_pixels=least, max_pixels=most))
    if not rows or not columns:
        raise ValueError(f"{height} x {width} pixels make no token of {side} x {side}")
    return rows, columns


@lru_cache(maxsize=4)
def _processor(folder: str, merge: int | None = None, patch_values: int | None = None) -> Any:
    """Return the image processor of a model, whose patches have the sizes of its vision tower, if these are given.

    It is the one on PIL, whether torchvision is installed or not: the two resize differently.
    """
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder!r} has no usable image processor ({error}): put the model's preprocessor_config.json there"
        ) from error
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        raise ValueError(
            f"the image processor of {folder!r} is a {type(processor).__name__}, and Qwen2VLImageProcessor is the one "
            "that is known: put the model's own preprocessor_config.json there"
        )
    own = 3 * processor.temporal_patch_size * processor.patch_size**2, processor.merge_size
    if merge is not None and own != (patch_values, merge):
        raise ValueError(
            f"the image processor of {folder!r} makes patches of {own[0]} numbers and tokens of {own[1]} x {own[1]} "
            f"patches, and the model's vision_config has {patch_values} and {merge}: put its own "
            "preprocessor_config.json there"
        )
    return processor
