"""Completions of a few prompts by the embedded engine, in this process: to look at a model, not to serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import DatasetConfig, GenerationConfig
from fivefold.data.prompts import render
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import SamplingParams, group_requests
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
    """`config.n_samples` completions of each prompt, decoded without special tokens.

    Args:
        model: Hugging Face folder, hub name, or `package:<name>`.
        chat: whether each prompt is put into the model's chat template, as the one message of a user.
        dtype: none: bfloat16 on a GPU, float32 without one.
        device: none: the GPU if there is one.

    Raises:
        ValueError: no prompt, a prompt without tokens or too long for the model, or no chat template.
    """
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT, --file PATH, or write prompts to standard input")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    tokenizer = load_tokenizer(resolve_model_path(model))
    rows = DatasetConfig(path=model, apply_chat_template=chat)
    token_ids = [render(prompt, rows, tokenizer, f"prompt {row}")[1] for row, prompt in enumerate(prompts)]
    engine = TransformersEngine.from_path(
        model, dtype=dtype, device=device, max_batch_size=256, tokenizer_path=None, load_weights=True
    )
    requests = group_requests(token_ids, config.n_samples, key=(seed,))
    completions = engine.generate(requests, SamplingParams.from_config(config))
    texts = [str(tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)) for completion in completions]
    return [texts[start : start + config.n_samples] for start in range(0, len(texts), config.n_samples)]
