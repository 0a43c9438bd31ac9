"""Completions of a few prompts, for a look at a model. The embedded engine makes them in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from fivefold.bridge.audit import check_weights
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema.data import DatasetConfig
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.data.prompts import render
from fivefold.families.read import load_shape
from fivefold.observe.errors import RunFailed
from fivefold.rollout.contract import complete
from fivefold.rollout.hf_model import check_size
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.tokenizer import decoded, load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine


def generate(
    model: str,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    seed: int,
    chat: bool,
    dtype: Literal["float32", "bfloat16"] | None,
    device: str | None,
) -> list[list[str]]:
    """Return `config.n_samples` completions of each prompt as texts, without special tokens.

    Args:
        model: Hugging Face folder, hub name, or `package:<name>`.
        prompts: texts to complete.
        config: how to sample.
        seed: the same seed gives the same completions.
        chat: whether each prompt is put into the model's chat template, as the only message of a user.
        dtype: number format of the weights; None: bfloat16 on a GPU, float32 without one.
        device: `cpu`, `cuda` or `cuda:N`; None: the GPU if there is one.

    Raises:
        ValueError: there is no prompt, a prompt has no tokens or is too long for the model, the model has no chat
            template, its weight files are broken or of another model, or this machine lacks the device.
        RunFailed: the model failed, for example because its logits are not finite.
    """
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT, --file PATH, or write prompts to standard input")
    place = _device(device)
    dtype = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    tokenizer = load_tokenizer(resolve_model_path(model))
    rows = DatasetConfig(path=model, apply_chat_template=chat)
    token_ids = [
        render(prompt, rows, tokenizer, f"prompt {number}").token_ids for number, prompt in enumerate(prompts, start=1)
    ]
    folder = resolve_model_folder(model)
    _check_weights(folder)
    engine = TransformersEngine.from_path(
        str(folder), dtype=dtype, device=place, max_batch_size=256, tokenizer_path=None, load_weights=True
    )
    requests = group_requests(token_ids, config.n_samples, key=(seed,))
    try:
        completions = complete(engine, requests, SamplingParams.from_config(config))
    except RuntimeError as error:
        raise RunFailed(str(error)) from error
    texts = decoded(tokenizer, [completion.token_ids for completion in completions])
    return [texts[start : start + config.n_samples] for start in range(0, len(texts), config.n_samples)]


def _device(name: str | None) -> torch.device:
    """Return the device of a name; None: the GPU if there is one.

    Raises:
        ValueError: this machine has no such device.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if n_gpus else []), *(f"cuda:{index}" for index in range(n_gpus))]
    if name is not None and name not in known:
        raise ValueError(f"this machine has no device {name!r}: give one of {', '.join(known)}")
    return torch.device(name or ("cuda" if n_gpus else "cpu"))


def _check_weights(folder: Path) -> None:
    try:
        shape = load_shape(folder)
    except ValueError:
        # Models that no engine trains can still generate; transformers compares their tensors when it loads them.
        shape = None
    check_weights(folder, shape)
    if shape is None:
        check_size(str(folder))
