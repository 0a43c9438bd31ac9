"""Make what `recipes/squares.yaml` needs: the model `package:tiny-vl` and the data `package:squares`.

    .venv/bin/python scripts/tiny_vl.py

The model is a Qwen3-VL whose vision tower has random weights, and which has learned to answer any question with some
colour. The data are images of a coloured square on a ground of another shade, with the question what colour the square
has. No image is in both splits.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PACKAGE = Path(__file__).resolve().parent.parent / "fivefold"
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 50, 190),
    "orange": (240, 140, 30),
}
GROUNDS = ((245, 245, 245), (15, 15, 15), (128, 128, 128))
SPECIAL = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_end|>",
)
WORDS = ("user", "assistant", "what", "colour", "is", "the", "square", *COLOURS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
N_TRAIN, N_TEST, N_LESSONS, SIDE = 512, 96, 200, 32


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words of the questions and answers."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def model(words: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return the model. Weights of the tower are large, so that different patches look different to it."""
    ids = dict(zip(SPECIAL, words.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    text = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text |= {"rope_parameters": rope}
    text |= {"eos_token_id": ids["<|im_end|>"]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen3VLForConditionalGeneration(config)


def picture(colour: str, ground: tuple[int, int, int], left: int, top: int, size: int) -> bytes:
    """Return the PNG of a square of `size` pixels."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    ImageDraw.Draw(image).rectangle((left, top, left + size - 1, top + size - 1), COLOURS[colour])
    held = io.BytesIO()
    image.save(held, "PNG", optimize=True)
    return held.getvalue()


def rows() -> list[dict[str, Any]]:
    """Return a question about each of some images, which all differ."""
    source, made = random.Random(0), dict[bytes, str]()
    while len(made) < N_TRAIN + N_TEST:
        size = source.randint(10, 20)
        left, top = (source.randint(0, SIDE - size) for _ in range(2))
        colour = source.choice(list(COLOURS))
        made[picture(colour, source.choice(GROUNDS), left, top, size)] = colour
    prompt = [{"role": "user", "content": "<image> what colour is the square"}]
    return [
        {"images": [{"bytes": image, "path": None}], "prompt": prompt, "answer": colour}
        for image, colour in made.items()
    ]


def teach(made: Qwen3VLForConditionalGeneration, words: PreTrainedTokenizerFast, asked: list[dict[str, Any]]) -> None:
    """Teach the language model to answer questions, whatever it sees, with a colour by chance."""
    colours = torch.tensor(words.convert_tokens_to_ids(list(COLOURS)))
    texts = [words.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in asked[:64]]
    tokens = words([text.replace("<image>", "") for text in texts], return_tensors="pt").input_ids
    weights = [parameter for name, parameter in made.named_parameters() if ".visual." not in name]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    for _ in range(N_LESSONS):
        wanted = colours[torch.randint(len(colours), (len(tokens),))]
        torch.nn.functional.cross_entropy(made(input_ids=tokens).logits[:, -1], wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Write both."""
    folder, words, data = PACKAGE / "models" / "tiny-vl", tokenizer(), rows()
    made = model(words)
    teach(made, words, data)
    made.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2}
    processor |= {"merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 16384}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    packaged = PACKAGE / "data" / "packaged" / "squares"
    packaged.mkdir(exist_ok=True)
    for split, own in {"train": data[:N_TRAIN], "test": data[N_TRAIN : N_TRAIN + N_TEST]}.items():
        pq.write_table(pa.Table.from_pylist(own), packaged / f"{split}.parquet")


if __name__ == "__main__":
    main()
