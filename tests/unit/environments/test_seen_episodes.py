"""Episodes of prompts with images, played by the embedded engine, against transformers' whole model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from fivefold.config.schema.data import DatasetConfig
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.data.prompts import load_prompts
from fivefold.environments.agents.chat_game import ChatGame
from fivefold.environments.environment import Environment
from fivefold.environments.game import Game
from fivefold.environments.play import Player, tasks_of
from fivefold.families.read import find_shape
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import PlacedImage, Trajectory
from fivefold.vision.places import expanded, placed_among

MODEL = Path(__file__).parents[3] / "fivefold" / "models" / "tiny-vl"
IMAGE, VIDEO, START = 4, 5, 3
SAMPLING = SamplingParams(3, 0, False, 1.0, 1.0, 0, (), (), bad_token_ids=(START, IMAGE, VIDEO, 6))
N_TURNS = 3


class Asks:
    """A game that asks for another colour after each move."""

    def reset(self) -> str:
        return "what colour"

    def step(self, move: str) -> tuple[str, float, bool]:
        return "is the square", 1.0, False


ASKS = "tests.unit.environments.test_seen_episodes:Asks"


def rows(folder: Path) -> Path:
    """Write a conversation with an image in each of two questions."""
    for number, colour in enumerate([(220, 40, 40), (40, 70, 220)]):
        Image.new("RGB", (32 + 16 * number, 32), colour).save(folder / f"{number}.png")
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what colour is the square"}]}
    chat = [asked, {"role": "assistant", "content": "red"}, asked]
    path = folder / "data.jsonl"
    path.write_text(json.dumps({"prompt": chat, "images": ["0.png", "1.png"], "answer": "blue"}) + "\n")
    return path


@pytest.mark.parametrize("in_chat", [False, True])
def test_every_turn_sees_the_images_of_the_row(tmp_path: Path, in_chat: bool) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    config = DatasetConfig(
        path=str(rows(tmp_path)), image_key="images", answer_key="answer", batch_size=1, max_length=200
    )
    [prompt] = load_prompts(config, tokenizer, (str(MODEL), find_shape("package:tiny-vl"))).prompts
    template = {"turn_template": "the {observation}"} if in_chat else {}
    played = EnvironmentConfig.model_validate({"game": ASKS, "max_turns": N_TURNS, "max_length": 200, **template})
    environment: Environment = (ChatGame if in_chat else Game)(played, tokenizer)
    engine = TransformersEngine.from_path(
        str(MODEL), dtype="float32", device="cpu", max_batch_size=4, tokenizer_path=None, load_weights=True
    )
    player = Player(engine, environment)
    requests = [GenerationRequest(prompt.token_ids, seed) for seed in range(3)]
    player.begin(0, tasks_of(prompt, requests, SAMPLING))
    done: list[Any] = []
    while not done:
        done = player.advance(60.0)
    [(_, episodes)] = done
    assert [episode.n_turns for episode in episodes] == [N_TURNS] * 3
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert [image.digest for image in trajectory.images] == [image.digest for image in prompt.images]
        starts = [image.start for image in trajectory.images]
        assert all(trajectory.tokens_T[start - 1] == START and trajectory.tokens_T[start] == IMAGE for start in starts)
        sampled_T = trajectory.logprobs_T[trajectory.mask_T].tolist()
        assert whole_logprobs(model, trajectory) == pytest.approx(sampled_T, abs=1e-4)


@torch.no_grad()
def whole_logprobs(model: Any, trajectory: Trajectory) -> list[float]:
    """Return the log-probs of the sampled tokens, without the tokens that are never sampled."""
    tokens = torch.from_numpy(trajectory.tokens_T).long()[None]
    merge = model.model.visual.spatial_merge_size
    logits = model(
        input_ids=tokens,
        pixel_values=torch.cat([torch.from_numpy(image.patches_PC) for image in trajectory.images]),
        image_grid_thw=torch.tensor([[1, each.rows * merge, each.columns * merge] for each in trajectory.images]),
        mm_token_type_ids=(tokens == IMAGE).int(),
    ).logits[0, :-1]
    logits[:, list(SAMPLING.bad_token_ids)] = -torch.inf
    own = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
    found: list[float] = own[torch.from_numpy(trajectory.mask_T[1:])].tolist()
    return found


def placed(prompt: Any, *starts: int) -> list[PlacedImage]:
    return [replace(prompt, start=start) for start in starts]


def test_images_are_where_the_tokens_of_a_sequence_have_them() -> None:
    one = PlacedImage(np.zeros((8, 4), np.float32), 7, 0, 1, 2)
    text = [9, 3, 4, 6, 8, 3, 4, 6]
    made = expanded(text, placed(one, 1, 5), 4)
    assert made == (9, 3, 4, 4, 6, 8, 3, 4, 4, 6)
    assert [image.start for image in placed_among(made, placed(one, 0, 0), 4)] == [2, 7]
    with pytest.raises(ValueError, match="has 2 images, and its prompt 1"):
        expanded(text, placed(one, 1), 4)
    with pytest.raises(ValueError, match="has 5 tokens of images, and its prompt 4"):
        placed_among([*made, 4], placed(one, 0, 0), 4)
