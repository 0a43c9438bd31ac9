"""The embedded engine's completions of prompts with images against transformers' whole models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from fivefold.rollout.protocol import GenerationRequest, SamplingParams, complete
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Completion, PlacedImage

IMAGE, MERGE, PATCH_VALUES = 66, 2, 24
FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"]
SAMPLING = SamplingParams(9, 0, False, 1.0, 1.0, 0, (), (), bad_token_ids=(65, 66))
Folder = Callable[..., Path]


def image(seed: int, start: int, rows: int, columns: int) -> PlacedImage:
    patches = np.random.default_rng(seed).normal(size=(rows * columns * MERGE**2, PATCH_VALUES))
    return PlacedImage(patches.astype(np.float32), seed, start, rows, columns)


def request(seed: int, *images: PlacedImage, length: int = 14) -> GenerationRequest:
    source = random.Random(length)
    tokens = [source.randrange(3, 60) for _ in range(length)]
    for each in images:
        tokens[each.start : each.start + each.n_tokens] = [IMAGE] * each.n_tokens
    return GenerationRequest(tuple(tokens), seed, images=images)


def requests() -> list[GenerationRequest]:
    """Return requests with and without images; two of them have the same tokens and different images."""
    return [
        request(0, image(1, 2, 3, 2)),
        request(1, image(2, 2, 3, 2)),
        request(2, image(1, 2, 3, 2)),
        request(3),
        request(4, image(3, 0, 1, 4), image(1, 6, 3, 2), length=17),
        request(5, image(4, 1, 1, 1), length=7),
    ]


def engine_at(path: Path, **options: Any) -> TransformersEngine:
    given = {"dtype": "float32", "device": "cpu", "max_batch_size": 4, "tokenizer_path": None, "load_weights": True}
    return TransformersEngine.from_path(str(path), **given | options)


def whole_logprobs(model: Any, asked: GenerationRequest, completion: Completion) -> list[float]:
    """Return the log-probs of a completion's tokens, without the tokens that are never sampled."""
    tokens = torch.tensor([[*asked.token_ids, *completion.token_ids.tolist()]])
    inputs: dict[str, Any] = {"input_ids": tokens}
    if asked.images:
        inputs |= {
            "pixel_values": torch.cat([torch.from_numpy(each.patches_PC) for each in asked.images]),
            "image_grid_thw": torch.tensor([[1, each.rows * MERGE, each.columns * MERGE] for each in asked.images]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    with torch.no_grad():
        logits = model(**inputs).logits[0, len(asked.token_ids) - 1 : -1]
    logits[:, list(SAMPLING.bad_token_ids)] = -torch.inf
    chosen = torch.from_numpy(completion.token_ids).long()[:, None]
    return logits.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()


def check(path: Path, asked: Sequence[GenerationRequest], completions: Sequence[Completion]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for each, completion in zip(asked, completions, strict=True):
        assert completion.logprobs.tolist() == pytest.approx(whole_logprobs(model, each, completion), abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_have_the_log_probs_of_whole_models(model_folder: Folder, family: str) -> None:
    path = model_folder(family)
    completions = complete(engine_at(path), requests(), SAMPLING)
    check(path, requests(), completions)
    same, other, again = (completions[i].token_ids.tolist() for i in (0, 1, 2))
    assert len({tuple(same), tuple(other), tuple(again)}) > 1


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_new_weights_and_sleep_keep_what_an_engine_sees(model_folder: Folder, family: str) -> None:
    path = model_folder(family)
    engine, asked = engine_at(path, recomputes=True), requests()
    first = complete(engine, asked, SAMPLING)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    assert not any("visual" in name for name in weights)
    engine.sleep()
    engine.wake()
    engine.submit(0, asked[0], SAMPLING)
    engine.collect(0.0)
    engine.update_weights(weights.items(), 1)
    [(_, completion)] = engine.collect(60.0)
    assert completion.token_ids.tolist() == first[0].token_ids.tolist()
    assert completion.logprobs.tolist() == pytest.approx(first[0].logprobs.tolist(), abs=1e-4)
